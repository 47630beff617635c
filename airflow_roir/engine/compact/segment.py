"""One segment of a published index: its sizes beside those of a fresh one, its reads, its age."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Segment:
    """One segment. None: it can't be known, and `note` says why.

    ordinal, name: its number and its table; segment 0 has the entries with a NULL in the columns that cut the segments.
    lower, upper: it has the keys from `lower` on and below `upper`; null is unbounded.
    rows: live entries, about; null if they weren't counted yet.
    heap_bytes, tree_bytes: the sizes of its table and of its B-trees, without TOAST and maps. Segment 0 of a unique
        index has two trees.
    heap_needed, tree_needed: the sizes if the segment were built now.
    leaf_density: how full the leaves of its trees are, 0 to 1, dead entries included; 0.9 right after a build.
    dead_rows: dead entries that no vacuum has removed yet, about.
    scans, rows_read: index scans since `since`, and the entries that they returned. Writes look up entries, too.
    blocks_read, blocks_hit: blocks of its table and trees, from outside and inside of `shared_buffers`.
    since: when these counters began: at the seal, at the last reset of the statistics, or after a crash.
    sealed_at: when its tree was built.
    growth: its rows divided by the median of the others'; null of segment 0, and if the others are empty.
    exact: whether pgstattuple measured it; else it is an estimate.
    note: the figures that aren't known, and why.
    """

    ordinal: int
    name: str
    lower: tuple[str, ...] | None
    upper: tuple[str, ...] | None
    rows: int | None
    heap_bytes: int
    tree_bytes: int
    heap_needed: int | None
    tree_needed: int | None
    leaf_density: float | None
    dead_rows: int
    scans: int
    rows_read: int
    blocks_read: int
    blocks_hit: int
    since: datetime | None
    sealed_at: datetime | None
    growth: float | None
    exact: bool = False
    note: str | None = None

    @property
    def bytes(self) -> int:
        """The bytes of table and trees."""
        return self.heap_bytes + self.tree_bytes

    @property
    def needed(self) -> int | None:
        """The bytes of table and trees if built now."""
        if self.heap_needed is None or self.tree_needed is None:
            return None
        return self.heap_needed + self.tree_needed

    @property
    def wasted(self) -> int | None:
        """About how many bytes building it now would free."""
        return None if self.needed is None else max(0, self.bytes - self.needed)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        moments = {name: at and at.isoformat() for name in ("since", "sealed_at") for at in [getattr(self, name)]}
        return {**asdict(self), **moments}


def worst_first(segments: Iterable[Segment]) -> list[Segment]:
    """The segments by the bytes that building them now would free; those without the figure come last."""
    return sorted(segments, key=lambda one: (one.wasted is None, -(one.wasted or 0), one.ordinal))
