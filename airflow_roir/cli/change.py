"""The command `change`: changes the options of a live operation."""

from __future__ import annotations

import typer

from airflow_roir.cli.app import (
    Index,
    app,
    database_of,
    say,
    show,
)
from airflow_roir.cli.given import Given, Wrong, is_live, settle_of_index, takes
from airflow_roir.options import BuildOptions


@app.command()
@takes(BuildOptions, is_live, changes=True)
def change(
    context: typer.Context,
    index: Index,
    *,
    given: Given,
    wrong: Wrong,
) -> None:
    """Change an unfinished operation, running or paused. Workers follow at their next batch."""
    from airflow_roir.engine.control import live_options, operations, requests
    from airflow_roir.engine.control.slow_options import slow_operation

    settle_of_index(context, wrong, index, given)
    database = database_of(context)
    before = operations.find_operation(database, index)
    after = requests.change_options(
        database,
        index,
        actor=operations.default_actor(),
        **given,
    )
    show(live_options.told(before, after))
    for line in slow_operation(database, after):
        say(line)
