"""A generation as the capture sees it: its mode, its entry."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_roir.definition import Scan
from airflow_roir.engine.entry import Entry

CAPTURE, DIRECT, ACTIVE = "capture", "direct", "active"


@dataclass(frozen=True)
class Target:
    """A generation that the capture function maintains, in its mode. scan: what it is built from."""

    generation_id: int
    entry: Entry
    mode: str
    scan: Scan = Scan.KEY
