"""Repairs indexes after partitions came or went without roir, by a plain DROP, DETACH or ATTACH."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import argument
from airflow_roir.engine.capture import partition_changes
from airflow_roir.engine.capture.partition_changes import Change
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.partitions import copy_rows, remove_entries, unique_rows
from airflow_roir.engine.partitions.detach import find_table
from airflow_roir.engine.readers import view
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import DuplicatesFound, LockNotAcquired, NotFound

GENERATIONS = """
SELECT g.id, g.index_id, g.entry, i.schema_name, i.name FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND g.status IN ('building', 'active', 'retired') ORDER BY g.id
"""
JOIN = """
INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, link, name, condition, status)
SELECT %(generation)s, t.relation, t.parent, t.leaf, t.link, t.relation::regclass::text,
       coalesce(roir.bounds_of(t.relation), 'true'), 'joining'
  FROM roir.partition_tree(%(source)s) t WHERE t.relation = %(relation)s
    ON CONFLICT DO NOTHING
"""
# again: a killed sync had begun to copy it, and it was detached since. Rows without bounds are those of a sync.
JOINING = """
SELECT id, bounds IS NULL AND link IS DISTINCT FROM %(link)s AS again FROM roir.source_partition
 WHERE generation_id = %(generation)s AND relation = %(relation)s AND status = 'joining'
"""
LEAVE = "UPDATE roir.source_partition SET status = 'leaving' WHERE id = %(id)s AND status = 'joining'"


@dataclass
class SyncReport:
    """The repaired partitions. gone, came: their names; entries are summed over the generations of all indexes."""

    gone: list[str]
    came: list[str]
    entries_removed: int = 0
    entries_added: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Sync:
    """One call of `sync_partitions`: its source, its actor, and its results so far."""

    database: Database
    source: Source
    actor: str
    report: Callable[[str], None]
    patience_s: float
    result: SyncReport

    def attempts(self, wanted: str, generation: Row[Any]) -> Attempts:
        """Attempts at a transaction that needs locks on the source and its partitions, or on a generation's view."""
        waiter = Waiter("sync-partitions", str(operations.index_name(generation)))
        return Attempts(
            self.database,
            wanted,
            self.source.relations,
            self.database.limits.attempt_ms,
            self.patience_s,
            waiter=waiter,
        )


@in_one_history
def sync_partitions(
    database: Database,
    table: str,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> SyncReport:
    """Removes the entries of partitions that are gone, and copies the rows of partitions that came with rows.

    Does this for every index of the table, in every phase of an operation, which can then be resumed. Safe to kill and
    to repeat. Raises NotFound, LockNotAcquired; DuplicatesFound if rows that came share keys of a unique index.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        oid, name = find_table(connection, table)
        source = catalog.read_source(connection, name)
        generations = execute(connection, GENERATIONS, {"source": oid}).all()
    if not generations:
        raise NotFound(f"table {name} has no roir index")
    result = SyncReport([], [])
    with telling_of_names():
        _sync(_Sync(database, source, actor, report, patience_s, result), generations)
    with database.transaction() as connection:
        leaving = [row for row in remove_entries.leaving(connection) if row.source_oid == oid]
    for row in leaving:
        result.entries_removed += remove_entries.remove(database, row, report, patience_s)
    return result


def _sync(sync: _Sync, generations: Sequence[Row[Any]]) -> None:
    for generation in generations:
        # Until there are no changes: if a whole level left and came back, its return is only seen after its leaving.
        while changed := _changes(sync, generation.id):
            for change in changed:
                if change.gone:
                    _forget(sync, generation, change)
                    _name(sync.result.gone, change)
                else:
                    sync.result.entries_added += _take_in(sync, generation, change)
                    _name(sync.result.came, change)


def _changes(sync: _Sync, generation_id: int) -> list[Change]:
    with sync.database.transaction() as connection:
        return partition_changes.changes(connection, sync.source, generation_id)


def _name(names: list[str], change: Change) -> None:
    if change.name not in names:
        names.append(change.name)


def _forget(sync: _Sync, generation: Row[Any], change: Change) -> None:
    def body(connection: Connection) -> None:
        values = {"generation": generation.id, "relation": change.relation}
        execute(connection, "SELECT roir.forget_gone(%(generation)s, %(relation)s::oid)", values)
        operations.record_event(connection, generation.index_id, None, sync.actor, "partition gone", change.name)

    shown = operations.index_name(generation).sql
    sync.attempts(shown, generation).run(body, sync.report, [shown])


def _collisions(sync: _Sync, generation: Row[Any], entry: Entry, change: Change) -> DuplicatesFound:
    """The error for a partition whose rows share keys: they are in the table already, so a user must change some."""
    groups, rows, first = copy_rows.record_collisions(sync.database, sync.source, generation.id, entry, change.relation)
    index = operations.index_name(generation)
    return DuplicatesFound(
        f"index {index}: partition {change.name} was attached without roir, and {rows} rows share {groups} "
        f"{'key' if groups == 1 else 'keys'} of the unique index: {'; '.join(first)}"
        f"{'' if groups == len(first) else f'; and {groups - len(first)} more'}. roir duplicates {argument(index)} "
        "lists them. Until they are healed the index lacks rows of that partition; then: roir sync-partitions "
        f"{argument(sync.source.name)}"
    )


def _take_in(sync: _Sync, generation: Row[Any], change: Change) -> int:
    entry = Entry.from_json(generation.entry)
    values = {
        "generation": generation.id,
        "source": sync.source.oid,
        "relation": change.relation,
        "link": change.link,
    }
    with sync.database.transaction() as connection:
        joining = execute(connection, JOINING, values).first()
        found = None if joining is None or joining.again else joining.id
        if joining is not None and joining.again:
            execute(connection, LEAVE, {"id": joining.id})
        if found is None and partition_changes.brings_rows(
            connection, sync.source, generation.id, entry, change.relation
        ):
            execute(connection, JOIN, values)
            found = execute(connection, JOINING, values).scalar()
            if found is None:
                raise LockNotAcquired(f"partition {change.name} was detached meanwhile. Run the command again")
    added = 0
    if found is not None:
        try:
            of = generation.id, entry, change.relation, found, sync.patience_s
            added = copy_rows.bring_in(sync.database, sync.source, *of, sync.report)
        except unique_rows.Collision:
            raise _collisions(sync, generation, entry, change) from None
        with sync.database.transaction() as connection:
            unique_rows.forget(connection, generation.id)

    def body(connection: Connection) -> None:
        if found is not None:
            # If the partition was detached again, its copied entries must leave.
            execute(connection, LEAVE, {"id": found})
            execute(connection, "SELECT roir.release_table(%(relation)s::oid)", {"relation": change.relation})
        partition_changes.adopt(connection, sync.source, generation.id, [change])
        if found is None and joining is None:
            view.hide(connection, generation.id)
        else:
            # The rows were there before: an older snapshot sees them, but not the entries that were copied now.
            view.refuse_older(connection, generation.id)
        if found is not None:
            operations.record_event(connection, generation.index_id, None, sync.actor, "partition came", change.name)

    shown = operations.index_name(generation).sql
    sync.attempts(sync.source.sql, generation).run(body, sync.report, [shown])
    return added
