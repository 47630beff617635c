"""Statements for psql that select the rows that share a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from airflow_roir.definition import QualifiedName, parse_name, quote
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.unique.duplicate_report import Duplicates, Group, Member, named
from airflow_roir.errors import NotFound

# Rows per statement; more make a condition that the planner reads for long.
ROWS = 500
# Characters that a terminal would obey, or that psql, which reads line by line, would take for the end of a line.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def statements(of: Duplicates, group: Group) -> Iterator[str]:
    """A comment, then SELECTs of the group's rows by primary key.

    For an index over shards, they select the index's entries, which name the shards.

    Raises NotFound if the table was dropped, or has another primary key now.
    """
    source = of.source
    if source is None or any(len(one.primary_key) != len(source.primary_key) for one in group.rows):
        raise NotFound(f"index {of.index}: its table, or the table's primary key, is gone; there is nothing to select")
    yield f"-- {_CONTROL.sub(_numbered, named(of.key, group.key))}"
    for start in range(0, len(group.rows), ROWS):
        listed = ", ".join(_row(source, one) for one in group.rows[start : start + ROWS])
        columns = ", ".join(identifier(name) for name in source.primary_key)
        columns = f"({columns})" if len(source.primary_key) > 1 else columns
        # Rows in shards are selected through the index, which has a column for the shard.
        what = "*" if of.apart else "tableoid::pg_catalog.regclass AS partition, *"
        name = parse_name(of.index) if of.apart else source.name
        yield f"SELECT {what} FROM {_name(name)} WHERE {columns} IN ({listed});"


def _row(source: Source, member: Member) -> str:
    values: Sequence[str] = [
        f"{literal(value or '')}::{type_}" for value, type_ in zip(member.primary_key, source.comparands, strict=True)
    ]
    return f"({', '.join(values)})" if len(values) > 1 else values[0]


def _name(name: QualifiedName) -> str:
    return ".".join(identifier(part) for part in (name.schema, name.name) if part is not None)


def literal(value: str) -> str:
    """A value as a string constant of printable characters, right with standard_conforming_strings on or off."""
    text = value.replace("'", "''")
    if "\\" not in text and not _CONTROL.search(text):
        return f"'{text}'"
    return f"E'{_CONTROL.sub(_numbered, text.replace(chr(92), chr(92) * 2))}'"


def identifier(name: str) -> str:
    """A name, quoted, of printable characters."""
    if not _CONTROL.search(name):
        return quote(name)
    numbered = _CONTROL.sub(lambda sign: f"\\{ord(sign[0]):04x}", name.replace("\\", "\\\\"))
    return f"U&{quote(numbered)}"


def _numbered(sign: re.Match[str]) -> str:
    return f"\\u{ord(sign[0]):04x}"
