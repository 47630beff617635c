"""A real pg_upgrade of a server whose databases are in each phase: nothing is lost, and operations continue.

pg_upgrade keeps the oids of tables. It creates schemas, functions, triggers and the links of partitions again.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psycopg2.errors
import pytest

from airflow_roir.engine import abort, clean_up, install
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.engine.partitions.sync import sync_partitions
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import SchemaVersionMismatch
from servers.killable import Server
from servers.postgres import programs
from tests.conftest import run_sql, with_template
from tests.engine import steps
from tests.engine.stages import Stage
from tests.engine.test_attach import BOUNDS, LOADED
from tests.engine.test_detach import assert_shown
from tests.engine.test_partitions import make

# An upgrade of a server takes a quarter of a minute. test_restore.py has the parts of it that indexes see.
pytestmark = pytest.mark.sample(0)

OLD, NEW = 16, 18
SHAPES = ("range", "two levels", "hash", "list")
PHASES = ("prepared", "mid-build", "built", "sealed", "mid-fold", "rebuild", "by block")
WRITES = (
    "UPDATE t SET k = 'new' WHERE id % 4 = 0",
    "UPDATE t SET d = (d + 10) % 30 WHERE id % 9 = 1",
    "DELETE FROM t WHERE id % 5 = 0",
)


def stand(database: Database, dsn: str, phase: str) -> None:
    """Leaves an operation over `t` in that phase, without a run."""
    make(dsn)
    options = {"scan": "block"} if phase == "by block" else {}
    stage = Stage(database, "mid-build" if phase == "by block" else phase, **options)
    stage.connection.close()
    end_run(database, stage.run)


def publish(database: Database, dsn: str, shape: str = "range") -> None:
    make(dsn, shape)
    steps.make_index(database, include="v", ranges=4, segments=2)


def database_name(kind: str, what: str) -> str:
    return f"{kind}_{what}".replace(" ", "_").replace("-", "_")


@pytest.fixture(scope="module")
def upgraded(pg: int, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of the new version, with the databases of an old one that the chosen tests need."""
    if pg not in (OLD, NEW):
        pytest.skip(f"from {OLD} to {NEW}, whatever --pg says")
    for version in (OLD, NEW):
        programs(version)
    with tempfile.TemporaryDirectory(prefix="roir-upgrade-") as folder:
        for name in ("", "old", "new", "work"):
            (Path(folder) / name).mkdir(exist_ok=True)
            (Path(folder) / name).chmod(0o777)
        old, new = Server(Path(folder) / "old", OLD), Server(Path(folder) / "new", NEW)
        old.start()
        try:
            chosen = (getattr(item, "callspec", None) for item in request.session.items)
            fill(
                old,
                dict.fromkeys(
                    spec.params["dsn"] for spec in chosen if spec and isinstance(spec.params.get("dsn"), tuple)
                ),
            )
        finally:
            old.close()
        quiet = {"user": new._user, "cwd": Path(folder) / "work", "check": True, "stdin": subprocess.DEVNULL}
        quiet |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # 18 makes servers with checksums, 16 without.
        subprocess.run([new._bin / "pg_checksums", "--disable", "-D", new._data], **quiet)
        was, now = (old._bin, old._data), (new._bin, new._data)
        command = [new._bin / "pg_upgrade", "-b", was[0], "-d", was[1], "-B", now[0], "-D", now[1], "-U", "postgres"]
        subprocess.run([*command, "--no-sync", "--link", "-s", Path(folder) / "work"], **quiet)
        new.start()
        try:
            yield new
        finally:
            new.close()


def fill(old: Server, wanted: Iterable[tuple[str, str]]) -> None:
    with_template(old.dsn())
    for kind, what in wanted:
        name = database_name(kind, what)
        old.execute(f"CREATE DATABASE {name} TEMPLATE roir_template")
        dsn = old.dsn(name)
        run_sql(dsn, "SELECT roir.guard()")
        if what in PHASES:
            stand(Database(dsn), dsn, what)
        elif what == "ordinary":
            rows = "INSERT INTO t SELECT i, i % 7 FROM generate_series(1, 50) i"
            run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text)", rows)
            steps.make_index(Database(dsn))
        else:
            publish(Database(dsn), dsn, what if what in SHAPES else "range")
        if what == "leaving":
            run_sql(dsn, "SELECT roir.detach_partition('t1', and_drop => true)")
        elif what == "joining":
            run_sql(dsn, *LOADED, f"SELECT roir.begin_attach('t', 't3', '{BOUNDS}')")


@pytest.fixture
def dsn(upgraded: Server, request: pytest.FixtureRequest) -> str:
    """The DSN of the database that the test names."""
    return upgraded.dsn(database_name(*request.param))


@pytest.fixture
def database(dsn: str) -> Database:
    return Database(dsn)


def databases(kind: str, *whats: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dsn", [(kind, what) for what in whats], indirect=True, ids=whats)


@pytest.mark.by_hand("sweeps")
@databases("published", *SHAPES)
def test_a_published_index_is_exact_and_its_partitions_are_known_after_init(database: Database, dsn: str) -> None:
    run_sql(dsn, *WRITES, "TRUNCATE t1")
    for command in (lambda: status(database), lambda: clean_up.clean_up(database)):
        with pytest.raises(SchemaVersionMismatch, match=r"by pg_upgrade: the partitions of (public\.)?t .*roir init"):
            command()
    install.init(database)
    install.init(database)
    report = clean_up.clean_up(database)
    assert (report.warnings, report.waiting) == ([], [])
    assert not [line for one in indexes(database) for line in one.warnings]
    steps.assert_exact(database)
    # The guard doesn't take partitions for new or gone, and refuses as before.
    run_sql(dsn, "ALTER TABLE t0 SET (fillfactor = 90)", "ALTER TABLE t ADD COLUMN note text", *WRITES)
    with pytest.raises(psycopg2.errors.ObjectInUse, match="entries behind"):
        run_sql(dsn, "ALTER TABLE t DETACH PARTITION t0 CONCURRENTLY")
    assert sync_partitions(database, "t", "test").as_dict() == {
        "gone": [],
        "came": [],
        "entries_removed": 0,
        "entries_added": 0,
    }
    run_sql(dsn, "TRUNCATE t2")
    steps.make_index(database, table=None, keys=None)
    steps.assert_exact(database)


@databases("unfinished", *PHASES)
def test_an_unfinished_operation_goes_on_after_init(database: Database, dsn: str) -> None:
    run_sql(dsn, *WRITES)
    with pytest.raises(SchemaVersionMismatch, match="roir init"):
        start_run(database, "ix", "test", take_over=True)
    install.init(database)
    assert status(database)[0].status == "running"
    run_sql(dsn, "UPDATE t SET k = 'newer' WHERE id % 7 = 0")
    run = start_run(database, "ix", "test", take_over=True)
    steps.through(database, run)
    run_sql(dsn, "DELETE FROM t WHERE id % 11 = 0", "TRUNCATE t2")
    steps.assert_exact(database)
    assert clean_up.clean_up(database).warnings == []


@databases("aborted", "mid-fold")
def test_an_unfinished_operation_is_aborted(database: Database, dsn: str) -> None:
    install.init(database)
    abort.abort(database, "ix", "test")
    run_sql(dsn, *WRITES)
    assert steps.sql(steps.session(dsn), "SELECT to_regclass('roir_data.g1')") == [(None,)]


@databases("special", "ordinary")
def test_an_ordinary_table_needs_nothing(database: Database, dsn: str) -> None:
    run_sql(dsn, "UPDATE t SET id = id + 1000, k = 'x' WHERE id < 9", "DELETE FROM t WHERE id = 20")
    assert status(database)[0].warnings == ()
    assert steps.assert_exact(database).rows == 49


@databases("special", "leaving")
def test_entries_that_were_leaving_stay_hidden(database: Database, dsn: str) -> None:
    assert_shown(database)
    install.init(database)
    assert_shown(database)
    assert clean_up.clean_up(database).partition_entries > 0
    steps.assert_exact(database)


@databases("special", "joining")
def test_an_attach_that_was_begun_goes_on(database: Database, dsn: str) -> None:
    install.init(database)
    with pytest.raises(psycopg2.errors.ObjectInUse, match="is being attached"):
        run_sql(dsn, "DELETE FROM t3")
    assert attach.attach_partition(database, "t", "t3", BOUNDS, "test") == 100
    assert_shown(database)
    assert steps.assert_exact(database).rows == 400


@databases("special", "taken out", "again")
def test_what_a_plain_detach_did_between_upgrade_and_init_is_not_lost(database: Database, dsn: str) -> None:
    """The link that the upgrade made is older than the capture trigger. A later link isn't taken for it."""
    run_sql(dsn, "SELECT roir.unguard()", "ALTER TABLE t DETACH PARTITION t1")
    if dsn.endswith("again"):
        run_sql(
            dsn, "DELETE FROM t1 WHERE id % 2 = 0", "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (10) TO (20)"
        )
    install.init(database)
    assert any("roir sync-partitions" in line for line in clean_up.clean_up(database).waiting)
    report = sync_partitions(database, "t", "test")
    assert report.gone == ["public.t1"]
    assert report.entries_removed > 0
    assert_shown(database)
    steps.assert_exact(database)
