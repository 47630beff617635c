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
    """The answer of `roir.look_up`. constants: SQL, for each column of the primary key, None if no row was found."""

    outcome: str
    entries: int | None
    constants: Sequence[str | None] | None
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
    """The statement that looks up. named: SQL for the arguments named, columns, identity and most, in order."""
    name, columns, identity, most = named
    return (
        "SELECT outcome, entries, constants, said FROM roir.look_up("
        f"{generation}, CAST({view} AS oid), CAST({source} AS oid), {name}, {columns}, "
        f"ARRAY[{', '.join(conditions)}], {identity}, {most})"
    )
