"""Sends an operation's figures to Airflow's own metrics: StatsD, Datadog or OpenTelemetry, as Airflow is configured.

A metric never fails a task: an error is logged once, and the work goes on without metrics.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf
from airflow.sdk.observability import stats

from airflow_roir.engine.snapshot.operation import OperationStatus, operation_soon

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database

log = logging.getLogger(__name__)

# As often as most backends aggregate.
EVERY_S = 10.0
GAUGES: dict[str, Callable[[OperationStatus], float | None]] = {
    "percent": lambda one: one.percent_complete,
    "rows_per_second": lambda one: one.rows_per_second_now,
    "seconds_left": lambda one: one.seconds_left,
    "parallelism": lambda one: one.options["parallelism"],
    "granted": lambda one: one.granted,
    "delta_rows": lambda one: one.delta_rows,
}
NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
# StatsD has no quotes: a line or a | in a tag would be another metric.
NO_TAG = re.compile(r"[^A-Za-z0-9_.-]")


class Sender:
    """Sends an operation's figures at intervals. Gauges are present values; counters count from the first look on.

    read: returns the figures; called only when it is time. tags: of the task. clock: seconds that never go back.
    has_tags: if not, it is plain StatsD, which drops tags; then the index is a part of each name.
    """

    def __init__(
        self,
        read: Callable[[], OperationStatus],
        tags: Mapping[str, str],
        has_tags: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._tags = tags
        self._has_tags = has_tags
        self._clock = clock
        self._last: float | None = None
        self._before: OperationStatus | None = None
        self._failed = False

    def turn(self) -> None:
        """Sends if it is time. Raises nothing."""
        if self._last is None or self._clock() - self._last >= EVERY_S:
            self.send()

    def send(self) -> None:
        """Sends now. Raises nothing."""
        self._last = self._clock()
        try:
            self._send(self._read())
        except Exception as error:
            if not self._failed:
                log.warning("The operation's metrics can't be sent now: %s", type(error).__name__)
                log.debug("Because of", exc_info=True)
            self._failed = True

    def _send(self, now: OperationStatus) -> None:
        before = self._before or now
        self._before = now
        for name, read in GAUGES.items():
            if (value := read(now)) is not None:
                stats.gauge(self._name(now, name), value, tags=self._tags_of(now))
        if now.rows > before.rows:
            stats.incr(self._name(now, "rows"), now.rows - before.rows, tags=self._tags_of(now))
        for cause, seconds in now.throttle_seconds.items():
            lost = round(seconds - before.throttle_seconds.get(cause, 0.0), 3)
            if lost > 0:
                name = self._name(now, "throttled_seconds", cause)
                # StatsD and OpenTelemetry also count fractions.
                stats.incr(name, lost, tags=self._tags_of(now, cause=cause))  # type: ignore[arg-type,unused-ignore]

    def _name(self, now: OperationStatus, what: str, cause: str = "") -> str:
        if self._has_tags:
            return f"roir.{what}"
        parts = ["roir", now.index.replace(".", "__"), what, *([cause] if cause else [])]
        return ".".join(NO_NAME.sub("_", part) for part in parts)

    def _tags_of(self, now: OperationStatus, **more: str) -> dict[str, str]:
        tags = {**self._tags, "index": now.index, "kind": now.kind, **more}
        return {name: NO_TAG.sub("_", value) for name, value in tags.items()}


@contextmanager
def sending(database: Database, operation_id: int, ti: Any) -> Iterator[Callable[[], None]]:
    """Yields the function to call at each turn; sends once more at a good end. Does nothing if Airflow's metrics are
    off."""
    if not _is_on("statsd_on", "statsd_datadog_enabled", "otel_on"):
        yield lambda: None
        return
    # In Airflow's order of precedence.
    plain = not _is_on("statsd_datadog_enabled") and _is_on("statsd_on") and not _is_on("statsd_influxdb_enabled")
    tags = getattr(ti, "stats_tags", None) or {"dag_id": ti.dag_id, "task_id": ti.task_id}
    sender = Sender(lambda: operation_soon(database, operation_id), tags, has_tags=not plain)
    yield sender.turn
    # Not by a task that was killed: it has seconds, and a server that is gone takes longer to notice.
    sender.send()


def _is_on(*options: str) -> bool:
    return any(conf.getboolean("metrics", option, fallback=False) for option in options)
