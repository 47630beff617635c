"""The command `metrics`: prints metrics, writes them to a file for node_exporter, or serves them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from airflow_roir.cli.app import app, database_of, dsn_of, say, show_as_it_is


@app.command()
def metrics(
    context: typer.Context,
    textfile: Annotated[
        Path | None, typer.Option(help="Write them to this file, NAME.prom, for node_exporter's textfile collector.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Serve them at host:port, until Ctrl-C, for Prometheus to scrape.")
    ] = None,
) -> None:
    """Print metrics of indexes and operations. The format is Prometheus's text."""
    if textfile is not None and listen is not None:
        raise typer.BadParameter("--textfile and --listen are two ways to the same: give one")
    dsn_of(context)
    from airflow_roir.cli.metrics_text import check_textfile, text_of, write_textfile

    if textfile is not None:
        check_textfile(textfile)
    database = database_of(context).named("roir metrics")
    if listen is not None:
        from airflow_roir.cli.metrics_server import serving

        told = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: told.set())
        with serving(database, listen) as address:
            say(f"serving metrics at http://{address}/metrics")
            told.wait()
        return
    text, problem = text_of(database)
    if textfile is not None:
        write_textfile(textfile, text)
    else:
        show_as_it_is(text.decode().rstrip("\n"))
    if problem is not None:
        say(problem)
        raise typer.Exit(1)
