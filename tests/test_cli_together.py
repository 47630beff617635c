"""Several indexes by one command: prepared first, built by one scan, each with a verdict of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.test_cli import here, roir

FILLED = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 20000) i",
    "ANALYZE t",
)
BUILD = ("build", "a", "--table", "t", "--keys", "k", "--parallelism", "1", "--master", "local[1]")


@pytest.mark.by_hand("sweeps")
def test_three_indexes_by_one_command_of_which_one_pauses(dsn: str) -> None:
    run_sql(dsn, *FILLED)
    build = (*BUILD, "--include", "v")
    done = roir(dsn, *build, "--with", 'b ("v", k)', "--with", "UNIQUE c (k)", "--master", "local[1]", "--json", code=3)
    told = {one["index"]: one for found in json.loads(done.stdout) for one in found["operations"]}
    assert {index: one["status"] for index, one in told.items()} == {
        "public.a": "completed",
        "public.b": "completed",
        "public.c": "paused",
    }
    assert "shares the scan of public." in done.stderr
    assert "roir: public.b: compared with the table" in done.stderr
    for index in ("a", "b"):
        steps.assert_exact(Database(dsn), index)
    # There is one cut, and a worker writes what it reads to all operations that share it.
    [(cuts,)] = sql(steps.session(dsn), "SELECT count(DISTINCT coalesce(scan_of, id)) FROM roir.operation")
    assert cuts == 1


def test_one_that_cannot_be_prepared_is_told_and_the_worst_code_counts(dsn: str) -> None:
    """Nothing is left to be built: no Spark starts."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)")
    done = here(dsn, "build", "a", "--table", "t", "--keys", "nothing", "--with", "b (neither)", code=2)
    assert "a: " in done.stderr
    assert "b: " in done.stderr
    refused = here(dsn, "build", "a", "--with", "b (k)", code=2)
    assert "give --table, too" in refused.stderr


@pytest.mark.by_hand("sweeps")
def test_what_nohup_ignores_stays_ignored(dsn: str) -> None:
    """Seen to pause both."""
    run_sql(dsn, *FILLED)
    build = (*BUILD, "--with", "b (v)")
    command = subprocess.Popen(
        [sys.executable, "-m", "airflow_roir.cli", *build],
        env={**os.environ, "ROIR_DSN": dsn},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert command.stderr is not None
    said, started = "", 0
    for line in command.stderr:
        said += line
        if "starting Spark" in line:
            started += 1
            if started == 2:
                command.send_signal(signal.SIGHUP)
    assert (command.wait(), started) == (0, 2), said
    for index in ("a", "b"):
        steps.assert_exact(Database(dsn), index)
