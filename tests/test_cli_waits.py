"""Commands that wait in their process: for a window, and for a place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from typing import Any

import pytest

from airflow_roir.engine.control import admission, operations
from airflow_roir.engine.control.run import end_run
from airflow_roir.engine.database import Database
from tests.engine import steps
from tests.engine.test_allowed import closed
from tests.test_cli import ROIR, here

VERIFY = ("verify", "ix", "--without-spark", "--json")


@pytest.fixture
def index(dsn: str, database: Database) -> str:
    steps.make_table(dsn, 200)
    steps.make_index(database)
    return "ix"


def until_it_waits(dsn: str, *arguments: str, says: str) -> subprocess.Popen[str]:
    command = subprocess.Popen(
        [ROIR, *arguments],
        env={**os.environ, "ROIR_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    line = command.stderr.readline()
    if says not in line:
        command.kill()
        raise AssertionError(line + command.stderr.read())
    return command


def paused_by(database: Database) -> Any:
    row = operations.find_operation(database, "ix")
    return (row.status, row.paused_by, row.pause_reason)


@pytest.mark.sample(0)
@pytest.mark.parametrize("ends", ["window", "interrupt", "pause", "abort"])
def test_a_command_waits_for_its_window(dsn: str, database: Database, index: str, ends: str) -> None:
    command = until_it_waits(dsn, *VERIFY, "--windows", closed(), says="outside of its window; opens at")
    assert paused_by(database)[:2] == ("paused", "window")
    if ends == "window":
        here(dsn, "change", "ix", "--windows", "off")
    elif ends == "interrupt":
        command.send_signal(signal.SIGINT)
    elif ends == "pause":
        here(dsn, "pause", "ix", "--reason", "month's end")
    else:
        here(dsn, "abort", "ix", "--reason", "too slow")
    out, said = command.communicate(timeout=100)
    if ends == "window":
        assert command.returncode == 0
        assert json.loads(out)["missing"] == 0
    elif ends == "abort":
        # Found: it ended with 0, as if it had compared something.
        assert command.returncode == 4
        assert re.search(r"operation 2 was aborted by .*: too slow; this command stops", said)
    else:
        assert command.returncode == 3
        status, _, reason = paused_by(database)
        assert (status, reason) == ("paused", "interrupted" if ends == "interrupt" else "month's end")


@pytest.mark.slow
def test_a_command_waits_for_its_place_and_a_resume_takes_options(dsn: str, database: Database, index: str) -> None:
    steps.sql(user := steps.session(dsn), "CREATE TABLE t2 AS SELECT * FROM t; ALTER TABLE t2 ADD PRIMARY KEY (id)")
    user.commit()
    here(dsn, "queue", "--max", "1")
    _, run = steps.begin(database, "other", "t2")
    command = until_it_waits(dsn, *VERIFY, says="queued: place 1 of 1; 1 running (public.other)")
    shown = here(dsn, "queue").stdout.splitlines()
    assert shown[0] == "at most 1 at the same time"
    assert shown[1].startswith("public.other: first build")
    assert "place 1" in shown[2]
    found = json.loads(here(dsn, "queue", "--json").stdout)
    assert [one["index"] for one in found["waiting"]] == ["public.ix"]
    end_run(database, run)
    assert command.communicate(timeout=100)[1] is not None
    assert command.returncode == 0
    assert here(dsn, "queue", "--max", "0").stdout.startswith("no limit")
    assert admission.queue(database).most is None


def test_options_are_read_as_users_write_them(dsn: str, database: Database) -> None:
    steps.make_table(dsn, 100)
    steps.begin(database)
    said = here(dsn, "change", "ix", "--max-duration", "2h", "--warn-after", "90min", "--abort-after", "3d")
    assert "--max-duration no limit -> 7200" in said.stdout
    row = operations.find_operation(database, "ix")
    assert (row.max_duration_s, row.warn_after_s, row.abort_after_s) == (7200, 5400, 259_200)
    here(dsn, "change", "ix", "--max-duration", "0", "--priority", "7", "--throttle", "replica_lag=1MB")
    row = operations.find_operation(database, "ix")
    assert (row.max_duration_s, row.priority, row.throttle) == (None, 7, {"replica_lag": 1_048_576})
    for wrong in (("--max-duration", "soon"), ("--windows", "at night"), ("--priority", "101")):
        here(dsn, "change", "ix", *wrong, code=2)
