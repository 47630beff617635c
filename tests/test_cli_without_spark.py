"""`--without-spark`: the workers are threads of the command. A pause, Ctrl-C and a kill are those of any run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from airflow_roir.cli.last_line import LastLine
from airflow_roir.cli.spark import CommandSpark
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.room import Room
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import session, sql
from tests.test_cli import ROIR, as_json, here, operation, roir

pytestmark = pytest.mark.sample(1)

BUILD = ("build", "ix", "--table", "t", "--keys", "k", "--include", "v", "--without-spark", "--parallelism", "3")
SLOWLY = ("--batch-rows", "1000", "--max-rows-per-second", "1500")


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 20_000, keys=50)


@contextmanager
def running(dsn: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, once it has copied rows."""
    command = subprocess.Popen(
        [ROIR, *arguments], env={**os.environ, "ROIR_DSN": dsn}, stderr=subprocess.PIPE, text=True
    )
    try:
        while not sql(session(dsn), "SELECT to_regclass('roir.scan_range') IS NOT NULL AND EXISTS (SELECT 1)")[0][0]:
            time.sleep(0.1)
        while sql(session(dsn), "SELECT coalesce(sum(rows), 0) FROM roir.scan_range") == [(0,)]:
            assert command.poll() is None
            time.sleep(0.1)
        yield command
    finally:
        command.kill()
        command.wait()


def test_a_build_needs_no_java(dsn: str, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    done = here(dsn, *BUILD, "--unique", "--keys", "id")
    assert "build: 3 workers" in done.stderr
    assert "starting Spark" not in done.stderr
    assert operation(dsn)["status"] == "completed"
    # A rebuild, compared before and after.
    assert "before its rebuild: 20,000 rows" in here(dsn, "build", "ix", "--without-spark", "--verify", "both").stderr
    steps.assert_exact(database)


def test_an_operation_leaves_connections_to_the_application(dsn: str, database: Database) -> None:
    """Found: 256 workers took every connection of the server, and the application was refused."""
    [(most,)] = sql(session(dsn), "SELECT current_setting('max_connections')::int")
    asked = ("--parallelism", str(most))
    told = re.compile(rf"only (\d+) of {most} workers start: \d+ of the server's {most} connections are used")
    found = told.search(as_json(dsn, "plan", "ix", "--table", "t", "--keys", "k", *asked)["slow"][-1])
    assert found is not None
    done = here(dsn, *BUILD, "--ranges", str(most), *asked).stderr
    found = told.search(done)
    assert found is not None, done
    workers = int(found[1])
    assert 2 <= workers < most / 3
    assert f"build: {workers} workers\n" in done
    assert [int(n) for n in re.findall(r"(\d+) workers at work", done)] <= [workers] * 9
    steps.assert_exact(database)


@pytest.mark.parametrize(
    ("most", "used", "workers"), [(100, 5, 24), (100, 60, 5), (100, 95, 2), (12, 3, 2), (1000, 10, 292)]
)
def test_a_tenth_of_the_connections_stays_free(most: int, used: int, workers: int) -> None:
    assert Room(most=most, used=used, reserved=3).workers == workers


def test_the_printed_commands_work_without_java(dsn: str, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: a build by threads printed `roir resume ix`, which failed for want of a Java."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SPARK_HOME", raising=False)
    paused = here(dsn, *BUILD, "--max-duration", "1s", *SLOWLY, code=3)
    assert "resume with: roir resume public.ix" in paused.stderr
    refused = here(dsn, "resume", "ix", "--master", "local[2]", code=2).stderr
    assert "Spark needs Java 17" in refused
    assert "--without-spark" in refused
    assert "Airflow" not in refused
    resumed = here(dsn, "resume", "ix", "--max-duration", "0", "--max-rows-per-second", "0").stderr
    assert "threads of this command work, as before; --master names a Spark instead" in resumed
    for command in ("verify", "compact"):
        assert "no Java for Spark here: working by threads" in here(dsn, command, "ix").stderr
    steps.assert_exact(database)


def test_a_resume_works_by_threads_as_the_build_did(
    dsn: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it started Spark for the rest of a build that threads had begun."""
    here(dsn, *BUILD, "--max-duration", "1s", *SLOWLY, code=3)
    monkeypatch.setattr(CommandSpark, "drive", lambda *_: pytest.fail("a Spark"))
    here(dsn, "resume", "ix", "--max-duration", "0", "--max-rows-per-second", "0")
    assert sql(session(dsn), "SELECT status, without_spark FROM roir.operation") == [("completed", True)]
    steps.assert_exact(database)


def test_where_spark_runs_is_refused(dsn: str) -> None:
    for option in (("--master", "local[2]"), ("--conf", "spark.x=1")):
        assert "leave out --master and --conf" in roir(dsn, *BUILD, *option, code=2).stderr


@pytest.mark.slow
def test_ctrl_c_pauses_and_a_resume_with_other_workers_continues(dsn: str, database: Database) -> None:
    with running(dsn, *BUILD, *SLOWLY) as command:
        command.send_signal(signal.SIGINT)
        said = command.communicate()[1]
    assert command.returncode == 3, said
    assert "resume with: roir resume public.ix" in said
    paused = operation(dsn)
    assert (paused["status"], paused["pause_reason"]) == ("paused", "interrupted")
    assert 0 < paused["rows"] < 20_000
    run_sql(dsn, "UPDATE t SET k = 'x' WHERE id % 7 = 0", "DELETE FROM t WHERE id % 11 = 0")
    done = here(dsn, "resume", "ix", "--without-spark", "--parallelism", "2", "--max-rows-per-second", "0")
    assert "build: 2 workers" in done.stderr
    steps.assert_exact(database)


@pytest.mark.slow
def test_a_signal_says_the_state_and_how_to_go_on(dsn: str, database: Database) -> None:
    """Found: SIGTERM ended a command without a word. It holds: as Ctrl-C, it says what pauses and what continues it."""

    def ended_while(at_work: str, *arguments: str) -> str:
        command = subprocess.Popen(
            [ROIR, *arguments], env={**os.environ, "ROIR_DSN": dsn}, stderr=subprocess.PIPE, text=True
        )
        try:
            while sql(session(dsn), f"SELECT count(*) FROM roir.shown_operation WHERE {at_work}") == [(0,)]:
                assert command.poll() is None
                time.sleep(0.1)
            command.terminate()
            said = command.communicate()[1]
        finally:
            command.kill()
            command.wait()
        assert command.returncode == 3, said
        return said.splitlines()[-1]

    for command in (BUILD, ("resume", "ix", "--without-spark")):
        line = ended_while("driven AND rows > 0", *command, *SLOWLY)
        assert line.startswith("roir: ended by a signal. Index public.ix, operation 1: paused by "), line
        assert line.endswith(": interrupted; resume with: roir resume public.ix"), line
    here(dsn, "resume", "ix", "--without-spark", "--max-rows-per-second", "0")
    # A command that waits, too.
    [(hour,)] = sql(session(dsn), "SELECT extract(hour FROM now() AT TIME ZONE 'UTC' + interval '12 hours')::int")
    closed = ("--windows", f"0 {hour} * * * for 1h")
    line = ended_while("kind = 'verify' AND status = 'paused'", "verify", "ix", "--without-spark", *closed)
    assert line.startswith("roir: ended by a signal. Index public.ix, operation 2: paused by window: "), line
    last = LastLine(Database("postgresql://nobody@127.0.0.1:9/none?connect_timeout=1"), "ix", 1)
    last.say()
    assert last.is_said


@pytest.mark.slow
def test_a_pause_from_outside_ends_the_command(dsn: str, database: Database) -> None:
    with running(dsn, *BUILD, *SLOWLY) as command:
        here(dsn, "pause", "ix", "--reason", "lunch")
        said = command.communicate()[1]
    assert command.returncode == 3, said
    assert "lunch" in said
    roir(dsn, "resume", "ix", "--without-spark", "--max-rows-per-second", "0")
    steps.assert_exact(database)


@pytest.mark.slow
def test_an_abort_from_outside_ends_the_command_and_is_told(dsn: str) -> None:
    """Found: it said that the role which had aborted the build drives it now."""
    with running(dsn, *BUILD, *SLOWLY) as command:
        here(dsn, "abort", "ix", "--reason", "too slow")
        said = command.communicate()[1]
    assert command.returncode == 4, said
    assert "index public.ix: operation 1 was aborted by " in said
    assert ": too slow; " in said
    assert " drives " not in said


@pytest.mark.slow
def test_a_killed_command_loses_nothing(dsn: str, database: Database) -> None:
    with running(dsn, *BUILD, *SLOWLY) as command:
        command.kill()
        command.wait()
    before = operation(dsn)["rows"]
    run_sql(dsn, "UPDATE t SET k = 'x' WHERE id % 7 = 0", "DELETE FROM t WHERE id % 11 = 0")
    here(dsn, "resume", "ix", "--without-spark", "--take-over", "--max-rows-per-second", "0")
    assert before > 0
    steps.assert_exact(database)


def test_several_indexes_are_built_by_one_scan(dsn: str, database: Database) -> None:
    assert len(as_json(dsn, *BUILD, "--with", "iy (v) INCLUDE (k)")) == 2
    for name in ("ix", "iy"):
        steps.assert_exact(database, name)


def test_a_plan_without_spark_has_no_start_of_spark(dsn: str) -> None:
    """Found: `roir plan` had no such option, and added the start of a Spark that the build wouldn't use."""
    asked = ("plan", "ix", "--table", "t", "--keys", "k")
    assert "of start on Spark" in here(dsn, *asked).stdout
    said = here(dsn, *asked, "--without-spark").stdout
    assert ("Spark" in said, " of work (" in said) == (False, True)
