"""A table with a column of many types, each with an index, and random statements about it. A seed gives a script."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg2
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Enum,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    Text,
    Uuid,
    and_,
    bindparam,
    case,
    cast,
    create_engine,
    delete,
    func,
    literal,
    not_,
    or_,
    select,
    tuple_,
    type_coerce,
    update,
)
from sqlalchemy.dialects.postgresql import CHAR, TIMESTAMP
from sqlalchemy.orm import aliased, joinedload, registry, relationship, selectinload
from sqlalchemy.pool import NullPool
from sqlalchemy.types import TypeDecorator

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps


class Mood(str, enum.Enum):
    """A `str` enum: drivers may take it for a text."""

    SAD = "sad"
    OK = "ok"


class Lowered(TypeDecorator[str]):
    """Has SQL of its own around each value."""

    impl = Text
    cache_ok = True

    def bind_expression(self, bindparam: Any) -> Any:
        """The value in lower case."""
        return func.lower(bindparam)


class Blank(TypeDecorator[str]):
    """Keeps None as an empty text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        """None is ''."""
        return "" if value is None else value

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """'' is None."""
        return value or None


class Cents(TypeDecorator[Decimal]):
    """Keeps an amount as a whole number."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        """In cents."""
        return None if value is None else int(Decimal(value) * 100)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        """In whole ones."""
        return None if value is None else Decimal(value) / 100


UTC = timezone.utc
NOON = datetime(2020, 5, 17, 12)
# Columns with their types in SQL and in Python, and values that rows have, then values that might be compared with.
COLUMNS: dict[str, tuple[str, Any, list[Any], list[Any]]] = {
    "t": ("text", Text, ["a", "A", "a ", "", "%s %(x)s", "it's \\ 'x'", "é"], ["b", Mood.OK]),
    "v": ("varchar(5)", String(5), ["a", "a ", "abcde", "%%"], ["abcdef", "A"]),
    "c": ("char(4)", CHAR(4), ["a", "ab", "abcd"], ["a   ", "abcde", ""]),
    "n": ("numeric(8,2)", Numeric(8, 2), [Decimal("1.50"), Decimal(2), Decimal("NaN")], [Decimal("1.5"), 2, 1.5, 7]),
    "w": ("numeric", Numeric, [Decimal("1.5"), Decimal("1.500"), Decimal(1)], [1, 1.5, Decimal("1.505"), True]),
    "i": ("int", Integer, [0, 1, 2, 7], [8, 2**40, Decimal("1.5"), Decimal(1), 1.0, True]),
    "b": ("bigint", BigInteger, [0, 1, 2**40], [2**70, 7]),
    "f": ("float8", Float, [0.0, -0.0, 0.1, float("nan"), float("inf")], [0, Decimal("0.1"), 1]),
    "ts": ("timestamp", DateTime, [NOON, NOON + timedelta(hours=1)], [NOON.date(), NOON.replace(tzinfo=UTC)]),
    "tz": ("timestamptz", TIMESTAMP(timezone=True), [NOON.replace(tzinfo=UTC)], [NOON, NOON + timedelta(days=1)]),
    "d": ("date", Date, [NOON.date(), date(2021, 1, 1)], [NOON, date(1, 1, 1)]),
    "u": ("uuid", Uuid, [UUID(int=1), UUID(int=2**100)], [UUID(int=3)]),
    "e": ("mood", Enum("sad", "ok", name="mood"), ["sad", "ok"], []),
    "me": ("mood", Enum(Mood, name="mood", values_callable=lambda m: [x.value for x in m]), list(Mood), []),
    "y": ("bytea", LargeBinary, [b"", b"\x00\xff", b"%\\'"], [b"a"]),
    "o": ("boolean", Boolean, [True, False], []),
    "lo": ("text", Lowered, ["a", "b"], ["A", "B"]),
    "bl": ("text", Blank, ["a", ""], [None]),
    "ce": ("int", Cents, [Decimal(1), Decimal("1.5")], [Decimal("1.505"), 1]),
    "ca": ('text COLLATE "C"', Text, ["a", "A", "b"], ["c"]),
    "ci": ("text COLLATE loose", Text, ["a", "A", "b"], ["B"]),
}
INDEXES = {name: name for name in COLUMNS if name != "o"} | {"i": "i,t", "ca": "ca,o,n"}
# Casts by which different values become equal. None fails: whether a row is cast at all depends on the plan.
ROUNDED: dict[str, tuple[Any, list[Any]]] = {
    "f": (String(1), ["0", "1"]),
    "n": (String(1), ["2", "1"]),
    "w": (Numeric(5, 0), [1, 2]),
    "ts": (Date, [NOON.date()]),
    "tz": (Date, [NOON.date()]),
    "t": (String(1), ["a", "A"]),
    "v": (String(1), ["a"]),
}
# Ignores case. The embedded server is without ICU: there all collations find the same equal texts.
LOOSE = "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
ROWS, PARTS = 240, 8
# Scripts delete many rows. Without this the table was soon empty, and nothing differed any more.
REFILL = "INSERT INTO zoo SELECT k.* FROM kept k WHERE NOT EXISTS (SELECT FROM zoo z WHERE z.id = k.id)"

metadata = MetaData()
zoo = Table(
    "zoo",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("part", Integer),
    *(Column(name, python) for name, (_, python, _, _) in COLUMNS.items()),
)
pets = Table(
    "pets", metadata, Column("id", Integer, primary_key=True), Column("owner", ForeignKey("zoo.id")), Column("k", Text)
)
mapping = registry()


class Animal:
    """A row of the zoo, by a part of its primary key."""

    id: Any
    t: Any
    i: Any
    pets: Any


class Pet:
    """A row that belongs to one of the zoo, or to none."""

    id: Any
    owner: Any
    animal: Any


mapping.map_imperatively(Animal, zoo, properties={"pets": relationship(Pet, back_populates="animal")})
mapping.map_imperatively(Pet, pets, properties={"animal": relationship(Animal, back_populates="pets")})


def make(dsn: str) -> None:
    """Makes the tables, with rows of a fixed seed, and the indexes."""
    columns = ", ".join(f"{name} {in_sql}" for name, (in_sql, *_) in COLUMNS.items())
    try:
        run_sql(dsn, LOOSE)
    except psycopg2.errors.FeatureNotSupported:
        run_sql(dsn, 'CREATE COLLATION loose FROM "C"')
    run_sql(
        dsn,
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        f"CREATE TABLE zoo (id int, part int, {columns}, PRIMARY KEY (id, part)) PARTITION BY LIST (part)",
        *(f"CREATE TABLE zoo_{n} PARTITION OF zoo FOR VALUES IN ({n})" for n in range(1, PARTS)),
        "CREATE TABLE zoo_0 PARTITION OF zoo FOR VALUES IN (0) PARTITION BY HASH (id)",
        *(f"CREATE TABLE zoo_0_{n} PARTITION OF zoo_0 FOR VALUES WITH (MODULUS 2, REMAINDER {n})" for n in range(2)),
        "CREATE TABLE pets (id int PRIMARY KEY, owner int, k text)",
    )
    chance = random.Random(1)
    database = Database(dsn, "roir tests")
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg2://", 1), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(zoo.insert(), [a_row(chance, number) for number in range(ROWS)])
        some = [{"id": n, "owner": chance.choice([None, *range(ROWS)]), "k": chance.choice("abc")} for n in range(60)]
        connection.execute(pets.insert(), some)
    run_sql(dsn, "CREATE TABLE kept AS SELECT * FROM zoo")
    for name, keys in INDEXES.items():
        steps.make_index(database, f"by_{name}", "zoo", keys)
    run_sql(dsn, "ANALYZE")
    database.engine.dispose()


def a_row(chance: random.Random, number: int) -> dict[str, Any]:
    """The values of a row."""
    values = {name: chance.choice([None, *has, *has]) for name, (_, _, has, _) in COLUMNS.items()}
    return {"id": number, "part": chance.randrange(PARTS), **values}


class Writer:
    """Writes random statements. chance: decides everything, so that the same seed gives the same statements."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def value(self, name: str) -> Any:
        """A value to compare a column with."""
        _, _, has, others = COLUMNS[name]
        return self.chance.choice([*has, *has, *others])

    def about(self, source: Any, name: str) -> Any:
        """A condition on a column."""
        column, chance = source[name], self.chance
        python = COLUMNS[name][1]
        forms: list[tuple[int, Callable[[], Any]]] = [
            (12, lambda: column == self.value(name)),
            (2, lambda: literal(self.value(name), python) == column),
            (6, lambda: column.in_([self.value(name) for _ in range(chance.randint(1, 4))])),
            (2, lambda: column.in_([self.value(name), None])),
            (1, lambda: column.in_([])),
            (4, lambda: column.is_(None)),
            (1, lambda: column.is_not(None)),
            (1, lambda: column != self.value(name)),
            (1, lambda: not_(column == self.value(name))),
            (1, lambda: ~column.in_([self.value(name)])),
            (1, lambda: column.op(">")(literal(self.value(name), python))),
            (1, lambda: column.is_not_distinct_from(self.value(name))),
            (2, lambda: func.coalesce(column, self.value(name)) == self.value(name)),
            (2, lambda: cast(column, Text) == str(self.value(name))),
            (2, lambda: func.lower(cast(column, Text)) == "a"),
            (1, lambda: column == cast(literal(self.value(name), python), python)),
            (1, lambda: column == source[name]),
            (1, lambda: column == select(func.max(zoo.c[name])).scalar_subquery()),
            (1, lambda: column.in_(select(zoo.c[name]).where(zoo.c.id < 9))),
            (1, lambda: tuple_(column, source.id).in_([(self.value(name), chance.randrange(ROWS))])),
            (2, lambda: type_coerce(column, python) == self.value(name)),
            (1, lambda: column == bindparam(None, self.value(name), type_=python)),
            (1, lambda: case((column == self.value(name), True), else_=False)),
            (1, lambda: source.id == chance.randrange(ROWS)),
            (1, lambda: source.part == chance.randrange(PARTS)),
            (1, lambda: column == None),  # noqa: E711
        ]
        if name == "bl":
            forms.append((20, lambda: column.in_(["a", None])))
        if name in ROUNDED:
            forms += [(4, lambda: cast(column, ROUNDED[name][0]) == chance.choice(ROUNDED[name][1]))]
        if python in (Text, Lowered) or name in ("v", "c"):
            forms += [
                (3, lambda: column.collate("C") == self.value(name)),
                (3, lambda: column.collate("loose") == self.value(name)),
                (2, lambda: func.lower(column) == self.value(name)),
                (2, lambda: column + "" == self.value(name)),
            ]
        return chance.choices([make for _, make in forms], [weight for weight, _ in forms])[0]()

    def condition(self, source: Any, depth: int = 0) -> Any:
        """A condition on a source of rows."""
        chance = self.chance
        name = chance.choice([*COLUMNS, "i", "ca"])
        if depth < 2 and chance.random() < 0.25:
            parts = [self.condition(source, depth + 1) for _ in range(2)]
            return chance.choice([and_, and_, or_, lambda *both: not_(or_(*both))])(*parts)
        if name in ("i", "ca") and chance.random() < 0.6:
            second = "t" if name == "i" else "o"
            return and_(self.about(source, name), self.about(source, second))
        return self.about(source, name)

    def where(self, source: Any) -> list[Any]:
        """One to three conditions."""
        return [self.condition(source) for _ in range(self.chance.choice([1, 1, 1, 2, 3]))]

    def selected(self) -> Any:
        """A SELECT of Core."""
        chance, c = self.chance, zoo.c
        alias, other = zoo.alias(), zoo.alias("other")
        forms: list[Callable[[], Any]] = [
            lambda: select(zoo).where(*self.where(c)),
            lambda: select(alias).where(*self.where(alias.c)),
            lambda: select(func.count(), c.part).where(*self.where(c)).group_by(c.part),
            lambda: select(c.t).distinct().where(*self.where(c)),
            lambda: select(c.id).where(*self.where(c)).order_by(c.id).limit(chance.randint(0, 3)),
            lambda: select(c.id).where(*self.where(c)).with_for_update(),
            lambda: select(c.id, pets.c.id).join(pets, pets.c.owner == c.id).where(*self.where(c)),
            lambda: select(c.id, pets.c.id).select_from(pets.outerjoin(zoo)).where(*self.where(c)),
            lambda: select(c.id, pets.c.id).select_from(zoo.outerjoin(pets)).where(*self.where(c)),
            lambda: select(c.id, pets.c.id).select_from(zoo.outerjoin(pets, full=True)).where(*self.where(c)),
            lambda: select(c.id, pets.c.id).outerjoin_from(pets, zoo, and_(pets.c.owner == c.id, *self.where(c))),
            lambda: select(alias.c.id, other.c.id).where(alias.c.id == other.c.id, *self.where(alias.c)),
            lambda: select(alias.c.id, other.c.id).where(
                alias.c.part == other.c.id, *self.where(alias.c), *self.where(other.c)
            ),
            lambda: select(pets.c.id).where(pets.c.owner.in_(select(c.id).where(*self.where(c)))),
            lambda: select(pets.c.id).where(select(c.id).where(c.id == pets.c.owner, *self.where(c)).exists()),
            lambda: select(c.id).where(*self.where(c)).union_all(select(c.id).where(*self.where(c))),
            lambda: select(select(c.id, c.t).where(*self.where(c)).cte()),
            lambda: select(select(zoo).where(*self.where(c)).subquery()),
            lambda: select(c.i, func.count()).where(*self.where(c)).group_by(c.i).having(func.count() > 1),
        ]
        return chance.choice([*forms[:3], *forms])()

    def mapped(self) -> Any:
        """A SELECT of the ORM."""
        other = aliased(Animal)
        forms: list[Callable[[], Any]] = [
            lambda: select(Animal).where(*self.where(_Mapped(Animal))),
            lambda: select(other).where(*self.where(_Mapped(other))),
            lambda: select(Animal).where(*self.where(_Mapped(Animal))).options(selectinload(Animal.pets)),
            lambda: select(Animal).where(*self.where(_Mapped(Animal))).options(joinedload(Animal.pets)),
            lambda: select(Pet).join(Pet.animal).where(*self.where(_Mapped(Animal))),
            lambda: select(Pet).outerjoin(Pet.animal.of_type(other)).where(*self.where(_Mapped(other))),
            lambda: select(Pet).outerjoin(Pet.animal).where(*self.where(_Mapped(Animal))),
            lambda: select(Pet).where(Pet.animal.has(and_(*self.where(_Mapped(Animal))))),
            lambda: (
                select(Animal)
                .where(*self.where(_Mapped(Animal)))
                .options(joinedload(Animal.pets))
                .order_by(Animal.id)
                .limit(3)
            ),
        ]
        return self.chance.choice(forms)()

    def changed(self) -> Any:
        """An UPDATE or DELETE."""
        chance = self.chance
        name = chance.choice([*COLUMNS])
        new = {name: chance.choice([None, *COLUMNS[name][2]])}
        if chance.random() < 0.2:
            new = {"part": chance.randrange(PARTS)}
        forms: list[Callable[[], Any]] = [
            lambda: update(zoo).where(*self.where(zoo.c)).values(new),
            lambda: update(zoo).where(*self.where(zoo.c)).values(new).returning(zoo.c.id),
            lambda: update(zoo).where(pets.c.owner == zoo.c.id, *self.where(zoo.c)).values(new),
            lambda: update(Animal).where(*self.where(_Mapped(Animal))).values(new),
            lambda: delete(zoo).where(*self.where(zoo.c)),
            lambda: delete(zoo).where(*self.where(zoo.c)).returning(zoo.c.id),
        ]
        return chance.choice(forms)()


class _Mapped:
    """The columns of a mapped class, found as those of a table are."""

    def __init__(self, entity: Any) -> None:
        self._entity = entity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entity, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._entity, name)


def script(seed: int) -> tuple[str, Sequence[tuple[str, Any]], bool]:
    """The isolation level of a transaction, its steps, and whether it commits.

    A step is `execute` or `other` with a statement, which another session then commits, or `get` with an id.
    """
    chance = random.Random(seed)
    writer = Writer(chance)
    level = chance.choice(["READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    taken: list[tuple[str, Any]] = []
    changes = False
    for _ in range(chance.randint(1, 5)):
        kind = chance.random()
        if kind < 0.1 and not changes:
            taken.append(("other", writer.changed()))
        elif kind < 0.25:
            taken.append(("get", (chance.randrange(ROWS), chance.choice(COLUMNS["t"][2]))))
            changes = True
        elif kind < 0.5:
            taken.append(("execute", writer.changed()))
            changes = True
        else:
            statement = writer.mapped() if chance.random() < 0.4 else writer.selected()
            taken.append(("execute", statement))
            changes = changes or getattr(statement, "_for_update_arg", None) is not None
    return level, taken, chance.random() < 0.5
