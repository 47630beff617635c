"""The life of a generation and of its parts: states, and every legal arrow with its reason.

Triggers of the control tables take these arrows and no others (`migrations/sql/arrows.sql`), as they take those of an
operation (`operation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GenerationStatus(str, Enum):
    """The status of a generation. `active`: readers see it. `retired`: replaced, but maintained for the revert window.
    `building`: under construction."""

    BUILDING = "building"
    ACTIVE = "active"
    RETIRED = "retired"
    DROPPED = "dropped"


class CaptureMode(str, Enum):
    """The effect of a write on a generation (docs/architecture.md#capture-modes). `none`: the generation is dropped."""

    CAPTURE = "capture"
    DIRECT = "direct"
    ACTIVE = "active"
    NONE = "none"


class SegmentStatus(str, Enum):
    """The status of a segment: without its index, with it, vacuumed too."""

    LOADING = "loading"
    INDEXED = "indexed"
    SEALED = "sealed"


class UnitStatus(str, Enum):
    """The status of a unit of a compaction: its present step, done, or left out."""

    WAITING = "waiting"
    COPYING = "copying"
    INDEXING = "indexing"
    FOLDING = "folding"
    DONE = "done"
    LEFT = "left"


@dataclass(frozen=True)
class Arrow:
    """One change of state in a control table, and why it may happen. States are the columns' values, with blanks."""

    table: str
    was: str
    becomes: str
    reason: str


# In the order of `Arrow.was`. A table that isn't here has one state: rows that are done with are deleted.
STATE_COLUMNS = {
    "operation": ("status", "phase"),
    "generation": ("status", "capture_mode"),
    "segment": ("status",),
    "source_partition": ("status",),
    "scan_range": ("done",),
    "delta_part": ("done",),
    "verification_unit": ("done",),
    "compaction_unit": ("status",),
}
ARROWS = (
    Arrow("generation", "building capture", "building direct", "the switch, under the drain lock"),
    Arrow("generation", "building direct", "active active", "the publish"),
    Arrow("generation", "active active", "retired active", "a publish or a revert shows another one"),
    Arrow("generation", "retired active", "active active", "a revert shows it again"),
    Arrow("generation", "building capture", "dropped none", "its build is aborted before the switch"),
    Arrow("generation", "building direct", "dropped none", "its build is aborted after the switch"),
    Arrow("generation", "active active", "dropped none", "its index is dropped"),
    Arrow("generation", "retired active", "dropped none", "its revert window has ended, or its index is dropped"),
    Arrow("segment", "loading", "indexed", "its unique index is built and attached"),
    Arrow("segment", "indexed", "sealed", "it is vacuumed and analysed"),
    Arrow("source_partition", "joining", "leaving", "the attach is given up, or its rows were rewritten"),
    Arrow("scan_range", "false", "true", "its last batch is committed, or its partition is gone"),
    Arrow("delta_part", "false", "true", "its last blocks are folded"),
    Arrow("verification_unit", "false", "true", "it is compared"),
    Arrow("compaction_unit", "waiting", "copying", "its segments are captured, and the new ones made"),
    Arrow("compaction_unit", "copying", "indexing", "all blocks are copied"),
    Arrow("compaction_unit", "indexing", "folding", "every new segment has its index"),
    Arrow("compaction_unit", "folding", "done", "the new segments are swapped in"),
    Arrow("compaction_unit", "copying", "waiting", "a segment was emptied or rewritten, or the operation is aborted"),
    Arrow("compaction_unit", "indexing", "waiting", "a segment was emptied or rewritten, or the operation is aborted"),
    Arrow("compaction_unit", "folding", "waiting", "a segment was emptied or rewritten, or the operation is aborted"),
    Arrow("compaction_unit", "waiting", "left", "a segment isn't there any more, or is rewritten again and again"),
)
