"""Connects a shard's server to the index server: a foreign server of postgres_fdw, and the table of intents there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg2
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import SECRETS, Database, bound, execute, said
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, RightMissing, RoirError
from airflow_roir.shards.announce import handed, intents
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy.survey import ShardPlan, Survey
from airflow_roir.shards.shard import SHARD_SCHEMA, Feed

# The options of a connection from a shard's server to the index server. A commit there must last: readers count on it.
OPTIONS = "-c synchronous_commit=on -c default_transaction_read_only=off -c lock_timeout=10s -c statement_timeout=30s"
DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "20",
    "keepalives_interval": "10",
    "keepalives_count": "4",
    "tcp_user_timeout": "60000",
}
# The settings that the session there must really have: a writer's commit and waits depend on them. Times are in ms.
KEPT = {"synchronous_commit": "on", "lock_timeout": "10000", "statement_timeout": "30000"}
SETTINGS = """
CREATE FOREIGN TABLE {table}_probe (name text, setting text) SERVER {server}
    OPTIONS (schema_name 'pg_catalog', table_name 'pg_settings')
"""
FOUND = "SELECT name, setting FROM {table}_probe WHERE name = ANY (%(names)s)"
OF_USER = ("user", "passcode", "sslcert", "sslkey", *SECRETS)
RIGHT = """
SELECT 1 FROM pg_foreign_table t JOIN pg_foreign_server s ON s.oid = t.ftserver
 WHERE t.ftrelid = to_regclass(%(table)s) AND s.srvname = %(server)s AND t.ftoptions @> %(options)s::text[]
"""
# A writer that holds the foreign table holds it until it ends.
LOCK_S = 10
PROBE = "INSERT INTO {table}_intent (xid) VALUES (pg_current_xact_id())"
PROBED = "DELETE FROM {table} WHERE {shard} IS NULL RETURNING xid::text"
SERVER_OF = f"SELECT server FROM {SHARD_SCHEMA}.outbox WHERE name = %(name)s"


def check_extension(connection: Connection, feed: Feed, source: Source) -> None:
    """Raises InvalidInput or RightMissing unless a shard has postgres_fdw, or may have it. connection: in the shard."""
    query = (
        "SELECT EXISTS (SELECT FROM pg_foreign_data_wrapper WHERE fdwname = 'postgres_fdw') AS present, "
        "EXISTS (SELECT FROM pg_available_extensions WHERE name = 'postgres_fdw') AS available, "
        "(SELECT rolsuper FROM pg_roles WHERE rolname = session_user) AS mighty, current_database()::text AS database"
    )
    found = execute(connection, query).one()
    grant = f"GRANT USAGE ON FOREIGN DATA WRAPPER postgres_fdw TO {quote(source.owner)}"
    where = f"shard {quote(feed.shard.name)}"
    if not found.present and not found.available:
        raise InvalidInput(
            f"{where}: its server doesn't have the extension postgres_fdw. Install PostgreSQL's contrib there, or let "
            "clients announce: --by client"
        )
    if not found.present and not found.mighty:
        raise RightMissing(
            f"{where}: only a superuser may create the extension. As one, in database {found.database}: "
            f"CREATE EXTENSION postgres_fdw; {grant}"
        )
    usage = "SELECT has_foreign_data_wrapper_privilege('postgres_fdw', 'USAGE')"
    if found.present and not execute(connection, usage).scalar_one():
        raise RightMissing(f"{where}: {quote(source.owner)} may not use postgres_fdw. As a superuser: {grant}")


def connection_of(feed: Feed) -> dict[str, str]:
    """The parameters by which the shard's server connects to the index server. Raises InvalidInput."""
    shard = feed.shard
    if not shard.index_dsn:
        raise InvalidInput(
            f"shard {quote(shard.name)} has no address of the index server. Give it: "
            f"ROIR_INDEX_DSN='host=… dbname=… user=… password=…' roir shard add {quote(shard.name)}"
        )
    try:
        found = {name: str(value) for name, value in psycopg2.extensions.parse_dsn(shard.index_dsn).items()}
    except (psycopg2.ProgrammingError, ValueError):
        found = {}
    if "user" not in found or "dbname" not in found:
        raise InvalidInput(
            f"shard {quote(shard.name)}: its --index-dsn must name at least user and dbname, since the shard's server "
            "has defaults of its own"
        )
    return found


def reach(connection: Connection, feed: Feed, source: Source) -> str:
    """Creates the foreign server that is the index server, and the user mapping for the source's owner; returns its
    name."""
    given = connection_of(feed)
    execute(connection, "SELECT pg_advisory_xact_lock(hashtext('roir_shard'), hashtext('announce'))")
    query = "SELECT EXISTS (SELECT FROM pg_foreign_data_wrapper WHERE fdwname = 'postgres_fdw')"
    if not execute(connection, query).scalar_one():
        execute(connection, "CREATE EXTENSION postgres_fdw")
    token = execute(connection, SERVER_OF, {"name": feed.outbox}).scalar_one()
    # The error of a writer that can't reach it shows this name.
    name = f"roir index server {hashlib.md5(token.encode()).hexdigest()[:8]} (see roir announce)"
    options = DEFAULTS | {key: value for key, value in given.items() if key not in OF_USER}
    options["options"] = f"{given.get('options', '')} {OPTIONS}".strip()
    query = "SELECT coalesce(srvoptions, '{}') FROM pg_foreign_server WHERE srvname = %(name)s"
    present = execute(connection, query, {"name": name}).scalar()
    if present is None:
        _send(connection, f"CREATE SERVER {quote(name)} FOREIGN DATA WRAPPER postgres_fdw OPTIONS", options)
    else:
        before = [one.split("=", 1)[0] for one in present]
        _send(connection, f"ALTER SERVER {quote(name)} OPTIONS", options, before)
    who = f"FOR {quote(source.owner)} SERVER {quote(name)}"
    mapped = {key: value for key, value in given.items() if key in OF_USER}
    mighty = "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"
    if "password" not in mapped and execute(connection, mighty).scalar_one():
        mapped["password_required"] = "false"
    execute(connection, f"DROP USER MAPPING IF EXISTS {who}")
    with _naming_the_option(f"CREATE USER MAPPING {who}"):
        handed.send(connection, f"CREATE USER MAPPING {who}", mapped)
    return name


def _send(connection: Connection, head: str, options: dict[str, str], before: Sequence[str] | None = None) -> None:
    """Sends a statement with options, none of them a secret."""
    parts = []
    for key, value in options.items():
        verb = "" if before is None else "SET " if key in before else "ADD "
        parts.append(f"{verb}{quote(key)} {bound(connection, '%(value)s', {'value': value})}")
    parts += [f"DROP {quote(key)}" for key in before or () if key not in options]
    with _naming_the_option(head.split(" OPTIONS")[0]):
        execute(connection, f"{head} ({', '.join(parts)})")


@contextmanager
def _naming_the_option(what: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise InvalidInput(f"{what}: {said(error)}; look at the shard's --index-dsn") from None


def make_foreign_table(connection: Connection, feed: Feed, shape: intents.Shape, server: str) -> None:
    """Creates the foreign table that is the feed's table of intents, unless it exists and is right."""
    schema, name = intents.table(feed.generation_id).split(".")
    table = f"{outbox.table(feed.outbox)}_intent"
    # Writers use the table if it exists; so it is left if it is right.
    given = {"table": table, "server": server, "options": [f"schema_name={schema}", f"table_name={name}"]}
    if execute(connection, RIGHT, given).scalar() is not None:
        return
    execute(connection, f"SET LOCAL lock_timeout = '{LOCK_S}s'")
    execute(connection, f"DROP FOREIGN TABLE IF EXISTS {table}")
    columns = shape.entry.definitions_of(shape.entry.identity_positions)
    execute(
        connection,
        f"CREATE FOREIGN TABLE {table} ({columns}, xid xid8) SERVER {quote(server)} "
        f"OPTIONS (schema_name '{schema}', table_name '{name}', batch_size '1000')",
    )
    rights.take_back(connection, [table])


def probe(database: Database, shard: Database, feed: Feed, server: str) -> None:
    """Writes an intent that names no row, and finds it here: so the connection works, and leads to this server.

    server: the foreign server's name. Raises InvalidInput, also where sessions there aren't given their settings.
    """
    where, table = f"shard {quote(feed.shard.name)}", intents.table(feed.generation_id)
    change = f"roir shard add {quote(feed.shard.name)} --index-dsn …"
    try:
        with shard.transaction() as connection:
            execute(connection, PROBE.format(table=outbox.table(feed.outbox)))
            xid = execute(connection, "SELECT pg_current_xact_id()::text").scalar_one()
            execute(connection, SETTINGS.format(table=outbox.table(feed.outbox), server=quote(server)))
            found = execute(connection, FOUND.format(table=outbox.table(feed.outbox)), {"names": list(KEPT)})
            others = [f"{row.name} is {row.setting}" for row in found if KEPT[row.name] != row.setting]
            execute(connection, f"DROP FOREIGN TABLE {outbox.table(feed.outbox)}_probe")
    except DBAPIError as error:
        raise InvalidInput(
            f"{where}: its server can't write to the index server: {said(error)}; correct the shard's --index-dsn: "
            f"{change}"
        ) from None
    if others:
        raise InvalidInput(
            f"{where}: its server's sessions on the index server don't have the settings that they ask for "
            f"({', '.join(others)}): a pooler between them ignores options. So a crash could lose a commit there, and "
            f"writers could wait for each other forever. Give an address without the pooler: {change}"
        )
    with database.transaction() as connection:
        column = intents.shape_of(connection, feed.generation_id).column
        # Deletes also intents that an earlier probe has left when it was killed.
        if xid not in execute(connection, PROBED.format(table=table, shard=column)).scalars().all():
            raise InvalidInput(
                f"{where}: its server writes to another database than this index server's; correct the shard's "
                f"--index-dsn: {change}"
            )


def needs_by_server(index_server: Database, found: Survey) -> dict[str, list[str]]:
    """The requirements of `roir announce --by server` that each shard lacks, as sentences. Changes nothing."""
    return {one.shard.name: list(_needs(index_server, one)) for one in found.shards}


def _needs(index_server: Database, one: ShardPlan) -> list[str]:
    feed = Feed(0, 0, one.shard, "", one.source.oid)
    needs = []
    try:
        connection_of(feed)
    except RoirError as error:
        needs.append(str(error))
    try:
        with one.shard.database(index_server.application_name, index_server.limits).transaction() as connection:
            check_extension(connection, feed, one.source)
    except RoirError as error:
        needs.append(str(error))
    except DBAPIError as error:
        needs.append(f"shard {quote(one.shard.name)} can't be looked at: {reason_of(error)}")
    return needs
