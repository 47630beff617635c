"""The command `reference`: makes a foreign key to the key of a unique index."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from airflow_roir.cli.app import AsJson, Conf, Index, Master, WithoutSpark, app, database_of, say, show
from airflow_roir.cli.given import Given, Wrong, settle_of_index, takes
from airflow_roir.cli.last_line import begins
from airflow_roir.options import ReferenceOptions


class OnDelete(str, Enum):
    """The values of --on-delete, as in SQL."""

    NO_ACTION = "no-action"
    RESTRICT = "restrict"
    CASCADE = "cascade"
    SET_NULL = "set-null"
    SET_DEFAULT = "set-default"


class OnUpdate(str, Enum):
    """The values of --on-update, as in SQL."""

    NO_ACTION = "no-action"
    CASCADE = "cascade"


@app.command()
@takes(ReferenceOptions)
def reference(
    context: typer.Context,
    child: Annotated[str, typer.Argument(help="The table with its columns: 'payments(order_id)', quoted as in SQL.")],
    index: Index,
    on_delete: Annotated[
        OnDelete, typer.Option(help="The action on a delete of a referenced row.", show_default=True)
    ] = OnDelete.NO_ACTION,
    on_update: Annotated[OnUpdate, typer.Option(help="The action on a change of its key.")] = OnUpdate.NO_ACTION,
    deferred: Annotated[bool, typer.Option("--deferred", help="Check at the commit: INITIALLY DEFERRED.")] = False,
    constraint: Annotated[
        str | None, typer.Option(help="The name of the foreign key; by default TABLE_COLUMN_fkey.", show_default=False)
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Names of the columns to add, separated by commas; by default order_created for order_id.",
            show_default=False,
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Drop the foreign key with its columns and triggers instead.")
    ] = False,
    *,
    given: Given,
    wrong: Wrong,
    without_spark: WithoutSpark = False,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Make a foreign key to a unique index. Checks the rows that are there, while users write."""
    from airflow_roir.definition import parse_columns, parse_name
    from airflow_roir.engine.control import live_options, operations
    from airflow_roir.engine.reference import prepare, removal

    names: tuple[str, ...] = ()
    with wrong.noted():
        names = parse_columns(columns, "--columns")
    with wrong.noted():
        if constraint is not None:
            constraint = parse_name(constraint, "--constraint").name
    settle_of_index(context, wrong, index, given)
    database = database_of(context)
    actor = operations.default_actor()
    if remove:
        removed = removal.remove_named(database, index, child, actor, say)
        show(f"removed: {', '.join(removed)}")
        return
    from airflow_roir.cli.execute import run_and_print
    from airflow_roir.cli.spark import spark_or_threads

    options = ReferenceOptions.asked(**given)
    live_options.check_throttle(database, options.throttle)
    with spark_or_threads(without_spark, database.dsn, master, conf) as spark:
        spark.check()
        begins()
        begun = prepare.begin(
            database,
            child,
            index,
            options,
            actor,
            on_delete=on_delete.value,
            on_update=on_update.value,
            deferred=deferred,
            name=constraint,
            added=names,
            report=say,
        )
        if begun.adopted:
            say(f"index {begun.index}: continuing unfinished foreign key, operation {begun.operation_id}")
        spark.start(begun.operation_id)
        run_and_print(database, begun.index, spark, as_json=as_json)
