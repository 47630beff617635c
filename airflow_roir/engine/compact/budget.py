"""How much a compaction may write, or how long it may work: `20GB`, `30min`, or both: `20GB, 30min`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from airflow_roir.errors import InvalidInput
from airflow_roir.quantity import duration, size
from airflow_roir.span import seconds

Limit = TypeVar("Limit", int, float)

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(B|bytes|kB|MB|GB|TB|PB)", re.IGNORECASE)
_UNITS = {"b": 1, "bytes": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40, "pb": 1 << 50}


@dataclass(frozen=True)
class Budget:
    """bytes: of tables, B-trees and WAL together; seconds: of one worker's work. None: no limit."""

    bytes: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: Any, name: str = "--budget") -> Budget:
        """Reads `20GB`, `1.5 TB`, `30min`, `1h 30min`, `20GB, 30min`; None and '' are no limit.

        A number needs a unit. 1 kB is 1,024 bytes. name: for the message. Raises InvalidInput.
        """
        if text is None or (isinstance(text, str) and text.strip() in ("", "None")):
            return cls()
        if isinstance(text, str) and "," in text:
            first, *more = (cls.parse(part, name) for part in text.split(","))
            for one in more:
                first = first.within(one)
            return first
        said = text.strip() if isinstance(text, str) else ""
        found = _SIZE.fullmatch(said)
        if found is not None:
            given = cls(bytes=int(float(found[1]) * _UNITS[found[2].lower()]))
        # A number without a unit could mean bytes or seconds.
        elif re.search(r"[a-z]\s*$", said) and said not in ("off", "never"):
            try:
                given = cls(seconds=seconds(name, said))
            except InvalidInput:
                raise _unreadable(name, text) from None
        else:
            raise _unreadable(name, text)
        if not (given.bytes or given.seconds):
            raise InvalidInput(f"{name} is {text!r}, which allows no work; leave it out for no limit")
        return given

    @property
    def is_limited(self) -> bool:
        """True if there is a limit."""
        return self.bytes is not None or self.seconds is not None

    def within(self, other: Budget) -> Budget:
        """The scarcer of each limit."""
        return Budget(_scarcer(self.bytes, other.bytes), _scarcer(self.seconds, other.seconds))

    def without(self, bytes_written: int, seconds_worked: float) -> Budget | None:
        """The budget that is left after this much work; None if it is spent."""
        left = Budget(
            None if self.bytes is None else self.bytes - bytes_written,
            None if self.seconds is None else self.seconds - seconds_worked,
        )
        spent = [limit for limit in (left.bytes, left.seconds) if limit is not None and limit < 1]
        return None if spent else left

    @property
    def exact(self) -> str:
        """The budget as `parse` reads it, to the byte and the second; '' is no limit."""
        limits = [] if self.bytes is None else [f"{self.bytes}B"]
        limits += [] if self.seconds is None else [f"{max(int(self.seconds), 1)}s"]
        return ", ".join(limits)

    def share(self, bytes_written: int, seconds_worked: float) -> float:
        """The part of the scarcer limit that this much work takes; 0 without a limit."""
        of_bytes = bytes_written / self.bytes if self.bytes is not None else 0.0
        of_seconds = seconds_worked / self.seconds if self.seconds is not None else 0.0
        return max(of_bytes, of_seconds)

    def __str__(self) -> str:
        """`20 GB`, `30 min`, `no limit`."""
        limits = [] if self.bytes is None else [size(self.bytes)]
        limits += [] if self.seconds is None else [duration(self.seconds)]
        return ", ".join(limits) or "no limit"


def _scarcer(one: Limit | None, other: Limit | None) -> Limit | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _unreadable(name: str, text: Any) -> InvalidInput:
    return InvalidInput(f"{name} is {text!r}; it must be a size, such as 20GB, or a time, such as 30min")
