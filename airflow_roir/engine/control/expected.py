"""Records which run will continue an operation, until when it is awaited, and whether it has ended.

`roir.abandoned_since` reads these columns. The engine knows nothing of Airflow's runs: its callers give their fates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.control.sign_of_life import HEARTBEAT_FRESH_S
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema

# The seconds of silence after which a command is gone: no command comes back automatically.
GRACE_S = 60
# In the queue a command asks every few seconds, a task every half minute.
QUEUE_S = 120

EXPECT = """
UPDATE roir.operation
   SET awaited_by = %(by)s, run_ended_at = NULL, grace_s = coalesce(%(grace)s, grace_s), last_try = %(last_try)s,
       awaited_until = CASE WHEN %(seconds)s IS NULL THEN 'infinity'
                            ELSE clock_timestamp() + make_interval(secs => %(seconds)s) END
 WHERE id = %(operation)s AND status IN ('running', 'paused')
"""
# The operations that no run drives, and that don't wait in the queue. runs: the runs that may continue the operation.
# lapses: the operation will soon be abandoned, unless one of them comes back.
UNDRIVEN = """
SELECT o.id, o.epoch, o.awaited_by, o.run_ended_at IS NOT NULL AS has_ended, o.last_try,
       coalesce(o.awaited_until < clock_timestamp() + make_interval(secs => %(waits)s / 2), true) AS lapses,
       array_remove(ARRAY[coalesce(o.awaited_by, CASE WHEN o.owner IS NULL THEN o.created_by END), o.owner], NULL)
           AS runs
  FROM roir.operation o
 WHERE o.status = 'running' AND (%(operations)s::bigint[] IS NULL OR o.id = ANY (%(operations)s))
   AND NOT coalesce(abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) < %(fresh)s, false)
   AND NOT coalesce(abs(extract(epoch FROM clock_timestamp() - o.queued_seen_at)) < %(queue)s, false)
 ORDER BY o.id
"""
# Neither another run nor another awaited run has come between.
SAME = """
 WHERE id = %(operation)s AND status = 'running' AND epoch = %(epoch)s
   AND awaited_by IS NOT DISTINCT FROM %(awaited_by)s
"""
NOTE_END = f"UPDATE roir.operation SET run_ended_at = clock_timestamp() {SAME} AND run_ended_at IS NULL"
NOTE_RETURN = f"UPDATE roir.operation SET run_ended_at = NULL, last_try = false {SAME}"
NOTE_OWN_END = """
UPDATE roir.operation SET run_ended_at = clock_timestamp()
 WHERE id = %(operation)s AND status IN ('running', 'paused') AND coalesce(awaited_by, owner) = %(by)s
   AND run_ended_at IS NULL
"""
# A run that is killed pauses its operation as interrupted; only its task learns of the cause.
NOTE_CAUSE = """
WITH said AS (
    UPDATE roir.operation SET pause_reason = %(cause)s
     WHERE id = %(operation)s AND status = 'paused' AND paused_by = %(by)s AND owner = %(by)s
       AND paused_at > clock_timestamp() - interval '30 s'
    RETURNING id)
UPDATE roir.event SET detail = %(cause)s
 WHERE id = (SELECT max(e.id) FROM roir.event e JOIN said s ON e.operation_id = s.id
              WHERE e.action = 'pause' AND e.actor = %(by)s)
"""
PAUSE = "SELECT roir.pause_operation(%(operation)s, %(epoch)s, %(actor)s, %(reason)s, %(reason)s)"


@dataclass(frozen=True)
class Fate:
    """The fate of a run. ended: it won't come back. switch: the actor that pauses its work, as long as a switch is off.

    waits: it starts as soon as Airflow has a free slot.
    """

    ended: bool = False
    switch: str | None = None
    waits: bool = False


# By an owner's name; None if the owner is no run, but a command for example. Raises Unknown.
FateOf = Callable[[str], Fate | None]
ENDED = Fate(ended=True)
COMES = Fate()
# Longer than the time until the next clean-up, which runs every hour.
WAITS_S = 7200
SWITCHED_OFF = "the DAG is paused in Airflow"


class Unknown(LookupError):
    """The fate of a run can't be found out now."""


@dataclass(frozen=True)
class Change:
    """A statement that the fate of an operation's runs calls for. row: of `UNDRIVEN`."""

    row: Row[Any]
    statement: str
    values: dict[str, Any]


def expect(
    database: Database,
    operation_id: int,
    by: str,
    seconds: float | None,
    grace_s: int | None = None,
    last_try: bool = False,
) -> None:
    """Writes that a run will drive the operation, or look again. seconds: within these; None: before it ends.

    grace_s: the silence that is allowed afterwards, in seconds; None keeps the operation's value. last_try: if the run
    dies afterwards, none comes by itself.
    """
    values = {"operation": operation_id, "by": by, "seconds": seconds, "grace": grace_s, "last_try": last_try}
    with database.transaction() as connection:
        execute(connection, EXPECT, values)


def has_ended(database: Database, operation_id: int, by: str) -> None:
    """Writes that a run has ended and won't come back. Changes nothing if another run drives the operation, or will."""
    with database.transaction() as connection:
        execute(connection, NOTE_OWN_END, {"operation": operation_id, "by": by})


def note_cause(database: Database, operation_id: int, by: str, cause: str) -> None:
    """Writes why a run has just paused its operation. Changes nothing if a user has paused it."""
    with database.transaction() as connection:
        execute(connection, NOTE_CAUSE, {"operation": operation_id, "by": by, "cause": cause})


def changes(connection: Connection, fate_of: FateOf, operations: Sequence[int] | None = None) -> list[Change]:
    """The statements for operations that no run drives, for these or for all; executes none of them.

    Raises SchemaVersionMismatch.
    """
    check_schema(connection)
    ids = None if operations is None else list(operations)
    values = {"operations": ids, "fresh": HEARTBEAT_FRESH_S, "queue": QUEUE_S, "waits": WAITS_S}
    found = (_change(row, fate_of) for row in execute(connection, UNDRIVEN, values).all())
    return [one for one in found if one is not None]


def _change(row: Row[Any], fate_of: FateOf) -> Change | None:
    try:
        fates = {run: fate for run in row.runs if (fate := fate_of(run)) is not None}
    except Unknown:
        return None
    seen = {"operation": row.id, "epoch": row.epoch, "awaited_by": row.awaited_by}
    coming = {run: fate for run, fate in fates.items() if not fate.ended}
    if not coming:
        return Change(row, NOTE_END, seen) if fates and not row.has_ended else None
    if row.lapses and all(fate.switch for fate in coming.values()):
        actor = next(fate.switch for fate in coming.values())
        return Change(row, PAUSE, {**seen, "actor": actor, "reason": SWITCHED_OFF})
    if row.lapses and (waiting := [run for run, fate in coming.items() if fate.waits]):
        return Change(
            row, EXPECT, {"operation": row.id, "by": waiting[0], "seconds": WAITS_S, "grace": None, "last_try": False}
        )
    # A task that was cleared, but has not started yet, has a try.
    comes_back = row.has_ended or (row.last_try and any(fate.waits for fate in coming.values()))
    return Change(row, NOTE_RETURN, seen) if comes_back else None


def apply(database: Database, found: list[Change]) -> None:
    """Executes the statements, each in its own transaction. An operation that has changed meanwhile stays as it is."""
    for one in found:
        with database.transaction() as connection:
            check_schema(connection, writes=True)
            execute(connection, one.statement, one.values)


def settle_runs(database: Database, fate_of: FateOf, operations: Sequence[int] | None = None) -> None:
    """Records the fates of the runs of operations that no run drives, of these or of all.

    Raises SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        found = changes(connection, fate_of, operations)
    apply(database, found)
