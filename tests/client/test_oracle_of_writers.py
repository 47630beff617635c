"""Random statements while another session writes, stepped: between a look-up and its statement, and between statements.

At READ COMMITTED a statement finds what it finds without the index; it misses at most rows that the same statement
wouldn't have found at the moment of its look-up under the same primary key. With one snapshot nothing differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, delete, event, select, text, update
from sqlalchemy.exc import StatementError

from roir_client.sqlalchemy import Indexes, use_indexes
from tests.client import zoo
from tests.client.test_oracle import drops_the_condition, keeps_entries_over_transactions
from tests.client.zoo import Writer

# How many scripts a broken variant may need.
MOST_SCRIPTS = 300
KEY = (zoo.zoo.c.id, zoo.zoo.c.part)
ROWS = text("SELECT z::text FROM zoo z ORDER BY id, part")
Keys = set[tuple[int, int]]


class Race:
    """A database, a session that uses its indexes, and another one that writes."""

    def __init__(self, dsn: str) -> None:
        url = dsn.replace("postgresql://", "postgresql+psycopg2://", 1)
        self.engine, self.other = create_engine(url), create_engine(url)
        self.indexes = use_indexes(self.engine, least_partitions=1, most_rows=1000, refresh_s=3600)
        self.writes: list[Callable[[], None]] = []
        event.listen(self.engine, "before_cursor_execute", self._before)

    def _before(self, _c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        """Before a statement that was restricted, or stays as it is: not before its look-up."""
        if not statement.startswith("SELECT roir.look_up") and self.writes:
            self.writes.pop()()

    def difference(self, seed: int) -> str | None:
        """The first result of a script's statement that isn't allowed, or None."""
        chance = random.Random(seed)
        writer = Writer(chance)
        level = chance.choice(["READ COMMITTED", "READ COMMITTED", "REPEATABLE READ"])
        conditions = writer.where(zoo.zoo.c)
        wanted = select(*KEY).where(*conditions)
        statement = chance.choice(
            [
                wanted,
                wanted.with_for_update(),
                update(zoo.zoo).where(*conditions).values(b=chance.choice([None, 1, 2])).returning(*KEY),
                delete(zoo.zoo).where(*conditions).returning(*KEY),
            ]
        )
        writes = [self._writes(writer, conditions) for _ in range(2)]
        with self.other.begin() as connection:
            connection.execute(text(zoo.REFILL))
        for write in writes:
            # Twice the same statement: the second one mustn't remember what the first one found.
            if (told := self._raced(level, wanted, statement, write)) is not None:
                return f"seed {seed}, {level}: {statement}\n{told}"
        return None

    def _writes(self, writer: Writer, conditions: list[Any]) -> Any:
        """A statement that changes rows which the condition selects, or might select then."""
        chance = writer.chance
        if chance.random() < 0.3:
            return writer.changed()
        name = chance.choice([*zoo.COLUMNS])
        new = {name: chance.choice([None, *zoo.COLUMNS[name][2]])}
        if chance.random() < 0.3:
            new = {"part": chance.randrange(zoo.PARTS)}
        where = conditions if chance.random() < 0.7 else writer.where(zoo.zoo.c)
        return chance.choice([update(zoo.zoo).where(*where).values(new), delete(zoo.zoo).where(*where)])

    def _raced(self, level: str, wanted: Any, statement: Any, write: Any) -> str | None:
        found: list[Keys | None] = []

        def commit() -> None:
            found.append(self._plainly(wanted))
            try:
                with self.other.begin() as connection:
                    connection.execute(write)
            except StatementError:
                pass
            found.append(self._plainly(wanted))

        refused, got = None, set()
        with self.engine.connect().execution_options(isolation_level=level) as connection:
            try:
                connection.execute(text("SELECT 1 FROM zoo"))
                self.writes.append(commit)
                got = {(row[0], row[1]) for row in connection.execute(statement)}
                connection.commit()
            except StatementError as error:
                refused = str(getattr(error.orig, "pgcode", None))
            finally:
                self.writes.clear()
        if not found:
            # SQLAlchemy itself has refused a value.
            return None
        before, after = found
        if before is None or after is None:
            # The statement is wrong with the index and without.
            return None if refused is not None else f"{got}, not an error"
        if refused is not None:
            return None if level != "READ COMMITTED" and refused == "40001" else refused
        if level != "READ COMMITTED":
            return None if got == before else f"{got}, not {before}"
        if before & after <= got <= after:
            return None
        return f"{got}\nbefore: {before}\nafter: {after}"

    def _plainly(self, wanted: Any) -> Keys | None:
        with self.other.connect() as connection:
            try:
                return {(row[0], row[1]) for row in connection.execute(wanted)}
            except StatementError:
                return None

    def close(self) -> None:
        self.engine.dispose()
        self.other.dispose()


@pytest.fixture
def race(zoo_copy: Callable[[], str]) -> Iterator[Race]:
    """A race in a copy of the zoo."""
    one = Race(zoo_copy())
    yield one
    one.close()


@pytest.mark.parametrize("seeds", [range(n, n + 200) for n in range(0, 2000, 200)], ids=str)
@pytest.mark.sample(0)
@pytest.mark.usefixtures("deadlocks_meant")
def test_a_statement_misses_only_what_it_may(race: Race, seeds: range) -> None:
    found = [difference for seed in seeds if (difference := race.difference(seed))]
    print(f"seeds {seeds}: {dict(race.indexes.counts)}")
    assert not found, f"{len(found)} scripts differ\n\n" + "\n\n".join(found[:3])
    assert race.indexes.counts["rewritten"] > len(seeds) / 4
    assert race.indexes.counts["error"] == 0


def forgets_a_row(patch: pytest.MonkeyPatch) -> None:
    """Forgets a row of those found."""
    look_up = Indexes._look_up

    def broken(self: Any, connection: Any, one: Any, asked: Any) -> Any:
        found = look_up(self, connection, one, asked)
        return type(found)(found.outcome, found.keys and found.keys[1:], found.said)

    patch.setattr(Indexes, "_look_up", broken)


@pytest.mark.parametrize(
    "variant",
    [drops_the_condition, keeps_entries_over_transactions, forgets_a_row],
    ids=lambda variant: variant.__name__,
)
@pytest.mark.slow
@pytest.mark.usefixtures("deadlocks_meant")
def test_a_broken_variant_is_found(race: Race, variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variant(monkeypatch)
    found = next((seed for seed in range(MOST_SCRIPTS) if race.difference(seed)), None)
    print(f"{variant.__name__}: seed {found}")
    assert found is not None
