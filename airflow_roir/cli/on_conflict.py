"""The command that makes the setting roir.on_conflict work for a table."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import app, database_of, say, show


@app.command(name="on-conflict")
def on_conflict(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table of a unique index: name or schema.name, quoted as in SQL.")],
    remove: Annotated[
        bool, typer.Option("--remove", help="Drop the triggers: the setting does nothing again.")
    ] = False,
) -> None:
    """Make SET roir.on_conflict = 'nothing' work for a table. It skips rows whose key another row has."""
    from airflow_roir.engine.control import operations
    from airflow_roir.engine.unique import on_conflict as settings

    settings.set_on_conflict(database_of(context), table, operations.default_actor(), remove, say)
    show(f"roir.on_conflict {'does nothing for' if remove else 'works for'} {table}")
