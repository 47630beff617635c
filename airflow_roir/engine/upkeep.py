"""The steps of a clean-up for one index: follow its source table, remove what finished operations left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.capture import alterations, installation, partition_changes
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.feeds import ends
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts, Drain
from airflow_roir.engine.readers import old_snapshots, rows_view, view
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import InvariantViolated, PartitionsChanged
from airflow_roir.generation_state import GenerationStatus

CLEAN_UP = Waiter("clean-up")
# A rebuild that copies from the index still reads the generation.
IS_READ = """EXISTS (SELECT FROM roir.generation b
                        WHERE b.index_id = g.index_id AND b.status = 'building' AND b.scan = 'index')"""
# A build under way must notice that its capture was replaced for a while.
IS_BUILT = """
SELECT EXISTS (SELECT FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
                WHERE i.source_oid = %(source)s AND g.status = 'building')
"""


@dataclass
class CleanUpReport:
    """The result of one clean-up. waiting: work that it left to the next one, with reasons. warnings: problems."""

    ghosts: int = 0
    deltas_dropped: int = 0
    generations_dropped: int = 0
    operations_aborted: int = 0
    guards_removed: int = 0
    partition_entries: int = 0
    invalid_indexes: int = 0
    waiting: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON shows it."""
        return asdict(self)


def _patience(database: Database) -> tuple[int, float]:
    """How long one attempt at a lock lasts, in milliseconds, and all attempts together, in seconds."""
    return database.limits.attempt_ms, database.limits.clean_up_s


def _status(connection: Connection, generation_id: int) -> str:
    """The generation's present status: a drop, a publish or another clean-up may have changed it meanwhile."""
    found = execute(connection, "SELECT status FROM roir.generation WHERE id = %(id)s", {"id": generation_id})
    return str(found.scalar_one())


def follow_partitions(database: Database, row: Any, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Register new partitions; name those that came or went with rows, which a user must settle."""
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, row.index_id, check=True)
        if source is None or _status(connection, row.id) == GenerationStatus.DROPPED:
            return
        # For the partitions that the guard has registered.
        tamper.follow(connection, row.id)
        try:
            came = partition_changes.check(
                connection, str(operations.index_name(row)), source, row.id, Entry.from_json(row.entry), set()
            )
        except PartitionsChanged as error:
            result.waiting.append(str(error))
            return

    def body(connection: Connection) -> None:
        partition_changes.adopt(connection, source, row.id, came)
        view.hide(connection, row.id)

    if came:
        name = operations.index_name(row)
        waiter = Waiter("clean-up", str(name))
        attempts = Attempts(database, source.sql, source.relations, *_patience(database), waiter=waiter)
        attempts.run(body, report, [name.sql])


def refresh_capture(database: Database, index_id: int, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Replace the capture function if it was made for another name, owner or primary key, or by another version."""
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, index_id, check=True)
        if source is None or not _may_refresh(connection, source):
            return

    def body(connection: Connection, lock: Callable[[], None]) -> bool:
        lock()
        if not _may_refresh(connection, source):
            return False
        # A mere change of names needs no warning: the old function missed no write, since writes failed.
        doubtful = installation.is_stale(connection, source, names_of_now=False)
        installation.refresh(connection, source)
        return doubtful

    if Drain(database, source.sql, source.relations, *_patience(database), CLEAN_UP).run(body, report):
        result.warnings.append(
            f"table {source.sql}: its capture was made for another owner or primary key, or by another version of "
            "roir, and has been replaced. Run roir verify for its indexes: writes may be missing there"
        )


def _may_refresh(connection: Connection, source: Source) -> bool:
    if not installation.is_stale(connection, source):
        return False
    is_built = execute(connection, IS_BUILT, {"source": source.oid}).scalar_one()
    return not (is_built and alterations.is_replaced(connection, source.oid))


def remove_guard(database: Database, row: Any, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Make the view plain: once no snapshot is older than the publish, readers need no guard."""
    name = operations.index_name(row)

    def holders(connection: Connection) -> bool:
        found = view.old_snapshots(connection, row.id)
        if found:
            result.waiting.append(
                f"index {name}: its view stays guarded until {found[0]} has ended, which is older than its publish"
            )
        return bool(found)

    def body(connection: Connection) -> bool:
        with connection.begin_nested() as attempt:
            view.show(connection, name, row.index_id, row.id, guarded=False)
            # The view is locked: from here on no publish can change it.
            if _status(connection, row.id) != GenerationStatus.ACTIVE or holders(connection):
                attempt.rollback()
                return False
        return True

    with database.transaction() as connection:
        if not view.is_ours(connection, name, row.index_id):
            if _status(connection, row.id) == GenerationStatus.ACTIVE:
                raise InvariantViolated(view.lost(connection, name, row.id))
            return
        if not view.is_guarded(connection, name) or holders(connection):
            return
    if Attempts(database, name.sql, (), *_patience(database), waiter=CLEAN_UP).run(body, report, [name.sql]):
        result.guards_removed += 1
        with database.transaction() as connection:
            result.warnings += [
                f"index {name}: the guard of its view ended {view.STANDBY_PATIENCE} after its publish, but {one}, "
                "doesn't say whether an older transaction is still open there"
                for one in view.unknown(connection, row.id)
            ]


def follow_table(database: Database, row: Any, report: Callable[[str], None]) -> None:
    """Make an index's rows view follow its table, if the table's columns have changed and no event trigger did it."""
    with database.transaction() as connection:
        name = rows_view.shown(connection, row.index_id)
        if name is None or not rows_view.is_stale(connection, row.index_id):
            return

    def body(connection: Connection) -> None:
        if rows_view.shown(connection, row.index_id) is not None:
            rows_view.make(connection, operations.index_name(row), row.index_id)

    Attempts(database, name, (), *_patience(database), waiter=CLEAN_UP).run(body, report, [name])


def drop_delta(database: Database, generation_id: int, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Drop the delta of a published generation, which holds only ghosts. Raises InvariantViolated if it holds more."""
    name = physical.delta(generation_id)

    def body(connection: Connection) -> int | None:
        if execute(connection, "SELECT to_regclass(%(name)s)", {"name": name}).scalar() is None:
            return None
        execute(connection, f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
        if _status(connection, generation_id) not in (GenerationStatus.ACTIVE, GenerationStatus.RETIRED):
            return None
        counts = {
            row.state: row.rows
            for row in execute(connection, f"SELECT state, count(*) AS rows FROM {name} GROUP BY state")
        }
        ghosts = int(counts.pop(EntryState.GHOST.value, 0))
        if counts:
            held = " and ".join(f"{rows:,} {state}" for state, rows in counts.items())
            raise InvariantViolated(f"{name} of a published generation still has {held} entries; run roir verify")
        execute(connection, f"DROP TABLE {name}")
        return ghosts

    with database.transaction() as connection:
        oid = execute(connection, "SELECT to_regclass(%(name)s)::oid", {"name": name}).scalar()
    if oid is None:
        return
    ghosts = Attempts(database, name, [int(oid)], *_patience(database), waiter=CLEAN_UP).run(body, report, [name])
    if ghosts is not None:
        result.ghosts += ghosts
        result.deltas_dropped += 1


def drop_generation(
    database: Database, row: Any, actor: str, result: CleanUpReport, report: Callable[[str], None]
) -> None:
    """Drop a retired generation whose time is over, unless a SERIALIZABLE transaction or a rebuild still reads it."""
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, row.index_id)

    def body(connection: Connection, lock: Callable[[], None]) -> bool:
        if source is not None:
            lock()
        if found := old_snapshots.overlapping(connection, [row.id]):
            result.waiting.append(f"index {operations.index_name(row)}: {old_snapshots.kept(found)}")
            return False
        changed = execute(
            connection,
            "UPDATE roir.generation g SET status = 'dropped', capture_mode = 'none' "
            "WHERE id = %(id)s AND status = 'retired' AND drop_after <= clock_timestamp() "
            f"AND NOT {IS_READ}",
            {"id": row.id},
        ).rowcount
        # A revert may have shown it again meanwhile.
        if not changed:
            return False
        ends().retire(connection, row.id, actor)
        if source is not None:
            installation.refresh(connection, source)
        physical.drop(connection, row.id)
        operations.record_event(connection, row.index_id, None, actor, "clean up", "dropped a retired generation")
        return True

    sql = source.sql if source is not None else physical.base(row.id)
    relations = source.relations if source is not None else ()
    if Drain(database, sql, relations, *_patience(database), CLEAN_UP).run(body, report, physical.names(row.id)):
        result.generations_dropped += 1
