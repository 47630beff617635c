"""Decides from a query of Django's ORM which of its conditions an index can serve.

Only conditions of WHERE that are connected by AND count: a column of the query's own table, or of one that is joined by
INNER, compared with values by `exact`, `in` or `isnull=True`. Everything else stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models.expressions import Col, ColPairs, Value
from django.db.models.fields.related_lookups import RelatedExact, RelatedIn, RelatedIsNull
from django.db.models.fields.tuple_lookups import TupleExact, TupleIn
from django.db.models.lookups import Exact, In, IntegerFieldExact, IsNull
from django.db.models.sql.constants import INNER
from django.db.models.sql.datastructures import BaseTable, Join
from django.db.models.sql.where import AND, WhereNode

from roir_client.lookup import EQUAL, NULL, ONE_OF
from roir_client.registry import Index, KeyColumn

# Subclasses mean something else.
_KINDS = {
    Exact: EQUAL,
    IntegerFieldExact: EQUAL,
    RelatedExact: EQUAL,
    In: ONE_OF,
    RelatedIn: ONE_OF,
    IsNull: NULL,
    RelatedIsNull: NULL,
}
_TUPLES = {TupleExact: EQUAL, TupleIn: ONE_OF}


@dataclass(frozen=True)
class Condition:
    """A condition on a column. leaf: what Django makes it of. place: of the column, if it compares several."""

    column: str
    kind: str
    leaf: Any
    place: int | None = None

    def parameters(self, compiler: Any) -> list[Any] | None:
        """The values as the statement sends them; None if it sends something else."""
        if self.kind == NULL:
            return []
        if self.place is not None:
            return self._of_tuples(compiler, self.place)
        sql, parameters = self.leaf.process_rhs(compiler, compiler.connection)
        marks = ["%s"] * len(parameters)
        return list(parameters) if sql == ("%s" if self.kind == EQUAL else f"({', '.join(marks)})") else None

    def _of_tuples(self, compiler: Any, place: int) -> list[Any] | None:
        field = list(self.leaf.lhs)[place].output_field
        found = []
        for row in [self.leaf.rhs] if self.kind == EQUAL else self.leaf.rhs:
            if any(value is None for value in row):
                continue
            sql, parameters = compiler.compile(Value(row[place], output_field=field))
            if sql != "%s":
                return None
            found += parameters
        return found or None


@dataclass(frozen=True)
class Target:
    """A table or alias in a query whose rows an index can find."""

    index: Index
    pins: tuple[tuple[KeyColumn, Condition], ...]
    alias: str
    named: tuple[str, ...]


def targets(query: Any, indexes: Mapping[str, tuple[tuple[str, ...], Sequence[Index]]]) -> list[Target]:
    """The tables of a query that indexes can restrict. indexes: by the name of a table, as Django has it."""
    by_alias: dict[str, list[Condition]] = {}
    for leaf in _leaves(query.where):
        for alias, condition in _conditions(leaf):
            by_alias.setdefault(alias, []).append(condition)
    chosen = []
    for alias, conditions in by_alias.items():
        table = query.alias_map.get(alias)
        if table is None or not query.alias_refcount.get(alias) or not _has_no_nulls_of_a_join(table):
            continue
        named, candidates = indexes.get(table.table_name, ((), ()))
        best = _best(candidates, conditions)
        if best is not None:
            chosen.append(Target(*best, alias, named))
    return chosen


def _leaves(node: Any) -> Iterator[Any]:
    """The conditions that are connected by AND."""
    if type(node) is not WhereNode:
        yield node
    elif not node.negated and (node.connector == AND or len(node.children) == 1):
        for child in node.children:
            yield from _leaves(child)


def _conditions(leaf: Any) -> Iterator[tuple[str, Condition]]:
    """The conditions on single columns that a leaf makes, each with the alias of its table."""
    kind = _KINDS.get(type(leaf))
    if kind is not None and type(leaf.lhs) is Col:
        if leaf.rhs is True if kind == NULL else leaf.rhs_is_direct_value() and not leaf.bilateral_transforms:
            yield leaf.lhs.alias, Condition(leaf.lhs.target.column, kind, leaf)
        return
    kind = _TUPLES.get(type(leaf))
    if kind is not None and type(leaf.lhs) is ColPairs and leaf.rhs_is_direct_value():
        for place, column in enumerate(leaf.lhs):
            yield column.alias, Condition(column.target.column, kind, leaf, place)


def _has_no_nulls_of_a_join(table: Any) -> bool:
    """False if rows of an outer join may have NULLs of their own. Django has no outer join but LEFT, from the left."""
    return type(table) is BaseTable or (type(table) is Join and table.join_type == INNER)


def _best(
    indexes: Sequence[Index], conditions: Sequence[Condition]
) -> tuple[Index, tuple[tuple[KeyColumn, Condition], ...]] | None:
    best: tuple[Index, tuple[tuple[KeyColumn, Condition], ...]] | None = None
    pinned = {one.column for one in conditions if one.kind != NULL}
    for index in indexes:
        # The planner needs no help.
        if index.parts <= pinned:
            continue
        pins = []
        for column in index.key:
            pin = _pin(column, conditions)
            if pin is None:
                break
            pins.append((column, pin))
        if pins and (best is None or _rank(index, pins) > _rank(*best)):
            best = index, tuple(pins)
    return best


def _rank(index: Index, pins: Sequence[tuple[KeyColumn, Condition]]) -> tuple[bool, int, int]:
    """One row is best, then many conditions, then a short key."""
    exact = len(pins) >= index.unique and all(pin.kind == EQUAL for _, pin in pins)
    return exact, len(pins), -len(index.key)


def _pin(column: KeyColumn, conditions: Sequence[Condition]) -> Condition | None:
    """The best condition on a column."""
    for kind in (EQUAL, ONE_OF, NULL):
        for one in conditions:
            if one.kind == kind and one.column == column.name:
                return one
    return None
