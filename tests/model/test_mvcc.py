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

SCHEDULES, AT_MOST, STEPS = 12, 60, 50
IDENTS, VALUES = (1, 2), ("a", "b")
KEYS = {"plain": "", "immediate": "DEFERRABLE", "deferred": "DEFERRABLE INITIALLY DEFERRED"}
OWN = "xmin = coalesce(pg_current_xact_id_if_assigned()::xid, '0')"
STATEMENTS = {
    "delete": "DELETE FROM x WHERE ident = {0}",
    "change": "UPDATE x SET value = '{1}' WHERE ident = {0}",
    "insert": "INSERT INTO x VALUES ({0}, '{1}')",
    "put": "INSERT INTO x VALUES ({0}, '{1}') ON CONFLICT (ident) DO UPDATE SET value = excluded.value",
    "insert or nothing": "INSERT INTO x VALUES ({0}, '{1}') ON CONFLICT (ident) DO NOTHING",
    "delete by value": "DELETE FROM x WHERE ident = {0} AND value = '{1}'",
    "change by value": "UPDATE x SET value = translate(value, 'ab', 'ba') WHERE ident = {0} AND value = '{1}'",
    "share by value": "SELECT value FROM x WHERE ident = {0} AND value = '{1}' FOR SHARE",
    "lock": "SELECT FROM x WHERE ident = {0} FOR UPDATE SKIP LOCKED",
    "delete own": f"DELETE FROM x WHERE ident = {{0}} AND {OWN}",
    "change own": f"UPDATE x SET value = '{{1}}' WHERE ident = {{0}} AND {OWN}",
    "look": f"SELECT value, {OWN} FROM x WHERE ident = {{0}}",
    "share": f"SELECT value FROM x WHERE ident = {{0}} AND NOT {OWN} FOR SHARE",
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
        self.checks: list[int] = []

    def begin(self, repeatable: bool) -> None:
        self.repeatable = repeatable
        self.connection = session(self.dsn, "REPEATABLE READ" if repeatable else "READ COMMITTED")
        sql(self.connection, "SELECT count(*) FROM pg_class")
        self.pid = self.connection.info.backend_pid
        self.checks = []

    def send(self, statement: str) -> None:
        """Runs it, or the commit if it is empty, in a thread of its own."""

        def run() -> None:
            assert self.connection is not None
            try:
                with self.connection.cursor() as cursor:
                    if not statement:
                        self.connection.commit()
                        self.outcome = 1
                        return
                    cursor.execute(statement)
                    self.outcome = sorted(cursor.fetchall()) if "SELECT value" in statement else cursor.rowcount
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

    def __init__(self, dsn: str, seed: int, key: str) -> None:
        self.random, self.key = random.Random(seed), key
        refused = ("look",) if key == "plain" else ("look", "put", "insert or nothing")
        self.verbs = [verb for verb in STATEMENTS if verb not in refused]
        self.both = [Both(dsn, number) for number in range(2)]
        self.watch = session(dsn)
        self.watch.autocommit = True
        sql(self.watch, "TRUNCATE x")
        sql(self.watch, "INSERT INTO x VALUES (1, 'a')")
        self.state = initial(Bounds(users=(("RC", 0), ("RC", 0)), rows=((1, "a"),)))
        self.log: list[str] = []
        self.seen = dict.fromkeys(("wait", "40001", "unique", "count", "two versions"), 0)

    def run(self, steps: int) -> None:
        if self.random.random() < 0.5:
            self.replace()
        for _ in range(steps):
            self.step(self.random.choice([both for both in self.both if both.waiting is None]))
        for both in sorted(self.both, key=lambda one: one.waiting is not None):
            if both.connection is not None:
                assert both.waiting is None, self.log
                self.end(both, "rollback")
        self.watch.close()

    def replace(self) -> None:
        """A sequence that chance seldom produces: an old snapshot shows a row that is gone, and its transaction's new
        one."""
        old, other = self.both
        self.begin(old, repeatable=True)
        self.begin(other, repeatable=False)
        self.statement(other, "delete", 1, "")
        self.end(other, "commit")
        self.statement(old, "insert", 1, self.random.choice(VALUES))
        self.statement(old, "look", 1, "")

    def begin(self, both: Both, repeatable: bool) -> None:
        both.begin(repeatable)
        self.log.append(f"{both.number}: begin {'RR' if repeatable else 'RC'}")
        self.set(both, self.state.source, snapshot=self.state.now if repeatable else NO_SNAPSHOT)

    def step(self, both: Both) -> None:
        if both.connection is None:
            self.begin(both, self.random.random() < 0.5)
        elif self.random.random() < 0.25:
            verb = self.random.choice(["commit", "commit", "rollback"])
            if any(self.is_ambiguous(both, ident, at_commit=True) for ident in both.checks):
                verb = "rollback"
            if verb == "commit" and both.checks:
                self.statement(both, "commit", 0, "")
            else:
                self.end(both, verb)
        else:
            chance = self.random
            ident = chance.choice(IDENTS)
            self.statement(both, chance.choice(self.verbs), ident, chance.choice(VALUES))
            if both.connection is not None and both.waiting is None:
                self.statement(both, "look", ident, "")

    def statement(self, both: Both, verb: str, ident: int, value: str) -> None:
        if verb == "lock" and (both.repeatable or self.touched(both, ident)):
            return
        if verb == "insert" and self.is_ambiguous(both, ident, at_commit=False):
            return
        # The model's put waits for the lock alone. If the row was deleted meanwhile, PostgreSQL's statement gets 40001,
        # while the model's begins again and inserts. So the model allows more, never less.
        if verb == "put" and both.repeatable and self.is_locked(both, ident):
            return
        snapshot = self.state.users[both.number].snapshot if both.repeatable else self.state.now
        before = self.state
        call, expected = self.apply(both, verb, ident, value, snapshot)
        if call is not None:
            if any(one.waiting for one in self.both):
                self.state = before
                return
            both.waiting = call
            self.set(both, self.state.source, statement=snapshot)
        self.log.append(f"{both.number}: {verb} {ident} {value} → {expected}")
        both.send(STATEMENTS[verb].format(ident, value) if verb != "commit" else "")
        if both.waiting:
            self.seen["wait"] += 1
            while not self.waits(both):
                assert not both.is_done(), f"it doesn't wait in PostgreSQL, {both.outcome}: {self.log}"
            return
        self.compare(both, expected)
        if verb == "commit" and both.connection is not None:
            self.end(both, "commit")

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

    def apply(self, both: Both, verb: str, ident: int, value: str, snapshot: int) -> tuple[Any, Any]:
        """The arguments of the call to repeat after a wait, or None; and the outcome."""
        table, me, repeatable = self.state.source, both.me, both.repeatable
        outcome: Any = 1
        own = True if verb.endswith("own") else None
        by_value = value if verb.endswith("by value") else ""
        try:
            if verb.startswith("delete"):
                table, found = mvcc.delete(table, ident, snapshot, me, repeatable, own, by_value)
                outcome = len(found)
            elif verb.startswith("change"):
                new = {"a": "b", "b": "a"}.__getitem__ if by_value else value
                table, found = mvcc.change(table, ident, new, snapshot, me, repeatable, own, by_value)
                outcome = len(found)
            elif verb == "insert":
                conflicts = self.key != "plain" and mvcc.may_conflict(table, ident, me)
                table = mvcc.insert(table, ident, value, me, unique=self.key == "plain")
                if conflicts and self.key == "immediate":
                    self.set(both, table)
                    return self.apply(both, "check", ident, value, snapshot)
                both.checks += [ident] * conflicts
            elif verb == "put":
                table = mvcc.put(table, ident, value, snapshot, me, repeatable)
            elif verb == "check":
                mvcc.check(table, ident, me)
            elif verb == "commit":
                for one in dict.fromkeys(both.checks):
                    mvcc.check(table, one, me)
            elif verb == "look":
                found = mvcc.versions(table, ident, snapshot, me)
                outcome = sorted((version[1], version[2] == me) for version in found)
                self.seen["two versions"] += len(found) > 1
            elif verb == "insert or nothing":
                table, met = mvcc.insert_or_nothing(table, ident, value, snapshot, me, repeatable)
                outcome = int(met is None)
            elif verb == "share by value":
                table, found = mvcc.share(table, ident, snapshot, me, repeatable, value, own=None)
                outcome = sorted((version[1],) for version in found)
            elif verb == "share":
                table, found = mvcc.share(table, ident, snapshot, me, repeatable)
                outcome = sorted((version[1],) for version in found)
            else:
                table, locked = mvcc.lock_unlocked(table, ident, me)
                outcome = int(locked is not None)
        except Wait:
            return (verb, ident, value), None
        except SerializationFailure:
            return None, SerializationFailure
        except UniqueViolation:
            return None, UniqueViolation
        both.checks = [one for one in both.checks if mvcc.own_rows(table, one, me)]
        self.set(both, table)
        return None, outcome

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
                again, expected = self.apply(other, *call, snapshot)
                assert again is None, "the one that it could wait for has ended"
                self.log.append(f"{other.number}: goes on → {expected}")
                self.set(other, self.state.source, statement=NO_SNAPSHOT)
                self.compare(other, expected)
                if call[0] == "commit" and other.connection is not None:
                    self.end(other, "commit")
        shown = sorted(sql(self.watch, "SELECT ident, value FROM x"))
        assert sorted(mvcc.committed(self.state.source)) == shown, self.log

    def is_ambiguous(self, both: Both, ident: int, at_commit: bool) -> bool:
        """Whether a check meets a row to wait for and one that decides: the index's order says which comes first."""
        own = mvcc.own_rows(self.state.source, ident, both.me)
        other = mark(1 - both.number)
        versions = [version for version in self.state.source if version[0] == ident]
        # Committed, and deleted by no transaction, if locked by one: a statement is refused beside it, so only a commit
        # meets both.
        decides = at_commit and any(v[2] >= 0 and (v[3] == mvcc.NEVER or v[4] >= mvcc.LOCKED) for v in versions)
        return (decides or len(own) > at_commit) and any(other in (version[2], version[3]) for version in versions)

    def is_locked(self, both: Both, ident: int) -> bool:
        """Whether the other session has locked a version that it hasn't changed."""
        other = mark(1 - both.number)
        return any(v[0] == ident and v[4] >= mvcc.LOCKED and mvcc.touched((v,), other) for v in self.state.source)

    def touched(self, both: Both, ident: int) -> bool:
        return mvcc.touched(tuple(v for v in self.state.source if v[0] == ident), both.me)

    def set(self, both: Both, source: mvcc.Table, now: int | None = None, **changes: int) -> None:
        users = list(self.state.users)
        users[both.number] = users[both.number]._replace(**changes)
        state: State = self.state._replace(
            source=source, users=tuple(users), now=self.state.now if now is None else now
        )
        self.state = canonical(state)


@pytest.mark.parametrize("key", KEYS)
def test_the_models_row_versions_behave_as_postgresqls(dsn: str, key: str) -> None:
    """Counts, values, waits, errors and what is committed, at both isolation levels, renumbered after every step."""
    run_sql(dsn, f"CREATE TABLE x (ident int PRIMARY KEY {KEYS[key]}, value text)")
    seen: dict[str, int] = {}
    for number in range(AT_MOST):
        if number >= SCHEDULES and min(seen.values()) > 0:
            break
        seed = random.randrange(1_000_000)
        schedule = Schedule(dsn, seed, key)
        try:
            schedule.run(STEPS)
        except BaseException:
            print(f"seed {seed}")
            raise
        for what, times in schedule.seen.items():
            seen[what] = seen.get(what, 0) + times
    print(f"{key}: {seen}")
    assert min(seen.values()) > 0, f"these schedules were too tame: {seen}"


@pytest.mark.parametrize("how", ["change", "delete"])
def test_a_key_share_sees_through_an_update_in_an_old_snapshot(dsn: str, how: str) -> None:
    """Why FOR KEY SHARE isn't enough where another row can have the key."""
    run_sql(dsn, "CREATE TABLE x (ident int PRIMARY KEY, value text)", "INSERT INTO x VALUES (1, 'a')")
    table = mvcc.commit(mvcc.insert((), 1, "a", mark(0)), mark(0), 1)
    old = session(dsn, "REPEATABLE READ")
    sql(old, "SELECT count(*) FROM x")
    run_sql(dsn, STATEMENTS[how].format(1, "b"))
    if how == "change":
        table, _ = mvcc.change(table, 1, "b", 1, mark(0), False)
    else:
        table, _ = mvcc.delete(table, 1, 1, mark(0), False)
    table = mvcc.commit(table, mark(0), 2)
    statement = "SELECT value FROM x WHERE ident = 1 FOR KEY SHARE"
    if how == "change":
        assert sql(old, statement) == [("a",)]
        assert [version[1] for version in mvcc.key_share(table, 1, 1, mark(1), True)] == ["a"]
    else:
        with pytest.raises(psycopg2.errors.SerializationFailure):
            sql(old, statement)
        with pytest.raises(SerializationFailure):
            mvcc.key_share(table, 1, 1, mark(1), True)
    old.close()


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
