"""The command that compares an index with its source: verify."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import (
    AbortAfter,
    AsJson,
    Conf,
    Index,
    Master,
    Parallelism,
    Priority,
    Throttle,
    WarnAfter,
    Windows,
    app,
    database_of,
    say,
    work_options,
)
from airflow_roir.options import VerifyOptions
from airflow_roir.span import seconds


@app.command(name="verify")
def verify_command(
    context: typer.Context,
    index: Index,
    parallelism: Parallelism = None,
    sample: Annotated[
        str | None,
        typer.Option(
            help="Compare only this percentage of the index, chosen at random: 1% or 1.", metavar="PERCENTAGE"
        ),
    ] = None,
    max_duration: Annotated[
        str | None, typer.Option(help="Stop after so long of work, 2h or 90min; the rest isn't compared.")
    ] = None,
    slices: Annotated[
        int | None,
        typer.Option(help="Compare the index in this many verifications; each continues where the last one stopped."),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what is found.")] = False,
    amcheck: Annotated[bool, typer.Option("--amcheck", help="Check the structure of the B-trees, too.")] = False,
    without_spark: Annotated[bool, typer.Option("--without-spark", help="Compare by threads of this command.")] = False,
    throttle: Throttle = None,
    windows: Windows = None,
    priority: Priority = None,
    warn_after: WarnAfter = None,
    abort_after: AbortAfter = None,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Compare an index with its source while users write. Exit code 1: they differ, and not all is repaired."""
    from airflow_roir.cli.execute import carry_on_verification, print_report, verify_by_threads
    from airflow_roir.cli.spark import CommandSpark
    from airflow_roir.engine import live_options, operations
    from airflow_roir.engine.verify import verification

    database = database_of(context)
    options = VerifyOptions(
        parallelism=VerifyOptions.parallelism if parallelism is None else parallelism,
        sample=_per_cent(sample),
        max_seconds=seconds("--max-duration", max_duration),
        slices=slices,
        repair=repair,
        amcheck=amcheck,
        **work_options(throttle, windows, None, priority, warn_after, abort_after),
    )
    if without_spark:
        print_report(verify_by_threads(database, index, options), as_json)
        return
    live_options.check_throttle(database, options.throttle)
    with CommandSpark(database.dsn, master, conf) as spark:
        spark.start()
        begun = verification.begin(database, index, options, operations.default_actor(), report=say)
        if begun.adopted:
            say(f"continuing unfinished verification {begun.operation_id}, with the options that it has")
        report = carry_on_verification(database, begun.index, spark, quiet=as_json)
    print_report(report, as_json)


def _per_cent(sample: str | None) -> float | None:
    try:
        return None if sample is None else float(sample.removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"--sample takes a percentage, such as 1% or 1, not {sample!r}") from None
