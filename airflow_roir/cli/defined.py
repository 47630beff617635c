"""The options that define an index, declared once for all commands that take a definition."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from airflow_roir.cli import complete
from airflow_roir.definition import IndexDefinition
from airflow_roir.errors import Complaints

# The placeholder in a command's signature: `takes` replaces it by these options, by their names.
Defined = Annotated[dict[str, Any], "the options that define an index"]

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "table": (
        str | None,
        typer.Option("--table", help="The table to index, for a new index.", autocompletion=complete.tables),
    ),
    "keys": (str | None, typer.Option("--keys", help="Key columns or expressions, comma-separated, in order.")),
    "where": (str | None, typer.Option("--where", help="Only rows that satisfy this condition get entries.")),
    "include": (str | None, typer.Option("--include", help="Included columns or expressions, comma-separated.")),
    "unique": (
        bool,
        typer.Option(
            "--unique", help="No two rows may have the same key, over all partitions, or shards. A rebuild keeps it."
        ),
    ),
    "nulls_not_distinct": (
        bool,
        typer.Option("--nulls-not-distinct", help="With --unique: keys with NULLs count, too."),
    ),
    "shards": (
        str | None,
        typer.Option("--shards", help="The shards that have the table, comma-separated, for an index over shards."),
    ),
    "shard_column": (
        str | None,
        typer.Option("--shard-column", help="The view's column with the shard's name; by default shard."),
    ),
}
PARAMETERS = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[kind, option],
    )
    for name, (kind, option) in _OPTIONS.items()
]


def definition_of(index: str, defined: dict[str, Any], complaints: Complaints) -> IndexDefinition:
    """The definition as the command line gives it. complaints: gets what is wrong with it."""
    return IndexDefinition.parse(index, **{name: defined[name] for name in _OPTIONS}, complaints=complaints)
