"""Logs a wait in three kinds of lines: one when it begins, one each hour, one when it ends.

A waiting task is a new process at each look, so what it has logged is kept outside: the caller gives what was kept.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from airflow_roir.quantity import duration

HOUR_S = 3600
FIELDS = {"by": int, "since": float, "hours": int, "log": int}


class WaitLog:
    """The wait of one task or command.

    kept: what `keep` got last, None if there is no wait. keep: keeps that, or None. say: takes a line. log: the log
    that the lines go to, the number of a try for example: another log begins with the first line again.
    clock: seconds since 1970.
    """

    def __init__(
        self,
        kept: Any,
        keep: Callable[[dict[str, Any] | None], object],
        say: Callable[[str], object],
        log: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # Users can edit what a task has kept.
        is_ours = (
            isinstance(kept, Mapping) and FIELDS.items() <= {name: type(one) for name, one in kept.items()}.items()
        )
        self._kept: Mapping[str, Any] | None = kept if is_ours and kept["log"] == log else None
        self._keep = keep
        self._say = say
        self._log = log
        self._clock = clock

    @property
    def is_on(self) -> bool:
        """True if a wait has begun, and hasn't ended."""
        return self._kept is not None

    def waits(self, by: str, line: str) -> float:
        """Logs the line if this wait has just begun, or if an hour is full; returns the seconds since it began.

        by: what is waited for. If that changes, another wait begins. Only its checksum is kept: a pause's reason may
        have values of rows.
        """
        now = self._clock()
        kept = self._kept
        checksum = zlib.crc32(by.encode())
        if kept is None or kept["by"] != checksum:
            self._note({"by": checksum, "since": now, "hours": 0, "log": self._log})
            self._say(line)
            return 0.0
        # A clock that was set back makes no wait shorter than nothing.
        waited = max(0.0, now - float(kept["since"]))
        if (hours := int(waited // HOUR_S)) > kept["hours"]:
            self._note({**kept, "hours": hours})
            self._say(f"{line} (waiting for {duration(waited)})")
        return waited

    def over(self) -> None:
        """Logs the end of the wait, if there was one."""
        if self._kept is not None:
            waited = max(0.0, self._clock() - float(self._kept["since"]))
            self._note(None)
            self._say(f"The wait is over after {duration(waited)}")

    def _note(self, kept: dict[str, Any] | None) -> None:
        self._kept = kept
        self._keep(kept)
