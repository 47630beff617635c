"""An application's use of indexes: its limits, when the registry is read again, and the counts. For every ORM."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from roir_client import registry
from roir_client.lookup import FOUND, Found
from roir_client.registry import Index, Registry

log = logging.getLogger("roir_client")

# With fewer partitions the planner is as fast by itself (benchmarks/results/application.md).
LEAST_PARTITIONS = 50
# With more rows the constants cost more than they save.
MOST_ROWS = 100
REFRESH_S = 60.0
# The shortest time between two readings of the registry.
PAUSE_S = 1.0
# The answer of an index that isn't what the registry says.
_STALE = ("gone", "error")


class Use:
    """The indexes that the statements of one database use.

    enabled: False leaves all statements as they are. counts: how often a statement was `rewritten`, and how often not,
    by reason: `values` that can't serve, `type` of a value, `many` rows, the session's `settings`, `gone`, `doubtful`,
    `name`, `rights`, `error` and `failed`, which the logger `roir_client` explains.
    """

    def __init__(
        self,
        enabled: bool = True,
        least_partitions: int = LEAST_PARTITIONS,
        most_rows: int = MOST_ROWS,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self.enabled = enabled
        self.counts: Counter[str] = Counter()
        self.most_rows = most_rows
        self.registry = Registry()
        self._least_partitions = least_partitions
        self._refresh_s = refresh_s
        self._refresh_at = 0.0
        self._reading = threading.Lock()

    def refresh(self) -> None:
        """Reads again which indexes there are, before the next statement."""
        self._refresh_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the registry is to be read again."""
        return time.monotonic() >= self._refresh_at

    def read(self, fetch: Callable[[str], str | None]) -> bool:
        """Reads the registry; True if it is another one. Meanwhile other threads use the old one."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            self._refresh_at = time.monotonic() + self._refresh_s
            read = registry.read(fetch, self._least_partitions)
            if read == self.registry:
                return False
            self.registry = read
            log.info("%d indexes can be used", len(read))
            return True
        finally:
            self._reading.release()

    def note(self, index: Index, found: Found) -> bool:
        """Counts an answer. True if rows were found, or that there are none."""
        log.debug("index %s: %s, %d rows", index, found.outcome, len(found.keys or ()))
        if found.outcome == FOUND:
            self.counts["rewritten"] += 1
            return True
        self.counts[found.outcome] += 1
        if found.outcome in _STALE:
            self._refresh_at = min(self._refresh_at, time.monotonic() + PAUSE_S)
            log.info("index %s isn't used: %s", index, found.said or found.outcome)
        return False

    def fail(self, error: Exception) -> None:
        """Counts a statement whose values can't be asked for: the statement itself says it better."""
        self.counts["failed"] += 1
        log.info("a statement stays as it is", exc_info=error)
