"""Finds the rows that an index over shards names for a condition, by one statement on the index server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Interval,
    Select,
    Text,
    cast,
    func,
    literal,
    select,
    type_coerce,
    union_all,
)
from sqlalchemy import column as new_column
from sqlalchemy import table as new_table
from sqlalchemy.dialects.postgresql import JSONB, REGCLASS
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BooleanClauseList, ClauseList, Grouping, Tuple
from sqlalchemy.sql.selectable import SelectBase
from sqlalchemy.sql.sqltypes import NULLTYPE
from sqlalchemy.sql.visitors import iterate, replacement_traverse

from airflow_roir.definition import QualifiedName, parse_name, quote
from airflow_roir.engine.retry.trouble import first_line, said
from airflow_roir.engine.source import catalog
from airflow_roir.errors import (
    IndexUnreachable,
    InvalidInput,
    NotFound,
    NotStrict,
    RightMissing,
    RoirError,
    StaleAnswer,
)
from airflow_roir.nearest import meant, meant_of
from airflow_roir.shards import rules

T = TypeVar("T")
STALE, NO_RIGHT, NOT_READY = "40R01", "42501", "55000"
# Classes of errors: a lost connection, no connection left, a server that shuts down or starts.
AWAY = ("08", "53", "57P")
# Another generation was published since the look-up.
PUBLISHED = ("40001", "42P01")
# No such view, or not that of an index over shards.
WRONG = ("42P01", "42809", "3F000")
# Comparisons that use no order.
EQUALITIES = (
    operators.like_op,
    operators.not_like_op,
    operators.startswith_op,
    operators.endswith_op,
    operators.contains_op,
    operators.eq,
    operators.ne,
    operators.in_op,
    operators.not_in_op,
    operators.is_,
    operators.is_not,
    operators.is_distinct_from,
    operators.is_not_distinct_from,
)
# Collations by which texts are compared as bytes.
BYTES = ("C", "POSIX", "ucs_basic")
# Types whose texts depend on settings of the session, by the beginnings of their names.
BY_DRIVER = (
    "date",
    "timestamp",
    "tsrange",
    "tstzrange",
    "tsmultirange",
    "tstzmultirange",
    "real",
    "double",
    "bytea",
    "money",
)


@dataclass(frozen=True)
class KeyColumn:
    """A column of the primary key. type: the base type's name as SQL; domain: the column's own type is a domain."""

    name: str
    type: str
    domain: bool


@dataclass(frozen=True)
class Home:
    """A shard's database by its token, and the name of its outbox. tick: the least number of its visits.

    table: the name that the indexed table had; level: of the read; an eventual one only checks the table.
    """

    token: str | None
    outbox: str
    table: QualifiedName
    tick: int = 0
    level: str = "strict"


@dataclass(frozen=True)
class Named:
    """The primary keys that an index names in one shard, by their texts. tick: as of the same snapshot."""

    keys: dict[str, tuple[Any, ...]]
    tick: int


@dataclass(frozen=True)
class About:
    """The facts that a reader has of an index over shards. identity: the columns of key and primary key; homes: of the
    shards.

    table: the name that it had when the index was created. primary_key: without the shard's column. unlike: columns
    whose values shards compare by other rules than the index server, with these rules.
    """

    generation: int
    table: QualifiedName
    shard_column: str
    columns: tuple[str, ...]
    identity: tuple[str, ...]
    primary_key: tuple[KeyColumn, ...]
    homes: Mapping[str, Home]
    unlike: Mapping[str, Sequence[str]] = field(default_factory=dict)


def look_up(engine: Engine, index: QualifiedName) -> About:
    """The present facts of the index. Raises NotFound, InvalidInput, RightMissing."""
    try:
        asked = select(func.roir.apart(cast(index.sql, REGCLASS)))
        found = with_session(engine, lambda connection: connection.execute(asked).scalar_one())
    except DBAPIError as error:
        if state_of(error) in WRONG:
            raise NotFound(f"{said(error)}{_near(engine, index)}") from error
        raise translated(index, error) from error
    shard, of = found["shard"], parse_name(found["table"], "table")
    names = [column["source"] for column in found["columns"]]
    return About(
        found["generation"],
        of,
        shard,
        tuple(names),
        tuple(names[: found["identity"]]),
        tuple(
            KeyColumn(c["source"], c["cast"], c["domain"])
            for c in found["columns"]
            if c["primary_key"] and c["source"] != shard
        ),
        {name: Home(one["home"], one["outbox"], of) for name, one in found["shards"].items()},
        _unlike(found["rules"], [one["rules"] or {} for one in found["shards"].values()]),
    )


def _unlike(ours: Mapping[str, list[str]], shards: Sequence[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    found = {
        column: list(dict.fromkeys(rule for one in shards for rule in rules.unlike(mine, one.get(column, mine))))
        for column, mine in ours.items()
    }
    return {column: unlike for column, unlike in found.items() if unlike}


def _compared(element: Any, equal: bool = False, bytewise: bool = False) -> Iterator[tuple[Any, bool, bool]]:
    """The columns in an expression: whether each is compared for equality only, and whether by its bytes."""
    if isinstance(element, ColumnElement) and getattr(element, "table", None) is not None:
        yield element, equal, bytewise
        return
    if isinstance(element, BinaryExpression):
        equal = element.operator in EQUALITIES
        bytewise = element.operator is operators.collate and getattr(element.right, "collation", None) in BYTES
    elif not isinstance(element, Grouping | Tuple | ClauseList) or isinstance(element, BooleanClauseList):
        equal = bytewise = False
    for child in element.get_children():
        yield from _compared(child, equal, bytewise)


def check_condition(index: QualifiedName, about: About, table: Any, where: ColumnElement[bool], strict: bool) -> None:
    """Raises InvalidInput if the index can't answer a condition."""
    has = set(about.identity if strict else about.columns)
    for element in iterate(where):
        if isinstance(element, SelectBase | CTE):
            raise InvalidInput(
                f"index {index}: the condition has a subquery, which would give another result in each database; "
                "run it first, and give its result as values"
            )
        if not isinstance(element, ColumnElement) or getattr(element, "table", None) is None:
            continue
        if not table.c.contains_column(element):
            raise InvalidInput(f"index {index}: the condition has {element}, which is no column of {table.fullname}")
        if element.name not in has:
            raise InvalidInput(
                f"index {index}: {quote(element.name)} "
                + (
                    "isn't a column of its key or of the primary key; strict reads can use no others. Filter the "
                    "returned rows instead"
                    if strict and element.name in about.columns
                    else f"isn't a column of it{meant_of(element.name, has)}"
                )
            )
    for element, equal, bytewise in _compared(where) if about.unlike else ():
        unlike = about.unlike.get(element.name)
        if unlike is None or _is_alike(unlike, equal, bytewise):
            continue
        raise InvalidInput(
            f"index {index}: the index server and a shard compare {quote(element.name)} by other rules "
            f"({rules.told(unlike)}), so that a row may meet the condition in the one and not in the other. Ask for "
            'equal values (=, IN) or a beginning (LIKE), compare a text by its bytes (column.collate("C")), or give '
            "both servers the same rules"
        )
    missing = [one.name for one in about.primary_key if one.name not in table.c]
    if missing:
        raise InvalidInput(
            f"index {index}: {table.fullname} is mapped without {', '.join(map(quote, missing))}, a part of its "
            "primary key"
        )


def _is_alike(unlike: Sequence[str], equal: bool, bytewise: bool) -> bool:
    """True if a comparison has one outcome on all servers."""
    if any(rule.startswith(rules.EQUALITY) for rule in unlike):
        return False
    return equal or (bytewise and not any(rule.startswith(rules.ENCODING) for rule in unlike))


def statement(
    index: QualifiedName,
    about: About,
    table: Any,
    where: ColumnElement[bool],
    strict: bool,
    max_staleness: timedelta | None,
) -> Any:
    """The statement that finds the shards and primary keys of entries, if `strict` of intents, too, that meet a
    condition."""
    entries = _of(index, about, table, where)
    if max_staleness is not None:
        # A sub-select: it runs once, before any entry is read.
        fresh = func.roir.fresh(cast(index.sql, REGCLASS), literal(max_staleness, Interval(native=True)))
        entries = entries.where(select(fresh).scalar_subquery())
    if not strict:
        return entries
    return union_all(entries, _of(QualifiedName("roir_data", f"g{about.generation}_announced"), about, table, where))


def _of(name: QualifiedName, about: About, table: Any, where: ColumnElement[bool]) -> Select[Any]:
    columns: list[Any] = [new_column(c.name, c.type) for c in table.columns if c.name in about.columns]
    seen: Any = new_table(name.name, *columns, new_column(about.shard_column, Text()), schema=name.schema).alias("e")

    def of_the_entry(element: Any, **_: Any) -> Any:
        if isinstance(element, ColumnElement) and table.c.contains_column(element):
            return seen.c[element.name]
        return None

    key = [seen.c[one.name] for one in about.primary_key]
    ticks = select(func.roir.ticks(about.generation, type_=JSONB)).scalar_subquery()
    shard = seen.c[about.shard_column]
    wanted = [shard.label("p0"), cast(ticks[shard].astext, BigInteger).label("p01"), key_text(key).label("p02")]
    # Not by the types of the table's columns, which may give back another value than they took.
    wanted += [
        _exact(c, one.type).label(f"p{i}") for i, (c, one) in enumerate(zip(key, about.primary_key, strict=True), 1)
    ]
    return select(*wanted).where(replacement_traverse(where, {}, of_the_entry))


def _exact(column: ColumnElement[Any], of: str) -> ColumnElement[Any]:
    """SQL for a value that comes back unchanged: its text, if that depends on no setting; else the driver's value."""
    if of.startswith(BY_DRIVER):
        return type_coerce(column, NULLTYPE)
    return func.concat(column, type_=Text())


def state_of(error: DBAPIError) -> str:
    """The SQLSTATE of an error of any driver."""
    return getattr(error.orig, "pgcode", None) or getattr(error.orig, "sqlstate", None) or ""


def is_away(error: DBAPIError) -> bool:
    """True if the error means that a server can't be asked now."""
    return not state_of(error) or state_of(error).startswith(AWAY)


def _near(engine: Engine, index: QualifiedName) -> str:
    """The end of the refusal of an index's name: the nearest view that the reader may see, if there is one."""

    def ask(connection: Connection) -> QualifiedName | None:
        found = connection.execute(select(func.current_schemas(False))).scalar_one()
        return catalog.near(connection, index, [index.schema] if index.schema else list(found), "v")

    with suppress(DBAPIError):
        return meant(with_session(engine, ask))
    return ""


def translated(index: QualifiedName, error: DBAPIError) -> RoirError:
    """The reader's error for an error of the index server."""
    kinds: dict[str, type[RoirError]] = {STALE: StaleAnswer, NOT_READY: NotStrict, NO_RIGHT: RightMissing}
    kind = kinds.get(state_of(error))
    if kind is not None:
        return kind(said(error))
    if is_away(error):
        return IndexUnreachable(f"index {index}: its server can't be asked: {first_line(error)}")
    return RoirError(f"index {index}: {said(error)}")


def with_session(engine: Engine, ask: Callable[[Connection], T]) -> T:
    """Asks in a session of its own; asks again if the pooled session was lost since its last use."""
    try:
        with engine.connect() as connection:
            return ask(connection)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    with engine.connect() as connection:
        return ask(connection)


def key_text(columns: Sequence[ColumnElement[Any]]) -> ColumnElement[str]:
    """SQL for a text that identifies a primary key: Python's values may be unhashable, or equal where the server's
    aren't."""
    return cast(func.row(*columns), Text)


def read(connection: Connection, wanted: Any) -> dict[str, Named]:
    """The named primary keys, by the names of the shards."""
    found: dict[str, Named] = {}
    for shard, tick, text, *key in connection.execute(wanted):
        found.setdefault(shard, Named({}, tick or 0)).keys[text] = tuple(key)
    return found
