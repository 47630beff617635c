"""The look-up: the statement that asks `roir.look_up` for the primary keys of rows, and its answer.

The values of a condition reach the server as they do in the application's own statement, by the same driver and with
the same types. There they become constants of their types. So a look-up compares as the statement does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roir_client.registry import Index, KeyColumn

EQUAL, ONE_OF, NULL = "=", "IN", "IS NULL"
FOUND, MANY = "found", "many"


@dataclass(frozen=True)
class Found:
    """The answer of `roir.look_up`: the primary keys of the rows, as texts."""

    outcome: str
    keys: Sequence[Sequence[str]] | None = None
    said: str | None = None

    def constants(self, column: int) -> str:
        """SQL for `IN` of the values that the rows have in a column of the primary key.

        One list for each column: with a list of whole keys the planner takes five times as long for 100 rows in 95 of
        600 partitions.
        """
        values = sorted({row[column] for row in self.keys or ()})
        return ", ".join(_quoted(value) for value in values) or "NULL"


def answer(told: Sequence[Sequence[str]] | Sequence[str], most: int) -> Found:
    """The rows that `roir.look_up` has found, or why nothing is known."""
    if told and isinstance(told[0], str):
        return Found(told[0], said=str(told[1]) if len(told) > 1 else None)
    return Found(FOUND, told) if len(told) <= most else Found(MANY)


# Drivers and SQLAlchemy take % and : for parameters.
_ESCAPED = str.maketrans({"'": "''", "%": "\\045", ":": "\\072"})


def _quoted(value: str) -> str:
    return "E'" + value.replace("\\", "\\\\").translate(_ESCAPED) + "'"


def statement(
    index: Index, named: Sequence[str], asked: Sequence[tuple[KeyColumn, str, Sequence[str]]], most: int
) -> str:
    """The statement that looks up.

    named: the table's schema, perhaps, and name, as the application's statement has them. asked: the columns, each with
    how it is compared, and SQL for the values.
    """
    name = ".".join('"' + part.replace('"', '""') + '"' for part in named)
    arguments = (
        str(index.generation),
        str(index.view),
        str(index.source),
        _quoted(name),
        _array(column.name for column, _, _ in asked),
        _array(kind for _, kind, _ in asked),
        _array("{" + ",".join(map(str, column.accepts)) + "}" for column, _, _ in asked),
        _array(index.identity),
        str(most),
        f"ARRAY[{', '.join(_types(values) for _, _, values in asked)}]",
        f"ARRAY[{', '.join(_literal(kind, values) for _, kind, values in asked)}]",
    )
    return f"SELECT roir.look_up({', '.join(arguments)})"


def _array(texts: Iterable[str]) -> str:
    """A constant, which the server parses faster than the array's elements."""
    elements = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return _quoted("{" + ",".join(f'"{element}"' for element in elements) + "}")


def _types(values: Sequence[str]) -> str:
    if not values:
        return "NULL"
    return f"concat_ws(',', {', '.join(f'CAST(pg_typeof({value}) AS oid)' for value in values)})"


def _literal(kind: str, values: Sequence[str]) -> str:
    if not values:
        return "NULL"
    if kind == EQUAL:
        return f"format('%L', {values[0]})"
    texts = ", ".join(f"format('%s', {value})" for value in values)
    return f"format('%L', ARRAY[{texts}])"
