"""Drops a unit's tables, function and triggers: before it begins again, after an abort, and after its swap."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.engine.compact import capture
from airflow_roir.engine.compact.unit import UNITS, UnitClaim, beside
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.generation_state import UnitStatus

# At this restart the unit is left out instead: a user empties or rewrites its segments too often.
MOST_RESTARTS = 3
TRIGGERS = """
SELECT t.tgrelid::regclass::text AS segment, t.tgrelid::oid::bigint AS oid FROM pg_trigger t
 WHERE t.tgfoid = to_regprocedure(%(function)s) ORDER BY t.tgrelid
"""
AGAIN = """status = 'waiting', files = NULL, cuts = NULL, watermark = NULL, blocks_done = 0, rows = 0,
       restarts = p.restarts + 1, note = %(note)s"""
LEAVE = "status = 'left', note = %(note)s"
# Waits for a worker that is about to commit, and changes the row that each commit checks. So later commits are fenced,
# also that of a worker whose statement has already read the old epoch.
FENCE = """
UPDATE roir.compaction_unit SET claim_token = claim_token + 1, claim_epoch = NULL, claim_worker = NULL
 WHERE operation_id = %(operation)s AND status NOT IN ('done', 'left')
RETURNING id, generation_id, status
"""
TAKEN_BACK = """
UPDATE roir.compaction_unit SET status = 'waiting', files = NULL, cuts = NULL, watermark = NULL
 WHERE id = %(unit)s AND status IN ('copying', 'indexing', 'folding')
"""


def drop(connection: Connection, generation_id: int, unit_id: int) -> None:
    """Drops the tables and the function of a unit, in the caller's transaction; its triggers must be gone."""
    name = beside(generation_id, unit_id)
    execute(connection, f"DROP FUNCTION IF EXISTS {name}_touch()")
    execute(connection, f"DROP TABLE IF EXISTS {name}, {name}_touched")


def begin_anew(
    database: Database, job: Job, worker: int, claim: UnitClaim, note: str, report: Callable[[str], None]
) -> None:
    """Drops the unit's new segments and its capture. The worker keeps its claim, and the unit waits to begin again.

    After `MOST_RESTARTS` times the unit is left out, and its claim ends. Raises LockNotAcquired, Fenced.
    """

    def body(connection: Connection, attempts: Attempts) -> None:
        _release(connection, attempts, claim.generation_id, claim.id)
        ended = claim.restarts + 1 >= MOST_RESTARTS
        UNITS.commit(connection, job.run, worker, claim, AGAIN, {"note": note}, ends="false")
        if ended:
            UNITS.commit(connection, job.run, worker, claim, LEAVE, {"note": f"{note}, {MOST_RESTARTS} times"})

    timeout_ms, patience_s = int(job.options["lock_timeout_ms"]), float(job.options["lock_patience_s"])
    _attempt(database, claim.generation_id, claim.id, body, report, timeout_ms, patience_s, None)


def take_back(database: Database, operation_id: int, report: Callable[[str], None], patience_s: float) -> None:
    """Drops the new segments and the captures of all units of an operation that aren't swapped in.

    The operation's epoch must have risen before. Raises LockNotAcquired.
    """
    with database.transaction() as connection:
        units = execute(connection, FENCE, {"operation": operation_id}).all()
    for unit in [unit for unit in units if unit.status != UnitStatus.WAITING]:

        def body(
            connection: Connection, attempts: Attempts, generation_id: int = unit.generation_id, unit_id: int = unit.id
        ) -> None:
            _release(connection, attempts, generation_id, unit_id)
            execute(connection, TAKEN_BACK, {"unit": unit_id})

        waiter = Waiter("compaction")
        _attempt(database, unit.generation_id, unit.id, body, report, database.limits.attempt_ms, patience_s, waiter)


def _release(connection: Connection, attempts: Attempts, generation_id: int, unit_id: int) -> None:
    function = f"{beside(generation_id, unit_id)}_touch()"
    held = execute(connection, TRIGGERS, {"function": function}).all()
    attempts.lock(connection, [row.segment for row in held], "ACCESS EXCLUSIVE")
    for row in held:
        execute(connection, f"DROP TRIGGER {capture.TRIGGER} ON {row.segment}")
    drop(connection, generation_id, unit_id)


def _attempt(
    database: Database,
    generation_id: int,
    unit_id: int,
    body: Callable[[Connection, Attempts], None],
    report: Callable[[str], None],
    timeout_ms: int,
    patience_s: float,
    waiter: Waiter | None,
) -> None:
    function = f"{beside(generation_id, unit_id)}_touch()"
    with database.transaction() as connection:
        held = execute(connection, TRIGGERS, {"function": function}).all()
    what = ", ".join(row.segment for row in held) or beside(generation_id, unit_id)
    # To drop a trigger needs an ACCESS EXCLUSIVE lock on its segment.
    attempts = Attempts(database, what, [row.oid for row in held], timeout_ms, patience_s, waiter=waiter)
    made = beside(generation_id, unit_id)
    exclusive = [*(row.segment for row in held), made, f"{made}_touched"]
    attempts.run(lambda connection: body(connection, attempts), report, exclusive)
