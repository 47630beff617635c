"""The results of a compaction in words: for the command, and for a task's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow_roir.generation_state import UnitStatus
from airflow_roir.quantity import counted, duration, size

if TYPE_CHECKING:
    from airflow_roir.engine.compact.compaction import CompactionReport


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
