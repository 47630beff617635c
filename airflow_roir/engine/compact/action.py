"""What may be done to a segment of an index, or to a run of neighbours, with the figures of `cost_model.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """rewrite: table and B-tree are made again; split: into parts; merge: a run into one."""

    REWRITE = "rewrite"
    SPLIT = "split"
    MERGE = "merge"


@dataclass(frozen=True)
class Action:
    """What may be done to a segment, or to a run of neighbours.

    ordinals: in key order. parts: segments there are afterwards. bytes_now, bytes_after: of tables and B-trees.
    pages_read: of tables; bytes_written: of tables and B-trees; bytes_logged: of WAL; seconds: of one worker's work.
    room_saved: bytes. reads_per_day: index scans. pages_saved_per_day: those that scans don't touch any more, or
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
        """Bytes that are free afterwards."""
        return max(0, self.bytes_now - self.bytes_after)

    @property
    def budgeted(self) -> int:
        """What counts against a budget in bytes: tables, B-trees and WAL."""
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
