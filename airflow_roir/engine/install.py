"""Creates and upgrades the control schema; adopts the indexes that a restore, a pg_upgrade or a DROP SCHEMA left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine import abort
from airflow_roir.engine.capture import installation
from airflow_roir.engine.control import operations, removal
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema import rights
from airflow_roir.engine.schema.schema import (
    RESTORED,
    build_of_code,
    check_build,
    check_known,
    check_writable,
    current,
    head,
    is_lost,
    made_by,
    migrations_folder,
)
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.checks import check_server
from airflow_roir.errors import InvalidInput
from airflow_roir.operation import Status

# Only this module imports Alembic, and late: no worker needs it.
if TYPE_CHECKING:
    from alembic.config import Config

RELATIONS = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'roir' AND c.relkind IN ('r', 'v')
"""


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, without any file. connection: the session that `env.py` uses."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def init(database: Database, report: Callable[[str], object] = lambda line: None) -> str:
    """Create or upgrade the control schema to this code's version; returns it. Safe to call again.

    If the database was restored from a dump, or upgraded by pg_upgrade, its indexes find their tables again
    (`adopt`). If schema `roir_data` was dropped, drops its indexes, too (`give_up`), with a line to `report` for each.

    Raises InvalidInput if the role may not create schemas in the database, or the server is too old,
    SchemaVersionMismatch if the schema is newer than the code, older than the first release, or made by another build.
    """
    from alembic import command

    with database.transaction() as connection:
        check_server(connection)
        check_writable(connection)
        # Two inits at once, as two schedulers might: one waits for the other and finds nothing to do.
        execute(connection, "SELECT pg_advisory_xact_lock(hashtext('roir.init'))")
        present = current(connection)
        if present is not None:
            check_known(connection, present)
        if present == head():
            check_build(made_by(connection))
        may_create = execute(
            connection,
            "SELECT has_database_privilege(current_database(), 'CREATE') "
            "OR (to_regnamespace('roir') IS NOT NULL AND to_regnamespace('roir_data') IS NOT NULL) AS may, "
            "current_user AS role, current_database() AS database",
        ).one()
        if not may_create.may:
            raise InvalidInput(
                f"role {quote(may_create.role)} has no right to create schemas in database "
                f"{quote(may_create.database)}; the owner of the database can run: "
                f"GRANT CREATE ON DATABASE {quote(may_create.database)} TO {quote(may_create.role)}"
            )
        before = set(execute(connection, RELATIONS).scalars())
        # Before the upgrade, which may create the schema.
        lost = is_lost(connection)
        command.upgrade(alembic_config(connection), "head")
        if present != head():
            execute(connection, "UPDATE roir.home SET made_by = %(build)s", {"build": build_of_code()})
        if lost:
            for line in give_up(connection, operations.default_actor()):
                report(line)
        # roir builds statements from values in these tables, so no other role may write there. Only new relations: the
        # grants of an administrator on older ones stay.
        rights.take_back(connection, sorted(set(execute(connection, RELATIONS).scalars()) - before))
        rights.give_again(connection)
        adopt(connection)
        execute(connection, "SELECT roir.only_read(id) FROM roir.generation WHERE status <> 'dropped' ORDER BY id")
        # Not if `roir.unguard` removed the event triggers, or the role may not create them: DDL is detected then.
        execute(connection, "SELECT roir.guard() FROM roir.setting WHERE guarded")
    return head()


# Shapes name types, tables and columns by oids and numbers, which a restore changes.
KEEP_SHAPES = """
SELECT roir.keep_shape(g.id) FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND g.status IN ('building', 'active', 'retired')
"""


def adopt(connection: Connection) -> None:
    """Makes indexes, partitions and capture functions name the present tables. A no-op if nothing has moved.

    Works in the caller's transaction; after a restore it locks the sources against writers. Operations that were
    unfinished in a dump become `failed`; after a pg_upgrade they can continue. A single source that was replaced isn't
    adopted.
    """
    restored = execute(connection, RESTORED).all()
    if restored:
        execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).attempt_ms}")
        for row in restored:
            execute(connection, f"LOCK TABLE {row.name} IN SHARE ROW EXCLUSIVE MODE")
        execute(connection, "SELECT roir.adopt_restored()")
        for row in restored:
            execute(connection, KEEP_SHAPES, {"source": row.present})
            installation.refresh(connection, catalog.read_source_by_oid(connection, row.present))
    execute(connection, "SELECT roir.adopt_upgraded()")
    execute(connection, "SELECT roir.settle() WHERE roir.moved() IS NOT NULL")


INDEXES = """
SELECT i.id, i.schema_name, i.name, i.key_columns, i.included_columns, i.is_unique, i.nulls_not_distinct, i.shard_table,
       i.expressions, i.condition, s.oid::regclass::text AS source
  FROM roir.index i LEFT JOIN pg_class s ON s.oid = i.source_oid::oid WHERE i.dropped_at IS NULL ORDER BY 2, 3
"""
UNFINISHED = "SELECT * FROM roir.operation WHERE index_id = %(index)s AND status = ANY (%(live)s)"


def give_up(connection: Connection, actor: str) -> list[str]:
    """Aborts all operations and drops all indexes in the control tables: schema `roir_data` exists again, but empty.

    DROP SCHEMA has dropped the entries of all indexes, their views, and the functions that captured the writes.
    Returns a line for each index, with the command that builds it again. The next clean-up releases the shards of an
    index over shards.
    """
    execute(connection, "GRANT USAGE ON SCHEMA roir_data TO PUBLIC")
    lines = []
    for index in execute(connection, INDEXES).all():
        name = str(operations.index_name(index))
        asked = {"index": index.id, "live": [status.value for status in operations.LIVE]}
        for row in execute(connection, UNFINISHED, asked).all():
            if row.status != Status.ABORTING:
                execute(connection, "SELECT roir.abort(%(index)s, 'schema roir_data was dropped', %(actor)s)",
                        {"index": name, "actor": actor})  # fmt: skip
            abort.conclude(connection, row, actor)
        removal.retire_for_good(connection, removal.generations_of(connection, index.id))
        operations.record_event(connection, index.id, None, actor, "drop", "schema roir_data was dropped")
        again = operations.build_again(index)
        if index.shard_table is None:
            removal.forget_index(connection, index.id)
        else:
            again = "run roir clean-up, which releases its shards; then build it again"
        lines.append(f"index {name} was dropped with schema roir_data; {again}")
    return lines
