"""The look-up: the statement that asks `roir.look_up` for the primary keys of rows, and its answer.

The values of a condition reach the server as they do in the application's own statement, by the same driver and with
the same types. There they become constants of their types. So a look-up compares as the statement does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EQUAL, ONE_OF, NULL = "=", "IN", "IS NULL"
FOUND = "found"


@dataclass(frozen=True)
class Found:
    """The answer. outcome: as `roir.look_up` says it; with `found`, rows and partitions are SQL, None for no row."""

    outcome: str
    entries: int | None
    rows: str | None
    partitions: Sequence[str | None] | None
    said: str | None


def condition(kind: str, values: Sequence[str], accepts: str) -> str:
    """SQL for one of the conditions of `roir.look_up`. values, accepts: SQL for the values, and for `accepts`."""
    if kind == NULL:
        return f"'{NULL}'"
    constants = [_constant(value, accepts) for value in values]
    if kind == EQUAL:
        return f"'= ' || {constants[0]}"
    return f"'IN (' || {' || chr(44) || '.join(constants)} || ')'"


def _constant(value: str, accepts: str) -> str:
    """NULL if the B-tree can't serve a comparison with the value's type."""
    return f"format('%L', {value}) || (CAST({accepts} AS jsonb) ->> CAST(CAST(pg_typeof({value}) AS oid) AS text))"


def statement(generation: int, view: int, source: int, conditions: Sequence[str], named: Sequence[str]) -> str:
    """The statement that looks up. named: SQL for the arguments named, columns, identity, parts and most, in order."""
    name, columns, identity, parts, most = named
    return (
        "SELECT outcome, entries, rows, partitions, said FROM roir.look_up("
        f"{generation}, CAST({view} AS oid), CAST({source} AS oid), {name}, {columns}, "
        f"ARRAY[{', '.join(conditions)}], {identity}, {parts}, {most})"
    )
