"""The words for an operation's state and figures. All surfaces use these."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_roir.actor import RUN, Way, way_of
from airflow_roir.definition import argument
from airflow_roir.engine.control import remedies
from airflow_roir.engine.snapshot.operation import ABANDONED, PAUSING, OperationStatus
from airflow_roir.engine.snapshot.parts import NextTask
from airflow_roir.operation import PLACED, QUEUED, Kind, Status
from airflow_roir.quantity import counted, duration, left, percent, rate

OF_ROWS = tuple(phase.value for phase, one in PLACED.items() if one.copies)


def noun(one: OperationStatus) -> str:
    """The kind of an operation: a census is a kind of its own."""
    return "census" if one.census else Kind(one.kind).noun


@dataclass(frozen=True)
class State:
    """The state of an operation. name: for programs, a status, `abandoned`, `queued` or `undriven`. word: on a chip.

    note: what the state means for the user. text: the run that drives it, the cause of its pause, or its end. remedy:
    what the user can do, '' for nothing.
    """

    name: str
    word: str
    note: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def state_of(one: OperationStatus) -> State:
    """The state of an operation in words; `pausing` only if the operation comes from `details.look`."""
    name = argument(one.index)
    if one.status == Status.RUNNING:
        return _running(one, name)
    if one.status == ABANDONED:
        lasts = duration(max(0.0, one.seconds_since(one.abandoned_since)))
        text = f"abandoned: no run has driven it for {lasts}, and none will"
        remedy = f"continue it with: roir resume {name}, or abort it with: roir abort {name}"
        return State(ABANDONED, "Abandoned", "No run drives it, and none will; nothing is lost", text, remedy)
    if one.status == PAUSING:
        alive = one.workers.alive if one.workers is not None else 0
        rest = f"{counted(alive, 'worker')} still to commit" if alive else "its run hasn't ended yet"
        note = "The workers finish their open batches"
        return State(PAUSING, "Pausing", note, f"pausing, on request {_by(one)}; {rest}")
    if one.status == Status.PAUSED:
        by = _by(one)
        if way_of(one.paused_by or "", one.owner) is Way.DUPLICATES:
            by = "since rows share keys of the unique index"
        text = f"paused{_ago(one, one.paused_at)} {by}"
        return State("paused", "Paused", f"Paused; nothing is lost{_then(one)}", text, way_on(one))
    if one.status == Status.FAILED:
        remedy = f"abort it with: roir abort {name}"
        return State("failed", "Failed", "It can't continue", f"failed: {one.error or ''}", remedy)
    return _ended(one)


def _running(one: OperationStatus, name: str) -> State:
    if one.driven:
        return State("running", "Running", time_left(one), f"running, driven by {one.owner or 'unknown'}")
    if one.notice is not None and one.notice.startswith(QUEUED):
        note = "It begins once others have ended"
        return State("queued", "Waiting", note, "waits for its turn", "roir queue shows the operations before it")
    if one.next_task is not None:
        word = "Starting" if one.next_task.runs else "Waiting"
        then = coming(one.next_task)
        return State("undriven", word, f"{then[0].upper()}{then[1:]}; nothing is lost", then)
    if one.expected_at is not None:
        tries = one.heartbeat_age is not None and not one.last_try
        first = f"its run continues it by about {remedies.moment(one.expected_at)}"
        if tries:
            first = remedies.next_try(-one.seconds_since(one.expected_at))
        note = f"{first[0].upper()}{first[1:]}; nothing is lost"
        text = f"{first}; no run has driven it for {duration(one.silent_seconds or 0)}"
        return State("undriven", "Not driven", note, text, f"or: roir resume {name}")
    if one.last_try:
        text = f"no run has driven it for {duration(one.silent_seconds or 0)}, and its task has no try left"
        note = "No run drives it, and its task has no try left; nothing is lost"
        owner = one.owner or ""
        return State("undriven", "Not driven", note, text, remedies.way_on(one.index, owner, owner))
    if one.heartbeat_age is None:
        begins = "its run's task begins when its turn comes"
        note = f"{begins[0].upper()}{begins[1:]}; nothing is lost"
        return State("undriven", "Waiting", note, "running, but no run drives it yet", begins)
    text = f"running, but no run has driven it for {duration(one.silent_seconds or 0)}"
    is_run = one.owner is not None and RUN.fullmatch(one.owner) is not None
    remedy = f"its task's next try will, or: roir resume {name}" if is_run else f"continue it with: roir resume {name}"
    return State("undriven", "Not driven", "No run drives it; nothing is lost", text, remedy)


def _ended(one: OperationStatus) -> State:
    by = f", aborted by {one.ended_by}: {one.end_reason or ''}" if one.ended_by else ""
    what = {Kind.VERIFY.value: "What was compared", Kind.COMPACT.value: "What wasn't swapped in"}
    built = what.get(one.kind, "What was built")
    ago = _ago(one, one.finished_at)
    if one.status == Status.ABORTING:
        remedy = "roir clean-up finishes it if its run is gone"
        return State("aborting", "Aborting", f"{built} waits for the clean-up", f"aborting{by}", remedy)
    if one.status == Status.ABORTED:
        rest = "what it had built is removed" if one.compaction is None else f"{one.compaction}, which stays"
        return State("aborted", "Aborted", f"{built} is gone", f"ended{ago}{by}; {rest}")
    if one.compaction is not None:
        text = str(one.compaction)
    else:
        verb = "compared" if one.kind == Kind.VERIFY else "copied"
        at = f", {rate(one.rows_per_second)} while it {verb}" if one.rows_per_second else ""
        text = f"{counted(one.rows, 'row')} {verb}{at}"
    if one.kind != Kind.VERIFY or not one.differences:
        return State("completed", "Completed", "Done", f"completed{ago}: {text}")
    found = f"completed{ago}: {counted(one.differences, 'difference')} found"
    if not one.differences_left:
        return State("completed", "Repaired", "All that differed is repaired", f"{found} and repaired; {text}")
    remedy = f"repair them with: roir verify {argument(one.index)} --repair"
    left = "" if one.differences_left == one.differences else f", {one.differences_left:,} not repaired"
    return State("completed", "Differs", "Index and table differ", f"{found}{left}; {text}", remedy)


def coming(task: NextTask) -> str:
    """The next step of the task that will drive an operation, in words."""
    if task.runs:
        return f"task {task.name} is starting"
    if task.at is None:
        return f"waiting for Airflow to start task {task.name}"
    return f"task {task.name} {'is tried' if task.retries else 'looks'} again about {remedies.moment(task.at)}"


def way_on(one: OperationStatus) -> str:
    """What to do to resume a paused operation: first by the way by which it was paused."""
    if one.next_task is not None and way_of(one.paused_by or "", one.owner) is Way.RUN:
        return f"goes on by itself: {coming(one.next_task)}"
    again_s = None if one.expected_at is None else -one.seconds_since(one.expected_at)
    return remedies.way_on(one.index, one.paused_by or "", one.owner, again_s)


def paused_by(one: OperationStatus) -> str:
    """`paused by ann: month-end close`."""
    return f"paused {_by(one)}"


def already_paused(one: OperationStatus) -> str:
    """`already paused at 32.8 %, for 5 min, by ann: month-end close; resume with: …`."""
    lasts = duration(one.seconds_since(one.paused_at))
    return f"already paused at {percent(one.percent_complete)}, for {lasts}, {_by(one)}; {way_on(one)}"


def _then(one: OperationStatus) -> str:
    """When a resume is seen, by the run of a user's pause."""
    if one.expected_at is None or way_of(one.paused_by or "", one.owner) in (Way.WINDOW, Way.SWITCH, Way.RUN):
        return ""
    return f"; its run looks again about {remedies.moment(one.expected_at)}"


def _by(one: OperationStatus) -> str:
    return f"by {one.paused_by or 'unknown'}: {one.pause_reason or ''}"


def _ago(one: OperationStatus, moment: datetime | None) -> str:
    return "" if moment is None else f" {duration(one.seconds_since(moment))} ago"


def time_left(one: OperationStatus) -> str:
    """`about 12 s left`; of a paused operation why it is paused."""
    if one.status in (PAUSING, Status.PAUSED):
        return paused_by(one)
    return left(one.seconds_left, one.seconds_left_low, one.seconds_left_high) or "time left: not known yet"


def done(one: OperationStatus) -> str:
    """The rows that are done: `120,000 of about 300,000 rows` while the operation copies or compares."""
    if one.rows_estimate and one.phase in OF_ROWS:
        return f"{one.rows:,} of about {counted(max(one.rows_estimate, one.rows), 'row')}"
    return counted(one.rows, "row")


def speed(one: OperationStatus) -> str:
    """The recent rate, else, while the operation copies or compares, the average until now; '' if there is none."""
    if one.rows_per_second_now:
        return rate(one.rows_per_second_now)
    return f"{rate(one.rows_per_second)} until now" if one.rows_per_second and one.phase in OF_ROWS else ""


# The figures that move when a run commits anything.
MOVES = ("phase", "percent_complete", "rows")


def figures(one: OperationStatus, before: OperationStatus | None = None) -> list[str]:
    """The figures of its progress: rows, rate, time left. before: the status when this run began; if nothing has moved
    since, that is said instead of a rate."""
    if before is not None and all(getattr(one, name) == getattr(before, name) for name in MOVES):
        return [done(one), "nothing committed yet since this run began"]
    found = [done(one), speed(one)]
    if one.status == Status.RUNNING and one.seconds_left is not None:
        found.append(time_left(one))
    return [text for text in found if text]
