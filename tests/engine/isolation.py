"""Transactions whose statements are interleaved turn by turn, as PostgreSQL's isolationtester does it.

A statement that waits for another session is left running while the others have their turns. A turn that comes to a
session which still waits can't be taken: such an interleaving doesn't exist.
"""

from __future__ import annotations

import itertools
import random
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import psycopg2
import psycopg2.extensions

READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE = "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"
LEVELS = (READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE)
SNAPSHOT, COMMIT, ROLLBACK = "snapshot", "COMMIT", "ROLLBACK"
# A turn of the build instead of a session's.
BUILD = -1
SERIALIZATION_FAILURE, DEADLOCK = "40001", "40P01"
REFUSE = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"
# Most statements take less. A statement that takes more is checked for a wait.
GLANCE_S = 0.001
# A statement takes this long only if something hangs.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Transaction:
    """Statements by their names on the menu. To take a snapshot that outlives a statement is a turn of its own."""

    isolation: str
    statements: tuple[str, ...]
    end: str = COMMIT

    @property
    def turns(self) -> tuple[str, ...]:
        """The transaction's turns, in order."""
        return (*self._before, *self.statements, self.end)

    @property
    def _before(self) -> tuple[str, ...]:
        return () if self.isolation == READ_COMMITTED else (SNAPSHOT,)

    def position(self, statement: int) -> int:
        """The turn of this transaction that is a statement's."""
        return statement + len(self._before)

    def without(self, statement: int) -> Transaction:
        """The same transaction with one statement less."""
        return replace(self, statements=self.statements[:statement] + self.statements[statement + 1 :])

    def __str__(self) -> str:
        initials = "".join(word[0] for word in self.isolation.split())
        return f"{initials}({'; '.join((*self.statements, self.end))})"


@dataclass(frozen=True)
class Schedule:
    """Transactions, and the order of their turns, by their numbers from 0."""

    transactions: tuple[Transaction, ...]
    turns: tuple[int, ...]

    def __str__(self) -> str:
        positions: Counter[int] = Counter()
        said = []
        for who in self.turns:
            if who == BUILD:
                said.append("the build")
                continue
            said.append(f"T{who + 1}: {self.transactions[who].turns[positions[who]]}")
            positions[who] += 1
        levels = ", ".join(f"T{i + 1} {one.isolation}" for i, one in enumerate(self.transactions))
        return f"[{levels}] " + " | ".join(said)

    @property
    def idle_at_build(self) -> bool:
        """True if each transaction is over at the build's turn, or has done no more than take a snapshot."""
        before = Counter(self.turns[: self.turns.index(BUILD)])
        return all(
            before[who] in (0, len(one.turns)) or one.turns[: before[who]] == (SNAPSHOT,)
            for who, one in enumerate(self.transactions)
        )

    def simpler(self) -> Iterator[Schedule]:
        """The same schedule with one statement less, or without one of the transactions."""
        for who, transaction in enumerate(self.transactions):
            if len(self.transactions) > 1:
                others = self.transactions[:who] + self.transactions[who + 1 :]
                yield Schedule(others, tuple(turn - (turn > who) for turn in self.turns if turn != who))
            for statement in range(len(transaction.statements)):
                where = [i for i, turn in enumerate(self.turns) if turn == who][transaction.position(statement)]
                changed = list(self.transactions)
                changed[who] = transaction.without(statement)
                yield Schedule(tuple(changed), self.turns[:where] + self.turns[where + 1 :])


def by_chance(
    chance: random.Random, statements: Sequence[str], number: int, levels: Sequence[str] = LEVELS, most: int = 3
) -> tuple[Transaction, ...]:
    """`number` transactions, chosen by chance, each of at most `most` statements."""
    return tuple(
        Transaction(
            chance.choice(levels),
            tuple(chance.choices(statements, k=chance.randint(1, most))),
            chance.choice((COMMIT, COMMIT, COMMIT, ROLLBACK)),
        )
        for _ in range(number)
    )


def shuffled(chance: random.Random, transactions: tuple[Transaction, ...], build: bool = False) -> Schedule:
    """A random interleaving of the transactions. build: with a turn of the build."""
    turns = [who for who, one in enumerate(transactions) for _ in one.turns] + [BUILD] * build
    chance.shuffle(turns)
    return Schedule(transactions, tuple(turns))


def all_pairs(statements: Sequence[str], levels: tuple[str, str]) -> Iterator[Schedule]:
    """Pairs of transactions with one statement each, in all interleavings. Pairs of one level come in one order."""
    for pair in itertools.product(statements, repeat=2):
        if levels[0] != levels[1] or pair[0] <= pair[1]:
            two = tuple(Transaction(level, (one,)) for level, one in zip(levels, pair, strict=True))
            yield from (Schedule(two, turns) for turns in interleavings(two))


def interleavings(transactions: Sequence[Transaction], build: bool = False) -> Iterator[tuple[int, ...]]:
    """All orders of the transactions' turns, in lexicographic order. build: with one turn of the build."""
    left = {who: len(one.turns) for who, one in enumerate(transactions)}
    if build:
        left = {BUILD: 1, **left}

    def rest(total: int) -> Iterator[tuple[int, ...]]:
        if total == 0:
            yield ()
        for who in left:
            if left[who]:
                left[who] -= 1
                yield from ((who, *others) for others in rest(total - 1))
                left[who] += 1

    return rest(sum(left.values()))


@dataclass(frozen=True)
class Outcome:
    """The end of one turn. error: its SQLSTATE, or '' for success. waited: it waited for another of the sessions."""

    error: str = ""
    waited: bool = False

    def __str__(self) -> str:
        return (self.error or "ok") + (", waited" if self.waited else "")


class Session:
    """A user's session that sends statements without waiting for their end."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg2.connect(dsn, async_=True)
        self._wait_for(self.connection)
        self.cursor = self.connection.cursor()
        self.pid = self.connection.get_backend_pid()
        self.busy = self.failed = self.waited = False
        self.send("SET deadlock_timeout = '20ms'")
        while not self.ended(1.0):
            pass

    @staticmethod
    def _wait_for(connection: psycopg2.extensions.connection) -> None:
        while (state := connection.poll()) != psycopg2.extensions.POLL_OK:
            reading = state == psycopg2.extensions.POLL_READ
            select.select([connection] if reading else [], [] if reading else [connection], [], PATIENCE_S)

    def send(self, statement: str) -> None:
        """Sends a statement."""
        assert not self.busy
        self.busy, self.waited, self.error = True, False, ""
        self.cursor.execute(statement)

    def ended(self, patience_s: float = 0.0) -> bool:
        """True if the statement has ended; `error` says how. patience_s: the longest wait for its end."""
        try:
            if self.connection.poll() != psycopg2.extensions.POLL_OK:
                select.select([self.connection], [], [], patience_s)
                if self.connection.poll() != psycopg2.extensions.POLL_OK:
                    return False
        except psycopg2.Error as error:
            self.error = error.pgcode or str(error)
        self.busy = False
        return True

    def close(self) -> None:
        self.connection.close()


class Watcher:
    """Asks the server which session waits for which."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()

    def is_blocked(self, session: Session, others: Sequence[Session]) -> bool:
        """True if the session waits for one of the others."""
        query = "SELECT pg_isolation_test_session_is_blocked(%s, %s)"
        self.cursor.execute(query, (session.pid, [other.pid for other in others]))
        [(blocked,)] = self.cursor.fetchall()
        return bool(blocked)


class Play:
    """One schedule under way: on one table, on rows of its own, in sessions that no other play uses meanwhile.

    sql: gives a statement's text by its name, its transaction's number and the turn's in it. refused: the turns that
    fail with 40001, by the same numbers.
    """

    def __init__(
        self,
        schedule: Schedule,
        sql: Callable[[str, int, int], str],
        sessions: Sequence[Session],
        watcher: Watcher,
        refused: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        self.schedule = schedule
        self.sql = sql
        self.sessions = sessions[: len(schedule.transactions)]
        self.watcher = watcher
        self.refused = refused
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.at = 0
        self.impossible = False
        self._done = [0] * len(self.sessions)
        self._open = [False] * len(self.sessions)
        for session in self.sessions:
            session.failed = False

    @property
    def prefix(self) -> tuple[int, ...]:
        """The turns up to and including the one that couldn't be taken."""
        return self.schedule.turns[: self.at + 1]

    def go_on(self) -> None:
        """Takes turns up to the build's next one, or to the end."""
        while self.at < len(self.schedule.turns):
            who = self.schedule.turns[self.at]
            if who == BUILD:
                self.at += 1
                return
            if self.sessions[who].busy:
                self.impossible = True
                self.give_up()
                return
            self._take(who)
            self.at += 1
        assert not any(session.busy for session in self.sessions)

    @property
    def over(self) -> bool:
        """True if no turn is left, or none can be taken."""
        return self.impossible or self.at == len(self.schedule.turns)

    def give_up(self) -> None:
        """Rolls back all open transactions."""
        while any(self._open):
            for who, session in enumerate(self.sessions):
                if self._open[who] and not session.busy:
                    session.send(ROLLBACK)
                    self._open[who] = False
                    self._settle(record=False)
            if any(session.busy for session in self.sessions):
                self._settle(record=False)

    def _take(self, who: int) -> None:
        transaction, session, position = self.schedule.transactions[who], self.sessions[who], self._done[who]
        turn = transaction.turns[position]
        self._done[who] += 1
        last = self._done[who] == len(transaction.turns)
        if session.failed and not last:
            return
        statement = turn
        if not last:
            statement = "SELECT 1" if turn == SNAPSHOT else self.sql(turn, who, position)
        if (who, position) in self.refused:
            statement = ROLLBACK if last else REFUSE
        if position == 0:
            statement = f"BEGIN ISOLATION LEVEL {transaction.isolation}; {statement}"
        session.send(statement)
        self._open[who] = not last
        self._settle()

    def _settle(self, record: bool = True) -> None:
        """Waits until each statement has ended, or waits for a session that may end it."""
        deadline = time.monotonic() + PATIENCE_S
        while busy := [session for session in self.sessions if session.busy]:
            for session in busy:
                if session.ended(GLANCE_S) and record:
                    self._record(session)
            busy = [session for session in busy if session.busy]
            free = any(open_ and not session.busy for open_, session in zip(self._open, self.sessions, strict=True))
            if busy and all(self.watcher.is_blocked(session, self.sessions) for session in busy):
                for session in busy:
                    session.waited = True
                if free:
                    return
            assert time.monotonic() < deadline, f"hangs: {self.schedule}"

    def _record(self, session: Session) -> None:
        who = self.sessions.index(session)
        position = self._done[who] - 1
        error = session.error
        if (who, position) in self.refused:
            error = SERIALIZATION_FAILURE
        if error:
            session.failed = True
        self.outcomes[who, position] = Outcome(error, session.waited)

    def told(self) -> str:
        """The outcomes of the turns, but for those that are `ok`."""
        ends = sorted(self.outcomes.items())
        return ", ".join(
            f"T{who + 1} {self.schedule.transactions[who].turns[position]}: {outcome}"
            for (who, position), outcome in ends
            if str(outcome) != "ok"
        )
