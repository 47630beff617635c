"""Installs the small schema of a shard, and checks that its version is this code's and its database the right one."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema import rights
from airflow_roir.engine.schema.schema import check_writable, migrations_folder
from airflow_roir.engine.source import checks
from airflow_roir.errors import InvalidInput, RightMissing, SchemaMissing, SchemaVersionMismatch
from airflow_roir.shards.shard import SHARD_SCHEMA, Shard

VERSION = 1

FOUND = f"""
SELECT n.oid IS NOT NULL AS present, pg_get_userbyid(n.nspowner) AS owner, session_user::text AS role,
       current_database()::text AS database, has_database_privilege(current_database(), 'CREATE') AS may_create,
       n.oid IS NOT NULL AND to_regclass('{SHARD_SCHEMA}.home') IS NOT NULL
           AND has_table_privilege('{SHARD_SCHEMA}.home', 'SELECT') AS readable
  FROM (SELECT) one LEFT JOIN pg_namespace n ON n.nspname = '{SHARD_SCHEMA}'
"""
OBJECTS = f"""
SELECT array(SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = '{SHARD_SCHEMA}'::regnamespace
                AND c.relkind IN ('r', 'S')) AS relations,
       array(SELECT p.oid::regprocedure::text FROM pg_proc p
              WHERE p.pronamespace = '{SHARD_SCHEMA}'::regnamespace) AS functions
"""


def sql() -> str:
    """The SQL that creates the small schema: the functions that a shard shares with an index server, and its own
    tables."""
    folder: Path = migrations_folder()
    shared = (folder / "sql" / "trees.sql").read_text().replace("roir.", f"{SHARD_SCHEMA}.")
    own = (folder / "shard.sql").read_text()
    return f"{own}\n{shared}\nINSERT INTO {SHARD_SCHEMA}.home (version) VALUES ({VERSION});\n"


def server_of(connection: Connection) -> str:
    """The index server's name in the shards. connection: the index server's."""
    query = "SELECT concat(system_identifier, '/', current_database()) FROM pg_control_system()"
    return str(execute(connection, query).scalar_one())


def install(database: Database) -> str:
    """Creates the small schema in a shard; returns the token of its database. Safe to call again.

    Raises InvalidInput, RightMissing, ReadOnlyServer, SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        checks.check_server(connection)
        check_writable(connection)
        execute(connection, "SELECT pg_advisory_xact_lock(hashtext('roir_shard'))")
        found = execute(connection, FOUND).one()
        if not found.present:
            if not found.may_create:
                raise RightMissing(
                    f"role {quote(found.role)} has no right to create schemas in database {found.database}; the owner "
                    f"of the database can run: GRANT CREATE ON DATABASE {quote(found.database)} TO {quote(found.role)}"
                )
            execute(connection, sql())
            made = execute(connection, OBJECTS).one()
            rights.take_back(connection, made.relations, made.functions)
        return _check(connection)


def check(connection: Connection, shard: Shard) -> None:
    """Raises the reason why this code can't work in a shard: no small schema, another version, another database."""
    try:
        token = _check(connection)
    except SchemaMissing:
        if shard.home is None:
            raise
        database = execute(connection, "SELECT current_database()").scalar_one()
        raise SchemaMissing(
            f"shard {quote(shard.name)}: database {database}, which answers under its DSN, has no schema "
            f"{SHARD_SCHEMA}: it is another database than the one that was added, or the schema was dropped there. "
            f"Correct the DSN: roir shard add {quote(shard.name)} --dsn …"
        ) from None
    if shard.home is not None and token != shard.home:
        raise InvalidInput(
            f"shard {quote(shard.name)}: another database answers under its DSN than the one that was added (its token "
            f"is {token}, not {shard.home}). Correct the DSN: roir shard add {quote(shard.name)} --dsn …"
        )


def _check(connection: Connection) -> str:
    found = execute(connection, FOUND).one()
    if not found.present:
        raise SchemaMissing(
            f"database {found.database} has no schema {SHARD_SCHEMA} yet; add it as a shard: roir shard add"
        )
    if not found.readable or found.owner != found.role:
        raise RightMissing(
            f"schema {SHARD_SCHEMA} of database {found.database} belongs to role {quote(found.owner)}; connect to the "
            f"shard as that role, not as {quote(found.role)}"
        )
    row = execute(connection, f"SELECT version, token::text FROM {SHARD_SCHEMA}.home").one()
    if row.version != VERSION:
        newer = "Upgrade airflow-provider-roir" if row.version > VERSION else "Upgrade it: roir shard add NAME"
        raise SchemaVersionMismatch(
            f"schema {SHARD_SCHEMA} of database {found.database} is at version {row.version}, this code needs "
            f"{VERSION}. {newer}"
        )
    return str(row.token)
