"""Commands for partitions that come and go."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import AsJson, Reason, app, database_of, print_json, say, show
from airflow_roir.quantity import counted


@app.command(name="detach-partition")
def detach_partition(
    context: typer.Context,
    partition: Annotated[str, typer.Argument(help="The partition: name or schema.name, quoted as in SQL.")],
    reason: Reason = "",
    drop: Annotated[bool, typer.Option("--drop", help="Drop the partition once it is detached.")] = False,
) -> None:
    """Detach a partition from its table and from all indexes. Rows and entries disappear at the same moment."""
    from airflow_roir.engine.control import operations
    from airflow_roir.engine.partitions import detach as detaching

    removed = detaching.detach_partition(
        database_of(context), partition, operations.default_actor(), reason, drop, report=say
    )
    show(f"partition {partition} {'dropped' if drop else 'detached'}; {counted(removed, 'entry', 'entries')} removed")


@app.command(name="attach-partition")
def attach_partition(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The source, or a partition of it that has partitions itself.")],
    partition: Annotated[str, typer.Argument(help="The loaded table that becomes a partition.")],
    bounds: Annotated[str, typer.Argument(help="As in ATTACH PARTITION: FOR VALUES … or DEFAULT.")],
) -> None:
    """Attach a loaded table as a partition, with its entries. Rows and entries appear at the same moment."""
    from airflow_roir.engine.control import operations
    from airflow_roir.engine.partitions import attach as attaching

    copied = attaching.attach_partition(database_of(context), table, partition, bounds, operations.default_actor(), say)
    show(f"{partition} attached to {table}; {counted(copied, 'entry', 'entries')} added")


@app.command(name="sync-partitions")
def sync_partitions(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The source: name or schema.name, quoted as in SQL.")],
    as_json: AsJson = False,
) -> None:
    """Repair indexes after a plain DROP, DETACH or ATTACH. Does so for all indexes of the partition's table."""
    from airflow_roir.engine.control import operations
    from airflow_roir.engine.partitions import sync

    report = sync.sync_partitions(database_of(context), table, operations.default_actor(), say)
    if as_json:
        print_json(report.as_dict())
        return
    show(
        f"gone: {', '.join(report.gone) or 'none'}, {counted(report.entries_removed, 'entry', 'entries')} removed; "
        f"came: {', '.join(report.came) or 'none'}, {counted(report.entries_added, 'entry', 'entries')} added",
    )
