"""The life of an operation: statuses, phases, and every legal transition with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

# The format of watermarks and bounds in the control tables. Another version of the code can only continue an operation
# whose format it knows.
FORMAT_VERSION = 2
# The same if ranges are blocks.
BLOCK_FORMAT_VERSION = 3
# These four name, in `paused_by`, a pause that no user asked for. Duplicates: rows share a key of a unique index; only
# a resume lifts that, no retry.
BY_DUPLICATES = "duplicates"
# The operation's windows are closed: it continues automatically when one opens.
BY_WINDOW = "window"
# The operation has worked for as long as it may: a resume lifts that.
BY_MAX_DURATION = "max_duration"
# The beginning of the notice of an operation that waits for others to end.
QUEUED = "queued: "
# A signal couldn't be read for too long.
BY_GOVERNOR = "governor"


class Status(str, Enum):
    """The status of an operation. It is `failed` only if to continue would be wrong; any other failure pauses it."""

    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTING = "aborting"
    ABORTED = "aborted"


class Kind(str, Enum):
    """The work of an operation on its generation: it builds, compares or refers to it, or rebuilds some segments."""

    CREATE = "create"
    REBUILD = "rebuild"
    VERIFY = "verify"
    COMPACT = "compact"
    REFERENCE = "reference"

    @property
    def noun(self) -> str:
        """The kind for people."""
        return {
            "create": "first build",
            "verify": "verification",
            "compact": "compaction",
            "reference": "foreign key",
        }.get(self.value, self.value)


# These have a generation of their own, with ranges and a delta. The other kinds work on the active generation.
BUILDS = (Kind.CREATE, Kind.REBUILD)


class Phase(str, Enum):
    """The phase of an operation. A build begins in `build`, since `prepare` is one transaction.

    A verification has phases of its own: `sum` compares sums of both sides, `check` compares rows. A compaction has the
    phase `compact`, a reference `fill`.
    """

    BUILD = "build"
    SEAL = "seal"
    FOLD = "fold"
    PUBLISH = "publish"
    SUM = "sum"
    CHECK = "check"
    COMPACT = "compact"
    FILL = "fill"
    DONE = "done"

    @property
    def shown(self) -> str:
        """The phase for people."""
        return {"sum": "compare sums", "check": "compare rows", "fill": "fill rows"}.get(self.value, self.value)


class Verb(str, Enum):
    """An event in the life of an operation."""

    START = "start"
    RESUME = "resume"
    PAUSE = "pause"
    ADVANCE = "advance"
    COMPLETE = "complete"
    FAIL = "fail"
    ABORT = "abort"
    REMOVE = "remove"


@dataclass(frozen=True)
class Transition:
    """One arrow: from a status and phase to another, and why it may be taken."""

    verb: Verb
    status: Status
    phase: Phase
    to_status: Status
    to_phase: Phase
    reason: str


@dataclass(frozen=True)
class Placed:
    """A phase in its place in the order of an operation's phases.

    until: the reason why it ends. final: it needs no other process, is short, and mostly waits for locks. It takes up a
    place in the queue, but waits for none, since a wait would only prolong the capture.
    percent: the percentage at its beginning. grows: the percentage that it adds; `done` is the share of that, in SQL
    over the arguments of `roir.percent_of`. copies: rows are copied or compared in it. pieces: the kind of its pieces
    to show, a key of `snapshot/bars.py`.
    """

    phase: Phase
    until: str
    pieces: str
    percent: int = 0
    grows: int = 0
    done: str | None = None
    copies: bool = False
    final: bool = False


# The phases of an operation in their order, without `done`.
BUILD_ORDER = (
    Placed(Phase.BUILD, "every range is copied", "ranges", 0, 60, "copied", copies=True),
    Placed(Phase.SEAL, "every segment has its index", "segments", 60, 25, "sealed"),
    Placed(Phase.FOLD, "nothing but ghosts and what writers hold is left in the delta", "segments", 85, final=True),
    Placed(Phase.PUBLISH, "the view shows the generation", "units", 87, 12, "compared", final=True),
)
ORDER = {
    Kind.CREATE: BUILD_ORDER,
    Kind.REBUILD: BUILD_ORDER,
    Kind.VERIFY: (
        Placed(Phase.SUM, "every side is summed", "units", 0, 99, "compared", copies=True),
        Placed(Phase.CHECK, "every suspicious row is compared", "units", 0, 99, "compared", copies=True),
    ),
    Kind.COMPACT: (
        Placed(Phase.COMPACT, "every unit is swapped in or left", "compactions", 0, 99, "compared", copies=True),
    ),
    Kind.REFERENCE: (
        Placed(Phase.FILL, "every row has its parent's place, and is checked", "ranges", 0, 99, "copied", copies=True),
    ),
}
PLACED = {one.phase: one for order in ORDER.values() for one in order}
PHASES_OF = {kind: tuple(one.phase for one in order) for kind, order in ORDER.items()}
OF_A_BUILD = PHASES_OF[Kind.CREATE]
FINAL = tuple(phase for phase, one in PLACED.items() if one.final)
# The phases that may take hours: they copy, sort or compare.
LONG = tuple(phase for phase in PLACED if phase not in FINAL)
_WORKING = tuple(PLACED)


def following(phase: Phase) -> Phase:
    """The phase after one that isn't the last of its operation."""
    order = next(order for order in PHASES_OF.values() if phase in order)
    return order[order.index(phase) + 1]


def _steps() -> Iterator[Transition]:
    """Yields the transitions from each phase to the next, and from the last one to the end."""
    for order in dict.fromkeys(ORDER.values()):
        for one, following in pairwise(order):
            yield Transition(Verb.ADVANCE, Status.RUNNING, one.phase, Status.RUNNING, following.phase, one.until)
        last = order[-1]
        yield Transition(Verb.COMPLETE, Status.RUNNING, last.phase, Status.COMPLETED, Phase.DONE, last.until)


TRANSITIONS: tuple[Transition, ...] = (
    *(
        Transition(Verb.START, Status.PAUSED, phase, Status.RUNNING, phase, "a run resumes it where it stood")
        for phase in _WORKING
    ),
    *(
        Transition(Verb.START, Status.RUNNING, phase, Status.RUNNING, phase, "a run takes it over from one that died")
        for phase in _WORKING
    ),
    *(
        Transition(Verb.RESUME, Status.PAUSED, phase, Status.RUNNING, phase, "a user lifts the pause for a waiting run")
        for phase in _WORKING
    ),
    *(
        Transition(Verb.PAUSE, Status.RUNNING, phase, Status.PAUSED, phase, "a user or a failure stops it")
        for phase in _WORKING
    ),
    *_steps(),
    *(
        Transition(Verb.FAIL, status, phase, Status.FAILED, phase, "to continue would give a wrong result")
        for status in (Status.RUNNING, Status.PAUSED)
        for phase in _WORKING
    ),
    *(
        Transition(Verb.ABORT, status, phase, Status.ABORTING, phase, "its workers are fenced")
        for status in (Status.RUNNING, Status.PAUSED, Status.FAILED)
        for phase in _WORKING
    ),
    *(
        Transition(Verb.REMOVE, Status.ABORTING, phase, Status.ABORTED, phase, "what it made is gone")
        for phase in _WORKING
    ),
)
