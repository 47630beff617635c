"""A unit of a compaction: neighbouring segments that new ones take the place of, and what is made for that meanwhile.

What a unit makes is named by it: the new segments beside the base, as partitions of a table of their own; the list of
identities that were touched since they are copied; the triggers that keep the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from airflow_roir.definition import DATA_SCHEMA
from airflow_roir.engine.claims import Pieces
from airflow_roir.engine.generation.cut import Bound
from airflow_roir.generation_state import UnitStatus

# Why a split is left out, as the next choice reads it.
FEW_KEYS = "its entries have too few keys for a split, and it wastes too little to be made again"
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

    files: of each segment its oid, its file, and how many blocks it had when it was captured. watermark: the segment,
    by its place, and the next block.
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
        """Of a row that a claim or a commit has returned."""
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
        """The partitioned table whose partitions the new segments are until they are the base's."""
        return beside(self.generation_id, self.id)

    @property
    def touched(self) -> str:
        """The identities that were written since the capture."""
        return f"{self.beside}_touched"

    @property
    def touch(self) -> str:
        """The function of the triggers that write them down."""
        return f"{self.beside}_touch"

    def part(self, place: int) -> str:
        """A new segment, by its place in the order of keys."""
        return f"{DATA_SCHEMA}.g{self.generation_id}_s{self.parts[place]:03d}"


def beside(generation_id: int, unit_id: int) -> str:
    """What all that a unit makes is named after."""
    return f"{DATA_SCHEMA}.g{generation_id}_u{unit_id}"
