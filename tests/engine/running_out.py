"""The life of an index, by the functions that commands and Spark's tasks call, with faults on the way."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg2
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, lifecycle, prepare
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import driving, start_run
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach
from airflow_roir.errors import WorkerFailed
from airflow_roir.operation import LONG, OF_A_BUILD, Phase
from airflow_roir.options import BuildOptions
from airflow_roir.spark import task
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

# Errors of the server that end a statement, with their SQLSTATEs. The cause `terminated` ends the session; `lost
# answer` hides the end of a commit.
RAISED = {
    "disk": ("53100", 'could not extend file "base/5/1": No space left on device'),
    "memory": ("53200", "out of shared memory"),
    "connections": ("53300", "too many connections for role"),
    "temporary files": ("53400", "temporary file size exceeds temp_file_limit (1000kB)"),
    "cancelled": ("57014", "canceling statement due to user request"),
}
CAUSES = (*RAISED, "terminated", "lost answer")
SCENES = {
    "plain": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, nullif(i % 7, 3)::text, i FROM generate_series(1, 60) i",
    ),
    "unique": (
        "CREATE TABLE t (id int, k text, v int, p int, PRIMARY KEY (id, p)) PARTITION BY LIST (p)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES IN (0)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
        "INSERT INTO t SELECT i, 'k' || i, i, i % 2 FROM generate_series(1, 60) i",
    ),
}
WRITES = {
    "plain": "INSERT INTO t SELECT i, 'w', i FROM generate_series({n}, {n} + 20) i",
    "unique": "INSERT INTO t SELECT i, 'w' || i, i, i % 2 FROM generate_series({n}, {n} + 20) i",
}
SMALL = {"ranges": 3, "segments": 2, "batch_rows": 17, "parallelism": 1}
# One in this many statements fails.
STRIDE = 19


class Faults:
    """Makes every STRIDE-th of a database's different statements fail once, or loses every few dozen commits."""

    def __init__(self, database: Database, cause: str, offset: int) -> None:
        self.database = database
        self.cause = cause
        self.offset = offset
        self.seen: set[str] = set()
        self.commits = 0
        self.made: list[str] = []

    @contextmanager
    def happening(self) -> Iterator[None]:
        engine = self.database.engine
        dialect: Any = engine.dialect
        commit = dialect.do_commit
        if self.cause == "lost answer":
            dialect.do_commit = lambda connection: self._commit(connection, commit)
        else:
            event.listen(engine, "before_cursor_execute", self._statement, retval=True)
        try:
            yield
        finally:
            if self.cause == "lost answer":
                dialect.do_commit = commit
            else:
                event.remove(engine, "before_cursor_execute", self._statement)

    def _statement(
        self, connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
    ) -> tuple[str, Any]:
        text = re.sub(r"\d+", "", statement)
        if text in self.seen:
            return statement, parameters
        self.seen.add(text)
        if len(self.seen) % STRIDE != self.offset:
            return statement, parameters
        self.made.append(text)
        if self.cause == "terminated":
            pid = connection.connection.dbapi_connection.info.backend_pid
            run_sql(self.database.dsn, f"SELECT pg_terminate_backend({pid}, 5000)")
            return statement, parameters
        state, message = RAISED[self.cause]
        return f"DO $$ BEGIN RAISE EXCEPTION '{message}' USING ERRCODE = '{state}'; END $$".replace("%", "%%"), ()

    def _commit(self, connection: Any, commit: Callable[[Any], None]) -> None:
        commit(connection)
        self.commits += 1
        if self.commits % (3 * STRIDE) == 3 * self.offset + 1:
            self.made.append("COMMIT")
            connection.close()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")


class Life:
    """The life of an index from the first command to the last, by the functions that commands and tasks call."""

    def __init__(self, database: Database, dsn: str, scene: str, **options: int) -> None:
        self.database = database
        self.dsn = dsn
        self.scene = scene
        self.options = BuildOptions(**{**SMALL, **options})
        self.failed: list[str] = []
        self.said: list[str] = []
        self._numbers = itertools.count(100, 100)

    def write(self) -> None:
        """Writes in sessions of users, which no fault disturbs."""
        more = WRITES[self.scene].format(n=next(self._numbers))
        run_sql(
            self.dsn, more, "UPDATE t SET v = v + 1, k = k || 'x' WHERE id % 3 = 0", "DELETE FROM t WHERE id % 11 = 5"
        )

    def command(self, name: str, work: Callable[[], object]) -> None:
        """Runs a command as a user or Airflow does: again after each failure."""
        for _ in range(8):
            try:
                work()
                return
            except DBAPIError as error:
                self.failed.append(f"{name}: {str(error.orig).splitlines()[0]}")
        raise AssertionError(self.failed)

    def live_once(self) -> None:
        """Does prepare and one run."""
        self._prepare()
        self.write()
        self.drive()

    def _prepare(self) -> None:
        definition = IndexDefinition.parse("ix", "t", "k", "v", unique=self.scene == "unique")
        prepare.prepare(self.database, definition, self.options, "test", self.said.append)

    def live(self) -> None:
        """Does everything from prepare to clean-up."""
        database = self.database
        self.command("prepare", self._prepare)
        self.write()
        self.command("drive", self.drive)
        steps.assert_exact(Database(self.dsn))
        if self.scene == "unique":
            run_sql(
                self.dsn,
                "CREATE TABLE t2 (id int, k text, v int, p int NOT NULL, PRIMARY KEY (id, p))",
                "INSERT INTO t2 SELECT i, 'p' || i, i, 2 FROM generate_series(1, 30) i",
            )
            self.command("attach", lambda: attach.attach_partition(database, "t", "t2", "FOR VALUES IN (2)", "test"))
            self.write()
            self.command("detach", self._detach)
        self.command("clean-up", lambda: clean_up.clean_up(database))

    def _detach(self) -> None:
        [(there,)] = sql(
            steps.session(self.dsn), "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = 't2'::regclass)"
        )
        if there:
            detach.detach_partition(self.database, "t2", "test")

    def drive(self) -> None:
        """Does a run up to the publish."""
        database = self.database
        if operations.find_operation(Database(self.dsn), "ix").status == "completed":
            return
        run = start_run(database, "ix", "test", take_over=True, report=self.said.append)
        with driving(database, run):
            for phase in (one for one in OF_A_BUILD if one in LONG):
                [(now,)] = sql(steps.session(self.dsn), "SELECT phase FROM roir.operation ORDER BY id DESC LIMIT 1")
                if now != phase:
                    continue
                for one in task.work(database, run, phase, 0, lambda seconds: time.sleep(seconds)):
                    if one.error is not None:
                        raise WorkerFailed(one.error)
                self.write()
                finish = lifecycle.PHASES[Phase(phase)].finish
                persist(database, run, partial(finish, database, run, self.said.append), self.said.append)
            self.write()
            lifecycle.run_phases(database, run, self.said.append)
