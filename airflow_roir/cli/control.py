"""Commands that change what there is: pause, abort, revert, drop, partitions, clean-up."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import AsJson, Index, Reason, app, database_of, out, print_json, say
from airflow_roir.engine import abort as aborts
from airflow_roir.engine import attach as attaching
from airflow_roir.engine import cleanup, control, sync
from airflow_roir.engine import detach as detaching
from airflow_roir.engine import revert as reverts
from airflow_roir.engine.status import operation_status


@app.command()
def pause(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Pause the running operation of an index; workers stop within one batch, which they commit."""
    database = database_of(context)
    row = control.pause(database, index, control.default_actor(), reason)
    status = operation_status(database, row.id)
    out.print(f"paused at {status.percent_complete:g} %; resume with: roir resume {index}", markup=False)


@app.command()
def abort(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Abort an unfinished operation: source and active generation stay as they are."""
    row = aborts.abort(database_of(context), index, control.default_actor(), reason, say)
    out.print(f"operation {row.id} is {row.status}", markup=False)


@app.command()
def revert(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Show the generation again that the last rebuild replaced, within its revert window."""
    done = reverts.revert(database_of(context), index, control.default_actor(), reason, say)
    out.print(f"index {done.index} shows generation {done.shown}; {done.retired} is kept for a while", markup=False)


@app.command()
def drop(context: typer.Context, index: Index) -> None:
    """Drop an index: its view, its generations, and the capture of its source's writes."""
    aborts.drop_index(database_of(context), index, control.default_actor(), say)
    out.print(f"index {index} dropped", markup=False)


@app.command(name="detach-partition")
def detach_partition(
    context: typer.Context,
    partition: Annotated[str, typer.Argument(help="The partition, as SQL writes it.")],
    reason: Reason = "",
    drop: Annotated[bool, typer.Option("--drop", help="Drop it, once it is detached.")] = False,
) -> None:
    """Take a partition out of its table and out of all indexes: hidden at once, then removed in batches."""
    removed = detaching.detach_partition(
        database_of(context), partition, control.default_actor(), reason, drop, report=say
    )
    out.print(f"partition {partition} {'dropped' if drop else 'detached'}; {removed:,} entries removed", markup=False)


@app.command(name="attach-partition")
def attach_partition(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The source, or a level of its partitions.")],
    partition: Annotated[str, typer.Argument(help="The loaded table that becomes a partition.")],
    bounds: Annotated[str, typer.Argument(help="As in ATTACH PARTITION: FOR VALUES … or DEFAULT.")],
) -> None:
    """Make a loaded table a partition, with its entries in all indexes; both are seen from the same moment on."""
    copied = attaching.attach_partition(database_of(context), table, partition, bounds, control.default_actor(), say)
    out.print(f"{partition} attached to {table}; {copied:,} entries added", markup=False)


@app.command(name="sync-partitions")
def sync_partitions(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The source, as SQL writes it.")],
    as_json: AsJson = False,
) -> None:
    """Put all indexes of a table right after partitions were dropped, detached or attached without roir."""
    report = sync.sync_partitions(database_of(context), table, control.default_actor(), say)
    if as_json:
        print_json(report.as_dict())
        return
    out.print(
        f"gone: {', '.join(report.gone) or 'none'}, {report.entries_removed:,} entries removed; "
        f"came: {', '.join(report.came) or 'none'}, {report.entries_added:,} entries added",
        markup=False,
    )


@app.command(name="clean-up")
def clean_up(context: typer.Context, as_json: AsJson = False) -> None:
    """Remove ghosts, empty deltas, and retired generations whose revert window is over."""
    report = cleanup.clean_up(database_of(context), control.default_actor())
    if as_json:
        print_json(report.as_dict())
        return
    out.print(
        f"{report.ghosts} ghosts, {report.deltas_dropped} deltas, {report.generations_dropped} generations removed; "
        f"{report.operations_aborted} operations aborted, {report.guards_removed} guards removed from views, "
        f"{report.partition_entries} entries of partitions that left"
    )
    for line in report.warnings:
        out.print(f"warning: {line}", markup=False)
    for line in report.waiting:
        out.print(f"left for the next time: {line}", markup=False)
