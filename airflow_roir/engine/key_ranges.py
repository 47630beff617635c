"""The key ranges of segments in their order: texts can't be compared, but each begins where another one ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from airflow_roir.engine.plan import Bound
from airflow_roir.errors import InvariantViolated


@dataclass(frozen=True)
class KeyRange:
    """A segment by its ordinal, and its bounds, half-open; None is unbounded."""

    ordinal: int
    lower: Bound | None
    upper: Bound | None


def in_key_order(pieces: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """All of them from the least key on. Ordinals tell no order: a compaction gives new segments new ones.

    Raises InvariantViolated if they don't cover all keys without a gap.
    """
    by_lower = {piece.lower: piece for piece in pieces}
    count = len(by_lower)
    found: list[KeyRange] = []
    at: Bound | None = None
    while at in by_lower:
        piece = by_lower.pop(at)
        found.append(piece)
        at = piece.upper
        if at is None:
            break
    if len(found) != count or (found and found[-1].upper is not None):
        raise InvariantViolated(
            f"segments {sorted(piece.ordinal for piece in by_lower.values())} don't join up with the others"
        )
    return tuple(found)
