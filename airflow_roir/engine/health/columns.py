"""Finds columns of a source that differ from those of a published generation."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import argument, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Column, Source


def problems(connection: Connection, index: str, source: Source, generation_id: int, entry: Entry) -> list[str]:
    """Differences between the source's columns and a published generation's, which the index's view can't follow."""
    base = execute(connection, "SELECT to_regclass(%(name)s)::oid", {"name": physical.base(generation_id)}).scalar_one()
    stored = {} if base is None else catalog.columns_of(connection, base)
    remedy = f"Drop the index and build it again: roir drop {argument(index)}"
    found = []
    for number, column in enumerate(entry.columns, start=1):
        now, then = source.columns.get(column.source), stored.get(f"c{number}")
        if now is None:
            found.append(
                f"index {index}: {source.sql} has no column {quote(column.source)} any more, so writes to it fail. "
                f"Rename the column back. Or: {remedy}"
            )
        elif then is not None and (now.type, now.collation) != (then.type, then.collation):
            found.append(
                f"index {index}: column {quote(column.source)} of {source.sql} is {_type(now)} now and {_type(then)} "
                f"in its entries, which may therefore be wrong. {remedy}"
            )
    key = [column.source for column in entry.columns[: entry.key]]
    identity = [column.source for column in entry.columns[: entry.identity]]
    if [*key, *(name for name in source.primary_key if name not in key)] != identity:
        found.append(
            f"index {index}: the primary key of {source.sql} is another one now, and the old one doesn't identify its "
            f"rows any more. {remedy}"
        )
    return found


def _type(column: Column) -> str:
    return column.type if column.collation is None else f"{column.type} COLLATE {column.collation}"
