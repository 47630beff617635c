"""The model's row versions against PostgreSQL's own: random schedules of two transactions, the same outcomes."""

from __future__ import annotations

import random
import threading
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from tests.conftest import run_sql
from tests.engine.steps import session, sql
from tests.model import mvcc
from tests.model.mvcc import SerializationFailure, UniqueViolation, Wait
from tests.model.state import NO_SNAPSHOT, Bounds, State, canonical, initial
from tests.model.writers import mark

SCHEDULES, STEPS = 30, 50
IDENTS, VALUES = (1, 2), ("a", "b")
STATEMENTS = {
    "delete": "DELETE FROM x WHERE ident = {0}",
    "change": "UPDATE x SET value = '{1}' WHERE ident = {0}",
    "insert": "INSERT INTO x VALUES ({0}, '{1}')",
    "put": "INSERT INTO x VALUES ({0}, '{1}') ON CONFLICT (ident) DO UPDATE SET value = excluded.value",
    "lock": "SELECT FROM x WHERE ident = {0} FOR UPDATE SKIP LOCKED",
}


class Both:
    """One transaction after another in PostgreSQL and in the model, for one session."""

    def __init__(self, dsn: str, number: int) -> None:
        self.dsn, self.number, self.me = dsn, number, mark(number)
        self.connection: psycopg2.extensions.connection | None = None
        self.repeatable = False
        self.waiting: tuple[str, int, str] | None = None
        self.thread: threading.Thread | None = None
        self.outcome: Any = None

    def begin(self, repeatable: bool) -> None:
        self.repeatable = repeatable
        self.connection = session(self.dsn, "REPEATABLE READ" if repeatable else "READ COMMITTED")
        sql(self.connection, "SELECT count(*) FROM pg_class")
        self.pid = self.connection.info.backend_pid

    def send(self, statement: str) -> None:
        def run() -> None:
            assert self.connection is not None
            try:
                with self.connection.cursor() as cursor:
                    cursor.execute(statement)
                    self.outcome = cursor.rowcount
            except psycopg2.errors.SerializationFailure:
                self.outcome = SerializationFailure
            except psycopg2.errors.UniqueViolation:
                self.outcome = UniqueViolation

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def is_done(self) -> bool:
        assert self.thread is not None
        self.thread.join(0.001)
        return not self.thread.is_alive()

    def end(self, verb: str) -> None:
        assert self.connection is not None
        self.connection.commit() if verb == "commit" else self.connection.rollback()
        self.connection.close()
        self.connection = None


class Schedule:
    """A random schedule. One session at most waits at a time, so that nothing deadlocks."""

    def __init__(self, dsn: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.both = [Both(dsn, number) for number in range(2)]
        self.watch = session(dsn)
        self.watch.autocommit = True
        sql(self.watch, "TRUNCATE x")
        sql(self.watch, "INSERT INTO x VALUES (1, 'a')")
        self.state = initial(Bounds(users=(("RC", 0), ("RC", 0)), rows=((1, "a"),)))
        self.log: list[str] = []
        self.seen = dict.fromkeys(("wait", "40001", "unique", "count"), 0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step(self.random.choice([both for both in self.both if both.waiting is None]))
        for both in sorted(self.both, key=lambda one: one.waiting is not None):
            if both.connection is not None:
                self.end(both, "commit")
        self.watch.close()

    def step(self, both: Both) -> None:
        if both.connection is None:
            repeatable = self.random.random() < 0.5
            both.begin(repeatable)
            self.log.append(f"{both.number}: begin {'RR' if repeatable else 'RC'}")
            self.set(both, self.state.source, snapshot=self.state.now if repeatable else NO_SNAPSHOT)
        elif self.random.random() < 0.25:
            self.end(both, self.random.choice(["commit", "commit", "rollback"]))
        else:
            self.statement(both)

    def statement(self, both: Both) -> None:
        verb, ident, value = (
            self.random.choice(list(STATEMENTS)),
            self.random.choice(IDENTS),
            self.random.choice(VALUES),
        )
        if verb == "lock" and (both.repeatable or self.touched(both, ident)):
            return
        snapshot = self.state.users[both.number].snapshot if both.repeatable else self.state.now
        try:
            expected = self.apply(both, verb, ident, value, snapshot)
        except Wait:
            if any(one.waiting for one in self.both):
                return
            both.waiting, expected = (verb, ident, value), None
            self.set(both, self.state.source, statement=snapshot)
        self.log.append(f"{both.number}: {verb} {ident} {value} → {expected}")
        both.send(STATEMENTS[verb].format(ident, value))
        if both.waiting:
            self.seen["wait"] += 1
            while not self.waits(both):
                assert not both.is_done(), f"it doesn't wait in PostgreSQL, {both.outcome}: {self.log}"
            return
        self.compare(both, expected)

    def waits(self, both: Both) -> bool:
        return bool(sql(self.watch, "SELECT cardinality(pg_blocking_pids(%s)) > 0", both.pid)[0][0])

    def compare(self, both: Both, expected: Any) -> None:
        while not both.is_done():
            assert not self.waits(both), f"it waits in PostgreSQL: {self.log}"
        assert both.outcome == expected, self.log
        if expected in (SerializationFailure, UniqueViolation):
            self.seen["40001" if expected is SerializationFailure else "unique"] += 1
            self.end(both, "rollback")
        else:
            self.seen["count"] += bool(expected)

    def apply(self, both: Both, verb: str, ident: int, value: str, snapshot: int) -> Any:
        table, me = self.state.source, both.me
        count: Any = 1
        try:
            if verb == "delete":
                table, found = mvcc.delete(table, ident, snapshot, me, both.repeatable)
                count = len(found)
            elif verb == "change":
                table, found = mvcc.change(table, ident, value, snapshot, me, both.repeatable)
                count = len(found)
            elif verb == "insert":
                table = mvcc.insert(table, ident, value, me)
            elif verb == "put":
                table = mvcc.put(table, ident, value, snapshot, me, both.repeatable)
            else:
                table, locked = mvcc.lock_unlocked(table, ident, me)
                count = int(locked is not None)
        except SerializationFailure:
            return SerializationFailure
        except UniqueViolation:
            return UniqueViolation
        self.set(both, table)
        return count

    def end(self, both: Both, verb: str) -> None:
        self.log.append(f"{both.number}: {verb}")
        both.end(verb)
        number = self.state.now + 1
        if verb == "commit":
            self.set(both, mvcc.commit(self.state.source, both.me, number), number, snapshot=NO_SNAPSHOT)
        else:
            self.set(both, mvcc.rollback(self.state.source, both.me), snapshot=NO_SNAPSHOT)
        for other in self.both:
            if other.waiting:
                snapshot = self.state.users[other.number].statement
                (call, other.waiting) = (other.waiting, None)
                expected = self.apply(other, *call, snapshot)
                self.log.append(f"{other.number}: goes on → {expected}")
                self.set(other, self.state.source, statement=NO_SNAPSHOT)
                self.compare(other, expected)
        shown = sorted(sql(self.watch, "SELECT ident, value FROM x"))
        assert sorted(mvcc.committed(self.state.source)) == shown, self.log

    def touched(self, both: Both, ident: int) -> bool:
        return any(v[0] == ident and both.me in (v[2], v[3]) for v in self.state.source)

    def set(self, both: Both, source: mvcc.Table, now: int | None = None, **changes: int) -> None:
        users = list(self.state.users)
        users[both.number] = users[both.number]._replace(**changes)
        state: State = self.state._replace(
            source=source, users=tuple(users), now=self.state.now if now is None else now
        )
        self.state = canonical(state)


def test_the_models_row_versions_behave_as_postgresqls(dsn: str) -> None:
    """Counts, waits, errors and what is committed, at both isolation levels, renumbered after every step."""
    run_sql(dsn, "CREATE TABLE x (ident int PRIMARY KEY, value text)")
    seen: dict[str, int] = {}
    for _ in range(SCHEDULES):
        seed = random.randrange(1_000_000)
        schedule = Schedule(dsn, seed)
        try:
            schedule.run(STEPS)
        except BaseException:
            print(f"seed {seed}")
            raise
        for what, times in schedule.seen.items():
            seen[what] = seen.get(what, 0) + times
    assert min(seen.values()) > 0, f"these schedules were too tame: {seen}"


@pytest.mark.parametrize("how", ["deleted and inserted anew", "updated"])
def test_a_waiting_delete_follows_an_update_and_nothing_else(how: str) -> None:
    """READ COMMITTED's own anomaly, which the capture must live with."""
    table = mvcc.insert((), 1, "a", mark(0))
    table = mvcc.commit(table, mark(0), 1)
    if how == "updated":
        table, _ = mvcc.change(table, 1, "b", 1, mark(0), False)
    else:
        table, _ = mvcc.delete(table, 1, 1, mark(0), False)
        table = mvcc.insert(table, 1, "b", mark(0))
    with pytest.raises(Wait):
        mvcc.delete(table, 1, 1, mark(1), False)
    _, found = mvcc.delete(mvcc.commit(table, mark(0), 2), 1, 1, mark(1), False)
    assert len(found) == (how == "updated")
