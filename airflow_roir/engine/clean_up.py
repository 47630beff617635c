"""Cleans up in the background: ghosts and deltas of published generations, and retired generations after their time.

Never touches a generation under construction (the paper's section 4.1: ghost clean-up must wait for the build).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument
from airflow_roir.engine import abort, drop, upkeep
from airflow_roir.engine.compact import leftovers
from airflow_roir.engine.control import long_pause, operations
from airflow_roir.engine.control.long_pause import LongPause
from airflow_roir.engine.database import Database, execute, has_vanished, sqlstate
from airflow_roir.engine.generation.feeds import ends
from airflow_roir.engine.health import faults
from airflow_roir.engine.locks.locks import MOST_VANISHED
from airflow_roir.engine.locks.table_lock import DENIED
from airflow_roir.engine.partitions import remove_entries
from airflow_roir.engine.reference import following
from airflow_roir.engine.reference.listing import references_to
from airflow_roir.engine.retry.trouble import Trouble, reason_of, trouble_of
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT
from airflow_roir.engine.upkeep import CleanUpReport
from airflow_roir.errors import InvalidInput, LockNotAcquired, RoirError

PUBLISHED = f"""
SELECT g.id, g.index_id, g.entry, i.schema_name, i.name, g.status = 'active' AS active,
       g.status = 'retired' AND g.drop_after <= clock_timestamp()
       AND NOT {upkeep.IS_READ} AS expired,
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
REFERRING = """
SELECT r.*, i.schema_name, i.name AS index_name, i.source_oid
  FROM roir.reference r JOIN roir.index i ON i.id = r.index_id ORDER BY r.id
"""
DROPPING = "SELECT id AS index_id, schema_name, name FROM roir.index WHERE id = ANY (%(ids)s) ORDER BY id"

# Duplicates contain values of the source table, and say why a build was aborted: of no use for a dropped index.
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

    tell: called for each long pause, and for each operation that was aborted because its pause was too long for its
    options. Tables that can't be locked soon are left to the next clean-up; the report names them.
    """
    result = CleanUpReport()
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        published = execute(connection, PUBLISHED).all()
        aborting = execute(connection, ABORTING).all()
        maintained = execute(connection, MAINTAINED).all()
        living = execute(connection, LIVING).all()
        referring = execute(connection, REFERRING).all()
        dropping = execute(connection, DROPPING, {"ids": drop.half_dropped(connection)}).all()
    for row in aborting:
        _attempt(result, row, partial(_finish_abort, database, row.operation_id, actor, result, report))
    for row in dropping:
        _attempt(result, row, partial(drop.finish_drop, database, row.index_id, report, database.limits.clean_up_s))
    # First: if the table has a new owner, its partitions can't be read before that owner has got its rights.
    for row in maintained:
        _attempt(result, row, partial(upkeep.refresh_capture, database, row.index_id, result, report))
    for row in published:
        _attempt(result, row, partial(upkeep.follow_partitions, database, row, result, report))
    for row in living:
        _attempt(result, row, partial(_look_for_problems, database, row, result))
    for row in referring:
        _attempt(result, row, partial(_follow_reference, database, row, actor, result, report))
    _attempt(result, None, partial(_settle_pauses, database, actor, result, tell, report))
    leaving: list[Any] = []
    _attempt(result, None, partial(_find_leaving, database, leaving))
    for row in leaving:
        _attempt(result, row, partial(_remove_entries, database, row, result, report))
    for row in [row for row in published if row.active]:
        _attempt(result, row, partial(upkeep.remove_guard, database, row, result, report))
    for row in [row for row in published if row.active]:
        _attempt(result, row, partial(upkeep.follow_table, database, row, report))
    for row in [row for row in published if row.has_delta]:
        _attempt(result, row, partial(upkeep.drop_delta, database, row.id, result, report))
    for row in [row for row in published if row.expired]:
        _attempt(result, row, partial(upkeep.drop_generation, database, row, actor, result, report))
    _attempt(result, None, partial(_drop_invalid, database, result, report))
    _attempt(result, None, partial(_release_shards, database, result, report))
    _attempt(result, None, partial(_forget_duplicates, database))
    return result


def _follow_reference(
    database: Database, row: Any, actor: str, result: CleanUpReport, report: Callable[[str], None]
) -> None:
    following.follow(database, row, actor, report, database.limits.clean_up_s)
    with database.transaction() as connection:
        found = references_to(connection, [row.index_id]).get(row.index_id)
    result.warnings += [line for line in (found.problems if found else ()) if line not in result.warnings]


def _drop_invalid(database: Database, result: CleanUpReport, report: Callable[[str], None]) -> None:
    result.invalid_indexes += leftovers.drop(database, report, database.limits.clean_up_s)


def _release_shards(database: Database, result: CleanUpReport, report: Callable[[str], None]) -> None:
    """Removes the captures in shards whose generations are gone, also in shards that were out of reach before."""
    result.waiting += ends().release(database, None, database.limits.clean_up_s, report)


def _forget_duplicates(database: Database) -> None:
    with database.transaction() as connection:
        execute(connection, OLD_DUPLICATES)


# By SQLSTATE. After any other error, roir assumes that the index's objects were altered. Stored bounds contain names of
# labels and types, which a user may have renamed.
RENAMED = "A label or a type was renamed. Rename it back, run roir clean-up, then rename it again"
REMEDIES = {
    DENIED: "Give the role that roir connects as this right again, then run roir clean-up",
    "22P02": RENAMED,
    "42704": RENAMED,
}


def _attempt(result: CleanUpReport, row: Any, work: Callable[[], object]) -> None:
    """Takes one step, for one index. If it fails, the report says so, and the other indexes are still cleaned up."""
    for left in range(MOST_VANISHED, -1, -1):
        try:
            work()
            return
        except (LockNotAcquired, InvalidInput) as error:
            # InvalidInput: the source is no longer a table that can be indexed.
            result.waiting.append(str(error))
            return
        except RoirError as error:
            result.warnings.append(_problem(row, str(error)))
            return
        except DBAPIError as error:
            if left and has_vanished(error):
                # Another clean-up, a drop or an abort has removed the object: try again.
                continue
            if trouble_of(error) in (Trouble.EXHAUSTED, Trouble.CANCELLED) and sqlstate(error):
                # Nothing is wrong with the index.
                result.waiting.append(reason_of(error) if row is None else f"index {_name(row)}: {reason_of(error)}")
                return
            # Without a server no other step can succeed.
            if error.connection_invalidated or sqlstate(error)[:2] in ("", "08", "57"):
                raise
            remedy = REMEDIES.get(sqlstate(error))
            result.warnings.append(_problem(row, str(error.orig).strip().split("\n", 1)[0], remedy))
            return


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
        # To read the definition of a view, the server locks it.
        execute(connection, f"SET LOCAL lock_timeout = {database.limits.attempt_ms}")
        try:
            found = faults.warnings(connection, row.operation_id)
        except DBAPIError as error:
            if sqlstate(error) != LOCK_TIMEOUT:
                raise
            raise LockNotAcquired(
                f"index {_name(row)}: can't be checked now, since a session holds a lock on its table or on its view"
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
    told = {pause.operation_id for pause in found}
    with database.transaction() as connection:
        # Recently abandoned ones are named, too: no user has asked for that state.
        others = [one for one in long_pause.abandoned(connection) if one.operation_id not in told]
    result.warnings += [pause.text for pause in [*found, *others]]
    result.operations_aborted += sum(pause.aborted for pause in found)


def _find_leaving(database: Database, leaving: list[Any]) -> None:
    with database.transaction() as connection:
        leaving += remove_entries.leaving(connection)


def _finish_abort(
    database: Database, operation_id: int, actor: str, result: CleanUpReport, report: Callable[[str], None]
) -> None:
    abort.finish_abort(database, operation_id, actor, report, database.limits.clean_up_s)
    result.operations_aborted += 1


def _remove_entries(database: Database, row: Any, result: CleanUpReport, report: Callable[[str], None]) -> None:
    result.partition_entries += remove_entries.remove(
        database, row, report, database.limits.clean_up_s, result.waiting.append
    )
