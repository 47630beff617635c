"""A command whose work is done doesn't fail because its last look does: it warns, and ends as the work ended."""

from __future__ import annotations

from typing import Any

import psycopg2
import pytest
from sqlalchemy.exc import ProgrammingError

from airflow_roir.cli import execute
from airflow_roir.engine.control import operations, slow_options
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot import operation
from airflow_roir.engine.source import checks
from tests.engine import steps
from tests.test_cli import here

WHY = "column s.differences does not exist"
NEW = ("--table", "t", "--keys", "k")


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn)


def fail(*_: Any, **__: Any) -> Any:
    raise ProgrammingError("SELECT 1", None, psycopg2.ProgrammingError(WHY))


def run_to_its_end(dsn: str, *arguments: str, code: int = 0) -> str:
    done = here(dsn, *arguments, "--without-spark", code=code)
    [line] = [line for line in done.stderr.splitlines() if "last look" in line]
    assert WHY in line
    assert done.stdout == ""
    assert operations.find_operation(Database(dsn), "ix").status == "completed"
    return str(line)


@pytest.mark.sample(0)
@pytest.mark.parametrize("look", ["overview", "operation_status"])
@pytest.mark.parametrize("command", ["build", "rebuild", "resume"])
def test_a_published_build_ends_with_0(dsn: str, monkeypatch: pytest.MonkeyPatch, command: str, look: str) -> None:
    """Found: after `publish: done` the status couldn't be read, and the command ended with 1."""
    if command == "rebuild":
        steps.make_index(Database(dsn))
    if command == "resume":
        steps.begin(Database(dsn))
        here(dsn, "pause", "ix")
    monkeypatch.setattr(execute, look, fail)
    arguments = {"build": ("build", "ix", *NEW), "rebuild": ("build", "ix"), "resume": ("resume", "ix")}[command]
    line = run_to_its_end(dsn, *arguments)
    kind = "rebuild" if command == "rebuild" else "create"
    assert f"ix: {kind} " in line
    assert "is done; a last look at it failed" in line
    assert line.rpartition("Look again: ")[2].startswith("roir status ")


def test_a_build_that_failed_still_fails(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_in_this_process", fail)
    done = here(dsn, "build", "ix", *NEW, "--without-spark", code=1)
    assert "last look" not in done.stderr


def test_a_verification_whose_result_is_not_known_is_not_called_exact(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.make_index(Database(dsn))
    monkeypatch.setattr(execute, "report_of", fail)
    assert "verification" in run_to_its_end(dsn, "verify", "ix", code=1)


def test_a_pause_and_a_change_and_an_init_are_done(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.begin(Database(dsn))
    monkeypatch.setattr(slow_options, "slow_operation", fail)
    assert "is changed; a last look" in here(dsn, "change", "ix", "--parallelism", "2").stderr
    monkeypatch.setattr(operation, "operation_status", fail)
    assert "is paused; a last look" in here(dsn, "pause", "ix").stderr
    monkeypatch.setattr(checks, "untried_server", fail)
    assert "is made; a last look" in here(dsn, "init").stderr
