"""The look-up: the statement that asks `roir.look_up` for the primary keys of rows, and its answer.

The values of a condition reach the server as they do in the application's own statement, by the same driver and with
the same types. There they become constants of their types. So a look-up compares as the statement does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roir_client.registry import Index

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
        600 partitions.
        """
        values = sorted({row[column] for row in self.keys or ()})
        return ", ".join(_quoted(value) for value in values) or "NULL"


# Drivers and SQLAlchemy take % and : for parameters.
_ESCAPED = str.maketrans({"'": "''", "%": "\\045", ":": "\\072"})


def _quoted(value: str) -> str:
    return "E'" + value.replace("\\", "\\\\").translate(_ESCAPED) + "'"


def condition(kind: str, values: Sequence[str], accepts: Sequence[tuple[int, str]]) -> str:
    """SQL for one of the conditions of `roir.look_up`. values: SQL for the values. accepts: of the key column."""
    if kind == NULL:
        return f"'{NULL}'"
    constants = [_constant(value, accepts) for value in values]
    if kind == EQUAL:
        return f"'= ' || {constants[0]}"
    return f"'IN (' || {' || chr(44) || '.join(constants)} || ')'"


def _constant(value: str, accepts: Sequence[tuple[int, str]]) -> str:
    """NULL if the B-tree can't serve a comparison with the value's type."""
    casts = " ".join(f"WHEN {oid} THEN {_quoted(cast)}" for oid, cast in accepts)
    return f"format('%L', {value}) || CASE CAST(pg_typeof({value}) AS oid) {casts} END"


def statement(index: Index, named: Sequence[str], columns: Sequence[str], conditions: Sequence[str], most: int) -> str:
    """The statement that looks up.

    named: the table's schema, perhaps, and name, as the application's statement has them. columns, conditions: what
    is compared, and SQL for how.
    """
    name = ".".join('"' + part.replace('"', '""') + '"' for part in named)
    return (
        f"SELECT outcome, keys, said FROM roir.look_up({index.generation}, CAST({index.view} AS oid), "
        f"CAST({index.source} AS oid), {_quoted(name)}, {_texts(columns)}, ARRAY[{', '.join(conditions)}], "
        f"{_texts(index.identity)}, {most})"
    )


def _texts(values: Sequence[str]) -> str:
    return f"ARRAY[{', '.join(map(_quoted, values))}]"
