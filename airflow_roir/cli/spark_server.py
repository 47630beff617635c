"""The command that keeps Spark running: spark-server."""

from __future__ import annotations

import typer

from airflow_roir.cli.app import Conf, Master, app
from airflow_roir.cli.spark import spark_options


@app.command("spark-server")
def spark_server(master: Master = None, conf: Conf = None) -> None:
    """Keep Spark running, for your commands and tasks on this machine, which then begin at once. Ends with Ctrl-C."""
    options = spark_options(master, conf)
    from airflow_roir.spark.log_file import spark_log
    from airflow_roir.spark.server import serve

    raise typer.Exit(serve(options, spark_log("server")))
