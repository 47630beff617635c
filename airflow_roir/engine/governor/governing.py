"""The governor: a thread of a run that reads the signals, grants workers, and records the lost time with its cause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import admission, operations
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.database import Database, execute, is_transient, to_json
from airflow_roir.engine.governor.control import FIRST, UNREADABLE, Control, Grant
from airflow_roir.engine.governor.readings import SignalReader
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.retry.trouble import OURS, reason_of
from airflow_roir.errors import Fenced, IllegalTransition, RoirError
from airflow_roir.operation import BY_GOVERNOR, Status
from airflow_roir.quantity import duration
from airflow_roir.signals import Reading

LOOK_EVERY_S = 1.0
# If two looks are farther apart, the machine slept, and no time was lost to a signal.
LONGEST_LOOK_S = 10.0
SAMPLE_EVERY_S = 2.0
# The last grant of a run that ended within this time is still good.
TAKE_OVER_S = 120
# A cause that lasts this long is reported; the same cause again only after a while, however often it comes and goes.
TELL_AFTER_S = 5.0
TELL_AGAIN_S = 300.0

# A worker may have written its own reason, that the server has no room: that stays.
GRANT = f"""
UPDATE roir.operation o
   SET granted = %(granted)s, granted_at = clock_timestamp(),
       throttled = CASE WHEN {OURS} THEN o.throttled ELSE %(why)s END,
       throttled_since = CASE WHEN {OURS} THEN o.throttled_since
                              WHEN %(why)s::text IS NULL THEN NULL
                              WHEN o.throttled IS NULL THEN clock_timestamp() ELSE o.throttled_since END
 WHERE o.id = %(operation)s AND o.epoch = %(epoch)s AND o.status = 'running'
"""
FREE = f"""
UPDATE roir.operation
   SET granted = NULL, granted_at = NULL, throttled = CASE WHEN {OURS} THEN throttled END,
       throttled_since = CASE WHEN {OURS} THEN throttled_since END
 WHERE id = %(operation)s AND epoch = %(epoch)s AND (granted_at IS NOT NULL OR NOT ({OURS}))
"""
# Without a grant and a limit in the row, all workers may work, though the run may have a query of its own.
HOLD = """
UPDATE roir.operation SET granted = 0, granted_at = clock_timestamp()
 WHERE id = %(operation)s AND epoch = %(epoch)s AND granted_at IS NULL
"""
LOSE = """
INSERT INTO roir.throttle_time (operation_id, cause, seconds) VALUES (%(operation)s, %(cause)s, %(seconds)s)
ON CONFLICT (operation_id, cause) DO UPDATE
   SET seconds = throttle_time.seconds + excluded.seconds, last_at = clock_timestamp()
"""
LAST_GRANT = """
SELECT granted FROM roir.operation
 WHERE id = %(operation)s AND granted > 0 AND clock_timestamp() - granted_at < make_interval(secs => %(within)s)
"""
# The grant stays, for the next run.
LEAVE = """
UPDATE roir.operation SET throttled = NULL, throttled_since = NULL WHERE id = %(operation)s AND epoch = %(epoch)s
"""
KEEP = "SELECT roir.keep_signals(%(operation)s, %(granted)s, %(readings)s::jsonb)"


class Governor:
    """Governs one run. say: takes its lines. Each `look` is a few short transactions."""

    def __init__(
        self,
        database: Database,
        run: Run,
        surroundings: Surroundings,
        say: Callable[[str], object] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._run = run
        self._say = say
        self._clock = clock
        self._reader = SignalReader(database, surroundings, clock)
        self._control: Control | None = None
        self._looked_at: float | None = None
        self._sampled_at = float("-inf")
        self._unreadable_since: float | None = None
        self._failing_since: float | None = None
        self._news = _News()

    def look(self, connection: Connection) -> Grant | None:
        """Read the signals, decide, write the grant; None without limits. Raises Fenced, DBAPIError."""
        now = self._clock()
        with connection.begin():
            row = read_control(connection, self._run)
            # A user may pause it at the same moment.
            with suppress(IllegalTransition):
                if admission.pause_when_over(connection, row, self._run.epoch, self._run.index) is not None:
                    row = read_control(connection, self._run)
        if row.status != Status.RUNNING:
            self._looked_at, self._unreadable_since, self._failing_since = None, None, None
            return None
        if not self._reader.limits(row.throttle):
            # `off` leaves only the reason.
            if row.granted_at is not None or row.throttled is not None:
                self._free(connection)
            self._control, self._looked_at, self._unreadable_since, self._failing_since = None, None, None, None
            return None
        if self._control is None:
            self._control = Control(self._first(connection, row))
        readings = self._reader.read(connection, row.throttle)
        grant = self._control.decide(readings, row.parallelism, now)
        with connection.begin():
            self._write(connection, row, grant, readings, now)
        for line in self._news.lines(grant, now):
            self._say(line)
            with connection.begin():
                operations.record_event(connection, row.index_id, row.id, "governor", "throttle", line)
        self._give_up(connection, row, grant, now)
        self._failing_since = None
        return grant

    def hold(self) -> None:
        """Hold all workers until the first look, if there are limits. Raises DBAPIError, NotFound, Fenced."""
        with self._database.transaction() as connection:
            if self._reader.limits(read_control(connection, self._run).throttle):
                execute(connection, HOLD, {"operation": self._run.operation_id, "epoch": self._run.epoch})

    def failed(self, why: str) -> None:
        """Hold the work after a look that failed, and pause it after `unreadable_s`, as for an unreadable signal.

        Raises DBAPIError, NotFound, Fenced.
        """
        now = self._clock()
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        self.hold()
        if now - since < self._database.limits.unreadable_s:
            return
        with self._database.transaction() as connection:
            row = read_control(connection, self._run)
            if row.status == Status.RUNNING and self._reader.limits(row.throttle):
                reason = f"for {duration(self._database.limits.unreadable_s)} its throttle has failed: {why}"
                operations.pause_operation(
                    connection, row, BY_GOVERNOR, f"{reason}. Change that; then resume", row.epoch
                )
        self._failing_since = None

    def _first(self, connection: Connection, row: Row[Any]) -> float:
        """The last grant of the run before this one, if it is recent; else the usual beginning."""
        values = {"operation": row.id, "within": TAKE_OVER_S}
        with connection.begin():
            return execute(connection, LAST_GRANT, values).scalar() or FIRST

    def _free(self, connection: Connection) -> None:
        with connection.begin():
            execute(connection, FREE, {"operation": self._run.operation_id, "epoch": self._run.epoch})

    def _write(self, connection: Connection, row: Row[Any], grant: Grant, readings: list[Reading], now: float) -> None:
        run = self._run
        values = {"operation": run.operation_id, "epoch": run.epoch, "granted": grant.workers, "why": _said(grant)}
        if not execute(connection, GRANT, values).rowcount:
            return
        since, self._looked_at = self._looked_at, now
        lost = 1 - grant.workers / row.parallelism
        if grant.cause is not None and since is not None and now - since < LONGEST_LOOK_S:
            seconds = (now - since) * lost
            execute(connection, LOSE, {"operation": run.operation_id, "cause": grant.cause, "seconds": seconds})
        if now - self._sampled_at >= SAMPLE_EVERY_S:
            self._sampled_at = now
            shown: dict[str, Any] = {}
            for reading in readings:
                # Among several replicas, the worst counts.
                known = shown.get(reading.signal.name)
                if known is None or _is_worse(reading, known):
                    shown[reading.signal.name] = reading
            kept = {name: reading.as_dict() for name, reading in shown.items()}
            values = {"operation": run.operation_id, "granted": grant.workers, "readings": to_json(kept)}
            execute(connection, KEEP, values)

    def _give_up(self, connection: Connection, row: Row[Any], grant: Grant, now: float) -> None:
        """Pause if a signal can't be read for too long."""
        if grant.cause != UNREADABLE:
            self._unreadable_since = None
            return
        if self._unreadable_since is None:
            self._unreadable_since = now
        if now - self._unreadable_since < self._database.limits.unreadable_s:
            return
        self._unreadable_since = None
        with connection.begin():
            lasting = duration(self._database.limits.unreadable_s)
            reason = f"for {lasting} {grant.why}. Change that, or take the limit away; then resume"
            with suppress(RoirError):
                operations.pause_operation(connection, row, BY_GOVERNOR, reason, self._run.epoch)

    def close(self) -> None:
        """Close all sessions, and clear the throttle's reason, which ends with the run."""
        self._reader.close()
        with suppress(DBAPIError), self._database.transaction() as connection:
            execute(connection, LEAVE, {"operation": self._run.operation_id, "epoch": self._run.epoch})


class _News:
    """Reports holds and a slower pace, but not each of the many that come and go."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._since = 0.0
        self._is_told = False
        self._told: dict[str, float] = {}

    def lines(self, grant: Grant, now: float) -> list[str]:
        lines = []
        if grant.cause != self._cause:
            if self._is_told and grant.cause is None:
                lines.append(f"no longer throttled: all workers work again after {duration(now - self._since)}")
            self._cause, self._since = grant.cause, now
            self._is_told = False
        if (
            grant.cause is not None
            and not self._is_told
            and now - self._since >= TELL_AFTER_S
            and now - self._told.get(grant.cause, float("-inf")) >= TELL_AGAIN_S
        ):
            self._is_told, self._told[grant.cause] = True, now
            lines.append(_said(grant) or "")
        return lines


def _said(grant: Grant) -> str | None:
    """The line of a grant: `throttled: replica r2 is 340 MB behind, limit 100 MB`, or `paced to` N workers."""
    if grant.why is None:
        return None
    if not grant.workers:
        return f"throttled: {grant.why}"
    many = f"{grant.workers:g} workers" if grant.workers > 1 else f"{grant.workers:.0%} of one worker"
    return f"paced to {'1 worker' if grant.workers == 1 else many}: {grant.why}"


def _is_worse(reading: Reading, known: Reading) -> bool:
    if reading.value is None or known.value is None:
        return reading.value is None
    return reading.load > known.load


@contextmanager
def governing(
    database: Database,
    run: Run,
    say: Callable[[str], object] = lambda line: None,
    surroundings: Surroundings | None = None,
) -> Iterator[None]:
    """Govern a run, in a thread, while the block runs. surroundings: by default from the environment.

    If the thread can't work, no grant is renewed, which is a hold after 15 s.
    """
    governor = Governor(database, run, surroundings or Surroundings.of_environment(), say)
    database.retry(governor.hold)
    stop = threading.Event()
    thread = threading.Thread(
        target=_work, args=(governor, database, run, stop, say), name="roir-governor", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LONGEST_LOOK_S)


def _work(
    governor: Governor, database: Database, run: Run, stop: threading.Event, say: Callable[[str], object]
) -> None:
    said = ""
    try:
        while not stop.is_set():
            try:
                with database.named(f"roir {run.operation_id} governor").connect() as connection:
                    while not stop.is_set():
                        governor.look(connection)
                        stop.wait(LOOK_EVERY_S)
            except Fenced:
                return
            except Exception as error:  # whatever it is, it must not end silently: the work is held by it
                line = f"{type(error).__name__}: {reason_of(error)}"
                # The workers report an outage.
                if line != said and not (isinstance(error, DBAPIError) and is_transient(error)):
                    said = line
                    say(f"the governor failed: {line}")
                with suppress(Exception):
                    governor.failed(line)
                stop.wait(LOOK_EVERY_S)
    finally:
        governor.close()
