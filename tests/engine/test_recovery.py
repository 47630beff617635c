"""PITR: a copy of the files and the archived log, recovered to a point in the middle of each phase.

The operation is as it was at that point. It continues, or is aborted, and the index is right.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from airflow_roir.engine import abort, clean_up, switch
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import status
from servers.killable import Server
from tests.conftest import run_sql, with_template
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_partitions import make

PATIENCE_S = 60.0
POINTS = ("prepared", "mid_build", "built", "sealed", "mid_fold", "folded", "published", "cleaned")
SAMPLE = "mid_fold"
points = pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point == SAMPLE else pytest.mark.sample(0)) for point in POINTS]
)


class Archive:
    """A server that was copied while it ran, and archived its log with a named point in each phase."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self.server = server

    def recovered(self, point: str) -> str:
        """The DSN of a server with all commits up to that point."""
        data, socket = self.folder / f"{point}-data", self.folder / point
        shutil.copytree(self.folder / "copy", data)
        socket.mkdir()
        socket.chmod(0o777)
        with (data / "postgresql.conf").open("a") as settings:
            settings.write(
                f"\nport = 5998\nlisten_addresses = ''\nunix_socket_directories = '{socket}'\narchive_mode = off\n"
                f"restore_command = 'cp {self.folder}/wal/%f %p'\nrecovery_target_name = '{point}'\n"
                "recovery_target_action = 'promote'\n"
            )
        (data / "recovery.signal").touch()
        subprocess.run(["chown", "-R", f"{self.server._user or 'root'}", data], check=True)
        data.chmod(0o700)
        self.control(data, "start", "-w", "-l", data / "log")
        dsn = f"postgresql://postgres@:5998/db?host={socket}"
        # The server is up before it is promoted.
        user = steps.session(dsn)
        user.autocommit = True
        deadline = time.monotonic() + PATIENCE_S
        while sql(user, "SELECT pg_is_in_recovery()") == [(True,)]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        user.close()
        return dsn

    def end(self, point: str) -> None:
        self.control(self.folder / f"{point}-data", "stop", "-m", "immediate")
        for name in (point, f"{point}-data"):
            shutil.rmtree(self.folder / name)

    def control(self, data: Path, *arguments: object) -> None:
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        command = [self.server._bin / "pg_ctl", "-D", data, *map(str, arguments)]
        subprocess.run(command, user=self.server._user, cwd="/", check=True, **quiet)


@pytest.fixture(scope="module")
def archive(pg: int) -> Iterator[Archive]:
    with tempfile.TemporaryDirectory(prefix="roir-pitr-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "wal").mkdir()
        (folder / "wal").chmod(0o777)
        (folder / "server").mkdir()
        server = Server(folder / "server", pg)
        with (server._data / "postgresql.conf").open("a") as settings:
            settings.write(f"\narchive_mode = on\narchive_command = 'cp %p {folder}/wal/%f'\nwal_level = replica\n")
        server.start()
        try:
            through_phases(server, folder)
        finally:
            server.close()
        yield Archive(folder, server)


def through_phases(server: Server, folder: Path) -> None:
    """Carries one operation through all phases, with writes before each point. The copy is made meanwhile."""
    with_template(server.dsn())
    server.execute("CREATE DATABASE db TEMPLATE roir_template")
    dsn = server.dsn("db")
    make(dsn)
    database = Database(dsn)
    keeper = psycopg2.connect(dsn)
    keeper.autocommit = True
    sql(keeper, "SELECT pg_backup_start('copy', true)")
    user = steps.session(dsn)

    def reached(point: str) -> None:
        sql(user, f"UPDATE t SET k = '{point}' WHERE id % 5 = {POINTS.index(point) % 5}")
        sql(user, f"DELETE FROM t WHERE id = {POINTS.index(point) + 20}")
        sql(user, f"INSERT INTO t VALUES ({POINTS.index(point)}, {POINTS.index(point) + 900}, '{point}', 1)")
        user.commit()
        # The write isn't committed: after the recovery it is gone.
        sql(user, f"UPDATE t SET k = 'open', v = v + 1 WHERE id % 3 = {POINTS.index(point) % 3}")
        run_sql(dsn, f"SELECT pg_create_restore_point('{point}')")
        user.rollback()

    _, run = steps.begin(database, include="v", ranges=4, segments=2)
    shutil.copytree(
        server._data, folder / "copy", ignore=shutil.ignore_patterns("pg_wal", "postmaster.*", "pg_replslot")
    )
    ((label,),) = sql(keeper, "SELECT labelfile FROM pg_backup_stop(false)")
    (folder / "copy" / "backup_label").write_text(label)
    for inner in ("pg_wal", "pg_replslot"):
        (folder / "copy" / inner).mkdir()
    keeper.close()
    reached("prepared")
    worker = steps.worker(database, run)
    worker.step(worker.claim())  # type: ignore[arg-type]
    worker.connection.close()
    reached("mid_build")
    steps.build_all(database, run)
    reached("built")
    steps.seal_all(database, run)
    reached("sealed")
    switch.switch(database, run)
    reached("mid_fold")
    steps.fold_delta(database, run)
    reached("folded")
    steps.publish_all(database, run)
    reached("published")
    clean_up.clean_up(database)
    reached("cleaned")
    user.close()
    run_sql(dsn, "SELECT pg_switch_wal()")


@points
def test_the_operation_goes_on_from_where_it_stood(archive: Archive, point: str) -> None:
    dsn = archive.recovered(point)
    try:
        database = Database(dsn)
        run_sql(dsn, "UPDATE t SET k = 'later' WHERE id % 7 = 0")
        found = status(database)[0]
        if found.status == "running":
            run = start_run(database, "ix", "test", take_over=True)
            steps.through(database, run)
        else:
            assert point in ("published", "cleaned")
        run_sql(dsn, "DELETE FROM t WHERE id % 11 = 0", "TRUNCATE t1")
        steps.assert_exact(database)
        report = clean_up.clean_up(database)
        assert (report.warnings, report.waiting) == ([], [])
        steps.assert_exact(database)
        steps.make_index(database, table=None, keys=None)
        steps.assert_exact(database)
    finally:
        archive.end(point)


@pytest.mark.sample(0)
@pytest.mark.parametrize("point", POINTS[:6])
def test_the_operation_is_aborted(archive: Archive, point: str) -> None:
    dsn = archive.recovered(point)
    try:
        database = Database(dsn)
        abort.abort(database, "ix", "test")
        run_sql(dsn, "UPDATE t SET k = 'later' WHERE id % 7 = 0")
        user = steps.session(dsn)
        assert sql(user, "SELECT to_regclass('roir_data.g1')") == [(None,)]
        user.close()
        steps.make_index(database)
        steps.assert_exact(database)
    finally:
        archive.end(point)
