"""What to do to resume a paused operation, by the way by which it was paused."""

from __future__ import annotations

from datetime import datetime, timezone

from airflow_roir.actor import RUN, SWITCH, Way, way_of
from airflow_roir.definition import argument


def way_on(index: str, paused_by: str, owner: str | None, expected_at: datetime | None = None) -> str:
    """A clause for the user, which begins in lower case. index: its full name; owner: of the operation.

    expected_at: when its DAG run will try again.
    """
    command = f"roir resume {argument(index)}"
    run = RUN.fullmatch(paused_by)
    match way_of(paused_by, owner):
        case Way.DUPLICATES:
            return f"change or delete rows until no two share a key, then: {command}"
        case Way.WINDOW:
            return (
                f"a run that waits continues by itself; or let it work now: roir change {argument(index)} --windows off"
            )
        case Way.SWITCH:
            return f"to resume, turn on the switch of DAG {paused_by.removeprefix(SWITCH)}"
        case Way.PAGE:
            return f"resume with the button of its page Index build, or: {command}"
        case Way.TASK:
            return f"resume with the DAG control_index, action resume, or: {command}"
        case Way.RUN if expected_at is not None:
            return f"goes on by itself at the next try, about {moment(expected_at)}, if one is left; or: {command}"
        case Way.RUN if run is not None:
            return (
                f"clear its task in run {run[2]} of DAG {run[1]} with those that follow it "
                f"(Downstream), or trigger {run[1]} for this index: it continues; or: {command}"
            )
        # A name that isn't printable can't be pasted into SQL.
        case Way.SQL if index.isprintable():
            quoted = index.replace("'", "''")
            return f"resume with: SELECT roir.resume('{quoted}'), or: {command}"
    return f"resume with: {command}"


def moment(at: datetime) -> str:
    """A moment of the next hours: `13:04 UTC`."""
    return f"{at.astimezone(timezone.utc):%H:%M} UTC"
