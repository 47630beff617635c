"""The modes of the capture, with a test's own writes in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg2.errors

from airflow_roir.engine import fold
from airflow_roir.engine import generation as physical
from airflow_roir.engine.build import Batch, Claim
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.run import Job, load_job
from tests.engine import steps

MODES = ("capture", "direct", "active")


def through_modes(
    database: Database, write: Callable[[str], None], index: str = "ix", table: str = "t", **definition: Any
) -> None:
    """Build an index in small pieces; call `write` in each mode, in the middle of that mode's work; compare after.

    capture: after the first batch. direct: after the switch, before the fold. active: after publish.
    """
    options = {"ranges": 3, "segments": 2, "batch_rows": 7}
    _, run = steps.begin(database, index, table, **{**options, **definition})
    worker = steps.worker(database, run)
    with worker.connection:
        claim = worker.claim()
        assert isinstance(claim, Claim)
        assert isinstance(worker.batch(claim), Batch)
    write("capture")
    steps.build_all(database, run)
    steps.seal_all(database, run)
    fold.switch(database, run)
    write("direct")
    fold.finish(database, run, fold.work(database, run))
    steps.publish_all(database, run)
    steps.assert_exact(database, index)
    write("active")
    steps.assert_exact(database, index)


class Stage:
    """An operation on `t (id, …)` that stands still in one mode, every range copied, for many writes one by one."""

    def __init__(self, database: Database, mode: str, **definition: Any) -> None:
        self.database = database
        self.mode = mode
        _, self.run = steps.begin(database, **{"ranges": 3, "segments": 2, "batch_rows": 7, **definition})
        steps.build_all(database, self.run)
        if mode != "capture":
            steps.seal_all(database, self.run)
            fold.switch(database, self.run)
        if mode == "active":
            fold.finish(database, self.run, fold.work(database, self.run))
            steps.publish_all(database, self.run)
        # One session for all that this looks at: to connect takes longer than to compare.
        self.connection = database._engine.connect()
        with self.connection.begin():
            self.job: Job = load_job(self.connection, self.run)
        self.base = physical.base(self.job.generation_id)
        self.delta = physical.delta(self.job.generation_id)

    def mix(self) -> None:
        """Leave every third entry to the delta, every third to the base, and the rest to both: touched and stale."""
        if self.mode == "active":
            return
        entry = self.job.entry
        columns = ", ".join(entry.physical())
        identity = next(i for i, column in enumerate(entry.columns) if column.source == "id")
        spare = [f"c{i + 1}" for i in entry.included_positions]
        connection = self.connection
        with connection.begin():
            everything = f"SELECT {columns} FROM ({self._overlay()}) o"
            execute(connection, f"CREATE TEMP TABLE mixed ON COMMIT DROP AS {everything}")
            execute(connection, f"DELETE FROM {self.base}; DELETE FROM {self.delta}")
            third = f"c{identity + 1} % 3"
            execute(connection, f"INSERT INTO {self.base} ({columns}) SELECT {columns} FROM mixed WHERE {third} > 0")
            execute(connection, f"INSERT INTO {self.delta} SELECT {columns}, 'regular' FROM mixed WHERE {third} < 2")
            if spare:  # the base's copy is stale
                execute(connection, f"UPDATE {self.base} SET {spare[0]} = NULL WHERE {third} = 1")

    def assert_exact(self, what: str) -> None:
        """Base overridden by delta = source (I3); in active mode the base alone (I1)."""
        entry = self.job.entry
        source = f"SELECT {', '.join(entry.source_columns('s'))} FROM {self.job.source.sql} s"
        ours = self._overlay() if self.mode != "active" else f"SELECT {', '.join(entry.physical())} FROM {self.base}"
        # As text, since equal values may differ.
        source, ours = (f"SELECT o::text FROM ({side}) o" for side in (source, ours))
        with self.connection.begin():
            extra = execute(self.connection, f"{ours} EXCEPT ALL {source}").all()
            missing = execute(self.connection, f"{source} EXCEPT ALL {ours}").all()
        assert not extra, f"{what}: extra in {self.mode} mode"
        assert not missing, f"{what}: missing in {self.mode} mode"

    def _overlay(self) -> str:
        entry = self.job.entry
        columns = ", ".join(entry.physical(prefix="b."))
        return (
            f"(SELECT {columns} FROM {self.base} b "
            f"WHERE NOT EXISTS (SELECT FROM {self.delta} d WHERE {entry.equal('b.', 'd.')}) "
            f"UNION ALL SELECT {', '.join(entry.physical())} FROM {self.delta} WHERE state = 'regular')"
        )


def follow(database: Database, dsn: str, mode: str, statements: dict[str, str], refill: str, **definition: Any) -> None:
    """Each statement on the same rows, once and twice in a row; compared each time, and at the end after publish.

    refill: fills table `t`, which is emptied before each statement.
    """
    stage = Stage(database, mode, **{"include": "v", **definition})
    user = steps.session(dsn)
    for name, statement in statements.items():
        steps.sql(user, "DELETE FROM t; " + refill)
        user.commit()
        stage.mix()
        stage.assert_exact(f"before {name}")
        for time in ("", "again, "):
            try:
                steps.sql(user, statement)
                user.commit()
            except psycopg2.errors.TriggeredDataChangeViolation:  # a BEFORE trigger went too far
                user.rollback()
            except psycopg2.errors.IntegrityError:
                if not time:
                    raise
                user.rollback()
            stage.assert_exact(time + name)
        steps.sql(user, "UPDATE t SET k = NULL, v = -v; DELETE FROM t; " + refill)
        user.rollback()
        stage.assert_exact(name + ", then a rollback")
    if mode == "capture":
        steps.seal_all(database, stage.run)
        fold.switch(database, stage.run)
    if mode != "active":
        fold.finish(database, stage.run, fold.work(database, stage.run))
        steps.publish_all(database, stage.run)
    stage.connection.close()
    steps.assert_exact(database)
