"""The capture of a shard: the outbox of a generation, and the triggers that touch entries in it.

A touch only says that an entry may have changed; the poll reads the source (docs/architecture-shards.md). So the order
of touches doesn't matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName, quote
from airflow_roir.engine.capture.plpgsql import function, literal
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry, equality_operators
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import SourceChanged
from airflow_roir.shards import home
from airflow_roir.shards.shard import SHARD_SCHEMA, Feed
from airflow_roir.shards.sources import check_owner

# Plans are kept. A plan made for an empty outbox would read all of it for each row once it is large.
BY_INDEX = " SET enable_seqscan = off"
REMEMBERED = f"SELECT entry FROM {SHARD_SCHEMA}.outbox WHERE name = %(name)s"
WRITTEN = f"""
INSERT INTO {SHARD_SCHEMA}.outbox (name, server, index_name, source, entry, leaves, bounds, capture, is_unique)
VALUES (%(name)s, %(server)s, %(index)s, %(source)s, %(entry)s::jsonb, {SHARD_SCHEMA}.leaves(%(source)s),
        {SHARD_SCHEMA}.bounds(%(source)s), {SHARD_SCHEMA}.capture_of(%(name)s), %(unique)s)
"""
# Marks all possible versions as announced.
NOTHING = "SELECT set_config(%(mark)s, concat_ws(':', pg_current_xact_id(), 0, 9223372036854775807), true)"
# {identity}: its columns' definitions. It is emptied all the time, and its first pages are read in each poll.
TABLE = f"""
CREATE TABLE {{table}} (
  {{identity}},
  version bigint NOT NULL DEFAULT nextval('{SHARD_SCHEMA}.version'),
  xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
  touched_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)
"""
# {rows}: the part of an INSERT after its columns. {kept}: of values that are equal but not the same, the last ones
# stay. The version is drawn in the update, under the row's lock: so it grows with each touch.
TOUCH = f"""
INSERT INTO {{table}} ({{identity}}) {{rows}} ON CONFLICT ({{identity}}) DO UPDATE
SET {{kept}}, version = nextval('{SHARD_SCHEMA}.version'), xid = pg_current_xact_id(), touched_at = clock_timestamp()
"""
# The body of the row trigger's function. {old}, {new}: the rows' indexed columns; {old_key}, {new_key}: those of their
# identities; {touch_old}, {touch_new}: by TOUCH. If a trigger on the outbox has kept a touch out, the first row is
# deleted, so that the outbox is in doubt.
TOUCHED = """
BEGIN
  IF TG_OP = 'INSERT' THEN
    {touch_new};
  ELSIF TG_OP = 'DELETE' THEN
    {touch_old};
  ELSIF {old} *<> {new} THEN
    IF {old_key} *<> {new_key} THEN
      {touch_old};
      IF NOT FOUND THEN
        DELETE FROM {table} WHERE version = 0;
      END IF;
    END IF;
    {touch_new};
  ELSE
    RETURN NULL;
  END IF;
  IF NOT FOUND THEN
    DELETE FROM {table} WHERE version = 0;
  END IF;
  RETURN NULL;
END
"""
# The body of the function of TRUNCATE for a whole table: all entries of the shard go.
EMPTIED = f"""
BEGIN
  UPDATE {SHARD_SCHEMA}.outbox SET emptied = nextval('{SHARD_SCHEMA}.version') WHERE name = '{{name}}';
  RETURN NULL;
END
"""
# The same for a leaf: {touch}, a format, touches its rows' entries. The TRUNCATE also removes rows that came since its
# snapshot, which it doesn't see.
EMPTIED_LEAF = """
BEGIN
  IF pg_relation_size(TG_RELID) = 0 THEN
    RETURN NULL;
  ELSIF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
    RAISE feature_not_supported USING
      MESSAGE = format('%s can''t be truncated at this isolation level', TG_RELID::regclass),
      DETAIL = 'Its table has a roir index on another server, whose entries of rows that this snapshot '
        'doesn''t see would stay.',
      HINT = 'Truncate it in a READ COMMITTED transaction, or use DELETE.';
  END IF;
  EXECUTE format({touch}, TG_RELID::regclass);
  RETURN NULL;
END
"""
# A row that is never shipped: an outbox without it was emptied.
FIRST = "INSERT INTO {table} (version) SELECT 0 WHERE NOT EXISTS (SELECT FROM {table} WHERE version = 0)"
RELATION = "SELECT oid::bigint FROM pg_class WHERE oid = (SELECT source FROM {schema}.outbox WHERE name = %(name)s)"


def table(outbox: str) -> str:
    """The outbox: identities, each with the version of its last touch."""
    return f"{SHARD_SCHEMA}.{outbox}"


def view(outbox: str) -> str:
    """The view of the source as entries, columns c1, c2, …; because of it the server refuses to drop or retype one."""
    return f"{SHARD_SCHEMA}.{outbox}_source"


def touch_function(outbox: str) -> str:
    """The function of the row trigger."""
    return f"{SHARD_SCHEMA}.{outbox}_touch"


def emptied_function(outbox: str) -> str:
    """The function of the triggers of TRUNCATE."""
    return f"{SHARD_SCHEMA}.{outbox}_emptied"


def trigger(outbox: str) -> str:
    """The row trigger's name. PostgreSQL fires triggers in the order of their names, which doesn't matter here."""
    return f"roir_{outbox}"


def install(
    database: Database,
    feed: Feed,
    definition: IndexDefinition,
    server: str,
    timeout_ms: int,
    patience_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Begins to capture the writes of a shard's table for a generation; when it returns, every writer in flight has
    ended.

    database: the shard's. server: the index server's name there. Safe to call again. Raises LockNotAcquired (names the
    blockers; changes nothing), SourceChanged (the table isn't the one that was planned), RightMissing.
    """
    with database.transaction() as connection:
        home.check(connection, feed.shard)
        if execute(connection, REMEMBERED, {"name": feed.outbox}).first() is not None:
            return
        source = catalog.read_source_by_oid(connection, feed.source_oid)
        check_owner(connection, source)
    assert definition.source is not None
    entry = Entry.of(source, definition, "none", 1)
    drain = Drain(database, source.sql, source.relations, timeout_ms, patience_s)
    with telling_of_names():
        drain.run(lambda connection, lock: _install(connection, lock, feed, source, entry, definition, server), report)


def _install(
    connection: Connection,
    lock: Callable[[], None],
    feed: Feed,
    source: Source,
    entry: Entry,
    definition: IndexDefinition,
    server: str,
) -> None:
    execute(connection, "SELECT pg_advisory_xact_lock_shared(hashtext('roir_shard'))")
    if execute(connection, REMEMBERED, {"name": feed.outbox}).first() is not None:
        return
    name = feed.outbox
    entry = _make_table(connection, name, entry)
    _make_view(connection, name, source, entry)
    for text in (_touched(name, entry), _emptied(name, source, entry)):
        execute(connection, text)
    lock()
    now = catalog.read_source_by_oid(connection, source.oid)
    if (now.columns, now.primary_key) != (source.columns, source.primary_key):
        raise SourceChanged(f"table {source.name} was altered meanwhile; start again")
    event = "AFTER INSERT OR UPDATE OR DELETE"
    _make_trigger(connection, trigger(name), event, source.sql, "ROW", touch_function(name))
    _watch_truncate(connection, name, source)
    execute(
        connection,
        WRITTEN,
        {
            "name": name,
            "server": server,
            "index": str(definition.name),
            "source": source.oid,
            "entry": json.dumps(entry.as_json()),
            "unique": definition.unique,
        },
    )
    functions = [f"{touch_function(name)}()", f"{emptied_function(name)}()"]
    rights.take_back(connection, [table(name), view(name)], functions)


def _make_table(connection: Connection, name: str, entry: Entry) -> Entry:
    """Creates the outbox; returns the entry with its equality operators, as its own index has them."""
    definitions = entry.definitions_of(entry.identity_positions)
    execute(connection, TABLE.format(table=table(name), identity=definitions))
    identity = ", ".join(entry.physical(entry.identity_positions))
    execute(connection, f"CREATE UNIQUE INDEX {name}_key ON {table(name)} ({identity}) NULLS NOT DISTINCT")
    execute(connection, f"CREATE INDEX {name}_version ON {table(name)} (version)")
    execute(connection, f"ALTER TABLE {table(name)} REPLICA IDENTITY FULL")
    execute(connection, FIRST.format(table=table(name)))
    return entry.comparing_by(equality_operators(connection, f"{table(name)}_key"))


def _make_view(connection: Connection, name: str, source: Source, entry: Entry) -> None:
    columns = ", ".join(f"{column.of('s')} AS c{i + 1}" for i, column in enumerate(entry.columns))
    only = "" if source.partitioned else "ONLY "
    execute(connection, f"CREATE VIEW {view(name)} AS SELECT {columns} FROM {only}{source.sql} s")


def touch(name: str, entry: Entry, rows: str) -> str:
    """SQL that touches entries. rows: the part of an INSERT after its columns."""
    identity = entry.physical(entry.identity_positions)
    kept = ", ".join(f"{column} = EXCLUDED.{column}" for column in identity)
    return TOUCH.strip().format(table=table(name), identity=", ".join(identity), rows=rows, kept=kept)


def _touched(name: str, entry: Entry) -> str:
    """The row trigger's function."""
    everything = [column.source for column in entry.columns]
    identity = everything[: entry.identity]

    def values(record: str) -> str:
        return f"VALUES ({', '.join(f'{record}.{quote(column)}' for column in identity)})"

    body = TOUCHED.strip().format(
        table=table(name),
        touch_old=touch(name, entry, values("OLD")),
        touch_new=touch(name, entry, values("NEW")),
        old=_image("OLD", everything),
        new=_image("NEW", everything),
        old_key=_image("OLD", identity),
        new_key=_image("NEW", identity),
    )
    return function(touch_function(name), body, BY_INDEX)


def _emptied(name: str, source: Source, entry: Entry) -> str:
    """The function of TRUNCATE."""
    if not source.partitioned:
        body = EMPTIED.format(name=name)
    else:
        columns = ", ".join(f"s.{quote(column.source)}" for column in entry.columns[: entry.identity])
        # The names of columns may contain a %.
        select = f"SELECT {columns} FROM ONLY ".replace("%", "%%")
        body = EMPTIED_LEAF.format(touch=literal(touch(name, entry, f"{select}%s s")))
    return function(emptied_function(name), body.strip(), BY_INDEX)


def _watch_truncate(connection: Connection, name: str, source: Source) -> None:
    when, relations = "AFTER", [source.sql]
    if source.partitioned:
        when, relations = "BEFORE", [catalog.name_of(connection, leaf).sql for leaf in source.leaves]
    for one in relations:
        _make_trigger(connection, f"{trigger(name)}_t", f"{when} TRUNCATE", one, "STATEMENT", emptied_function(name))


def _make_trigger(connection: Connection, name: str, event: str, relation: str, each: str, calls: str) -> None:
    execute(connection, f"CREATE TRIGGER {name} {event} ON {relation} FOR EACH {each} EXECUTE FUNCTION {calls}()")
    execute(connection, f"ALTER TABLE {relation} ENABLE ALWAYS TRIGGER {name}")


def renew(connection: Connection, name: str) -> None:
    """Puts the first row back into an outbox that was emptied. connection: in the shard, in autocommit."""
    # One message, so one transaction; it has nothing to announce.
    execute(connection, f"{NOTHING};\n{FIRST.format(table=table(name))}", {"mark": f"{SHARD_SCHEMA}.{name}"})


def read_entry(connection: Connection, name: str) -> Entry | None:
    """The form of the outbox's entries; None if the outbox is gone."""
    found: dict[str, Any] | None = execute(connection, REMEMBERED, {"name": name}).scalar()
    return None if found is None else Entry.from_json(found)


def relation(connection: Connection, name: str) -> int | None:
    """The oid of an outbox's source table; None if that was dropped."""
    found: int | None = execute(connection, RELATION.format(schema=SHARD_SCHEMA), {"name": name}).scalar()
    return found


def remove(
    database: Database,
    name: str,
    timeout_ms: int,
    patience_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Ends the capture of a generation in a shard. Safe to call again. Raises LockNotAcquired."""
    with database.transaction() as connection:
        if not _is_installed(connection):
            return
        oid = relation(connection, name)
        source = None if oid is None else catalog.read_source_by_oid(connection, oid, check=False)
    if source is None:
        with database.transaction() as connection:
            _drop(connection, name, [])
        return
    # Readers block the DROP of a trigger.
    drain = Drain(database, source.sql, source.relations, timeout_ms, patience_s)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        lock()
        now = catalog.read_source_by_oid(connection, source.oid, check=False)
        leaves = [catalog.name_of(connection, leaf) for leaf in now.leaves] if now.partitioned else []
        _drop(connection, name, [now.name, *leaves])

    with telling_of_names():
        drain.run(body, report, [source.sql])


def _drop(connection: Connection, name: str, relations: list[QualifiedName]) -> None:
    for relation in relations:
        execute(connection, f"DROP TRIGGER IF EXISTS {trigger(name)}_t ON {relation.sql}")
    if relations:
        execute(connection, f"DROP TRIGGER IF EXISTS {trigger(name)} ON {relations[0].sql}")
    drop_announcing(connection, name, relations[0] if relations else None)
    execute(connection, f"DROP VIEW IF EXISTS {view(name)}")
    # A leaf that was detached has kept its trigger of TRUNCATE.
    execute(connection, f"DROP FUNCTION IF EXISTS {touch_function(name)}(), {emptied_function(name)}() CASCADE")
    execute(connection, f"DROP TABLE IF EXISTS {table(name)}")
    execute(connection, f"DELETE FROM {SHARD_SCHEMA}.outbox WHERE name = %(name)s", {"name": name})


def drop_announcing(connection: Connection, name: str, source: QualifiedName | None) -> None:
    """Drops the trigger and the functions that announce writes (`announce.py`), if they exist. The caller has locked
    the source, if that exists."""
    if source is not None:
        execute(connection, f"DROP TRIGGER IF EXISTS {trigger(name)}_w ON {source.sql}")
    functions = ", ".join(f"{table(name)}_{one}()" for one in ("announce", "whole", "own"))
    execute(connection, f"DROP FUNCTION IF EXISTS {functions} CASCADE")
    execute(connection, f"DROP FOREIGN TABLE IF EXISTS {table(name)}_intent")
    execute(connection, f"DROP INDEX IF EXISTS {table(name)}_xid")


def _is_installed(connection: Connection) -> bool:
    return bool(execute(connection, f"SELECT to_regclass('{SHARD_SCHEMA}.outbox') IS NOT NULL").scalar_one())


def _image(record: str, columns: list[str]) -> str:
    return f"ROW({', '.join(f'{record}.{quote(column)}' for column in columns)})::record"
