"""Two operators' random commands beside writers with triggers of their own, prepared transactions, old readers, kills.

They run in threads: the seed decides what each does, but not when they meet.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any

import psycopg2
import psycopg2.extensions
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, is_transient, sqlstate
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import RoirError
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.meeting import DIFFERENCE, Meeting
from tests.engine.operators import COMMANDS, EXPECTED, OPTIONS, REFUSED
from tests.engine.steps import sql
from tests.engine.writers import ISOLATIONS

# The triggers write to the written table itself: before and after, by a statement of their own.
TRIGGERS = (
    """CREATE FUNCTION adjust() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         IF NEW.id % 7 = 0 THEN NEW.k := coalesce(NEW.k, '') || '!'; END IF;
         IF NEW.id % 11 = 0 AND pg_trigger_depth() = 1 THEN UPDATE public.t SET v = v + 1 WHERE id = NEW.id - 1; END IF;
         RETURN NEW; END $$""",
    """CREATE FUNCTION follow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         IF pg_trigger_depth() = 1 THEN
           DELETE FROM public.t WHERE id = NEW.id + 1 AND NEW.id % 5 = 0;
           UPDATE public.t SET k = NEW.k WHERE id = NEW.id + 2;
         END IF; RETURN NULL; END $$""",
    "CREATE TRIGGER a_adjust BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION adjust()",
    "CREATE TRIGGER z_follow AFTER INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION follow()",
)
WRITES = (
    "UPDATE t SET k = '{k}', v = v + 1 WHERE id = {i}",
    "UPDATE t SET d = {d} WHERE id = {i}",
    "UPDATE t SET id = {j} WHERE id = {i}",
    "DELETE FROM t WHERE id IN ({i}, {j})",
    "INSERT INTO t VALUES ({d}, {i}, '{k}', 0) ON CONFLICT (d, id) DO UPDATE SET k = excluded.k",
    "SAVEPOINT s; DELETE FROM t WHERE id = {i}; ROLLBACK TO s; INSERT INTO t VALUES ({d}, {j}, NULL, 1)",
)
# Errors that a user's statement may get: waits, snapshots, no partition, a duplicate, a kill, a partition that is gone.
# 42P07: IF NOT EXISTS is evaluated before the wait for the table, and another session may create it during the wait.
USERS = ("42P07", "55P03", "40001", "40P01", "23514", "23505", "57P01", "42P01", "27000", "08006", "55006", "57014")
# Errors of a read whose generation or index goes meanwhile.
NO_ANSWER = ("40001", "42P01", "42809", "55P03", "57P01", "40P01")
AGAIN = {
    "t2 again": "CREATE TABLE IF NOT EXISTS t2 PARTITION OF t FOR VALUES FROM (20) TO (30)",
    "t3 again": "CREATE TABLE IF NOT EXISTS t3 PARTITION OF t FOR VALUES FROM (30) TO (40)",
}
PATIENT = Limits(attempt_ms=200, table_lock_ms=200, clean_up_s=2.0, repair_rest_s=0.01)


def rebuild(database: Database) -> None:
    """Does a whole rebuild."""
    steps.make_index(database, "ix", None, None, **OPTIONS)


def alter(statement: str, database: Database) -> None:
    run_sql(database.dsn, statement)


DONE: dict[str, Callable[[Database], object]] = {
    # The publish is a rebuild's last step.
    **{name: command for name, command in COMMANDS.items() if name != "publish"},
    "rebuild": rebuild,
    **{name: partial(alter, statement) for name, statement in AGAIN.items()},
}
# A drop leaves nothing to look at, so it is rare.
WEIGHTS = [1 if name == "drop" else 5 if name in ("rebuild", "clean-up") else 3 for name in DONE]


class Storm:
    """Storms for some seconds in one database. Then the operations are finished, and all must be exact."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.dsn = dsn
        self.seed = seed
        self.halt = threading.Event()
        self.found: list[str] = []
        self.counts: Counter[str] = Counter()
        run_sql(dsn, *TRIGGERS)

    def rage(self, seconds: float) -> None:
        parts: list[tuple[Callable[[random.Random, int], None], int]] = [
            (self._operate, 2), (self._write, 3), (self._read, 2), (self._kill, 1)
        ]  # fmt: skip
        threads = [
            threading.Thread(target=self._guarded, args=(part, number), daemon=True)
            for part, times in parts
            for number in range(times)
        ]
        for thread in threads:
            thread.start()
        self.halt.wait(seconds)
        self.halt.set()
        for thread in threads:
            thread.join()
        with closing(steps.session(self.dsn)) as user:
            user.autocommit = True
            for (gid,) in sql(user, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
                sql(user, f"COMMIT PREPARED '{gid}'")
        end = Meeting(self.dsn, "clean-up", "clean-up")
        end.settle()
        end.close()
        self.found += end.found

    def _guarded(self, part: Callable[[random.Random, int], None], number: int) -> None:
        try:
            part(random.Random(f"{self.seed}/{part.__name__}/{number}"), number)
        except BaseException as error:
            self.found.append(f"{part.__name__}: {type(error).__name__}: {error}")

    def _operate(self, chance: random.Random, number: int) -> None:
        database = Database(self.dsn, f"operator {number}", PATIENT)
        while not self.halt.is_set():
            [name] = chance.choices(list(DONE), WEIGHTS)
            try:
                DONE[name](database)
                self.counts[name] += 1
            except EXPECTED as error:
                self.counts[type(error).__name__] += 1
            except (DBAPIError, psycopg2.Error) as error:
                code = sqlstate(error) if isinstance(error, DBAPIError) else error.pgcode
                # A kill, or an error that a user's own DDL or call of a function may get.
                if not is_transient(error) and code not in (*REFUSED, *USERS):  # type: ignore[arg-type]
                    self.found.append(f"{name}: {code} {error}")
            except RoirError as error:
                self.found.append(f"{name}: {type(error).__name__}: {error}")

    def _write(self, chance: random.Random, number: int) -> None:
        user = None
        while not self.halt.is_set():
            try:
                if user is None or user.closed:
                    user = steps.session(self.dsn, ISOLATIONS[number % 3])
                self._transaction(user, chance, number)
            except psycopg2.Error as error:
                if error.pgcode not in (*USERS, None):
                    self.found.append(f"writer: {error.pgcode} {error}")
                with suppress(psycopg2.Error):
                    assert user is not None
                    user.rollback()
            self.halt.wait(0.01)
        if user is not None:
            user.close()

    def _transaction(self, user: psycopg2.extensions.connection, chance: random.Random, number: int) -> None:
        sql(user, "SET LOCAL lock_timeout = '300ms'")
        for _ in range(chance.randint(1, 3)):
            values = {"i": chance.randint(1, 90), "j": chance.randint(1, 120), "d": chance.randint(10, 39)}
            [statement] = chance.choices(WRITES, [5, 3, 3, 3, 5, 2])
            sql(user, statement.format(k=chance.randint(0, 9), **values))
            self.halt.wait(chance.random() * 0.05)
        if chance.random() < 0.15:
            gid = f"storm {self.seed} {number}"
            sql(user, f"PREPARE TRANSACTION '{gid}'")
            self.halt.wait(chance.random() * 0.5)
            user.rollback()
            user.autocommit = True
            sql(user, f"{chance.choice(['COMMIT', 'ROLLBACK'])} PREPARED '{gid}'")
            user.autocommit = False
        elif chance.random() < 0.2:
            user.rollback()
        else:
            user.commit()
        self.counts["transactions"] += 1

    def _read(self, chance: random.Random, number: int) -> None:
        """Reads view and table again and again: in one snapshot for a while, or one statement at a time."""
        while not self.halt.is_set():
            user = steps.session(self.dsn, "REPEATABLE READ" if number else chance.choice(ISOLATIONS))
            with closing(user), suppress(psycopg2.OperationalError):
                sql(user, "SELECT count(*) FROM pg_class")
                until = time.monotonic() + chance.random() * 3
                while time.monotonic() < until and not self.halt.is_set():
                    self._look(user)
                    self.halt.wait(0.03)

    def _look(self, user: psycopg2.extensions.connection) -> None:
        sql(user, "SAVEPOINT s")
        try:
            sql(user, "SET LOCAL lock_timeout = '100ms'")
            wrong = sql(user, DIFFERENCE)
        except psycopg2.Error as error:
            if error.pgcode not in (*NO_ANSWER, None):
                self.found.append(f"reader: {error.pgcode} {error}")
            sql(user, "ROLLBACK TO s")
            return
        self.counts["looks"] += 1
        [(level,)] = sql(user, "SHOW transaction_isolation")
        self.found += [f"a reader, {level}, saw {count} {side}" for side, count in wrong]
        sql(user, "ROLLBACK TO s")

    def _kill(self, chance: random.Random, _number: int) -> None:
        with closing(steps.session(self.dsn)) as killer:
            killer.autocommit = True
            while not self.halt.wait(chance.random() * 4):
                who = "application_name LIKE 'operator%%' AND state <> 'idle'"
                victims: list[tuple[Any, ...]] = sql(
                    killer, f"SELECT pid FROM pg_stat_activity WHERE {who} AND datname = current_database()"
                )
                if victims and chance.random() < 0.5:
                    sql(killer, "SELECT pg_terminate_backend(%s)", chance.choice(victims)[0])
                    self.counts["kills"] += 1
