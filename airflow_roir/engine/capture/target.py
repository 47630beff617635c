"""A generation as the capture sees it: its mode, its entry, its segments."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_roir.definition import Scan
from airflow_roir.engine.entry import Entry
from airflow_roir.engine.plan import Bound
from airflow_roir.generation_state import CaptureMode

CAPTURE, DIRECT, ACTIVE = (mode.value for mode in (CaptureMode.CAPTURE, CaptureMode.DIRECT, CaptureMode.ACTIVE))


@dataclass(frozen=True)
class Target:
    """A generation that the capture function maintains, in its mode. scan: what it is built from.

    bounds: those between its segments, which stay as prepare made them; None if they aren't known. constraint: what a
    unique index is called where it refuses a row.
    """

    generation_id: int
    entry: Entry
    mode: str
    scan: Scan = Scan.KEY
    bounds: tuple[Bound, ...] | None = None
    constraint: str = ""

    def values(self, record: str) -> list[str]:
        """SQL for an entry's values out of a row of the source, or out of `here`."""
        return self.entry.physical(prefix="here.") if record == "here" else self.entry.source_columns(record)
