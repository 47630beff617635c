"""Decides from the shape of a SQLAlchemy statement which of its conditions an index can serve.

Only conditions of WHERE that are connected by AND count: a column of a table compared with a bound value by `=` or
`IN`, or `IS NULL`. Everything else stays what it is.
"""

from __future__ import annotations

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
    """A condition on a column of an index. bind: the name of its value among the compiled statement's parameters."""

    column: KeyColumn
    kind: str
    bind: str | None
    type: Any


@dataclass(frozen=True, eq=False)
class Target:
    """A table or alias in a statement, `from_`, whose rows an index can find. named: as the session finds the table."""

    index: Index
    pins: tuple[Pin, ...]
    from_: Any
    named: tuple[str | None, str]


@dataclass
class _Condition:
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


def targets(statement: Any, compiled: Any, registry: Registry, schemas: Mapping[Any, Any]) -> tuple[Target, ...]:
    """The tables of a statement that indexes can restrict.

    compiled: the statement's compiled form. schemas: its schema_translate_map.
    """
    by_from: dict[Any, list[_Condition]] = {}
    for leaf in leaves(statement._where_criteria):
        found = _condition(leaf)
        if found is not None and _table(found.column) is not None:
            by_from.setdefault(found.column.table, []).append(found)
    plain = _is_plain(statement)
    chosen = []
    for from_, conditions in by_from.items():
        table = from_ if isinstance(from_, Table) else from_.element
        schema = schemas.get(table.schema, table.schema) if schemas else table.schema
        best = _best(registry.of(schema, table.name), conditions, compiled, plain)
        if best is not None:
            chosen.append(Target(*best, from_, (schema, table.name)))
    return tuple(chosen)


def _condition(leaf: Any) -> _Condition | None:
    if not isinstance(leaf, BinaryExpression):
        return None
    left, right, operator = leaf.left, leaf.right, leaf.operator
    if operator is operators.eq:
        if isinstance(right, Column) and isinstance(left, BindParameter):
            left, right = right, left
        if isinstance(left, Column) and isinstance(right, BindParameter) and not right.expanding:
            return _Condition(left, EQUAL, right)
    elif operator is operators.in_op:
        if isinstance(left, Column) and isinstance(right, BindParameter) and right.expanding:
            return _Condition(left, ONE_OF, right)
    elif operator is operators.is_ and isinstance(left, Column) and isinstance(right, Null):
        return _Condition(left, NULL, None)
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
    indexes: Sequence[Index], conditions: Sequence[_Condition], compiled: Any, plain: bool
) -> tuple[Index, tuple[Pin, ...]] | None:
    best: tuple[Index, tuple[Pin, ...]] | None = None
    pinned = {one.column.name for one in conditions if one.kind != NULL}
    for index in indexes:
        # The planner needs no help.
        if index.parts <= pinned:
            continue
        pins = []
        for column in index.key:
            pin = _pin(column, conditions, compiled)
            if pin is None:
                break
            pins.append(pin)
        if not pins or not (plain or any(pin.kind != NULL for pin in pins)):
            continue
        found = index, tuple(pins)
        if best is None or _rank(*found) > _rank(*best):
            best = found
    return best


def _rank(index: Index, pins: Sequence[Pin]) -> tuple[bool, int, int]:
    """One row is best, then many conditions, then a short key."""
    exact = len(pins) >= index.unique and all(pin.kind == EQUAL for pin in pins)
    return exact, len(pins), -len(index.key)


def _pin(column: KeyColumn, conditions: Sequence[_Condition], compiled: Any) -> Pin | None:
    """The best condition on a column that can be asked for."""
    for kind in (EQUAL, ONE_OF, NULL):
        for one in conditions:
            if one.kind != kind or one.column.name != column.name:
                continue
            if one.bind is None:
                return Pin(column, NULL, None, None)
            sent = compiled.binds.get(one.bind.key)
            # SQLAlchemy writes such a value into the text, and no parameter has it.
            if sent in compiled.literal_execute_params:
                continue
            if sent is not None and _is_typed(sent.type, compiled.dialect):
                return Pin(column, kind, compiled.bind_names[sent], sent.type)
    return None


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


def may_turn_none(type_: Any) -> bool:
    """True if a type can bind None to a value other than NULL."""
    return isinstance(type_, TypeDecorator) or bool(type_.should_evaluate_none)
