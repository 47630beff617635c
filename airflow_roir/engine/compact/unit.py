"""A unit of a compaction: neighbouring segments, and the new ones that will replace them.

These objects have the unit's id in their names: a partitioned table beside the base, whose partitions are the new
segments; the list of identities that were touched since the capture; the function of the triggers that keep the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from airflow_roir.definition import DATA_SCHEMA
from airflow_roir.engine.claims import Pieces
from airflow_roir.engine.generation.cut import Bound
from airflow_roir.generation_state import UnitStatus

# The reason for which a split is left out; the next choice looks for this text.
FEW_KEYS = "its entries have too few keys for a split, and it wastes too little to be rewritten"
ENDED = f"status IN ('{UnitStatus.DONE.value}', '{UnitStatus.LEFT.value}')"
UNITS = Pieces(
    "unit",
    "roir.compaction_unit",
    "operation_id = %(operation)s",
    f"NOT {ENDED}",
    "generation_id, action, segments, parts, cuts, files, status, watermark, restarts",
)


@dataclass(frozen=True)
class UnitClaim:
    """A worker's hold on a unit. segments, parts: ordinals, in the order of keys. cuts: the bounds between the parts.

    files: the oid and the file of each segment, and its number of blocks at the capture. watermark: the place of the
    segment that is being copied, and the next block.
    """

    id: int
    ordinal: int
    token: int
    generation_id: int
    action: str
    segments: tuple[int, ...]
    parts: tuple[int, ...]
    cuts: tuple[Bound, ...]
    files: tuple[tuple[int, int, int], ...]
    status: UnitStatus
    watermark: tuple[int, int]
    restarts: int

    @classmethod
    def of(cls, row: Row[Any]) -> UnitClaim:
        """The claim by a row that a claim or a read of the unit returned."""
        return cls(
            row.id,
            row.ordinal,
            row.claim_token,
            row.generation_id,
            row.action,
            tuple(row.segments),
            tuple(row.parts),
            tuple(tuple(cut) for cut in row.cuts or ()),
            tuple((oid, filenode, blocks) for oid, filenode, blocks in row.files or ()),
            UnitStatus(row.status),
            tuple(row.watermark or (0, 0)),
            row.restarts,
        )

    @property
    def beside(self) -> str:
        """The partitioned table that has the new segments until the swap attaches them to the base."""
        return beside(self.generation_id, self.id)

    @property
    def touched(self) -> str:
        """The table of identities that were written since the capture."""
        return f"{self.beside}_touched"

    @property
    def touch(self) -> str:
        """The function of the triggers that list these identities."""
        return f"{self.beside}_touch"

    def part(self, place: int) -> str:
        """The name of a new segment, by its place in the order of keys."""
        return f"{DATA_SCHEMA}.g{self.generation_id}_s{self.parts[place]:03d}"


def beside(generation_id: int, unit_id: int) -> str:
    """The name of a unit's partitioned table, with which the names of its list and function begin."""
    return f"{DATA_SCHEMA}.g{generation_id}_u{unit_id}"
