"""A generation as the capture sees it: its mode, its entry, its segments."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_roir.definition import Scan
from airflow_roir.engine.generation.cut import Bound
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.generation_state import CaptureMode

CAPTURE, DIRECT, ACTIVE = (mode.value for mode in (CaptureMode.CAPTURE, CaptureMode.DIRECT, CaptureMode.ACTIVE))


@dataclass(frozen=True)
class Target:
    """A generation that the capture function maintains, in its mode. scan: how the build reads the source.

    bounds: those between its segments in the order of keys, whose ordinals are `segments`; None if they aren't known.
    layout: how often segments were swapped for new ones. constraint: the name of a unique index in errors.
    """

    generation_id: int
    entry: Entry
    mode: str
    scan: Scan = Scan.KEY
    bounds: tuple[Bound, ...] | None = None
    constraint: str = ""
    segments: tuple[int, ...] = ()
    layout: int = 0

    def segment_at(self, place: int) -> int:
        """The ordinal of a segment by its place, from 0, in the order of keys. Prepare's ordinals are in that order."""
        return self.segments[place] if self.segments else place + 1

    def values(self, record: str) -> list[str]:
        """SQL for an entry's values from a row of the source, or from `here`."""
        return self.entry.physical(prefix="here.") if record == "here" else self.entry.source_columns(record)
