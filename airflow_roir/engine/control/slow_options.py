"""Warnings of options that make a build slow, in words; shown once, when the options are given."""

from __future__ import annotations

from typing import Any

from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.database import Database, execute
from airflow_roir.operation import BUILDS, Phase
from airflow_roir.options import BuildOptions

# If its rate limit makes a copy last longer than this, the user may not know.
LONG_S = 3600
# This many commits alone take seconds.
MANY_BATCHES = 10_000
# A worker waits for PostgreSQL nearly all of its time, but each is a process.
WORKERS_PER_CORE = 2
RANGES_LEFT = "SELECT count(*) FROM roir.scan_range WHERE operation_id = %(operation)s AND NOT done"


def slow(options: BuildOptions | Any, rows: int, pieces: int | None = None, cores: int | None = None) -> list[str]:
    """One sentence for each option that makes an operation slow, if that matters for this many rows.

    options: those of a build, or an operation's row. rows: of the source, estimated. pieces: the ranges that are left.
    cores: of the machine, if all workers share one.
    """
    found = []
    batches = rows // options.batch_rows
    if batches > MANY_BATCHES:
        found.append(
            f"slow: batches of {options.batch_rows:,} rows make {batches:,} commits; "
            f"{BuildOptions.batch_rows:,} rows are usual (--batch-rows)"
        )
    rate = options.max_rows_per_second
    if rate and rows / rate > LONG_S:
        found.append(
            f"slow: at {rate:,} rows per second the copy of {rows:,} rows takes {rows / rate / 3600:,.1f} hours; you "
            "can change the limit while it runs (--max-rows-per-second)"
        )
    if pieces is not None and options.parallelism > max(pieces, BuildOptions.parallelism):
        ranges = "1 range is" if pieces == 1 else f"{pieces:,} ranges are"
        found.append(
            f"{options.parallelism} workers are asked for, but {ranges} left: the other workers aren't started"
        )
    if cores is not None and options.parallelism > cores * WORKERS_PER_CORE:
        found.append(
            f"slow: {options.parallelism} workers share {cores} {'core' if cores == 1 else 'cores'}; more than "
            f"{cores * WORKERS_PER_CORE} slow each other down (--parallelism)"
        )
    return found


def slow_operation(database: Database, row: OperationRow) -> list[str]:
    """One sentence for each option that makes a build slow; none for other operations.

    row: as `change_options` returns it.
    """
    if row.kind not in BUILDS:
        return []
    pieces = None
    if row.phase == Phase.BUILD:
        with database.transaction() as connection:
            pieces = execute(connection, RANGES_LEFT, {"operation": row.id}).scalar_one()
    return slow(row, row.rows_estimate or 0, pieces)
