"""Random statements, with the indexes and on a twin without them: results, errors and effects are the same.

A script is a transaction of some statements (tests/client/zoo.py); its seed is printed if anything differs. Broken
variants of the client are found.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BooleanClauseList, Cast, Grouping
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.util import greenlet_spawn

from roir_client import lookup, shape
from roir_client.sqlalchemy import Indexes, use_indexes
from tests.client import zoo
from tests.client.zoo import Animal

EFFECTS = (text("SELECT z::text FROM zoo z ORDER BY id, part"), text("SELECT p::text FROM pets p ORDER BY id"))
# How many scripts a broken variant may need.
MOST_SCRIPTS = 300


class Twins:
    """Two databases with the same rows. The statements of the first engine use the indexes."""

    def __init__(self, dsns: list[str], driver: str) -> None:
        urls = [dsn.replace("postgresql://", f"postgresql+{driver}://", 1) for dsn in dsns]
        self.loop = asyncio.new_event_loop() if driver == "asyncpg" else None
        self.engines = [create_async_engine(url).sync_engine if self.loop else create_engine(url) for url in urls]
        self.others = [create_engine(dsn.replace("postgresql://", "postgresql+psycopg2://", 1)) for dsn in dsns]
        self.indexes = use_indexes(self.engines[0], least_partitions=1, most_rows=1000, refresh_s=3600)

    @property
    def distinguishes_collations(self) -> bool:
        """Whether texts that differ can be equal by a collation."""
        with self.others[0].connect() as connection:
            return bool(connection.scalar(text("SELECT 'a' = 'A' COLLATE loose")))

    def difference(self, seed: int) -> str | None:
        """The first difference after a script, or None."""
        told = [
            self._called(lambda twins: self._played(seed, *twins), twins)
            for twins in zip(self.engines, self.others, strict=True)
        ]
        for step, (with_, without) in enumerate(zip(*told, strict=True)):
            if with_ != without:
                level, steps, _ = zoo.script(seed)
                return f"seed {seed}, {level}, step {step}: {with_}\nwithout: {without}\n" + "\n".join(
                    f"{kind}: {what}" for kind, what in steps
                )
        return None

    def _called(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """The result of a function that uses an engine."""
        if self.loop is None:
            return function(argument)
        return self.loop.run_until_complete(greenlet_spawn(function, argument))

    def _played(self, seed: int, engine: Engine, other: Engine) -> list[Any]:
        level, steps, commits = zoo.script(seed)
        told: list[Any] = []
        with other.begin() as connection:
            connection.execute(text(zoo.REFILL))
        with Session(engine.execution_options(isolation_level=level)) as session:
            for kind, what in steps:
                try:
                    told.append(self._step(session, other, kind, what))
                except SQLAlchemyError as error:
                    told.append(_error(error))
                    if isinstance(error, DBAPIError):
                        session.rollback()
                        break
            if commits:
                try:
                    session.commit()
                except SQLAlchemyError as error:
                    told.append(_error(error))
        told += [None] * (len(steps) + 1 - len(told))
        with other.connect() as connection:
            told.append([connection.execute(effect).scalars().all() for effect in EFFECTS])
        return told

    def _step(self, session: Session, other: Engine, kind: str, what: Any) -> Any:
        if kind == "other":
            with other.begin() as connection:
                return connection.execute(what).rowcount
        if kind == "get":
            animal: Any = session.get(Animal, what[0])
            if animal is None:
                return None
            animal.t = what[1]
            session.flush()
            return [_shown(animal), sorted(pet.id for pet in animal.pets)]
        result: Any = session.execute(what)
        if not getattr(result, "returns_rows", True):
            return result.rowcount
        if any(getattr(one, "entity_namespace", None) for one in getattr(what, "column_descriptions", ())):
            result = result.unique()
        return sorted(repr([_shown(value) for value in row]) for row in result)

    def close(self) -> None:
        for engine in [*self.engines, *self.others]:
            self._called(Engine.dispose, engine)
        if self.loop is not None:
            self.loop.close()


def _shown(value: Any) -> Any:
    """An object by its columns and loaded rows."""
    if not hasattr(value, "_sa_instance_state"):
        return value
    loaded = value.__dict__
    columns = {
        name: repr(loaded[name]) for name in sorted(loaded) if name not in ("_sa_instance_state", "pets", "animal")
    }
    pets = sorted(pet.id for pet in loaded["pets"]) if "pets" in loaded else None
    return type(value).__name__, columns, pets


def _error(error: SQLAlchemyError) -> Any:
    orig = getattr(error, "orig", None)
    return type(error).__name__, getattr(orig, "pgcode", None) or getattr(orig, "sqlstate", None)


@pytest.fixture
def twins(zoo_copy: Callable[[], str]) -> Iterator[Callable[[str], Twins]]:
    """Makes twins for a driver."""
    made: list[Twins] = []

    def make(driver: str) -> Twins:
        made.append(Twins([zoo_copy(), zoo_copy()], driver))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("seeds", [range(n, n + 200) for n in range(0, 4000, 200)], ids=str)
@pytest.mark.parametrize("driver", ["psycopg2", "psycopg", "asyncpg"])
@pytest.mark.sample(0)
@pytest.mark.usefixtures("deadlocks_meant")
def test_nothing_differs_from_a_twin_without_indexes(twins: Callable[[str], Twins], driver: str, seeds: range) -> None:
    two = twins(driver)
    found = [difference for seed in seeds if (difference := two.difference(seed))]
    print(f"{driver}, seeds {seeds}: {dict(two.indexes.counts)}")
    assert not found, f"{len(found)} scripts differ\n\n" + "\n\n".join(found[:3])
    assert two.indexes.counts["rewritten"] > len(seeds) / 4
    assert two.indexes.counts["error"] == 0


# --- Broken variants.


def drops_the_condition(patch: pytest.MonkeyPatch) -> None:
    """Selects what was found, whatever the statement says."""
    restricted = Indexes._restricted

    def broken(self: Any, connection: Any, sql: str, context: Any) -> str:
        new = restricted(self, connection, sql, context)
        if new == sql:
            return sql
        # The condition stays for the driver's parameters.
        return re.sub(
            r"( WHERE (?:\S+ IN \((?:E'(?:[^']|'')*'|NULL|, )*\) AND )+)(.+?)(?= ORDER BY| FOR | RETURNING| LIMIT|$)",
            r"\1((\2) IS NOT NULL OR true)",
            new.replace("\n", " "),
            count=1,
        )

    patch.setattr(Indexes, "_restricted", broken)


def keeps_entries_over_transactions(patch: pytest.MonkeyPatch) -> None:
    kept: dict[Any, Any] = {}
    look_up = Indexes._look_up

    def broken(self: Any, connection: Any, one: Any, asked: Any) -> Any:
        key = (str(one.target.index), [pin.kind for pin in one.target.pins], repr(asked))
        found = kept.get(repr(key))
        if found is None:
            found = kept[repr(key)] = look_up(self, connection, one, asked)
        return found

    patch.setattr(Indexes, "_look_up", broken)


def takes_or_for_and(patch: pytest.MonkeyPatch) -> None:
    leaves = shape.leaves

    def broken(criteria: Any) -> Any:
        for one in criteria:
            if isinstance(one, BooleanClauseList) and one.operator is operators.or_:
                yield from broken(one.clauses)
            else:
                yield from leaves((one,))

    patch.setattr(shape, "leaves", broken)


def _without(patch: pytest.MonkeyPatch, bare: Callable[[Any], Any]) -> None:
    """Takes something off the column of a condition."""
    condition = shape._condition

    def broken(leaf: Any) -> Any:
        if isinstance(leaf, shape.BinaryExpression) and bare(leaf.left) is not leaf.left:
            column = bare(leaf.left)
            fits = isinstance(column, shape.Column) and isinstance(leaf.right, shape.BindParameter)
            if fits and leaf.operator is operators.eq:
                return shape._Condition(column, lookup.EQUAL, leaf.right)
            return None
        return condition(leaf)

    patch.setattr(shape, "_condition", broken)


def ignores_a_cast(patch: pytest.MonkeyPatch) -> None:
    _without(patch, lambda left: left.clause if isinstance(left, Cast) else left)


def ignores_a_function(patch: pytest.MonkeyPatch) -> None:
    _without(patch, lambda left: next(iter(left.clauses)) if isinstance(left, FunctionElement) else left)


def compares_texts(patch: pytest.MonkeyPatch) -> None:
    def broken(index: Any, named: Any, asked: Any, most: int) -> str:
        as_text = [
            (replace(one, accepts=(25, 705)), kind.replace(lookup.EQUAL, "OPERATOR(pg_catalog.||) '' ="), some)
            for one, kind, some in asked
        ]
        return statement(index, named, as_text, most)

    statement, literal = lookup.statement, lookup._literal
    patch.setattr(lookup, "statement", broken)
    patch.setattr(lookup, "_types", lambda values: "'25'" if values else "NULL")
    patch.setattr(lookup, "_literal", lambda kind, values: literal(kind[-1:] if "=" in kind else kind, values))


def ignores_a_collation(patch: pytest.MonkeyPatch) -> None:
    def bare(left: Any) -> Any:
        inner = left.element if isinstance(left, Grouping) else left
        return inner.left if getattr(inner, "operator", None) is operators.collate else left

    _without(patch, bare)
    # The value's type has the collation, too.
    patch.setattr(shape, "_is_typed", lambda type_, dialect: True)


def takes_any_is_null(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shape, "_is_plain", lambda statement: True)


def forgets_what_none_means(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shape, "may_turn_none", lambda type_: False)


VARIANTS = [
    drops_the_condition,
    keeps_entries_over_transactions,
    takes_or_for_and,
    ignores_a_cast,
    ignores_a_function,
    compares_texts,
    takes_any_is_null,
    ignores_a_collation,
    forgets_what_none_means,
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
@pytest.mark.slow
@pytest.mark.usefixtures("deadlocks_meant")
def test_a_broken_variant_is_found(
    twins: Callable[[str], Twins], variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = twins("psycopg2")
    if variant is ignores_a_collation and not two.distinguishes_collations:
        pytest.skip("needs a server with ICU: --pg 15 --pg-bin /usr/lib/postgresql/15/bin")
    variant(monkeypatch)
    found = next((seed for seed in range(MOST_SCRIPTS) if two.difference(seed)), None)
    print(f"{variant.__name__}: seed {found}")
    assert found is not None


def test_a_script_is_the_same_by_its_seed() -> None:
    one, two = (zoo.script(7) for _ in range(2))
    assert [str(what) for _, what in one[1]] == [str(what) for _, what in two[1]]
    assert select(zoo.zoo).compile() is not None
