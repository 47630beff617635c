"""The command `doctor`: looks at all that a first build needs, and prints one list with remedies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from airflow_roir.cli import complete
from airflow_roir.cli.app import AsJson, Master, app, database_of, print_json, show

if TYPE_CHECKING:
    from airflow_roir.engine.forecast.set_up import Finding

# Airflow's start takes some seconds, on a busy machine many.
AIRFLOW_S = 120
MASTER_S = 5.0
PACKAGES = ("SQLAlchemy", "psycopg2-binary", "pyspark")
AIRFLOW = "apache-airflow"


@app.command()
def doctor(
    context: typer.Context,
    table: Annotated[
        str | None,
        typer.Option("--table", help="A table to be indexed: looks at it, too.", autocompletion=complete.tables),
    ] = None,
    master: Master = None,
    as_json: AsJson = False,
) -> None:
    """Look at all that a first build needs, and say what helps. Changes nothing; exits with 1 for a problem."""
    from airflow_roir.definition import parse_name
    from airflow_roir.engine.forecast import set_up
    from airflow_roir.spark.options import SparkOptions

    # A wrong value is refused, as any other command does.
    SparkOptions(master)
    if table is not None:
        parse_name(table, "table")
    found = [*set_up.look(database_of(context), table), *_packages(), _java(), *_master(master), *_airflow()]
    if as_json:
        print_json([one.as_dict() for one in found])
    else:
        for one in found:
            show(f"{one.verdict:8} {one.what}: {one.says}{f'. {one.remedy}' if one.remedy else ''}")
    if any(one.verdict == set_up.PROBLEM for one in found):
        raise typer.Exit(1)


def _packages() -> list[Finding]:
    from airflow_roir.engine.forecast.set_up import OK, WARNING, Finding

    found = []
    for name in PACKAGES:
        try:
            found.append(Finding(name, OK, version(name)))
        except PackageNotFoundError:
            found.append(Finding(name, WARNING, "not installed under this name", f"pip install {name}"))
    return found


def _java() -> Finding:
    from airflow_roir.engine.forecast.set_up import OK, WARNING, Finding, refused
    from airflow_roir.errors import JavaMissing
    from airflow_roir.spark.java import use_java

    try:
        return Finding("Java", OK, str(use_java(dict(os.environ))))
    except JavaMissing as error:
        # A build without Spark needs none.
        without = refused("Java", error, WARNING)
        return Finding("Java", WARNING, without.says, f"{without.remedy}; or: roir build --without-spark")


def _master(master: str | None) -> list[Finding]:
    """Whether Spark's address can be reached, if it is one of a host."""
    from airflow_roir.engine.forecast.set_up import OK, PROBLEM, Finding

    if master is None or not master.startswith(("spark://", "sc://")):
        return []
    try:
        # A master may be a list of several, of which one is enough.
        places = [urlsplit(f"//{one}") for one in master.split("://", 1)[1].split(";")[0].rstrip("/").split(",")]
        for n, place in enumerate(places, start=1):
            try:
                port = place.port or (15002 if master.startswith("sc") else 7077)
                socket.create_connection((place.hostname or "", port), MASTER_S).close()
                break
            except OSError:
                if n == len(places):
                    raise
    except (OSError, ValueError) as error:
        remedy = "Start Spark there, or open the way to it; a build can also do without: --without-spark"
        return [Finding("Spark", PROBLEM, f"{master} can't be reached: {error}", remedy)]
    return [Finding("Spark", OK, f"{master} takes connections")]


def _airflow() -> list[Finding]:
    """Airflow's part, by a process of its own; none if Airflow isn't installed or was never configured."""
    from airflow_roir.engine.forecast.set_up import OK, WARNING, Finding

    try:
        found = [Finding("Airflow", OK, version(AIRFLOW))]
    except PackageNotFoundError:
        return [Finding("Airflow", OK, "not installed here; the command needs none")]
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()
    configured = Path(os.environ.get("AIRFLOW_CONFIG", home / "airflow.cfg")).expanduser()
    if not configured.is_file():
        # Its import would write this file.
        says = f"not looked at: there is no {configured}"
        return [*found, Finding("Airflow's set-up", OK, says, "Run roir doctor where Airflow runs, with AIRFLOW_HOME")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "airflow_roir.page.set_up"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=AIRFLOW_S,
            check=True,
        )
        told: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return [*found, Finding("Airflow's set-up", WARNING, f"can't be read: {last}", "Look at: airflow db check")]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return [*found, Finding("Airflow's set-up", WARNING, f"can't be read: {error}", "Look at: airflow db check")]
    return [*found, *(Finding(**one) for one in told)]
