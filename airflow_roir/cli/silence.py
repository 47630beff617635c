"""A server that gives no answer, for the views of `roir status --watch`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from airflow_roir.quantity import duration


@dataclass(frozen=True)
class Silence:
    """The server gives no answer: since when (a clock's seconds), and the last error, if there was one."""

    since: float
    said: str

    def __str__(self) -> str:
        what = f": {self.said}" if self.said else ""
        return f"no answer since {duration(round(time.monotonic() - self.since))}{what}"
