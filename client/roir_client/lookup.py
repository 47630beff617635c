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
    """The answer of `roir.look_up`: the primary keys of the rows, as texts."""

    outcome: str
    keys: Sequence[Sequence[str]] | None
    said: str | None

    def constants(self, column: int) -> str:
        """SQL for `IN` of the values that the rows have in a column of the primary key.

        One list for each column: with a list of whole keys the planner takes five times as long for 100 rows in 95 of
        600 partitions. No % is in it, which drivers take for a parameter.
        """
        values = sorted({row[column] for row in self.keys or ()})
        return ", ".join(_quoted(value) for value in values) or "NULL"


def _quoted(value: str) -> str:
    return "E'" + value.replace("\\", "\\\\").replace("'", "''").replace("%", "\\045") + "'"


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
        "SELECT outcome, keys, said FROM roir.look_up("
        f"{generation}, CAST({view} AS oid), CAST({source} AS oid), {name}, {columns}, "
        f"ARRAY[{', '.join(conditions)}], {identity}, {most})"
    )
