"""The command `report`: prints an operation as one page, for a change ticket."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import Index, app, database_of, show_as_it_is


@app.command()
def report(
    context: typer.Context,
    index: Index,
    operation: Annotated[
        int | None,
        typer.Option(help="The number of an operation; by default the latest build, with what followed."),
    ] = None,
    in_html: Annotated[bool, typer.Option("--html", help="HTML instead of Markdown.")] = False,
) -> None:
    """Print an operation as one page, for a change ticket. Has what, when, who, pauses, verification, figures."""
    from airflow_roir.engine.snapshot import report as page

    show_as_it_is(page.write(database_of(context), index, operation, in_html))
