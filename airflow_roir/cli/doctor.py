"""The command `doctor`: looks at all that a first build needs, and prints one list with remedies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airflow_roir.cli import complete
from airflow_roir.cli.app import AsJson, Master, app, database_of, print_json, show

if TYPE_CHECKING:
    from airflow_roir.engine.forecast.set_up import Finding

# Airflow's start takes some seconds, on a busy machine many.
AIRFLOW_S = 120
AIRFLOW = "apache-airflow"


@app.command()
def doctor(
    context: typer.Context,
    table: Annotated[
        str | None,
        typer.Option("--table", help="Also check this table, which is to be indexed.", autocompletion=complete.tables),
    ] = None,
    master: Master = None,
    as_json: AsJson = False,
) -> None:
    """Look at all that a first build needs. Says what helps; changes nothing; exits with 1 for a problem."""
    from airflow_roir.definition import parse_name
    from airflow_roir.engine.forecast import set_up
    from airflow_roir.spark import machine
    from airflow_roir.spark.options import SparkOptions

    # A wrong value is refused, as any other command does.
    SparkOptions(master)
    if table is not None:
        parse_name(table, "table")
    found = [*set_up.look(database_of(context), table), *machine.look(master), *_airflow()]
    if as_json:
        print_json([one.as_dict() for one in found])
    else:
        for one in found:
            show(f"{one.verdict:8} {one.what}: {one.says}{f'. {one.remedy}' if one.remedy else ''}")
    if any(one.verdict == set_up.PROBLEM for one in found):
        raise typer.Exit(1)


def _airflow() -> list[Finding]:
    """Airflow's part, by a process of its own, if Airflow is installed and was configured."""
    from airflow_roir.engine.forecast.set_up import OK, UNKNOWN, WARNING, Finding

    def untold(verdict: str, says: str, remedy: str) -> list[Finding]:
        installed = Finding("Airflow", OK, version(AIRFLOW), where="Airflow")
        return [installed, Finding("Airflow's set-up", verdict, says, remedy, "Airflow")]

    try:
        version(AIRFLOW)
    except PackageNotFoundError:
        return [Finding("Airflow", OK, "not installed here; the command needs none", where="Airflow")]
    home = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser()
    configured = Path(os.environ.get("AIRFLOW_CONFIG", home / "airflow.cfg")).expanduser()
    if not configured.is_file():
        # Its import would write this file.
        says = f"not looked at: there is no {configured}"
        return untold(UNKNOWN, says, "Run roir doctor where Airflow runs, with AIRFLOW_HOME")
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
        return untold(WARNING, f"can't be read: {last}", "Look at: airflow db check")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return untold(WARNING, f"can't be read: {error}", "Look at: airflow db check")
    return [Finding(**one) for one in told]
