"""Decides from the shape of a SQLAlchemy statement which of its conditions an index can serve.

Only conditions of WHERE that are connected by AND count: a column of a table compared with a bound value by `=` or
`IN`, or `IS NULL`. Everything else stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Column, Table
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList, Grouping, Null
from sqlalchemy.sql.selectable import Alias, Join, Select, TableValuedAlias
from sqlalchemy.types import TypeDecorator

from roir_client.lookup import EQUAL, NULL, ONE_OF
from roir_client.registry import Index, KeyColumn, Registry


@dataclass(frozen=True)
class Pin:
    """A condition on a column of an index. bind: the place of its value among the statement's bound parameters."""

    column: KeyColumn
    kind: str
    bind: int | None
    type: Any


@dataclass(frozen=True, eq=False)
class Target:
    """A table or alias in a statement whose rows an index can find. leaf: the place of a condition on it."""

    index: Index
    pins: tuple[Pin, ...]
    leaf: int
    named: tuple[str | None, str]


@dataclass
class _Condition:
    leaf: int
    column: Column[Any]
    kind: str
    bind: BindParameter[Any] | None


def leaves(criteria: Sequence[Any]) -> Iterator[Any]:
    """The conditions that are connected by AND."""
    for one in criteria:
        if isinstance(one, Grouping):
            yield from leaves((one.element,))
        elif isinstance(one, BooleanClauseList) and one.operator is operators.and_:
            yield from leaves(one.clauses)
        else:
            yield one


def column_of(leaf: Any) -> Column[Any]:
    """The column of a condition that `targets` chose."""
    return leaf.left if isinstance(leaf.left, Column) else leaf.right


def targets(
    statement: Any, binds: Sequence[BindParameter[Any]], registry: Registry, dialect: Any, schemas: Mapping[Any, Any]
) -> tuple[Target, ...]:
    """The tables of a statement that indexes can restrict.

    binds: the parameters of the statement's cache key. schemas: its schema_translate_map.
    """
    places = {id(bind): place for place, bind in enumerate(binds)}
    by_from: dict[Any, list[_Condition]] = {}
    for number, leaf in enumerate(leaves(statement._where_criteria)):
        found = _condition(number, leaf)
        if found is not None and _table(found.column) is not None:
            by_from.setdefault(found.column.table, []).append(found)
    plain = _is_plain(statement)
    chosen = []
    for from_, conditions in by_from.items():
        table = from_ if isinstance(from_, Table) else from_.element
        schema = schemas.get(table.schema, table.schema) if schemas else table.schema
        target = _best(registry.of(schema, table.name), (schema, table.name), conditions, places, dialect, plain)
        if target is not None:
            chosen.append(target)
    return tuple(chosen)


def _condition(number: int, leaf: Any) -> _Condition | None:
    if not isinstance(leaf, BinaryExpression):
        return None
    left, right, operator = leaf.left, leaf.right, leaf.operator
    if operator is operators.eq:
        if isinstance(right, Column) and isinstance(left, BindParameter):
            left, right = right, left
        if isinstance(left, Column) and isinstance(right, BindParameter) and not right.expanding:
            return _Condition(number, left, EQUAL, right)
    elif operator is operators.in_op:
        if isinstance(left, Column) and isinstance(right, BindParameter) and right.expanding:
            return _Condition(number, left, ONE_OF, right)
    elif operator is operators.is_ and isinstance(left, Column) and isinstance(right, Null):
        return _Condition(number, left, NULL, None)
    return None


def _table(column: Column[Any]) -> Table | None:
    """The table of a column, also by an alias; None if it is a column of something else."""
    from_: Any = column.table
    if isinstance(from_, Alias) and not isinstance(from_, TableValuedAlias):
        from_ = from_.element
    if not isinstance(from_, Table):
        return None
    entity = column._annotations.get("parententity")
    # A mapper that selects from something else than its table replaces the table's columns when it compiles.
    if entity is not None and (entity.mapper.with_polymorphic or entity.mapper.concrete):
        return None
    return from_


def _is_plain(statement: Any) -> bool:
    """False if rows of an outer join may have NULLs of their own, which IS NULL would find."""
    if not isinstance(statement, Select):
        return True
    return not statement._setup_joins and not any(isinstance(one, Join) for one in statement._from_obj)


def _best(
    indexes: Sequence[Index],
    named: tuple[str | None, str],
    conditions: Sequence[_Condition],
    places: Mapping[int, int],
    dialect: Any,
    plain: bool,
) -> Target | None:
    best: Target | None = None
    pinned = {one.column.name for one in conditions if one.kind != NULL}
    for index in indexes:
        # The planner needs no help.
        if index.parts <= pinned:
            continue
        pins = []
        leaf = None
        for column in index.key:
            pin, at = _pin(column, conditions, places, dialect)
            if pin is None:
                break
            pins.append(pin)
            leaf = at if leaf is None else leaf
        if leaf is None or not (plain or any(pin.kind != NULL for pin in pins)):
            continue
        found = Target(index, tuple(pins), leaf, named)
        if best is None or _rank(found) > _rank(best):
            best = found
    return best


def _rank(target: Target) -> tuple[bool, int, int]:
    """One row is best, then many conditions, then a short key."""
    exact = len(target.pins) >= target.index.unique and all(pin.kind == EQUAL for pin in target.pins)
    return exact, len(target.pins), -len(target.index.key)


def _pin(
    column: KeyColumn, conditions: Sequence[_Condition], places: Mapping[int, int], dialect: Any
) -> tuple[Pin | None, int]:
    """The best condition on a column that can be asked for, and its place."""
    for kind in (EQUAL, ONE_OF, NULL):
        for one in conditions:
            if one.kind != kind or one.column.name != column.name:
                continue
            if one.bind is None:
                return Pin(column, NULL, None, None), one.leaf
            place = places.get(id(one.bind))
            if place is not None and _is_typed(one.bind.type, dialect):
                return Pin(column, kind, place, one.bind.type), one.leaf
    return None, 0


def _is_typed(type_: Any, dialect: Any) -> bool:
    """True if the server learns a value's type from the value as it is sent, and no collation comes with it.

    psycopg2 sends constants. The others send parameters, whose types SQLAlchemy adds as casts, or psycopg by itself.
    """
    if type_._is_tuple_type or type_._is_array:
        return False
    impl = type_._unwrapped_dialect_impl(dialect)
    if getattr(impl, "collation", None) is not None:
        return False
    return bool(impl.render_bind_cast) or dialect.driver.startswith("psycopg")


# Values that psycopg sends with their type.
_TYPED = (int, float, Decimal, UUID, bytes, bool, date, datetime, time, timedelta)


def is_sent_typed(type_: Any, value: Any, dialect: Any) -> bool:
    """False if psycopg would leave the type of this value to the server, as that of a text without a cast."""
    if dialect.driver == "psycopg2" or type_._unwrapped_dialect_impl(dialect).render_bind_cast:
        return True
    process = type_._cached_bind_processor(dialect)
    return type(process(value) if process else value) in _TYPED


_ANONYMOUS = re.compile(r"%\(\d+ (.*)\)s")


def is_overridden(bind: BindParameter[Any], values: Mapping[str, Any]) -> bool:
    """True if one of the values given to the execution may be for this parameter under the name that it is compiled to.

    An anonymous parameter `no` is compiled to `no_1`, or `no_2`.
    """
    body = _ANONYMOUS.fullmatch(bind.key)
    if body is None:
        return False
    name = re.compile(re.escape(body[1]) + r"_\d+")
    return any(name.fullmatch(key) for key in values)


def may_turn_none(type_: Any) -> bool:
    """True if a type can bind None to a value other than NULL."""
    return isinstance(type_, TypeDecorator) or bool(type_.should_evaluate_none)
