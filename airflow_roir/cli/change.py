"""The command that changes a live operation's options."""

from __future__ import annotations

import typer

from airflow_roir.cli.app import (
    AbortAfter,
    BatchRows,
    Index,
    MaxDuration,
    MaxRows,
    Parallelism,
    Priority,
    ShardParallelism,
    Throttle,
    WarnAfter,
    Windows,
    app,
    database_of,
    say,
    show,
    work_options,
)


@app.command()
def change(
    context: typer.Context,
    index: Index,
    parallelism: Parallelism = None,
    batch_rows: BatchRows = None,
    max_rows_per_second: MaxRows = None,
    shard_parallelism: ShardParallelism = None,
    throttle: Throttle = None,
    windows: Windows = None,
    max_duration: MaxDuration = None,
    priority: Priority = None,
    warn_after: WarnAfter = None,
    abort_after: AbortAfter = None,
) -> None:
    """Change an unfinished operation, running or paused. Workers follow at their next batch."""
    from airflow_roir.engine import live_options, operations
    from airflow_roir.engine.forecast.slow import slow_operation

    database = database_of(context)
    before = operations.find_operation(database, index)
    after = operations.change_options(
        database,
        index,
        actor=operations.default_actor(),
        parallelism=parallelism,
        batch_rows=batch_rows,
        max_rows_per_second=max_rows_per_second,
        shard_parallelism=shard_parallelism,
        **work_options(throttle, windows, max_duration, priority, warn_after, abort_after),
    )
    show(live_options.told(before, after))
    for line in slow_operation(database, after):
        say(line)
