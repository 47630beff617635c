"""The next step for a user, in a line: after an error of an operation, and to resume a paused one.

docs/troubleshooting.md says more.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timezone

from airflow_roir.actor import RUN, SWITCH, Way, way_of
from airflow_roir.definition import argument
from airflow_roir.quantity import counted

# By the words of the errors, the more specific first; a table's name may contain any of these words. {index} is quoted
# for a shell.
REMEDIES = (
    (r"The index can't have this row", "Change or delete the row that is named. Then: roir resume {index}"),
    (r"permission denied|must be owner", "Give roir's role the right that is named. Then: roir resume {index}"),
    (
        r"Spark (can't be started|gave up)|Spark's driver",
        "See Spark's log for the cause. Then: roir resume {index}",
    ),
    (
        r"of the unique index",
        "Change or delete rows until no two share a key; roir duplicates {index} --sql selects them. Then: "
        "roir resume {index}",
    ),
    (r"no lock on|waiting for a lock", "End the transaction that is named. Then: roir resume {index}"),
    (
        r"the server has no room|could not extend|No space left|disk full",
        "Make room; roir clean-up frees some. Then: roir resume {index}",
    ),
    (
        r"the server has (no|a limit)",
        "Raise the limit that is named, or free what others take of it. Then: roir resume {index}",
    ),
    (r"somebody cancels", "See who, or which job, cancels roir's statements. Then: roir resume {index}"),
    (r"is called .+ now", "Rename the label back. Then: roir resume {index}"),
    # The command that the error itself names, with the table.
    (r"[Rr]un: (?P<command>roir (?:clean-up|sync-partitions .+))", "{command}. Then: roir resume {index}"),
    (
        r"differs from its table",
        "roir.discrepancy has the rows. roir resume {index} compares again; or roir abort {index}",
    ),
    (r"[Ff]enced|drives operation", "Nothing: a newer run drives it, and this one has changed nothing"),
    (r"interrupted", "roir resume {index}"),
    (
        r"\bconnection\b|terminating|shutting down|starting up|server closed|too many clients",
        "See that PostgreSQL is up and reachable. The task's next try resumes, or: roir resume {index}",
    ),
)
FAILED = "To continue would give a wrong index: roir abort {index}, then build again"
OTHERWISE = "Remove the cause. Then: roir resume {index}"


def remedy(said: str, index: str, failed: bool) -> str:
    """The next step after an error. said: its message; failed: True if the operation can't continue."""
    if failed:
        return FAILED.format(index=argument(index))
    for pattern, text in REMEDIES:
        if found := re.search(pattern, said):
            return text.format(index=argument(index), **found.groupdict())
    return OTHERWISE.format(index=argument(index))


def way_on_without_run(index: str, paused_by: str, owner: str | None) -> str:
    """As `way_on`, on the page, for an operation whose run was deleted in Airflow: nothing of that run can go on."""
    on = f"Continue triggers a new one for this index; or: roir resume {argument(index)}"
    if way_of(paused_by, owner) is Way.DUPLICATES:
        on = way_on(index, paused_by, owner)
    return f"its run was deleted; {on}"


def way_on(index: str, paused_by: str, owner: str | None, again_s: float | None = None) -> str:
    """A clause for the user, which begins in lower case. index: its full name; owner: of the operation.

    again_s: the seconds within which its DAG run will try again; None if it won't.
    """
    command = f"roir resume {argument(index)}"
    run = RUN.fullmatch(paused_by)
    match way_of(paused_by, owner):
        case Way.DUPLICATES:
            return f"change or delete rows until no two share a key, then: {command}"
        case Way.WINDOW:
            return (
                f"a run that waits continues when a window opens, else: {command}; or let it work now: "
                f"roir change {argument(index)} --windows off"
            )
        case Way.SWITCH:
            return f"to resume, turn on the switch of DAG {paused_by.removeprefix(SWITCH)}"
        case Way.PAGE:
            return f"resume with the button of its page Index build, or: {command}"
        case Way.TASK:
            return f"resume with the DAG control_index, action resume, or: {command}"
        case Way.RUN if again_s is not None:
            return f"{next_try(again_s)}; or: {command}"
        case Way.RUN if run is not None:
            return (
                f"clear its task in run {run[2]} of DAG {run[1]} with those that follow it (Downstream), if "
                f"that run still exists, or trigger {run[1]} for this index: it continues; or: {command}"
            )
        # A name that isn't printable can't be pasted into SQL.
        case Way.SQL if index.isprintable():
            quoted = index.replace("'", "''")
            return f"resume with: SELECT roir.resume('{quoted}'), or: {command}"
    return f"resume with: {command}"


def next_try(seconds: float) -> str:
    """A clause for a task that died. seconds: until the latest moment of its next try.

    No clock time: Airflow knows the moment, and its pages show it, but the database only has a bound. Nor does the
    database know of a mark that the task didn't live to see.
    """
    minutes = counted(max(1, math.ceil(seconds / 60)), "minute")
    return f"goes on by itself at the next try, within {minutes} at the latest, unless its run was marked"


def moment(at: datetime) -> str:
    """A moment of the next hours: `13:04 UTC`."""
    return f"{at.astimezone(timezone.utc):%H:%M} UTC"
