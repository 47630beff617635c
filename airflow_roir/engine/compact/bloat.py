"""Bloat: how much of a published generation's tables holds no entry, and how much a rebuild would win.

The figures are estimates from the catalogs and the last ANALYZE, and reading them reads no entry. The extension
pgstattuple measures them, which reads all entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from airflow_roir.engine.compact.cost_model import is_waste
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.engine.compact.segments import EMPTY_TREE


@dataclass(frozen=True)
class Bloat:
    """How much of a generation's tables and B-trees holds no entry. None: it can't be known, and `note` says why.

    TOAST isn't counted.

    rows: entries, about.
    bytes, share: free or dead room, in bytes and as a share of the size of tables and B-trees, 0 to 1. The room that a
        fresh B-tree leaves free isn't counted.
    ghosts: leftovers of the build, until the next clean-up.
    win_bytes, win_share: the room that a rebuild would win; 0 if it isn't worth one: below 25 % or 256 kB.
    exact: whether pgstattuple measured all of it; else it is an estimate.
    note: the figures that aren't known, and why.
    """

    rows: int | None
    bytes: int | None
    share: float | None
    ghosts: int
    win_bytes: int | None
    win_share: float | None
    exact: bool = False
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without the rows, which are a field of the index."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}


def bloat_of(found: Sequence[Segment], ghosts: int) -> Bloat:
    """The bloat of a generation, from all its segments."""
    if not found:
        return Bloat(None, None, None, ghosts, None, None, note="the index's tables are gone")
    notes = dict.fromkeys(part for one in found for part in (one.note or "").split("; "))
    note = "; ".join(part for part in notes if part and part != EMPTY_TREE) or None
    counts = [one.rows for one in found if one.rows is not None]
    rows = sum(counts) if len(counts) == len(found) else None
    sizes = [one.needed for one in found if one.needed is not None]
    if rows is None or len(sizes) < len(found):
        return Bloat(rows, None, None, ghosts, None, None, note=note)
    now = sum(one.bytes for one in found)
    free = max(0, now - sum(sizes))
    share = round(free / now, 3) if now else 0.0
    worth = is_waste(now, now - free)
    exact = all(one.exact for one in found)
    return Bloat(rows, free, share, ghosts, free if worth else 0, share if worth else 0.0, exact, note)
