"""A standby as target: reads work there, writes are refused at once, and a run waits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from airflow_roir.cli import app
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import ReadOnlyServer
from airflow_roir.spark import task
from servers.killable import Server
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.pair import Pair, pair
from tests.engine.test_failover import go_on
from tests.engine.test_replication import dsn as dsn
from tests.engine.test_replication import primary as primary
from tests.engine.test_replication import replayed

NEW = ("public.other", "--table", "public.t", "--keys", "v")
WRITES = (
    ("init",),
    ("plan", *NEW),
    ("build", *NEW),
    ("build", "ix"),
    ("resume", "ix2"),
    ("change", "ix2", "--parallelism", "2"),
    ("pause", "ix2"),
    ("abort", "ix2"),
    ("revert", "ix"),
    ("rows-view", "ix"),
    ("drop", "ix"),
    ("verify", "ix"),
    ("verify", "ix", "--without-spark"),
    ("clean-up",),
    ("attach-partition", "t", "t1", "DEFAULT"),
    ("detach-partition", "t"),
    ("sync-partitions", "t"),
)
READS = (
    ("status",),
    ("status", "ix", "--json"),
    ("status", "ix", "--history"),
    ("status", "--watch"),
    ("duplicates", "ix2"),
)


@pytest.fixture(scope="module")
def both(primary: Server) -> Iterator[Pair]:
    primary.execute("CREATE DATABASE target TEMPLATE roir_template")
    dsn = primary.dsn("target")
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "CREATE TABLE t1 (LIKE t INCLUDING ALL)",
        "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i",
        "ANALYZE t",
    )
    database = Database(dsn)
    steps.make_index(database)
    steps.begin(database, "ix2", unique=True)
    requests.pause(database, "ix2", "test", "")
    with pair(primary, dsn) as found:
        yield found
    primary.execute("DROP DATABASE target WITH (FORCE)")


@pytest.mark.sample(0)
@pytest.mark.parametrize("command", WRITES, ids=" ".join)
def test_what_writes_is_refused_at_once_and_says_why(both: Pair, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*command], env={"ROIR_DSN": both.there})
    if command[0] == "plan":
        # It lists all objections to a build.
        assert (done.exit_code, "is a standby" in done.output) == (2, True)
        return
    assert isinstance(done.exception, ReadOnlyServer), (done.output, done.exception)
    assert "is a standby" in str(done.exception)


@pytest.mark.sample(0)
@pytest.mark.parametrize("command", READS, ids=" ".join)
def test_what_only_reads_works(both: Pair, command: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*command], env={"ROIR_DSN": both.there, "COLUMNS": "200"})
    assert done.exit_code == 0, (done.output, done.exception)
    if "--json" in command:
        assert json.loads(done.stdout)["indexes"][0]["index"] == "public.ix"


@pytest.mark.by_hand("sweeps")
def test_a_worker_that_meets_a_standby_waits_for_its_promotion(primary: Server, dsn: str) -> None:
    """The address leads to a standby as long as the failover takes."""
    with pair(primary, dsn) as both:
        database = Database(both.any_dsn)
        _, run = steps.begin(database, ranges=3, segments=2, batch_rows=7)
        replayed(both.here, both.there)
        both.kill()
        waited: list[float] = []

        def wait(seconds: float) -> None:
            if not waited:
                both.promote()
            waited.append(seconds)

        done = list(task.work(database, run, "build", 0, wait))
        assert [m.error for m in done] == [None] * 3
        assert waited
        go_on(database)


@pytest.mark.by_hand("sweeps")
def test_a_standby_that_is_not_promoted_in_time_ends_the_run_and_the_next_goes_on(primary: Server, dsn: str) -> None:
    """The pause can't be recorded there. The error says why, and nothing is lost."""
    with pair(primary, dsn) as both:
        database = Database(both.any_dsn, limits=Limits(outage_s=1))
        _, run = steps.begin(database, ranges=3, segments=2, batch_rows=7)
        replayed(both.here, both.there)
        both.kill()
        [ended] = task.work(database, run, "build", 0)
        assert ended.error is not None
        assert "standby" in ended.error
        with pytest.raises(DBAPIError, match="read-only transaction"):
            steps.build_all(database, run)
        both.promote()
        go_on(database)
