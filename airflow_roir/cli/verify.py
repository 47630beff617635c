"""The command that compares an index with its source: verify."""

from __future__ import annotations

from typing import Annotated

import typer

from airflow_roir.cli.app import (
    AsJson,
    Conf,
    Index,
    Master,
    app,
    database_of,
    say,
)
from airflow_roir.cli.given import Given, takes
from airflow_roir.options import VerifyOptions


@app.command(name="verify")
@takes(VerifyOptions, lambda option: option.offered and option.name != "max_duration_s")
def verify_command(
    context: typer.Context,
    index: Index,
    *,
    given: Given,
    without_spark: Annotated[bool, typer.Option("--without-spark", help="Compare by threads of this command.")] = False,
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
    options = VerifyOptions.asked(**given)
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
