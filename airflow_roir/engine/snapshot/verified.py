"""The last verification of the generation that readers see, with what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.as_json import plain_fields
from airflow_roir.engine.database import execute
from airflow_roir.engine.verify.counts import Counts, counted_in
from airflow_roir.quantity import counted

# The newest verification that has ended of the generation that readers see: one of an older generation doesn't count.
VERIFIED = """
SELECT DISTINCT ON (v.index_id) v.index_id, v.finished_at AS at, v.rows, v.missing, v.extra, v.different, v.corrupt,
       v.damaged, v.duplicate, v.repaired, v.complete, v.options
  FROM roir.verification v JOIN roir.generation g ON g.id = v.generation_id AND g.status = 'active'
 WHERE v.finished_at IS NOT NULL AND v.index_id = ANY (%(indexes)s)
 ORDER BY v.index_id, v.finished_at DESC, v.id DESC
"""


@dataclass(frozen=True, kw_only=True)
class Verified(Counts):
    """The last verification of the generation that readers see.

    at: when it ended.
    rows: source rows that were compared.
    missing, extra, different: rows without an entry, entries without a row, entries with other values.
    corrupt: B-trees that amcheck or a lookup refused.
    damaged: heap and B-tree disagree, or the index's view shows other rows.
    duplicate: rows without an entry in a unique index, whose key another row has.
    repaired: the discrepancies that were repaired, or were right when the repair looked again.
    part: the part that was compared: `all`, `sample`, `slice`, or `time limit` if that ended it.
    """

    at: datetime
    rows: int
    repaired: int
    part: str

    @property
    def differences_left(self) -> int:
        """The discrepancies that aren't repaired."""
        return max(0, self.found - self.repaired)

    @property
    def outcome(self) -> str:
        """`exact`, `3 differences in a sample`, `3 differences repaired`."""
        part = {"all": "", "sample": " in a sample", "slice": " in a slice"}.get(self.part, " as far as it came")
        left, repaired = self.differences_left, counted(self.repaired, "difference")
        said = counted(left, "difference") if left else f"{repaired} repaired" if self.repaired else "exact"
        return said + part

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return plain_fields(self) | {"differences_left": self.differences_left, "outcome": self.outcome}


def verifications(connection: Connection, index_ids: Sequence[int]) -> dict[int, Verified]:
    """The last verification of the generation that readers see, by index; only for indexes that have one."""
    return {row.index_id: _verified(row) for row in execute(connection, VERIFIED, {"indexes": list(index_ids)})}


def _verified(row: Row[Any]) -> Verified:
    part = "all"
    if not row.complete:
        part = "sample" if row.options.get("sample") else "slice" if row.options.get("slices") else "time limit"
    return Verified(at=row.at, rows=row.rows, repaired=row.repaired, part=part, **counted_in(row))
