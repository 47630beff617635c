"""The command `verify`: compares an index with its source."""

from __future__ import annotations

import typer

from airflow_roir.cli.app import (
    AsJson,
    Conf,
    Index,
    Master,
    WithoutSpark,
    app,
    database_of,
    say,
)
from airflow_roir.cli.given import Given, Wrong, settle_of_index, takes
from airflow_roir.cli.last_line import begins
from airflow_roir.options import VerifyOptions


@app.command(name="verify")
@takes(VerifyOptions, lambda option: option.offered and option.name != "max_duration_s")
def verify_command(
    context: typer.Context,
    index: Index,
    *,
    given: Given,
    wrong: Wrong,
    without_spark: WithoutSpark = False,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Compare an index with its table while users write. Exits with 1 if a difference is left at the end."""
    from airflow_roir.cli.execute import run_and_print
    from airflow_roir.cli.spark import spark_or_threads
    from airflow_roir.engine.control import live_options, operations
    from airflow_roir.engine.verify import record

    settle_of_index(context, wrong, index, given)
    database = database_of(context)
    options = VerifyOptions.asked(**given)
    live_options.check_throttle(database, options.throttle)
    with spark_or_threads(without_spark, database.dsn, master, conf) as spark:
        spark.start()
        begins()
        begun = record.begin(database, index, options, operations.default_actor(), report=say)
        if begun.adopted:
            say(f"index {begun.index}: continuing unfinished verification {begun.operation_id}, with its options")
        run_and_print(database, begun.index, spark, as_json=as_json)
