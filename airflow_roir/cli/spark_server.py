"""The command that keeps Spark running: spark-server."""

from __future__ import annotations

import typer

from airflow_roir.cli.app import Conf, Master, app


@app.command("spark-server")
def spark_server(master: Master = None, conf: Conf = None) -> None:
    """Keep Spark running, for your commands and tasks on this machine, which then begin at once. Ends with Ctrl-C."""
    from airflow_roir.cli.spark import spark_options
    from airflow_roir.spark.log_file import spark_log
    from airflow_roir.spark.server import serve

    raise typer.Exit(serve(spark_options(master, conf), spark_log("server")))
