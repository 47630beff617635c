"""Two operators' commands that meet: one runs in a gap of the other, beside readers and a writer. Then the checks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import psycopg2
import psycopg2.extensions
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, sqlstate
from airflow_roir.engine.health import faults
from airflow_roir.errors import NotFound, RoirError
from tests.engine import steps
from tests.engine.operators import (
    CALLS,
    COMMANDS,
    EXPECTED,
    FIRST,
    PASSING,
    REFUSED,
    ROWS,
    SECOND,
    WAITING,
    cloned,
)
from tests.engine.steps import sql
from tests.engine.test_locks import watching

# The differences between view and table, in one snapshot.
DIFFERENCE = f"""
SELECT x.side, x.n FROM (
  SELECT 'entries without rows' AS side, count(*) AS n FROM (SELECT {ROWS} FROM ix EXCEPT ALL SELECT {ROWS} FROM t) a
  UNION ALL
  SELECT 'rows without entries', count(*) FROM (SELECT {ROWS} FROM t EXCEPT ALL SELECT {ROWS} FROM ix) b) x
 WHERE x.n > 0
"""
# Errors of a view that is gone, or that refuses the snapshot.
NO_ANSWER = ("40001", "42P01", "42809")
ORPHANS = """
SELECT c.relname FROM pg_class c
 WHERE c.relnamespace = 'roir_data'::regnamespace AND c.relkind IN ('r', 'p', 'v')
   AND (c.relname LIKE 'joining%%' OR c.relname ~ '_u[0-9]+$' OR c.relname ~ '^g[0-9]+' AND NOT EXISTS (
     SELECT FROM roir.generation g WHERE g.status <> 'dropped' AND g.id = substring(c.relname, '^g([0-9]+)')::bigint))
"""
JOINING = "SELECT count(*) FROM roir.source_partition WHERE status = 'joining'"
LIVE = "SELECT count(*) FROM roir.generation WHERE status <> 'dropped'"
SHOWN = "SELECT count(*) FROM roir.generation WHERE status = 'active'"
TRIGGERS = """
SELECT count(*) FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
 WHERE p.pronamespace = 'roir_data'::regnamespace AND p.proname ~ '^(capture|truncate)_'
"""
WAITS = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock' "
    "AND datname = current_database()"
)


@dataclass
class Meeting:
    """One first command and one second command, in one gap.

    readers: `none`. `snapshots`: REPEATABLE READ readers from before, the middle and after. `holding`: from the gap on
    a transaction has read the view; once the first command waits for it, the second command runs, and then the
    transaction ends. `in it`: that transaction itself does what the second command does.
    """

    dsn: str
    first: str
    second: str
    readers: str = "none"
    verified: bool = True
    found: list[str] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    old: dict[str, psycopg2.extensions.connection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.database = Database(self.dsn, "first", WAITING if self.readers in ("holding", "in it") else FIRST)
        self.other = Database(self.dsn, "second", SECOND)
        self.watch = watching(self.dsn)
        self.failed: dict[str, BaseException] = {}

    # -- the two commands

    def go(self, at: int) -> int:
        """Runs the whole meeting with the gap before the first command's statement or commit number `at`. Returns the
        number of these.
        """
        if self.readers == "snapshots":
            self._take("before")
        seen, then = self._run(at)
        for thread in then:
            thread.join()
        if self.readers == "snapshots":
            self._take("after")
        self.compare("afterwards")
        self.settle()
        return seen

    def run_alone(self) -> None:
        """Runs the first command alone, to learn its statements."""
        self._run(0)

    def _take(self, moment: str) -> None:
        self.old[moment] = steps.old_session(self.dsn)

    def _run(self, at: int) -> tuple[int, list[threading.Thread]]:
        seen = 0
        then: list[threading.Thread] = []

        def gap(*given: Any) -> None:
            nonlocal seen
            seen += 1
            self.statements.append(given[2] if len(given) > 2 else "COMMIT")
            if seen == at:
                self._in_the_gap(then)

        event.listen(self.database.engine, "before_cursor_execute", gap)
        event.listen(self.database.engine, "commit", gap)
        try:
            self._do(self.first, self.database, "first")
        finally:
            event.remove(self.database.engine, "before_cursor_execute", gap)
            event.remove(self.database.engine, "commit", gap)
        return seen, then

    def _in_the_gap(self, then: list[threading.Thread]) -> None:
        if self.readers in ("holding", "in it"):
            reader = steps.session(self.dsn)
            try:
                sql(reader, "SET lock_timeout = '400ms'")
                sql(reader, "SELECT count(*) FROM ix")
            except psycopg2.Error:
                # The first command has the view already.
                reader.close()
                return
            then.append(self._thread(lambda: self._beside(reader)))
            return
        self._write()
        if self.readers == "snapshots":
            self._take("in the gap")
        then.append(thread := self._thread(lambda: self._do(self.second, self.other, "second")))
        while thread.is_alive() and not sql(self.watch, WAITS, "second")[0][0]:
            pass
        self.compare("in the gap")
        if self.readers == "snapshots":
            self._take("after the second one's turn")

    def _beside(self, reader: psycopg2.extensions.connection) -> None:
        """Waits until the first command waits for the reader. Then the second command runs, and the reader ends."""
        with closing(reader):
            while not sql(self.watch, WAITS, "first")[0][0] and not self._is_over:
                pass
            if self.readers == "in it":
                try:
                    sql(reader, CALLS[self.second])
                    reader.commit()
                except psycopg2.Error as error:
                    if error.pgcode not in (*REFUSED, "55P03", "40P01"):
                        raise
                    reader.rollback()
                return
            thread = self._thread(lambda: self._do(self.second, self.other, "second"))
            while thread.is_alive() and not sql(self.watch, WAITS, "second")[0][0]:
                pass
            reader.rollback()
            thread.join()

    _is_over = False

    def _thread(self, work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.found.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _do(self, command: str, database: Database, who: str) -> None:
        self.failed.pop(who, None)
        try:
            COMMANDS[command](database)
        except EXPECTED as error:
            self.failed[who] = error
        except DBAPIError as error:
            if command not in CALLS or sqlstate(error) not in REFUSED:
                self.found.append(f"{who}, {command}: {sqlstate(error)} {error.orig}".strip())
        except RoirError as error:
            self.found.append(f"{who}, {command}: {type(error).__name__}: {error}")
        finally:
            if who == "first":
                self._is_over = True

    def _write(self) -> None:
        """Writes in a session that doesn't wait for locks on the table."""
        with closing(steps.session(self.dsn)) as user:
            for number, statement in enumerate(
                ("UPDATE t SET k = 'w', v = v + 1 WHERE id % 8 = 3", "DELETE FROM t WHERE id % 16 = 5",
                 "INSERT INTO t SELECT 20 + id % 20, 900 + id, k, v FROM t WHERE id % 10 = 2")
            ):  # fmt: skip
                try:
                    sql(user, "SET LOCAL lock_timeout = '5ms'")
                    sql(user, statement)
                    user.commit()
                except psycopg2.Error as error:
                    user.rollback()
                    if error.pgcode not in ("55P03", "23514"):
                        self.found.append(f"writer's statement {number}: {error.pgcode} {error}")

    # -- the checks

    def compare(self, moment: str) -> None:
        """Compares for each reader the view with the table that the reader sees."""
        with closing(steps.session(self.dsn)) as now:
            sql(now, "SET lock_timeout = '20ms'")
            for name, reader in {"now": now, **self.old}.items():
                self._ask(f"{moment}, {name}", reader)

    def _ask(self, name: str, reader: psycopg2.extensions.connection) -> None:
        try:
            sql(reader, "SAVEPOINT s; SET LOCAL lock_timeout = '20ms'")
            wrong = sql(reader, DIFFERENCE)
            sql(reader, "ROLLBACK TO s")
        except psycopg2.Error as error:
            if error.pgcode not in (*NO_ANSWER, "55P03"):
                self.found.append(f"{name}: {error.pgcode} {error}")
            sql(reader, "ROLLBACK TO s")
            return
        self.found += [f"{name}: {number} {side}" for side, number in wrong]

    def settle(self) -> None:
        """Checks the end: a command that failed for a while succeeds. After a clean-up all is as the control tables
        say, and exact.
        """
        for reader in self.old.values():
            reader.close()
        self.old.clear()
        for who, command in (("first", self.first), ("second", self.second)):
            if isinstance(self.failed.get(who), PASSING):
                self._do(command, self.other, who)
                if isinstance(again := self.failed.get(who), PASSING):
                    self.found.append(f"{command} fails again: {again}")
        for _ in range(2):
            self._do("clean-up", self.other, "clean-up")
        self.compare("after a clean-up")
        with self.other.transaction() as connection:
            # An attach that no command continues is reported truthfully.
            joining = connection.exec_driver_sql(JOINING).scalar_one()
            self.found += [
                f"status: {line}"
                for line in faults.warnings(connection)
                if not (joining and "is being attached to" in line)
            ]
            there = connection.exec_driver_sql("SELECT to_regclass('public.ix') IS NOT NULL").scalar_one()
            live = connection.exec_driver_sql(LIVE).scalar_one()
            triggers = connection.exec_driver_sql(TRIGGERS).scalar_one()
            shown = connection.exec_driver_sql(SHOWN).scalar_one()
        if bool(live) != bool(triggers):
            self.found.append(f"{live} generations, {triggers} triggers")
        if shown and not there:
            self.found.append(f"{shown} generations that are shown, but no view")
        elif live and not there:
            # An operation that was prepared after the drop's first half is a new build, which hasn't been published.
            self._finish()
        elif live:
            self._settle_index()
        self.found += [f"left behind: {name}" for (name,) in sql(self.watch, ORPHANS)]

    def _settle_index(self) -> None:
        exact = steps.compare(self.other, "ix")
        if exact.missing or exact.extra or exact.different:
            self.found.append(str(exact))
        if self._unfinished():
            self._finish()
        if self.verified:
            report = lifecycle.verify(self.other, "ix")
            if not report.is_exact:
                self.found.append(f"verify: {report}")
            self.compare("at last")

    def _unfinished(self) -> bool:
        with self.other.transaction() as connection:
            try:
                found = operations.find_index(connection, IndexDefinition.parse("ix").name)
            except NotFound:
                # Its only operation was aborted.
                return False
            last = operations.newest_operation(connection, found.id)
        return last is not None and last.status in operations.LIVE

    def _finish(self) -> None:
        """Aborts an unfinished operation. This, too, must leave everything right."""
        self._do("abort", self.other, "abort")
        self._do("clean-up", self.other, "clean-up")
        if self._unfinished():
            self.found.append(f"an operation is unfinished yet: {self.failed}")

    def close(self) -> None:
        for reader in self.old.values():
            reader.close()
        self.watch.close()


def meet(server: str, template: str, first: str, second: str, at: int, readers: str = "none") -> list[str]:
    """Runs one meeting in a database of its own; returns the errors."""
    with cloned(server, template) as dsn:
        # A verification takes as long as all other steps together.
        meeting = Meeting(dsn, first, second, readers, verified=at % 4 == 0)
        try:
            meeting.go(at)
        finally:
            meeting.close()
        return meeting.found


# Statements that take or need a lock on objects that both commands change. Statements that only read are between two of
# them.
CHANGES = re.compile(
    r"^\s*(COMMIT|INSERT|UPDATE|DELETE|CREATE|ALTER|DROP|TRUNCATE|LOCK|SET LOCAL lock_timeout|SELECT roir\.\w+\(%)",
    re.I,
)
VIEW = re.compile(r"refresh_view|forget_gone|VIEW |detach_partition\(|(begin|finish|cancel)_attach\(")


class Gaps:
    """The gaps of each command in each scene."""

    def __init__(self, server: str, templates: dict[str, str]) -> None:
        self.server = server
        self.templates = templates
        self.known: dict[tuple[str, str], list[str]] = {}

    def of(self, scene: str, first: str, readers: str = "none") -> list[int]:
        """The numbers of the first command's statements and commits before which the second command starts.

        If a reader holds the view: before those that need the view. Else: before those that lock, change or commit
        something.
        """
        if (scene, first) not in self.known:
            with cloned(self.server, self.templates[scene]) as dsn:
                alone = Meeting(dsn, first, first)
                try:
                    alone.run_alone()
                finally:
                    alone.close()
            self.known[scene, first] = alone.statements
        wanted = VIEW if readers in ("holding", "in it") else CHANGES
        return [number for number, text in enumerate(self.known[scene, first], 1) if wanted.search(text)]
