"""Up to which block each segment is written: rows that come later come behind that (docs/architecture.md#early). Pure.

Workers append. A batch writes behind the end that a segment had when the batch began, but for the free room in blocks
that its worker wrote to before. So once every transaction has ended that ran at a look, nothing comes before the end
that a segment had at that look, less a margin for that room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# Free room is in the last block that each worker wrote to, and in those by which a segment grew at once (64 at most).
# Whatever comes still further before is the seal's to find.
MARGIN_BLOCKS = 128
# Looks that are remembered: one a second, and a batch takes about a second.
REMEMBERED = 120


@dataclass(frozen=True)
class Snapshot:
    """What a look sees. xmin: every transaction before it has ended; xmax: none from it on is seen; running: others."""

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Of the text of a pg_snapshot."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(one) for one in running.split(",") if one))

    def unseen(self) -> str:
        """SQL that a row `s` was written by a transaction that this snapshot doesn't see."""
        short = [one % (1 << 32) for one in (self.xmax, *self.running)]
        newer = f"age(s.xmin) <= age('{short[0]}'::xid)"
        if not self.running:
            return newer
        return f"({newer} OR s.xmin = ANY ('{{{','.join(map(str, short[1:]))}}}'::xid[]))"


class Growth:
    """The ends of segments as they were at the last looks."""

    def __init__(self) -> None:
        self._looks: deque[tuple[Snapshot, Mapping[int, int]]] = deque(maxlen=REMEMBERED)

    def look(self, snapshot: Snapshot, ends: Mapping[int, int]) -> None:
        """ends: the blocks of each segment, read before the snapshot was taken: what it misses began behind them."""
        self._looks.append((snapshot, ends))

    def settled(self, segment: int, now: Snapshot) -> int:
        """The block before which nothing of those that run now, or later, will be written; 0 if nothing is known."""
        for snapshot, ends in reversed(self._looks):
            if snapshot.xmax <= now.xmin:
                return max(0, ends.get(segment, 0) - MARGIN_BLOCKS)
        return 0
