"""Commands that change an operation or an index: pause, abort, revert, drop, clean-up."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import AsJson, Index, Reason, app, database_of, last_look, print_json, say, show
from airflow_roir.cli.cells import printable
from airflow_roir.definition import argument


@app.command()
def pause(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Pause the running operation of an index. Workers commit their open batch, then stop."""
    from airflow_roir.engine.control import operations, requests
    from airflow_roir.engine.snapshot.operation import operation_status
    from airflow_roir.engine.snapshot.words import already_paused, paused_by, way_on
    from airflow_roir.operation import Status
    from airflow_roir.quantity import percent

    database = database_of(context)
    before = operations.find_operation(database, index)
    row = requests.pause(database, index, operations.default_actor(), reason)
    with last_look(f"index {index}: operation {row.id} is paused", f"roir status {argument(index)}"):
        status = operation_status(database, row.id)
        was = (before.id, before.paused_by, before.paused_at)
        if before.status == Status.PAUSED and was == (row.id, row.paused_by, row.paused_at):
            show(printable(f"index {index} is {already_paused(status)}"))
            return
        # Another user may have paused it first.
        at = percent(status.percent_complete)
        if status.paused_by is None:
            show(f"paused at {at}, and resumed since")
            return
        show(f"paused at {at} {printable(paused_by(status)).removeprefix('paused ')}; {printable(way_on(status))}")


@app.command()
def abort(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Abort an unfinished operation, and remove what it built. The table and the published index stay as they are."""
    from airflow_roir.engine import abort as aborts
    from airflow_roir.engine.control import operations

    row = aborts.abort(database_of(context), index, operations.default_actor(), reason, say)
    show(f"index {index}: operation {row.id} is {row.status}")


@app.command()
def revert(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Undo the last rebuild, within its revert window. Readers see the generation that it replaced."""
    from airflow_roir.engine import revert as reverts
    from airflow_roir.engine.control import operations

    done = reverts.revert(database_of(context), index, operations.default_actor(), reason, say)
    show(f"index {done.index} shows the replaced generation again; the other one is kept for its revert window")


@app.command()
def drop(context: typer.Context, index: Index) -> None:
    """Drop an index, with its view and entries. With the source's last index, the capture goes, too."""
    from airflow_roir.engine import drop as drops
    from airflow_roir.engine.control import operations

    drops.drop_index(database_of(context), index, operations.default_actor(), say)
    show(f"index {index} dropped")


@app.command(name="rows-view")
def rows_view(
    context: typer.Context,
    index: Index,
    drop: Annotated[bool, typer.Option("--drop", help="Drop that view.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the view INDEX_rows, to read and write whole rows. Run it again to follow its table."""
    from airflow_roir.engine import whole_rows
    from airflow_roir.engine.control import operations

    change = whole_rows.drop_rows_view if drop else whole_rows.make_rows_view
    name = change(database_of(context), index, operations.default_actor(), say)
    if as_json:
        print_json({"index": index, "rows_view": None if drop else name})
        return
    show(f"view {name} dropped" if drop else f"view {name} shows whole rows; grant rights on it to its readers")


@app.command()
def queue(
    context: typer.Context,
    most: Annotated[
        int | None,
        typer.Option("--max", help="How many operations may run at the same time from now on; 0: no limit."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the operations that run, and those that wait. They start in this order."""
    from airflow_roir.engine.control import admission
    from airflow_roir.operation import Kind, Phase
    from airflow_roir.quantity import duration

    database = database_of(context)
    found = admission.queue(database) if most is None else admission.set_most(database, most)
    if as_json:
        print_json(found.as_dict())
        return
    show(f"at most {found.most} at the same time" if found.most is not None else "no limit: none waits")
    for one in (*found.running, *found.waiting):
        since = "" if one.seconds is None else f" for {duration(one.seconds)}"
        does = f"runs{since}" if one.place is None else f"waits{since}, place {one.place}"
        who = f", driven by {printable(one.owner)}" if one.owner and one.place is None else ""
        show(
            f"{printable(one.index)}: {Kind(one.kind).noun} {one.operation_id}, phase {Phase(one.phase).shown}, "
            f"priority {one.priority}, {does}{who}"
        )
    if not (found.running or found.waiting):
        show("nothing runs")


@app.command(name="clean-up")
def clean_up(context: typer.Context, as_json: AsJson = False) -> None:
    """Remove what finished operations have left.

    That is ghosts, deltas, retired generations after their revert window, and unfinished aborts.
    """
    from airflow_roir.engine import clean_up as cleaning
    from airflow_roir.engine.control import operations
    from airflow_roir.quantity import counted

    report = cleaning.clean_up(database_of(context), operations.default_actor())
    if as_json:
        print_json(report.as_dict())
        return
    show(
        f"removed: {counted(report.ghosts, 'ghost')}, {counted(report.deltas_dropped, 'delta')}, "
        f"{counted(report.generations_dropped, 'generation')}, {counted(report.guards_removed, 'view guard')}, "
        f"{counted(report.partition_entries, 'entry', 'entries')} of detached partitions, "
        f"{counted(report.invalid_indexes, 'invalid index', 'invalid indexes')}; "
        f"finished: {counted(report.operations_aborted, 'abort')}"
    )
    for line in report.warnings:
        show(f"warning: {line}")
    for line in report.waiting:
        show(f"left for the next clean-up: {line}")
