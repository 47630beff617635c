"""How far compactions are: each one's units, those in progress, and the bytes saved until now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.quantity import counted, size

PROGRESS = """
SELECT u.operation_id, count(*) AS units, count(*) FILTER (WHERE u.status = 'done') AS done,
       count(*) FILTER (WHERE u.status = 'left') AS left_out,
       coalesce(sum(u.bytes_before) FILTER (WHERE u.status = 'done'), 0)::bigint AS bytes_before,
       coalesce(sum(u.bytes_after) FILTER (WHERE u.status = 'done'), 0)::bigint AS bytes_after,
       coalesce(array_agg(format('%%s of %%s %%s: %%s', u.action,
                                 CASE cardinality(u.segments) WHEN 1 THEN 'segment' ELSE 'segments' END,
                                 array_to_string(u.segments, ', '), u.status) ORDER BY u.ordinal)
                FILTER (WHERE u.status IN ('copying', 'indexing', 'folding')), '{}') AS at_hand
  FROM roir.compaction_unit u WHERE u.operation_id = ANY (%(operations)s) GROUP BY u.operation_id
"""


@dataclass(frozen=True)
class Standing:
    """The progress of one compaction. units: all of them; done: those that are swapped in; left_out: those left out.

    bytes_before, bytes_after: of segments that were replaced, and of those that took their place. at_hand: the units in
    progress, in words.
    """

    units: int
    done: int
    left_out: int
    bytes_before: int
    bytes_after: int
    at_hand: tuple[str, ...]

    def __str__(self) -> str:
        """`2 of 3 units swapped in, 8 GB before, 3 GB after; 1 left out`."""
        said = f"{self.done:,} of {counted(self.units, 'unit')} swapped in"
        if self.done:
            said += f", {size(self.bytes_before)} before, {size(self.bytes_after)} after"
        return said + (f"; {self.left_out:,} left out" if self.left_out else "")


def standings(connection: Connection, operations: Sequence[int]) -> dict[int, Standing]:
    """The progress of those operations that are compactions, by operation."""
    rows = execute(connection, PROGRESS, {"operations": list(operations)})
    return {
        row.operation_id: Standing(
            row.units, row.done, row.left_out, row.bytes_before, row.bytes_after, tuple(row.at_hand)
        )
        for row in rows
    }
