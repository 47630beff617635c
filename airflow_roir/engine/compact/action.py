"""The possible actions on a segment of an index, or on a run of neighbours, with the figures of `cost_model.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """rewrite: a new table and B-tree; split: several segments in place of one; merge: one in place of a run."""

    REWRITE = "rewrite"
    SPLIT = "split"
    MERGE = "merge"


@dataclass(frozen=True)
class Action:
    """A possible action on a segment, or on a run of neighbours.

    ordinals: in key order. parts: the number of segments afterwards. bytes_now, bytes_after: of tables and B-trees.
    pages_read: of tables; bytes_written: of tables and B-trees; bytes_logged: of WAL; seconds: of one worker's work.
    room_saved: bytes. reads_per_day: index scans. pages_saved_per_day: pages that scans don't touch any more, or
    find in the cache. gain, cost: in page reads; the gain is that of the whole horizon. why: in words.
    """

    kind: Kind
    ordinals: tuple[int, ...]
    parts: int
    bytes_now: int
    bytes_after: int
    pages_read: int
    bytes_written: int
    bytes_logged: int
    seconds: float
    reads_per_day: float
    pages_saved_per_day: float
    gain: float
    cost: float
    why: str

    @property
    def room_saved(self) -> int:
        """The bytes that the action frees."""
        return max(0, self.bytes_now - self.bytes_after)

    @property
    def budgeted(self) -> int:
        """The bytes that count against a budget: tables, B-trees and WAL."""
        return self.bytes_written + self.bytes_logged

    @property
    def net(self) -> float:
        """The gain without the cost."""
        return self.gain - self.cost

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rounded = {name: round(getattr(self, name), 1) for name in ("seconds", "reads_per_day", "gain", "cost")}
        rounded["pages_saved_per_day"] = round(self.pages_saved_per_day, 1)
        told = {"kind": self.kind.value, "ordinals": list(self.ordinals), "room_saved": self.room_saved}
        return {**asdict(self), **rounded, **told}
