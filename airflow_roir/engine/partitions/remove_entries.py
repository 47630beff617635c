"""Removes the entries of partitions that left the source: they are hidden at once, and deleted here in batches.

An entry is removed if no row of the source projects to it. The removal locks the entry first, then looks at the source
again under the lock, with a later snapshot: a writer that brought such a row has committed and is seen, or waits for
the lock and writes the entry again. So no order with writers is needed, and new rows in the same bounds keep their
entries.

An older snapshot still sees the removed entries, but the table without the partition, since DETACH and DROP apply to
every snapshot. So the view hides these entries until no such snapshot can exist any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, has_vanished
from airflow_roir.engine.generation import physical
from airflow_roir.engine.locks.in_batches import in_batches
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.locks.table_lock import check_name
from airflow_roir.engine.readers import view
from airflow_roir.engine.readers.old_snapshots import Holder, holders
from airflow_roir.engine.source import catalog, owner
from airflow_roir.engine.source.files import File, files_of
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import LockNotAcquired, NotFound

LEAVING = """
SELECT p.id, p.generation_id, g.index_id, p.relation, p.name, p.removed_xid IS NOT NULL AS removed, i.source_oid,
       format('%I.%I', i.schema_name, i.name) AS view,
       roir.entry_condition(g.entry, p.condition, 'x') AS within,
       CASE WHEN EXISTS (SELECT FROM pg_class c WHERE c.oid = i.source_oid::oid)
            THEN roir.has_row(g.entry, i.source_oid::oid, 'x') ELSE 'false' END AS has_row
  FROM roir.source_partition p
  JOIN roir.generation g ON g.id = p.generation_id
  JOIN roir.index i ON i.id = g.index_id
 WHERE p.status = 'leaving' AND g.status <> 'dropped'
 ORDER BY p.id
"""

HAS_ROW = "SELECT roir.has_row(g.entry, %(source)s::oid, 'x') FROM roir.generation g WHERE g.id = %(generation)s"

GIVEN_UP = """
UPDATE roir.source_partition p SET status = 'leaving'
 WHERE p.status = 'joining' AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = p.relation::oid)
"""

# Ends the notes of a table that was dropped while it was being attached.
STOP_NOTING = """
SELECT roir.stop_noting(%(relation)s::oid, ended => false)
 WHERE NOT EXISTS (SELECT FROM roir.source_partition p WHERE p.relation = %(relation)s AND p.status = 'joining')
"""
# Tables that are being attached: their rows have entries, but aren't rows of the source yet.
JOINING = """
SELECT p.name, roir.entry_condition(g.entry, p.condition, 'x') AS within
  FROM roir.source_partition p JOIN roir.generation g ON g.id = p.generation_id
 WHERE p.generation_id = %(generation)s AND p.status = 'joining'
   AND NOT EXISTS (SELECT FROM pg_inherits h WHERE h.inhrelid = p.relation::oid)
"""

# This transaction is younger than every transaction that has removed entries.
REMOVED = """
UPDATE roir.source_partition SET removed_xid = pg_current_xact_id()::text, removed_at = clock_timestamp()
 WHERE id = %(id)s AND status = 'leaving' AND removed_xid IS NULL
"""
# No removal in a generation under construction: each snapshot that sees its publish also sees the earlier removals.
REMOVAL = """
SELECT p.removed_xid AS xid, p.removed_at > clock_timestamp() - %(patience)s::interval AS recent
  FROM roir.source_partition p JOIN roir.generation g ON g.id = p.generation_id
 WHERE p.id = %(id)s AND g.status <> 'building'
"""

REMOVALS = """
SELECT p.id, format('%%I.%%I', i.schema_name, i.name) AS view, p.name
  FROM roir.source_partition p
  JOIN roir.generation g ON g.id = p.generation_id
  JOIN roir.index i ON i.id = g.index_id
 WHERE p.status = 'leaving' AND p.removed_xid IS NOT NULL AND g.status = 'active'
   AND i.id = (SELECT index_id FROM roir.operation WHERE id = %(operation)s)
 ORDER BY p.removed_at
"""

# The statements of a batch. No values are bound in them: the conditions may have literals with a per cent sign.
# {within}: true if an entry `x` of the {store} is in the partition's bounds. {still}: 'AND …', true if it has no row
# and may be removed; empty once the source's owner was asked.
LOCK_STORE = "LOCK TABLE {store} IN ROW SHARE MODE"
LOCK_IN_BLOCKS = """
SELECT x.ctid::text FROM {store} x
 WHERE x.ctid >= '({first},0)' AND x.ctid < '({end},0)' AND {within} {still} FOR UPDATE
"""
IS_JOINING = """
SELECT EXISTS (SELECT FROM {store} x WHERE x.ctid = ANY (ARRAY[{tids}]::tid[]) {still} AND {joining})
"""
REMOVE = "DELETE FROM {store} x WHERE x.ctid = ANY (ARRAY[{tids}]::tid[]) {still}"
# In a delta an entry becomes antimatter, whether the base has an entry or not.
REMOVE_FROM_DELTA = """
UPDATE {store} x SET state = '{antimatter}' WHERE x.ctid = ANY (ARRAY[{tids}]::tid[]) {still}
"""
# For an untrusted owner the first two are sent as the owner, the last one as roir.
FIND_IN_BLOCKS = """
SELECT x.ctid FROM {store} x WHERE x.ctid >= '({first},0)' AND x.ctid < '({end},0)' AND {within} {still}
"""
FIND_STILL = "SELECT x.ctid FROM {store} x WHERE x.ctid = ANY (ARRAY[{tids}]::tid[]) {still}"
LOCK_FOUND = "SELECT x.ctid::text FROM {store} x WHERE x.ctid = ANY (ARRAY[{tids}]::tid[]) FOR UPDATE"

STORES = """
SELECT to_regclass(%(delta)s)::oid::bigint AS relation, to_regclass(%(delta)s)::text AS name, true AS delta
 WHERE to_regclass(%(delta)s) IS NOT NULL
UNION ALL
SELECT relation::bigint, relation::regclass::text, false FROM roir.partition_tree(to_regclass(%(base)s)) WHERE leaf
"""
EXISTS = "SELECT to_regclass(%(name)s)"
# The locks by which another session may hold rows of entries, or the tables that hold entries.
ENTRIES_HELD_BY = ["RowShareLock", "RowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock"]


def leaving(connection: Connection) -> list[Row[Any]]:
    """The partitions whose entries are still to be removed, one row for each generation that has them."""
    # Including tables that were dropped before they were attached.
    execute(connection, GIVEN_UP)
    return list(execute(connection, LEAVING).all())


def remove(
    database: Database,
    row: Row[Any],
    report: Callable[[str], None],
    patience_s: float,
    wait: Callable[[str], object] | None = None,
) -> int:
    """Removes the entries of one partition that left, in batches; then removes its condition from the view.

    Safe to repeat, to kill, and to run several times at once. Returns the number of entries. patience_s: how long to
    try for each lock. wait: hears, instead of `report`, of an older snapshot's holder, which keeps the view's condition
    until a later clean-up. Raises LockNotAcquired if the patience isn't enough: the other entries stay hidden.
    """
    removed = 0
    if not row.removed:
        values = {"delta": physical.delta(row.generation_id), "base": physical.base(row.generation_id)}
        with database.transaction() as connection:
            stores = execute(connection, STORES, values).all()
        removed = sum(_remove_from(database, row, store, report, patience_s) for store in stores)
        with database.transaction() as connection:
            execute(connection, REMOVED, {"id": row.id})
    with database.transaction() as connection:
        holder = _older(connection, _removal(connection, row))
    if holder is None:
        attempts = Attempts(
            database, row.view, (), database.limits.attempt_ms, patience_s, waiter=Waiter("removal of entries")
        )
        holder = attempts.run(lambda connection: _conclude(connection, row), report, [row.view])
    if holder is not None:
        (wait or report)(_waits(row, f"partition {row.name}", holder))
    return removed


def _waits(row: Row[Any], of: str, holder: Holder) -> str:
    return (
        f"index {row.view}: the entries of {of} are removed, but its lookups are slower until {holder} has ended, "
        "whose snapshot is older. The next roir clean-up after that ends it"
    )


def still_hidden(connection: Connection, operation_id: int) -> list[str]:
    """A line if the view of an operation's index still hides removed entries, because of an older snapshot."""
    rows = execute(connection, REMOVALS, {"operation": operation_id}).all()
    for row in rows:
        if (holder := _older(connection, _removal(connection, row))) is not None:
            of = f"partition {row.name}" if len(rows) == 1 else f"{len(rows)} partitions ({row.name} and others)"
            return [_waits(row, of, holder)]
    return []


def _removal(connection: Connection, row: Row[Any]) -> Row[Any] | None:
    return execute(connection, REMOVAL, {"id": row.id, "patience": view.STANDBY_PATIENCE}).first()


def _older(connection: Connection, removal: Row[Any] | None) -> Holder | None:
    """A session or standby that may have a snapshot which still sees the removed entries; None if there is none."""
    if removal is None:
        return None
    return next((one for one in holders(connection, removal.xid) if one.known or removal.recent), None)


def _conclude(connection: Connection, row: Row[Any]) -> Holder | None:
    """Forgets the partition, and removes its condition from the view; or returns the holder of an older snapshot."""
    execute(connection, STOP_NOTING, {"relation": row.relation})
    view.hold(connection, row.index_id)
    removal = _removal(connection, row)
    with connection.begin_nested() as attempt:
        execute(connection, "DELETE FROM roir.source_partition WHERE id = %(id)s", {"id": row.id})
        execute(connection, "SELECT roir.refresh_view(%(id)s)", {"id": row.generation_id})
        # Checked again with the view locked, since a session can pass its snapshot on.
        if (holder := _older(connection, removal)) is not None:
            attempt.rollback()
            return holder
    return None


def _remove_from(
    database: Database, row: Row[Any], store: Row[Any], report: Callable[[str], None], patience_s: float
) -> int:
    """Removes the entries of one segment or delta; returns how many. Begins again if the table gets another file."""
    attempts = Attempts(
        database,
        f"the entries of partition {row.name}",
        [store.relation],
        database.limits.attempt_ms,
        patience_s,
        ENTRIES_HELD_BY,
        then="The next roir clean-up continues",
    )
    removed = 0
    try:
        while True:
            # In a batch, since its size takes a lock, for which an uncommitted TRUNCATE makes us wait.
            [file] = in_batches(attempts, [store.name], _file, report, patience_s)
            if file is None:
                return removed
            # NULL if the store is being dropped.
            blocks = range(0, file.blocks or 0, database.limits.removal_blocks)

            def batch(connection: Connection, first: int, file: File = file) -> int | None:
                return _batch(connection, row, store, file, first, first + database.limits.removal_blocks)

            for taken in in_batches(attempts, blocks, batch, report, patience_s):
                if taken is None:
                    break
                removed += taken
            else:
                return removed
    except DBAPIError as error:
        if not has_vanished(error):
            raise
        with database.transaction() as connection:
            if execute(connection, EXISTS, {"name": store.name}).scalar() is None:
                # The store was dropped with its generation, by a clean-up for example.
                return removed
        raise LockNotAcquired(
            f"entries of partition {row.name} can't be removed now: {str(error.orig).splitlines()[0]}. "
            "Something was renamed meanwhile; the next roir clean-up adopts the new name and continues"
        ) from error


def _batch(connection: Connection, row: Row[Any], store: Row[Any], file: File, first: int, end: int) -> int | None:
    """Removes the entries in the blocks from `first` to before `end` of a segment or delta; returns how many.

    file: the file of these blocks. None if the store has another file by now: VACUUM FULL moves entries to any place.
    """
    # Antimatter must stay: it may be for a copy that a batch is about to commit.
    only = f"AND x.state = '{EntryState.REGULAR.value}'" if store.delta else ""
    if execute(connection, EXISTS, {"name": store.name}).scalar() is None:
        return 0
    source = _source(connection, row)
    has_row = row.has_row
    if source is not None:
        # The lock that a query for rows takes; under it the source keeps its owner and its name.
        catalog.hold(connection, source)
        asked = {"generation": row.generation_id, "source": source.oid}
        has_row = execute(connection, HAS_ROW, asked).scalar_one()
    # After the source, in the order of a TRUNCATE. A rewrite would make the entries' places meaningless.
    execute(connection, LOCK_STORE.format(store=store.name))
    now = _file(connection, store.name)
    if now is None or (now.relation, now.filenode) != (file.relation, file.filenode):
        return None
    parts = {
        "store": store.name,
        "first": first,
        "end": end,
        "within": row.within,
        "still": f"AND NOT {has_row} {only}",
    }
    if source is not None and not owner.is_trusted(connection, source):
        removed = _step_as_owner(connection, row, source, store, parts)
    else:
        removed = _step(connection, row, store, parts)
    if source is not None and removed:
        check_name(connection, source.sql, source.oid)
    return removed


def _step(connection: Connection, row: Row[Any], store: Row[Any], parts: Mapping[str, Any]) -> int:
    tids = _listed(execute(connection, LOCK_IN_BLOCKS.strip().format(**parts)).scalars())
    return _take_away(connection, row, store, {**parts, "tids": tids}) if tids else 0


def _take_away(connection: Connection, row: Row[Any], store: Row[Any], parts: Mapping[str, Any]) -> int:
    """Removes locked entries; returns how many. A copy of the same entries waits for that, and then writes them again.

    Raises LockNotAcquired if a table that is being attached has entries among them.
    """
    for joining in execute(connection, JOINING, {"generation": row.generation_id}).all():
        if execute(connection, IS_JOINING.strip().format(**parts, joining=joining.within)).scalar_one():
            table = joining.name.replace("'", "''")
            raise LockNotAcquired(
                f"entries of partition {row.name} can't be removed yet: {joining.name} is being attached with the same "
                f"bounds. Run that roir attach-partition again, or cancel it: SELECT roir.cancel_attach('{table}'). "
                "The next roir clean-up continues"
            )
    change = REMOVE_FROM_DELTA if store.delta else REMOVE
    return execute(connection, change.strip().format(**parts, antimatter=EntryState.ANTIMATTER.value)).rowcount


def _step_as_owner(
    connection: Connection, row: Row[Any], source: Source, store: Row[Any], parts: Mapping[str, Any]
) -> int:
    """As `_step`, for an untrusted owner: rows are read as the owner, entries locked and removed by their places."""

    def asked(statement: str, **more: str) -> str:
        query = statement.strip().format(**parts, **more)
        return _listed(owner.rows(connection, source, query, "place tid").scalars())

    lock = LOCK_FOUND.format(store=store.name, tids=asked(FIND_IN_BLOCKS))
    held = _listed(execute(connection, lock).scalars())
    if not held:
        return 0
    return _take_away(connection, row, store, {**parts, "tids": asked(FIND_STILL, tids=held), "still": ""})


def _listed(tids: Iterable[str]) -> str:
    """Addresses as the elements of an SQL array."""
    return ", ".join(f"'{tid}'" for tid in tids)


def _source(connection: Connection, row: Row[Any]) -> Source | None:
    try:
        # Unchecked: the source may have been altered so that it couldn't be indexed any more.
        return catalog.read_source_by_oid(connection, row.source_oid, check=False)
    except NotFound:
        return None


def _file(connection: Connection, name: str) -> File | None:
    """The present file of a store; None if the store is gone."""
    oid = execute(connection, "SELECT to_regclass(%(name)s)::oid::bigint", {"name": name}).scalar()
    return next(iter(files_of(connection, [oid])), None) if oid is not None else None
