"""The life of an operation: statuses, phases, and every legal transition with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# The format of watermarks and bounds in the control tables; another version of the code must know it to go on.
FORMAT_VERSION = 2
# Where ranges are blocks.
BLOCK_FORMAT_VERSION = 3
# Who pauses where rows share a key of a unique index: no retry lifts that, only a resume.
BY_DUPLICATES = "duplicates"
# Who pauses outside of an operation's windows: it goes on by itself inside.
BY_WINDOW = "window"
# Who pauses an operation that has worked for as long as it may: a resume lifts that.
BY_MAX_DURATION = "max_duration"
# How the notice of an operation begins that waits for others to end.
QUEUED = "queued: "
# Who pauses if a signal can't be read for too long.
BY_GOVERNOR = "governor"


class Status(str, Enum):
    """What an operation is doing. `failed` only if to continue would be wrong; any other failure pauses."""

    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTING = "aborting"
    ABORTED = "aborted"


class Kind(str, Enum):
    """What an operation does with its generation: builds it, compares it, or makes some of its segments again."""

    CREATE = "create"
    REBUILD = "rebuild"
    VERIFY = "verify"
    COMPACT = "compact"


# They have a generation of their own, with ranges and a delta. The others work on the one that readers see.
BUILDS = (Kind.CREATE, Kind.REBUILD)


class Phase(str, Enum):
    """Where an operation stands. `prepare` is one transaction: an operation is born in `build`.

    A verification has phases of its own: `sum` compares sums of both sides, `check` compares rows. So has a compaction.
    """

    BUILD = "build"
    SEAL = "seal"
    FOLD = "fold"
    PUBLISH = "publish"
    SUM = "sum"
    CHECK = "check"
    COMPACT = "compact"
    DONE = "done"


class Verb(str, Enum):
    """What can happen to an operation."""

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


# The phases of an operation in their order, but for `done`.
OF_A_BUILD = (Phase.BUILD, Phase.SEAL, Phase.FOLD, Phase.PUBLISH)
PHASES_OF = {
    Kind.CREATE: OF_A_BUILD,
    Kind.REBUILD: OF_A_BUILD,
    Kind.VERIFY: (Phase.SUM, Phase.CHECK),
    Kind.COMPACT: (Phase.COMPACT,),
}
# What needs no other process: short, and mostly waits for locks. It takes up a place in the queue, but waits for none,
# since it would only capture for longer.
FINAL = (Phase.FOLD, Phase.PUBLISH)
_WORKING = tuple(dict.fromkeys(phase for phases in PHASES_OF.values() for phase in phases))
# What may take hours of copying, sorting or comparing.
LONG = tuple(phase for phase in _WORKING if phase not in FINAL)

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
    Transition(Verb.ADVANCE, Status.RUNNING, Phase.BUILD, Status.RUNNING, Phase.SEAL, "every range is copied"),
    Transition(Verb.ADVANCE, Status.RUNNING, Phase.SEAL, Status.RUNNING, Phase.FOLD, "every segment has its index"),
    Transition(
        Verb.ADVANCE,
        Status.RUNNING,
        Phase.FOLD,
        Status.RUNNING,
        Phase.PUBLISH,
        "nothing but ghosts and what writers hold is left in the delta",
    ),
    Transition(Verb.ADVANCE, Status.RUNNING, Phase.SUM, Status.RUNNING, Phase.CHECK, "every side is summed"),
    Transition(
        Verb.COMPLETE, Status.RUNNING, Phase.CHECK, Status.COMPLETED, Phase.DONE, "every suspicious row is compared"
    ),
    Transition(
        Verb.COMPLETE, Status.RUNNING, Phase.COMPACT, Status.COMPLETED, Phase.DONE, "every unit is swapped in or left"
    ),
    Transition(
        Verb.COMPLETE,
        Status.RUNNING,
        Phase.PUBLISH,
        Status.COMPLETED,
        Phase.DONE,
        "the view shows the generation",
    ),
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
