"""A full disk, for builds and users: a command without room fails, nothing is lost, and all continues afterwards."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.errors
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import abort, clean_up, lifecycle
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry import patience
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import WorkerFailed
from servers.killable import Server
from tests.conftest import run_sql, with_template
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.running_out import Life
from tests.engine.stages import Stage


class Disk:
    """A small file system of its own, and the file that fills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self) -> None:
        with self.filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(65536))
        with self.filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))

    def make_room(self, of: int | None = None) -> None:
        if of is None:
            self.filler.unlink()
        else:
            os.truncate(self.filler, self.filler.stat().st_size - of)


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="roir-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", folder]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")
        try:
            yield Disk(Path(folder))
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="module")
def small(disk: Disk, pg: int) -> Iterator[Server]:
    (disk.folder / "server").mkdir()
    disk.folder.chmod(0o755)
    one = Server(disk.folder / "server", pg)
    one.start()
    with_template(one.dsn())
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def dsn(small: Server, disk: Disk, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"db_{abs(hash(request.node.name))}"
    small.execute(f"CREATE DATABASE {name} TEMPLATE roir_template")
    run_sql(
        small.dsn(name),
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i",
    )
    yield small.dsn(name)
    if disk.filler.exists():
        disk.make_room()
    small.execute(f"DROP DATABASE {name} WITH (FORCE)")


def finish(database: Database) -> None:
    """Carries the operation to its end by another run."""
    run = start_run(database, "ix", "test", take_over=True)
    phase = status(database)[0].phase
    if phase == "build":
        steps.build_all(database, run)
        phase = "seal"
    if phase == "seal":
        steps.seal_all(database, run)
    lifecycle.run_phases(database, run)


@pytest.mark.parametrize(
    "phase",
    ["mid-build", *(pytest.param(one, marks=pytest.mark.sample(0)) for one in ("built", "mid-fold", "published"))],
)
def test_users_and_builds_fail_and_go_on(disk: Disk, dsn: str, phase: str) -> None:
    """A transaction without room is rolled back, table and entries alike; those that need no room commit."""
    database = Database(dsn)
    stage = Stage(database, phase)
    stage.connection.close()
    end_run(database, stage.run)
    disk.fill()
    outcomes = []
    user = steps.session(dsn)
    # The index needs a new block first: small tables have room in theirs.
    for number in range(40):
        try:
            steps.sql(user, f"INSERT INTO t SELECT {1000 * number} + i, 'k' || i, i FROM generate_series(1000, 1400) i")
            steps.sql(user, f"UPDATE t SET k = 'n{number}' WHERE id % 7 = {number} % 7")
            user.commit()
            outcomes.append("done")
        except psycopg2.errors.DiskFull:
            user.rollback()
            outcomes.append("full")
        if outcomes[-3:] == ["full"] * 3:
            break
    assert outcomes[-1] == "full"
    steps.sql(user, "SELECT count(*) FROM t")
    user.rollback()
    if phase == "mid-build":
        run = start_run(database, "ix", "test", take_over=True)
        with pytest.raises(DBAPIError, match="No space left"):
            finish(database)
        end_run(database, run)
    disk.make_room()
    steps.sql(user, "UPDATE t SET k = 'after' WHERE id % 4 = 0")
    user.commit()
    user.close()
    if phase != "published":
        finish(database)
    steps.assert_exact(database)
    clean_up.clean_up(database)
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_server_that_stops_for_want_of_wal_loses_nothing(small: Server, disk: Disk, dsn: str) -> None:
    """A server without room for WAL stops, whichever session wrote the WAL. Committed writes are there afterwards."""
    database = Database(dsn)
    stage = Stage(database, "mid-fold")
    stage.connection.close()
    end_run(database, stage.run)
    user = steps.session(dsn)
    steps.sql(user, "UPDATE t SET k = 'kept' WHERE id % 4 = 0")
    user.commit()
    steps.sql(user, "UPDATE t SET k = 'lost' WHERE id % 3 = 0")
    disk.fill()
    log = steps.session(dsn)
    log.autocommit = True
    with pytest.raises(psycopg2.OperationalError):
        steps.sql(log, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000)) FROM generate_series(1, 300)")
    disk.make_room()
    # The server may already be starting again, and a second one would not start beside it.
    with suppress(subprocess.CalledProcessError):
        small.kill()
    small.start()
    finish(database)
    steps.assert_exact(database)
    user = steps.session(dsn)
    assert steps.sql(user, "SELECT count(*) FILTER (WHERE k = 'kept'), count(*) FILTER (WHERE k = 'lost') FROM t") == [
        (15, 0)
    ]
    user.close()


# The statement before which the disk gets full. The first two need pages of their own.
PLACES = {
    "build": "INSERT INTO roir_data.",
    "seal": "SELECT set_config('max_parallel_maintenance_workers'",
    "fold": "WITH gone",
    "prepare": "INSERT INTO roir.generation",
    "verify": "UPDATE roir.verification_unit",
    "publish": "CREATE OR REPLACE VIEW",
}


@pytest.mark.parametrize("place", [pytest.param(one, marks=pytest.mark.sample(0)) for one in PLACES])
def test_a_full_disk_is_waited_for_with_nothing_open(
    disk: Disk, dsn: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues automatically when there is room again. Until then its row says why it waits."""
    run_sql(dsn, "INSERT INTO t SELECT i, repeat('k', 100) || i, i FROM generate_series(1000, 20000) i", "ANALYZE t")
    database = Database(dsn, "roir tests")
    life = Life(database, dsn, "plain", ranges=2, segments=2, batch_rows=5000)
    looks: list[tuple[Any, ...]] = []
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        look = "SELECT throttled, throttled_since IS NOT NULL, status FROM roir.operation"
        ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'roir tests' AND xact_start IS NOT NULL"
        user = steps.session(dsn)
        looks.extend((*row, *steps.sql(user, ours)[0]) for row in steps.sql(user, look))
        user.close()
        if len(naps) == 3:
            disk.make_room()

    monkeypatch.setattr(patience.time, "sleep", nap)
    with before(database, PLACES[place], disk.fill):
        life.live()
    assert not life.failed
    if place in ("build", "seal"):
        assert len(looks) >= 3
    for throttled, since, how, open_transactions in looks:
        assert throttled.startswith("throttled: the server has no room: could not ")
        assert (since, how, open_transactions) == (True, "running", 0)
    user = steps.session(dsn)
    lost = dict(steps.sql(user, "SELECT cause, count(*) FROM roir.throttle_time GROUP BY cause"))
    events = steps.sql(user, "SELECT count(*) FROM roir.event WHERE action = 'exhausted'")[0][0]
    assert (lost == {"disk": 1}, events > 0) == (bool(looks), bool(looks))
    assert steps.sql(user, "SELECT throttled, throttled_since FROM roir.operation") == [(None, None)]


@pytest.mark.slow
def test_a_disk_that_stays_full_pauses_the_build_and_an_abort_gives_the_room_back(
    disk: Disk, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sql(dsn, "INSERT INTO t SELECT i, repeat('k', 100) || i, i FROM generate_series(1000, 40000) i", "ANALYZE t")
    database = Database(dsn, "roir tests")
    life = Life(database, dsn, "plain", ranges=2, segments=2, batch_rows=5000)
    naps: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", naps.append)
    with before(database, "INSERT INTO roir_data.", disk.fill, at=3), pytest.raises(WorkerFailed, match="no room"):
        life.live()
    assert sum(naps) > 0.8 * database.limits.exhausted_s - patience.EXHAUSTED_LONGEST_S
    [now] = status(database)
    assert (now.status, "the server has no room: could not extend file" in str(now.pause_reason)) == ("paused", True)
    # The abort itself needs some pages of the catalogs: it drops triggers and replaces a function.
    disk.make_room(1 << 20)
    taken = disk.filler.stat().st_size
    assert abort.abort(database, "ix", "test").status == "aborted"
    disk.fill()
    assert disk.filler.stat().st_size > taken + (1 << 20)
