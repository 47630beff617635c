"""Which run is to drive an operation on, until when it is waited for, and whether it has ended.

`roir.abandoned_since` reads what is written here. The engine doesn't know what a run is: who knows tells its fate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.control.sign_of_life import HEARTBEAT_FRESH_S
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema

# So long may a command be silent: it never comes back by itself.
GRACE_S = 60
# A command that waits in the queue asks each few seconds, a task each half minute.
QUEUE_S = 120

EXPECT = """
UPDATE roir.operation
   SET awaited_by = %(by)s, run_ended_at = NULL, grace_s = coalesce(%(grace)s, grace_s),
       awaited_until = CASE WHEN %(seconds)s IS NULL THEN 'infinity'
                            ELSE clock_timestamp() + make_interval(secs => %(seconds)s) END
 WHERE id = %(operation)s AND status IN ('running', 'paused')
"""
# Those that no run drives, and that wait for no place. runs: those that may continue it. lapses: unless one of them
# comes back soon, it will be abandoned.
UNDRIVEN = """
SELECT o.id, o.epoch, o.awaited_by, o.run_ended_at IS NOT NULL AS has_ended,
       coalesce(o.awaited_until < clock_timestamp() + make_interval(secs => %(waits)s / 2), true) AS lapses,
       array_remove(ARRAY[coalesce(o.awaited_by, CASE WHEN o.owner IS NULL THEN o.created_by END), o.owner], NULL)
           AS runs
  FROM roir.operation o
 WHERE o.status = 'running' AND (%(operation)s IS NULL OR o.id = %(operation)s)
   AND NOT coalesce(abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) < %(fresh)s, false)
   AND NOT coalesce(abs(extract(epoch FROM clock_timestamp() - o.queued_seen_at)) < %(queue)s, false)
 ORDER BY o.id
"""
# Nothing may have come between: another run, or another one that is waited for.
SAME = """
 WHERE id = %(operation)s AND status = 'running' AND epoch = %(epoch)s
   AND awaited_by IS NOT DISTINCT FROM %(awaited_by)s
"""
NOTE_END = f"UPDATE roir.operation SET run_ended_at = clock_timestamp() {SAME} AND run_ended_at IS NULL"
NOTE_RETURN = f"UPDATE roir.operation SET run_ended_at = NULL {SAME}"
NOTE_OWN_END = """
UPDATE roir.operation SET run_ended_at = clock_timestamp()
 WHERE id = %(operation)s AND status IN ('running', 'paused') AND coalesce(awaited_by, owner) = %(by)s
   AND run_ended_at IS NULL
"""
PAUSE = "SELECT roir.pause_operation(%(operation)s, %(epoch)s, %(actor)s, %(reason)s, %(reason)s)"


@dataclass(frozen=True)
class Fate:
    """A run, as far as is known. ended: it won't come back. switch: the actor that pauses its work, as long as a
    switch is off. waits: it is about to come, and needs a free place only.
    """

    ended: bool = False
    switch: str | None = None
    waits: bool = False


# None: it isn't a run of theirs, but a command for example. Raises Unknown.
FateOf = Callable[[str], Fate | None]
ENDED = Fate(ended=True)
COMES = Fate()
# Until the next one who knows looks: an hourly clean-up, mostly.
WAITS_S = 7200
SWITCHED_OFF = "the DAG is paused in Airflow"


class Unknown(LookupError):
    """Nothing can be found out about a run now."""


@dataclass(frozen=True)
class Change:
    """A statement for an operation, by the fate of its runs. row: of `UNDRIVEN`."""

    row: Row[Any]
    statement: str
    values: dict[str, Any]


def expect(database: Database, operation_id: int, by: str, seconds: float | None, grace_s: int | None = None) -> None:
    """Write that a run will drive the operation, or look again. seconds: within these; None: before it ends.

    grace_s: how long its silence may last then, and once it drives; None keeps what there is.
    """
    values = {"operation": operation_id, "by": by, "seconds": seconds, "grace": grace_s}
    with database.transaction() as connection:
        execute(connection, EXPECT, values)


def has_ended(database: Database, operation_id: int, by: str) -> None:
    """Write that a run was ended, and won't come back; nothing if another one drives the operation, or will."""
    with database.transaction() as connection:
        execute(connection, NOTE_OWN_END, {"operation": operation_id, "by": by})


def changes(connection: Connection, fate_of: FateOf, operation_id: int | None = None) -> list[Change]:
    """Find the statements for operations that no run drives, for one or for all; changes nothing itself."""
    values = {"operation": operation_id, "fresh": HEARTBEAT_FRESH_S, "queue": QUEUE_S, "waits": WAITS_S}
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
        return Change(row, EXPECT, {"operation": row.id, "by": waiting[0], "seconds": WAITS_S, "grace": None})
    return Change(row, NOTE_RETURN, seen) if row.has_ended else None


def apply(database: Database, found: list[Change]) -> None:
    """Write them, each in a transaction of its own; what has changed meanwhile stays as it is."""
    for one in found:
        with database.transaction() as connection:
            check_schema(connection, writes=True)
            execute(connection, one.statement, one.values)


def settle_runs(database: Database, fate_of: FateOf, operation_id: int | None = None) -> None:
    """Ask the fate of the runs of operations that no run drives, of one or of all, and write what that changes."""
    with database.transaction() as connection:
        found = changes(connection, fate_of, operation_id)
    apply(database, found)
