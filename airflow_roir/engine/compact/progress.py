"""How far compactions are, and their results, in words: units, those in progress, the bytes saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.generation_state import UnitStatus
from airflow_roir.quantity import counted, duration, size

if TYPE_CHECKING:
    from airflow_roir.engine.compact.compaction import CompactionReport


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


def told(report: CompactionReport) -> Iterator[str]:
    """The report's lines: the whole compaction, then each unit."""
    done = [unit for unit in report.units if unit["status"] == UnitStatus.DONE]
    left = [unit for unit in report.units if unit["status"] == UnitStatus.LEFT]
    said = f"{report.index}: {counted(len(done), 'unit')} of {len(report.units):,} swapped in"
    if done:
        said += f", {size(report.bytes_before)} before, {size(report.bytes_after)} after"
    yield said + (f"; {counted(len(left), 'unit')} left out" if left else "")
    for unit in report.units:
        yield f"  {of_unit(unit)}"


def of_unit(unit: Mapping[str, Any]) -> str:
    """`rewrite of segment 3: 1.2 GB before, 0.4 GB after, 1,000 rows in 12 s`."""
    ordinals = unit["segments"]
    what = f"{unit['action']} of segment{'s' if len(ordinals) > 1 else ''} {', '.join(map(str, ordinals))}"
    if unit["status"] == UnitStatus.LEFT:
        return f"{what}: left out, {unit['note']}"
    if unit["status"] != UnitStatus.DONE:
        return f"{what}: not done"
    sizes = f"{size(unit['bytes_before'])} before, {size(unit['bytes_after'])} after"
    return f"{what}: {sizes}, {counted(unit['rows'], 'row')} in {duration(unit['seconds'])}"
