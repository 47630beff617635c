"""The discrepancies of a verification by their kinds, which each of its displays counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The numbers of discrepancies.

    missing, extra: rows without an entry, entries without a row.
    different: entries whose included or equal-yet-distinct values differ.
    corrupt: B-trees that amcheck or a lookup refused.
    damaged: heap and B-tree of the table, or of the entries, disagree, so that a lookup can't tell; or the view shows
    other rows.
    duplicate: rows without an entry in a unique index, whose key another row has.
    """

    missing: int
    extra: int
    different: int
    corrupt: int
    damaged: int
    duplicate: int

    @property
    def found(self) -> int:
        """The number of all discrepancies."""
        return sum(getattr(self, kind) for kind in KINDS)


KINDS = tuple(one.name for one in fields(Counts))


def counted_in(row: object) -> dict[str, int]:
    """The numbers of a row that has them, by their kinds."""
    return {kind: getattr(row, kind) for kind in KINDS}
