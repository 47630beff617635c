"""The command `roir doctor`: one list of what a first build needs, with remedies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import make_dsn

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.forecast import set_up, signals
from airflow_roir.engine.forecast.set_up import OK, PROBLEM, UNKNOWN, WARNING
from airflow_roir.engine.sessions import room
from airflow_roir.options import BuildOptions
from airflow_roir.signals import SIGNALS, Reading
from tests.conftest import database_dsn, run_sql
from tests.test_cli import ROIR

TABLE = 'CREATE TABLE "Or|ders" (id int PRIMARY KEY, v int)'


def doctor(dsn: str, home: Path, *arguments: str, **more: str) -> tuple[int, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    done = subprocess.run(
        [ROIR, "doctor", "--json", *arguments],
        env={**environment, "ROIR_DSN": dsn, "AIRFLOW_HOME": str(home), **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, {one["what"]: one for one in json.loads(done.stdout)}


def everything(dsn: str) -> str:
    """All relations and functions, as text."""
    query = (
        "SELECT string_agg(x::text, ',' ORDER BY x) FROM (SELECT oid FROM pg_class UNION SELECT oid FROM pg_proc) o (x)"
    )
    with Database(dsn).transaction() as connection:
        return str(execute(connection, query).scalar_one())


def test_a_set_up_that_is_right_has_no_problem_and_is_left_as_it_was(dsn: str, tmp_path: Path) -> None:
    run_sql(dsn, TABLE)
    before = everything(dsn)
    code, found = doctor(dsn, tmp_path, "--table", '"Or|ders"')
    assert code == 0
    assert {name: one["verdict"] for name, one in found.items() if one["verdict"] == PROBLEM} == {}
    assert found["session"]["verdict"] == found["schema"]["verdict"] == found['"Or|ders"']["verdict"] == OK
    assert found["guard"]["verdict"] == WARNING
    assert "roir.guard()" in found["guard"]["remedy"]
    assert "no " in found["Airflow's set-up"]["says"]
    assert list(tmp_path.iterdir()) == []
    assert everything(dsn) == before


def test_problems_are_listed_all_at_once_with_what_helps(server: str, dsn: str, tmp_path: Path) -> None:
    """No schema, a role without rights, a table without a primary key, no Java, no Spark there."""
    run_sql(server, "DROP DATABASE IF EXISTS doctored", "DROP ROLE IF EXISTS patient")
    run_sql(server, "CREATE DATABASE doctored", "CREATE ROLE patient LOGIN")
    try:
        empty = database_dsn(server, "doctored")
        run_sql(empty, "CREATE TABLE bare (v int)")
        with socket.socket() as unused:
            # Bound, and not listening: no other process gets this port.
            unused.bind(("127.0.0.1", 0))
            master = f"spark://127.0.0.1:{unused.getsockname()[1]}"
            code, found = doctor(
                make_dsn(empty, user="patient"),
                tmp_path,
                "--table",
                "bare",
                "--master",
                master,
                JAVA_HOME=str(tmp_path),
                PATH="",
            )
        assert code == 1
        assert found["rights"]["remedy"] == 'GRANT CREATE ON DATABASE "doctored" TO "patient"'
        assert found["schema"]["verdict"] == PROBLEM
        assert "roir init" in found["schema"]["says"]
        assert found["bare"]["verdict"] == found["Spark"]["verdict"] == PROBLEM
        assert found["Java"]["verdict"] == WARNING
        assert "--without-spark" in found["Java"]["remedy"]
    finally:
        run_sql(server, "DROP DATABASE doctored WITH (FORCE)", "DROP ROLE patient")


@pytest.mark.parametrize("table", ["nowhere", "a.b.c", "pg_class"])
def test_a_table_that_cannot_be_indexed_is_a_problem_of_the_list(dsn: str, table: str) -> None:
    found = set_up.look(Database(dsn), table)
    assert found[-1].verdict == PROBLEM
    assert found[-1].what == table


def test_a_server_that_is_away_is_the_only_line_of_the_database(tmp_path: Path) -> None:
    found = set_up.look(Database(f"host={tmp_path} dbname=x"))
    assert [(one.what, one.verdict) for one in found] == [("session", PROBLEM)]


def test_a_role_that_does_not_exist_is_told_with_the_command_that_makes_one(dsn: str) -> None:
    """Found: PostgreSQL's message alone."""
    (found,) = set_up.look(Database(make_dsn(dsn, user="nobody_yet")))
    assert (found.what, found.verdict) == ("session", PROBLEM)
    assert found.remedy.endswith("roir role-sql NAME")


@pytest.mark.parametrize(
    ("seconds", "limit"), [(None, 20), (0.004, 20), (0.010, 20), (0.0101, 30), (0.0351, 80), (0.08, 200)]
)
def test_the_suggested_time_of_a_commit_is_not_passed_already(seconds: float | None, limit: int) -> None:
    """Found: 20 ms was suggested where commits took 20 to 80 ms."""
    assert signals.commit_limit(seconds) == limit


def test_what_was_not_looked_at_is_not_ok(dsn: str, tmp_path: Path) -> None:
    """Found: `ok Airflow's set-up: not looked at`."""
    _, found = doctor(dsn, tmp_path)
    assert found["Airflow's set-up"]["verdict"] == found["disk"]["verdict"] == UNKNOWN


def test_too_few_connections_are_warned_of(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BESIDE_WORKERS", 1_000_000)
    (found,) = [one for one in set_up.look(Database(dsn)) if one.what == "max_connections"]
    assert found.verdict == WARNING
    assert "max_connections" in found.remedy


def test_a_signal_that_can_not_be_read_matters_only_to_those_who_throttle_by_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: it was called ok."""
    unread = Reading(SIGNALS["slot_room"], 1.0, None, problem="no right")
    monkeypatch.setattr(signals, "look", lambda *_: signals.Signals((unread,), "commit_latency=20ms"))
    (found,) = [one for one in set_up.look(Database(dsn)) if one.what == "throttle"]
    assert (found.verdict, found.says) == (UNKNOWN, "slot_room can't be read: no right")
    assert found.remedy == "That matters only if you throttle by slot_room"


def test_signals_that_can_not_be_read_are_one_finding(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: `unknown throttle` was printed twice."""
    names = ("replica_lag", "replica_delay", "slot_room")
    unread = [Reading(SIGNALS[name], 1.0, None, problem="no right") for name in names[:2]]
    unread.append(Reading(SIGNALS[names[2]], 1.0, None, "s1", "it is gone"))
    monkeypatch.setattr(signals, "look", lambda *_: signals.Signals(tuple(unread), "commit_latency=20ms"))
    (found,) = [one for one in set_up.look(Database(dsn)) if one.what == "throttle"]
    assert found.says == (
        "replica_lag and replica_delay can't be read: no right; slot_room of s1 can't be read: it is gone"
    )
    assert found.remedy == "That matters only if you throttle by replica_lag or replica_delay or slot_room"


def test_the_connections_of_a_build_are_those_that_a_pool_must_have(dsn: str) -> None:
    """A worker of the seal holds up to three sessions."""
    (found,) = [one for one in set_up.look(Database(dsn)) if one.what == "max_connections"]
    most = 3 * BuildOptions().parallelism + 10
    assert found.says.endswith(f"a build with 2 workers takes up to {most}")
    page = (Path(__file__).parents[1] / "docs" / "pgbouncer.md").read_text()
    assert "three sessions for each worker, and ten more" in page
    assert int(page.partition("pool_size=")[2].split()[0]) >= most


def test_a_role_without_any_right_is_told_what_it_lacks_and_sees_the_rest(server: str, dsn: str) -> None:
    run_sql(dsn, TABLE)
    run_sql(server, "CREATE ROLE visitor LOGIN")
    try:
        found = {one.what: one for one in set_up.look(Database(make_dsn(dsn, user="visitor")), '"Or|ders"')}
        assert found["session"].verdict == found["lock_timeout"].verdict == found["encoding"].verdict == OK
        assert found["rights"].verdict == PROBLEM
        assert found["rights"].remedy.startswith("roir role-sql ")
        assert found['"Or|ders"'].verdict == PROBLEM
    finally:
        run_sql(server, "DROP ROLE visitor")
