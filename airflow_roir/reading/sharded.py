"""Rows of sharded tables through one index apart from them, at a stated level of consistency (docs/shards.md#read).

from airflow_roir.reading import ShardedIndex

by_email = ShardedIndex(index_engine, "public.orders_by_email", {"s0": engine0, "s1": engine1})
for user, shard in by_email.rows(User, User.email == "x@y", consistency="strict"):
    ...
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Engine, FromClause, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, parse_name, quote
from airflow_roir.errors import InvalidInput, NotStrict, ShardUnreachable
from airflow_roir.reading import candidates, truth
from airflow_roir.reading.candidates import About, Home, Named

T = TypeVar("T")
Level = Literal["eventual", "bounded", "strict"]
# More threads than this wait for shards in turn.
THREADS = 32
# The most questions to the index server if another generation is published each time: a rebuild, then its revert.
MOST_ASKED = 3
DSNS = "SELECT name, dsn FROM roir.shard WHERE removed_at IS NULL"


class Found(NamedTuple):
    """A row, and the name of the shard that it is in."""

    row: Any
    shard: str


@dataclass(frozen=True)
class Answer:
    """The rows that were found, in no order. away: the reasons why shards weren't read, by their names."""

    found: list[Found]
    away: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Found]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    @property
    def rows(self) -> list[Any]:
        """The rows alone."""
        return [one.row for one in self.found]


class ShardedIndex:
    """An index over shards, opened once for many reads, from several threads if you like.

    engine: SQLAlchemy's, of the index server. index: its name as SQL. shards: engines of the shards by the names that
    `roir shard list` shows; without them their DSNs are read from `roir.shard`, which takes SELECT on that table, and
    the engines are this object's own: `close` ends them. The DSNs are read again if a shard can't be reached, or isn't
    known: `roir shard add` may have changed them. Each thread takes a connection of each shard that it reads.
    """

    def __init__(self, engine: Engine, index: str, shards: Mapping[str, Engine] | None = None) -> None:
        self.index: QualifiedName = parse_name(index, "index")
        self._engine = engine
        self._own = shards is None
        self._dsns = _dsns(engine, self.index) if shards is None else {}
        self._shards = {name: _engine(dsn) for name, dsn in self._dsns.items()} if shards is None else dict(shards)
        self._lock = threading.Lock()
        self._about: About | None = None
        self._threads: ThreadPoolExecutor | None = None

    def rows(
        self,
        source: Any,
        where: ColumnElement[bool],
        consistency: Level = "eventual",
        *,
        max_staleness: timedelta | float | None = None,
        partial: bool = False,
    ) -> Answer:
        """The rows of a table, in all shards, that meet a condition, each as its shard has it now.

        source: a `Table`, whose rows come back as SQLAlchemy's, or an ORM class, whose instances come back detached. It
            must be the table that is indexed: `bounded` and `strict` check that in each shard, and so does `eventual`
            if its name isn't the one that the index knows.
        where: over the source's own columns: those of the index, and for `strict` those of key and primary key. Its
            truth must depend on the row alone.
        max_staleness: for `bounded`, seconds or a `timedelta`.
        partial: leave out shards that can't be reached, and name them in `Answer.away`, rather than raise.

        Guarantees for a row that met the condition before the call, and still does after it: `eventual`: none;
        `bounded`: it is found if it was committed `max_staleness` before the call; `strict`: it is found. At each level
        a row that comes back met the condition in a snapshot that its shard took during the call, and comes once. No
        snapshot spans two shards. If a row is moved to another shard, inserted there before it is deleted here,
        `strict` finds at least one of both. If it is deleted first, it may be found in neither.

        Raises StaleAnswer (retry), NotStrict, ShardUnreachable (names the shard), IndexUnreachable, InvalidInput,
        NotFound, RightMissing, and RoirError for other errors of a server: all of them RoirError, with the database's
        error as their cause and its SQLSTATE as `sqlstate`. SQLAlchemy's own errors, such as an exhausted pool, aren't
        wrapped.
        """
        age = _level(consistency, max_staleness)
        known = self._about
        try:
            answer = self._rows(source, where, consistency, age, partial)
            if not answer.away or not self._follow_dsns():
                return answer
        except (InvalidInput, NotStrict, ShardUnreachable):
            # The index may have been rebuilt since the look-up, so that its old capture is gone; or a shard may have
            # another DSN.
            if not self._follow_dsns() and (known is None or candidates.look_up(self._engine, self.index) == known):
                raise
        self._about = None
        return self._rows(source, where, consistency, age, partial)

    def _rows(
        self, source: Any, where: ColumnElement[bool], consistency: Level, age: timedelta | None, partial: bool
    ) -> Answer:
        mapped = not isinstance(source, FromClause)
        table: Any = inspect(source).local_table if mapped else source
        strict = consistency == "strict"
        asked: dict[str, set[str]] = {}
        answers: dict[str, dict[str, Any]] = {}
        away: dict[str, str] = {}
        missed = True
        while missed:
            about, named = self._candidates(table, where, strict, age)
            new = {
                shard: {text: key for text, key in one.keys.items() if text not in asked.get(shard, ())}
                for shard, one in named.items()
                if shard not in away
            }
            new = {shard: keys for shard, keys in new.items() if keys}
            self._check_known(new)
            if strangers := [shard for shard in new if shard not in about.homes]:
                raise NotStrict(f"index {self.index}: it was extended to {', '.join(map(quote, strangers))} meanwhile")
            calls = {
                shard: _asking(
                    self._shards[shard],
                    shard,
                    _home(about, replace(about.homes[shard], tick=named[shard].tick), table, consistency),
                    source,
                    table,
                    about.primary_key,
                    where,
                    list(keys.values()),
                )
                for shard, keys in new.items()
            }
            for shard, found in self._ask(calls, away if partial else None).items():
                asked.setdefault(shard, set()).update(new[shard])
                answers.setdefault(shard, {}).update(found)
            # A row that is gone from one shard may be in another one, to which it moved before.
            missed = strict and any(_has_gone(asked.get(shard, ()), answers.get(shard, ())) for shard in new)
        return Answer([Found(row, shard) for shard, rows in answers.items() for row in rows.values()], away)

    def _follow_dsns(self) -> bool:
        """Reads the DSNs again, if the engines are this object's own; True if any has changed."""
        if not self._own:
            return False
        now = _dsns(self._engine, self.index)
        with self._lock:
            changed = [name for name, dsn in now.items() if self._dsns.get(name) != dsn]
            old = [self._shards[name] for name in changed if name in self._shards]
            self._shards = self._shards | {name: _engine(now[name]) for name in changed}
            self._dsns = now
        for engine in old:
            engine.dispose()
        return bool(changed)

    def close(self) -> None:
        """Ends its threads, and the engines that it made."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        if self._own:
            for engine in self._shards.values():
                engine.dispose()

    def __enter__(self) -> ShardedIndex:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _candidates(
        self, table: Any, where: ColumnElement[bool], strict: bool, age: timedelta | None
    ) -> tuple[About, dict[str, Named]]:
        """The keys that the index server names. If another generation was published meanwhile, asks again."""
        asked = 0
        while True:
            about = self._about
            if about is None:
                about = self._about = candidates.look_up(self._engine, self.index)
            candidates.check_condition(self.index, about, table, where, strict)
            wanted = candidates.statement(self.index, about, table, where, strict, age)
            asked += 1
            try:
                return about, candidates.with_session(self._engine, functools.partial(candidates.read, wanted=wanted))
            except DBAPIError as error:
                self._about = None
                if asked == MOST_ASKED or candidates.state_of(error) not in candidates.PUBLISHED:
                    raise candidates.translated(self.index, error) from error

    def _check_known(self, named: Mapping[str, Any]) -> None:
        unknown = [shard for shard in named if shard not in self._shards]
        if unknown:
            raise InvalidInput(
                f"index {self.index}: give an engine of shard {', '.join(map(quote, unknown))}, too: rows there match"
            )

    def _ask(self, calls: Mapping[str, Callable[[], T]], away: dict[str, str] | None) -> dict[str, T]:
        """The results by shard, which are read at the same time. away: gets the errors of shards; None: raises them."""
        if len(calls) > 1:
            with self._lock:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(min(THREADS, len(self._shards)), "roir-reading")
                threads = self._threads
            running: dict[str, Callable[[], T]] = {shard: threads.submit(call).result for shard, call in calls.items()}
        else:
            running = dict(calls)
        done: dict[str, T] = {}
        failed: list[Exception] = []
        # All end before an error is raised: none goes on for a caller that has left.
        for shard, result in running.items():
            try:
                done[shard] = result()
            except ShardUnreachable as error:
                if away is None:
                    failed.append(error)
                else:
                    away[shard] = str(error)
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return done


def _has_gone(asked: Sized, found: Sized) -> bool:
    return len(found) < len(asked)


def _home(about: About, home: Home, table: Any, consistency: Level) -> Home | None:
    """The database that the shard must be; None: any. An eventual answer may come from a replica, without rights."""
    if consistency != "eventual":
        return home
    is_named = table.name == about.table.name and table.schema in (None, about.table.schema)
    return None if is_named else replace(home, level=consistency)


def _asking(*what: Any) -> Callable[[], dict[str, Any]]:
    return lambda: truth.ask(*what)


def _level(consistency: str, max_staleness: timedelta | float | None) -> timedelta | None:
    if consistency not in ("eventual", "bounded", "strict"):
        raise InvalidInput(f"consistency is {consistency!r}; it must be eventual, bounded or strict")
    if (consistency == "bounded") != (max_staleness is not None):
        raise InvalidInput("give max_staleness with consistency='bounded', and only then")
    if max_staleness is None:
        return None
    age = max_staleness if isinstance(max_staleness, timedelta) else timedelta(seconds=max_staleness)
    if age < timedelta(0):
        raise InvalidInput(f"max_staleness is {max_staleness}; it must be 0 or more")
    return age


def _dsns(engine: Engine, index: QualifiedName) -> dict[str, str]:
    try:
        found = candidates.with_session(engine, lambda connection: connection.execute(text(DSNS)).all())
    except DBAPIError as error:
        raise candidates.translated(index, error) from error
    dsns = {row.name: row.dsn for row in found}
    unknown = [name for name, dsn in dsns.items() if dsn is None]
    if unknown:
        raise InvalidInput(
            f"shard {', '.join(map(quote, unknown))}: the index server has no DSN of it; give the shards' engines"
        )
    return dsns


def _engine(dsn: str) -> Engine:
    def connect() -> Any:
        import psycopg2

        return psycopg2.connect(dsn, application_name="roir reading", connect_timeout=10)

    return create_engine("postgresql+psycopg2://", creator=connect)
