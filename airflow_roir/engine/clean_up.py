"""Clean up, in the background: ghosts and deltas of published generations, and retired ones after their window.

It never touches a generation that is building (the paper's section 4.1: ghost clean-up must wait for the build).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument
from airflow_roir.engine import abort, drop
from airflow_roir.engine.capture import alterations, installation, partition_changes
from airflow_roir.engine.compact import leftovers
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.long_pause import LongPause
from airflow_roir.engine.database import Database, execute, has_vanished, sqlstate
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.lanes import ends
from airflow_roir.engine.health import faults
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import DENIED, MOST_VANISHED, Attempts, Drain
from airflow_roir.engine.partitions import remove_entries
from airflow_roir.engine.readers import old_snapshots, view
from airflow_roir.engine.retry.trouble import Trouble, reason_of, trouble_of
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import InvalidInput, InvariantViolated, LockNotAcquired, PartitionsChanged, RoirError
from airflow_roir.generation_state import GenerationStatus

CLEAN_UP = Waiter("clean-up")


@dataclass
class CleanUpReport:
    """What one clean-up did. waiting: what it left for the next one, with the reason. warnings: what is wrong."""

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
        """For JSON."""
        return asdict(self)


# A rebuild from the index reads it still.
IS_READ = """EXISTS (SELECT FROM roir.generation b
                        WHERE b.index_id = g.index_id AND b.status = 'building' AND b.scan = 'index')"""
PUBLISHED = f"""
SELECT g.id, g.index_id, g.entry, i.schema_name, i.name, g.status = 'active' AS active,
       g.status = 'retired' AND g.drop_after <= clock_timestamp()
       AND NOT {IS_READ} AS expired,
       to_regclass('roir_data.g' || g.id || '_delta') IS NOT NULL AS has_delta
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE g.status IN ('active', 'retired') ORDER BY g.id
"""
ABORTING = """
SELECT o.id AS operation_id, i.schema_name, i.name FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE o.status = 'aborting' ORDER BY o.id
"""
MAINTAINED = """
SELECT DISTINCT i.id AS index_id, i.schema_name, i.name FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE g.status IN ('active', 'building') ORDER BY i.id
"""
LIVING = """
SELECT i.schema_name, i.name, max(o.id) AS operation_id FROM roir.index i JOIN roir.operation o ON o.index_id = i.id
 WHERE i.dropped_at IS NULL GROUP BY i.id ORDER BY i.id
"""
# A build must find out that its capture was another one for a while.
IS_BUILT = """
SELECT EXISTS (SELECT FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
                WHERE i.source_oid = %(source)s AND g.status = 'building')
"""
DROPPING = "SELECT id AS index_id, schema_name, name FROM roir.index WHERE id = ANY (%(ids)s) ORDER BY id"

# They say why a build was aborted, by values of the table that nobody asks for any more then.
OLD_DUPLICATES = """
DELETE FROM roir.duplicate d USING roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE o.id = d.operation_id AND i.dropped_at < clock_timestamp() - interval '7 days'
"""


@in_one_history
def clean_up(
    database: Database,
    actor: str = "clean-up",
    report: Callable[[str], None] = lambda line: None,
    tell: Callable[[LongPause], object] = lambda pause: None,
) -> CleanUpReport:
    """Remove what finished operations leave. Safe at any time, by several processes at once.

    tell: hears of pauses that last for long, and of those that were aborted for that, as their options say.
    What can't be locked soon is left for the next clean-up; the report names it.
    """
    result = CleanUpReport()
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        published = execute(connection, PUBLISHED).all()
        aborting = execute(connection, ABORTING).all()
        maintained = execute(connection, MAINTAINED).all()
        living = execute(connection, LIVING).all()
        dropping = execute(connection, DROPPING, {"ids": drop.half_dropped(connection)}).all()
    for row in aborting:
        _attempt(result, row, partial(_finish_abort, database, row.operation_id, actor, result, report))
    for row in dropping:
        _attempt(result, row, partial(drop.finish_drop, database, row.index_id, report, database.limits.clean_up_s))
    # First: under a new owner of the table partitions can't be looked at before he has his rights.
    for row in maintained:
        _attempt(result, row, partial(_refresh_capture, database, row.index_id, result, report))
    for row in published:
        _attempt(result, row, partial(_follow_partitions, database, row, result, report))
    for row in living:
        _attempt(result, row, partial(_look_for_problems, database, row, result))
    _attempt(result, None, partial(_settle_pauses, database, actor, result, tell, report))
    leaving: list[Any] = []
    _attempt(result, None, partial(_find_leaving, database, leaving))
    for row in leaving:
        _attempt(result, row, partial(_remove_entries, database, row, result, report))
    for row in [row for row in published if row.active]:
        _attempt(result, row, partial(_remove_guard, database, row, result, report))
    for row in [row for row in published if row.has_delta]:
        _attempt(result, row, partial(_drop_delta, database, row.id, result, report))
    for row in [row for row in published if row.expired]:
        _attempt(result, row, partial(_drop_generation, database, row, actor, result, report))
    _attempt(result, None, partial(_drop_invalid, database, result, report))
    _attempt(result, None, partial(_release_shards, database, result, report))
    _attempt(result, None, partial(_forget_duplicates, database))
    return result


def _drop_invalid(database: Database, result: CleanUpReport, report: Callable[[str], None]) -> None:
    result.invalid_indexes += leftovers.drop(database, report, database.limits.clean_up_s)


def _release_shards(database: Database, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """The captures in shards of generations that are gone, also of those that were out of reach then."""
    result.waiting += ends().release(database, None, database.limits.clean_up_s, report)


def _forget_duplicates(database: Database) -> None:
    with database.transaction() as connection:
        execute(connection, OLD_DUPLICATES)


# By SQLSTATE; of all else that an index's objects were altered. Bounds that were written down name labels and types.
RENAMED = "A label or a type was renamed. Rename it back, run roir clean-up, then rename it again"
REMEDIES = {
    DENIED: "Give the role that roir connects as this right again, then run roir clean-up",
    "22P02": RENAMED,
    "42704": RENAMED,
}


def _attempt(result: CleanUpReport, row: Any, work: Callable[[], object]) -> None:
    """One step, for one index. If it fails, the report says so, and the other indexes are still cleaned up."""
    for left in range(MOST_VANISHED, -1, -1):
        try:
            work()
            return
        except (LockNotAcquired, InvalidInput) as error:
            # InvalidInput: the source is no table any more that could be indexed; the other indexes are cleaned up.
            result.waiting.append(str(error))
            return
        except RoirError as error:
            result.warnings.append(_problem(row, str(error)))
            return
        except DBAPIError as error:
            if left and has_vanished(error):
                # Another clean-up, a drop or an abort was faster: look again.
                continue
            if trouble_of(error) in (Trouble.EXHAUSTED, Trouble.CANCELLED) and sqlstate(error):
                # Nothing is wrong with the index.
                result.waiting.append(reason_of(error) if row is None else f"index {_name(row)}: {reason_of(error)}")
                return
            # Without a server there is nothing to go on with.
            if error.connection_invalidated or sqlstate(error)[:2] in ("", "08", "57"):
                raise
            remedy = REMEDIES.get(sqlstate(error))
            result.warnings.append(_problem(row, str(error.orig).strip().split("\n", 1)[0], remedy))
            return


def _patience(database: Database) -> tuple[int, float]:
    """Of one attempt at a lock, in milliseconds, and of all of them, in seconds."""
    return database.limits.attempt_ms, database.limits.clean_up_s


def _name(row: Any) -> Any:
    return operations.index_name(row) if hasattr(row, "schema_name") else row.view


def _problem(row: Any, said: str, remedy: str | None = None) -> str:
    if row is None:
        return said
    name = _name(row)
    if said.startswith(f"index {name}:"):
        return said
    remedy = remedy or (
        f"Undo the change to its view or tables, or drop the index and build it again: roir drop {argument(name)}"
    )
    return f"index {name} can't be cleaned up: {said}. {remedy}"


def _look_for_problems(database: Database, row: Any, result: CleanUpReport) -> None:
    with database.transaction() as connection:
        # The definition of a view is read under its lock.
        execute(connection, f"SET LOCAL lock_timeout = {database.limits.attempt_ms}")
        try:
            found = faults.warnings(connection, row.operation_id)
        except DBAPIError as error:
            if sqlstate(error) != LOCK_TIMEOUT:
                raise
            raise LockNotAcquired(
                f"index {_name(row)}: can't be checked now, since somebody holds a lock on its table or on its view"
            ) from error
    result.warnings += [line for line in found if line not in result.warnings]


def _settle_pauses(
    database: Database,
    actor: str,
    result: CleanUpReport,
    tell: Callable[[LongPause], object],
    report: Callable[[str], None],
) -> None:
    found = abort.settle_pauses(database, actor, None, tell, report)
    result.warnings += [pause.text for pause in found]
    result.operations_aborted += sum(pause.aborted for pause in found)


def _find_leaving(database: Database, leaving: list[Any]) -> None:
    with database.transaction() as connection:
        leaving += remove_entries.leaving(connection)


def _finish_abort(
    database: Database, operation_id: int, actor: str, result: CleanUpReport, report: Callable[[str], None]
) -> None:
    abort.finish_abort(database, operation_id, actor, report, database.limits.clean_up_s)
    result.operations_aborted += 1


def _follow_partitions(database: Database, row: Any, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Register partitions that were created; name those that came or went with rows, which is for a user to settle."""
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, row.index_id, check=True)
        if source is None or _status(connection, row.id) == GenerationStatus.DROPPED:
            return
        # Of those that the guard has taken in.
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


def _refresh_capture(database: Database, index_id: int, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Make the capture function again if it is one for another name or primary key of the table, or of older code."""
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, index_id, check=True)
        if source is None or not _may_refresh(connection, source):
            return

    def body(connection: Connection, lock: Callable[[], None]) -> bool:
        lock()
        if not _may_refresh(connection, source):
            return False
        # Under other names it did what it does: nothing was missed, writes failed.
        doubtful = installation.is_stale(connection, source, names_of_now=False)
        installation.refresh(connection, source)
        return doubtful

    if Drain(database, source.sql, source.relations, *_patience(database), CLEAN_UP).run(body, report):
        result.warnings.append(
            f"table {source.sql}: its capture was made for another owner or primary key, or by another version of "
            "roir, and was made again. Run roir verify for its indexes"
        )


def _may_refresh(connection: Connection, source: Source) -> bool:
    if not installation.is_stale(connection, source):
        return False
    is_built = execute(connection, IS_BUILT, {"source": source.oid}).scalar_one()
    return not (is_built and alterations.is_replaced(connection, source))


def _status(connection: Connection, generation_id: int) -> str:
    """Its present status: a drop, a publish or another clean-up may have been faster."""
    found = execute(connection, "SELECT status FROM roir.generation WHERE id = %(id)s", {"id": generation_id})
    return str(found.scalar_one())


def _remove_entries(database: Database, row: Any, result: CleanUpReport, report: Callable[[str], None]) -> None:
    result.partition_entries += remove_entries.remove(
        database, row, report, database.limits.clean_up_s, result.waiting.append
    )


def _remove_guard(database: Database, row: Any, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Once no snapshot is older than the publish, readers need no guard."""
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
            # The view is locked: from here on no publish comes between.
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


def _drop_delta(database: Database, generation_id: int, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Ghosts are all that a published generation's delta holds; they go with it, at once."""
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
            raise InvariantViolated(f"{name} of a published generation still holds {counts}; run roir verify")
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


def _drop_generation(
    database: Database, row: Any, actor: str, result: CleanUpReport, report: Callable[[str], None]
) -> None:
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, row.index_id)

    def body(connection: Connection, lock: Callable[[], None]) -> bool:
        if source is not None:
            lock()
        if found := old_snapshots.overlapping(connection, [row.id]):
            result.waiting.append(f"index {_name(row)}: {old_snapshots.kept(found)}")
            return False
        changed = execute(
            connection,
            "UPDATE roir.generation g SET status = 'dropped', capture_mode = 'none' "
            "WHERE id = %(id)s AND status = 'retired' AND drop_after <= clock_timestamp() "
            f"AND NOT {IS_READ}",
            {"id": row.id},
        ).rowcount
        # A revert may have been faster, which shows it again.
        if not changed:
            return False
        ends().retire(connection, row.id, actor)
        if source is not None:
            installation.refresh(connection, source)
        physical.drop(connection, row.id)
        operations.record_event(connection, row.index_id, None, actor, "clean up", f"dropped generation {row.id}")
        return True

    sql = source.sql if source is not None else physical.base(row.id)
    relations = source.relations if source is not None else ()
    if Drain(database, sql, relations, *_patience(database), CLEAN_UP).run(body, report, physical.names(row.id)):
        result.generations_dropped += 1
