"""Readings once a second beside a build under a governor: the replica's lag, by both servers' own positions."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import Any

import psycopg2

from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.probe import Probe

EVERY_S = 1.0
# The operation's state, and how many of its workers are at work.
OPERATION = """
SELECT o.id, o.phase, o.status, o.granted, o.throttled,
       (SELECT coalesce(sum(rows), 0)::bigint FROM roir.scan_range WHERE operation_id = o.id) AS rows,
       (SELECT count(*) FROM pg_stat_activity
         WHERE application_name LIKE 'roir %% worker %%' AND state = 'active'
           AND wait_event IS DISTINCT FROM 'PgSleep') AS working
  FROM roir.operation o WHERE o.id > %s ORDER BY o.id DESC LIMIT 1
"""
PRIMARY = "SELECT pg_current_wal_lsn() - '0/0', extract(epoch FROM clock_timestamp())::float"
STANDBY = "SELECT pg_last_wal_replay_lsn() - '0/0'"
Sample = dict[str, Any]


class Watch(threading.Thread):
    """Samples for as long as a block lasts, in the order of their times."""

    def __init__(self, primary: str, standby: str) -> None:
        super().__init__(daemon=True)
        self._sessions = [psycopg2.connect(dsn, application_name="bench watch") for dsn in (primary, standby)]
        for session in self._sessions:
            session.autocommit = True
        # The governor's signals, measured also if there is no governor.
        self._probe = Probe(Database(primary, "bench probe"))
        self._halt = threading.Event()
        self.samples: list[Sample] = []
        self.error: BaseException | None = None
        # Operations up to this one are over.
        self.last_operation = 0

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._halt.set()
        self.join()
        self._probe.close()
        for session in self._sessions:
            session.close()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        due = time.monotonic()
        try:
            while not self._halt.is_set():
                self.samples.append(self._look())
                due = max(due + EVERY_S, time.monotonic())
                self._halt.wait(due - time.monotonic())
        except BaseException as error:
            self.error = error

    def _look(self) -> Sample:
        primary, standby = (session.cursor() for session in self._sessions)
        with primary, standby:
            # The standby first: what it has replayed, the primary had written.
            standby.execute(STANDBY)
            [(replayed,)] = standby.fetchall()
            primary.execute(PRIMARY)
            [(written, at)] = primary.fetchall()
            sample: Sample = {"at": round(at, 2), "written": int(written), "replayed": int(replayed)}
            primary.execute(OPERATION, (self.last_operation,))
            commit, _ = self._probe.read()
            sample["commit_ms"] = None if commit is None else round(commit * 1000, 2)
            if (row := primary.fetchone()) is not None:
                names = [column.name for column in primary.description]
                sample |= dict(zip(names, row, strict=True))
        return sample


def lags(samples: list[Sample]) -> None:
    """Gives each sample the replica's lag in bytes and seconds: since when had the primary what is replayed now?

    By the samples themselves: between two of them the primary is taken to have written evenly.
    """
    positions = [sample["written"] for sample in samples]
    for number, sample in enumerate(samples):
        sample["lag_bytes"] = max(0, sample["written"] - sample["replayed"])
        after = bisect_left(positions, sample["replayed"], hi=number + 1)
        if not sample["lag_bytes"] or after == 0 or after > number:
            sample["lag_s"] = 0.0
            continue
        low, high = samples[after - 1], samples[after]
        share = (sample["replayed"] - low["written"]) / max(1, high["written"] - low["written"])
        written_at = low["at"] + share * (high["at"] - low["at"])
        sample["lag_s"] = round(max(0.0, sample["at"] - written_at), 2)
