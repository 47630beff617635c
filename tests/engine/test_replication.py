"""Real replicas: a hot standby that reads an index, and subscriptions in both directions of an indexed table."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up, lifecycle
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.errors import InvalidInput, LockNotAcquired
from servers.killable import Server, running_server
from tests.conftest import database_dsn, run_sql, with_template
from tests.engine import steps
from tests.engine.stages import Stage, through_modes
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def primary(pg: int) -> Iterator[Server]:
    with running_server(pg) as server:
        server.execute("ALTER SYSTEM SET wal_level = logical")
        server.execute("ALTER SYSTEM SET wal_receiver_status_interval = 1")
        server.close()
        server.start()
        with_template(server.dsn())
        yield server


@pytest.fixture
def dsn(primary: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"db_{abs(hash(request.node.name))}"
    primary.execute(f"CREATE DATABASE {name} TEMPLATE roir_template")
    run_sql(
        primary.dsn(name),
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i",
    )
    yield primary.dsn(name)
    primary.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def standby_of(primary: Server, upstream: str | None = None, settings: str = "") -> Iterator[str]:
    """The DSN of a streaming standby's database postgres. upstream: another standby that it follows instead."""
    with tempfile.TemporaryDirectory(prefix="roir-standby-") as folder:
        data = Path(folder) / "data"
        Path(folder).chmod(0o777)
        socket = Path(folder) / "socket"
        socket.mkdir()
        socket.chmod(0o777)
        quiet = {"user": primary._user, "cwd": "/", "check": True}
        quiet |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run(
            [primary._bin / "pg_basebackup", "-D", data, "-R", "-c", "fast", "-d", upstream or primary.dsn()], **quiet
        )
        with (data / "postgresql.conf").open("a") as configuration:
            configuration.write(f"\nport = 5999\nlisten_addresses = ''\nunix_socket_directories = '{socket}'\n")
            configuration.write(settings)
        control = [primary._bin / "pg_ctl", "-D", data, "-l", data / "log"]
        subprocess.run([*control, "start", "-w"], **quiet)
        try:
            yield f"postgresql://postgres@:5999/postgres?host={socket}"
        finally:
            subprocess.run([*control, "stop", "-m", "immediate"], **quiet)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits by polling: another server's work has no step of ours to wait for."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {PATIENCE_S:g} s"
        time.sleep(0.05)


def replayed(dsn: str, standby: str) -> None:
    ((position,),) = sql(steps.session(dsn), "SELECT pg_current_wal_lsn()")

    def reached() -> bool:
        user = steps.session(standby)
        ((there,),) = sql(user, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", position)
        user.close()
        return bool(there)

    wait_until(reached, "the standby's replay")


@pytest.mark.by_hand("sweeps")
def test_a_standbys_old_reader_is_refused_and_keeps_the_guard_by_its_feedback(primary: Server, dsn: str) -> None:
    database = Database(dsn)
    with standby_of(primary) as standby:
        there = database_dsn(standby, dsn.rsplit("/", 1)[1])
        steps.make_index(database)
        # Without feedback the primary can't know what the standby reads, and waits for a day.
        wait_until(lambda: walsenders(dsn), "the standby")
        report = clean_up.clean_up(database)
        assert report.guards_removed == 0
        assert any("without hot_standby_feedback" in line for line in report.waiting)
        replayed(dsn, there)
        old = steps.session(there, "REPEATABLE READ")
        assert sql(old, "SELECT count(*) FROM ix") == [(60,)]
        old.rollback()
        # With feedback the standby's oldest snapshot is known, and no VACUUM ends it.
        run_sql(standby, "ALTER SYSTEM SET hot_standby_feedback = on", "SELECT pg_reload_conf()")
        sql(old, "SELECT count(*) FROM pg_class")
        wait_until(lambda: walsenders(dsn, "backend_xmin IS NOT NULL"), "the standby's feedback")
        steps.make_index(database, table=None, keys=None)
        replayed(dsn, there)
        report = clean_up.clean_up(database)
        assert report.guards_removed == 0
        assert not any("without hot_standby_feedback" in line for line in report.waiting)
        with pytest.raises(psycopg2.errors.SerializationFailure, match="published after"):
            sql(old, "SELECT count(*) FROM ix")
        old.rollback()
        wait_until(lambda: clean_up.clean_up(database).guards_removed == 1, "the end of that snapshot")
        replayed(dsn, there)
        assert sql(old, "SELECT count(*) FROM ix") == [(60,)]
        old.close()


FEEDBACK = "hot_standby_feedback = on\n"
PARTITIONED = (
    "DROP TABLE t",
    "CREATE TABLE t (d int, id int, k text, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
    "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (10)",
    "INSERT INTO t SELECT i % 10, i, 'k' FROM generate_series(1, 30) i",
    "CREATE TABLE t1 (d int, id int, k text, PRIMARY KEY (d, id))",
    "INSERT INTO t1 SELECT 15, i, 'loaded' FROM generate_series(1, 20) i",
)
BOUNDS = "FOR VALUES FROM (10) TO (20)"


@pytest.mark.parametrize(
    "cascading",
    [pytest.param(False, id="standby"), pytest.param(True, id="standby of a standby", marks=pytest.mark.sample(0))],
)
def test_an_attach_waits_for_an_older_snapshot_on_a_standby(primary: Server, dsn: str, cascading: bool) -> None:
    """Otherwise the snapshot would see the table with the partition, and the view without it."""
    database = Database(dsn)
    run_sql(dsn, *PARTITIONED)
    steps.make_index(database)
    with ExitStack() as stack:
        standby = stack.enter_context(standby_of(primary, settings=FEEDBACK))
        if cascading:
            standby = stack.enter_context(standby_of(primary, standby, FEEDBACK))
        there = database_dsn(standby, dsn.rsplit("/", 1)[1])
        replayed(dsn, there)
        old = steps.session(there, "REPEATABLE READ")
        # The reader has no lock on t1: the replay of an attempt's lock would wait for the reader, and the reader for
        # the replay.
        sql(old, "SELECT count(*) FROM pg_class")
        wait_until(lambda: walsenders(dsn, "backend_xmin IS NOT NULL"), "the standby's feedback")
        said: list[str] = []
        with pytest.raises(LockNotAcquired, match=r"a standby, by its walsender .* has a snapshot that is older"):
            attach.attach_partition(database, "t", "t1", BOUNDS, "test", said.append, patience_s=3)
        assert "waiting for a standby" in said[0]
        assert sql(old, "SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM ix)") == [(30, 30)]
        old.rollback()
        attach.attach_partition(database, "t", "t1", BOUNDS, "test")
        replayed(dsn, there)
        assert sql(old, "SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM ix)") == [(50, 50)]
        old.close()


def test_an_attach_names_standbys_that_do_not_tell_and_slots_that_do(primary: Server, dsn: str) -> None:
    """Found: a standby without feedback, or a slot whose standby is away, was passed over silently. It holds: attach
    names it, and so does the clean-up that ends a view guard.
    """
    database = Database(dsn)
    run_sql(dsn, *PARTITIONED, "SELECT pg_create_physical_replication_slot('away', true)")
    steps.make_index(database)
    try:
        with standby_of(primary):
            wait_until(lambda: walsenders(dsn), "the standby")
            said: list[str] = []
            attach.attach_partition(database, "t", "t1", BOUNDS, "test", said.append)
            assert [line for line in said if "without hot_standby_feedback" in line and "doesn't wait for it" in line]
            assert [line for line in said if "isn't connected, of replication slot away" in line]
            assert clean_up.clean_up(database).guards_removed == 0
            run_sql(dsn, "UPDATE roir.generation SET published_at = published_at - interval '25 hours'")
            report = clean_up.clean_up(database)
            assert report.guards_removed == 1
            assert any("without hot_standby_feedback" in line for line in report.warnings)
            assert any("replication slot away" in line for line in report.warnings)
    finally:
        run_sql(dsn, "SELECT pg_drop_replication_slot('away')")


@pytest.mark.parametrize("phase", ["mid-build", pytest.param("mid-fold", marks=pytest.mark.sample(0))])
def test_after_a_failover_the_operation_goes_on(primary: Server, dsn: str, phase: str) -> None:
    """It continues on a promoted standby, from the commits that were replayed there."""
    stage = Stage(Database(dsn), phase)
    stage.connection.close()
    # The run hasn't ended: it died with its server.
    user = steps.session(dsn)
    sql(user, "UPDATE t SET k = 'replayed' WHERE id % 7 = 0")
    user.commit()
    with standby_of(primary) as standby:
        there = database_dsn(standby, dsn.rsplit("/", 1)[1])
        replayed(dsn, there)
        sql(user, "UPDATE t SET k = 'open' WHERE id % 5 = 0")
        run_sql(there, "SELECT pg_promote()")
        database = Database(there)
        run_sql(there, "UPDATE t SET v = -1 WHERE id % 4 = 0", "DELETE FROM t WHERE id % 9 = 0")
        run = start_run(database, "ix", "test", take_over=True)
        if phase == "mid-build":
            steps.build_all(database, run)
            steps.seal_all(database, run)
        lifecycle.run_phases(database, run)
        assert steps.assert_exact(database).rows == 54
        assert clean_up.clean_up(database).warnings == []
    user.close()


def walsenders(dsn: str, condition: str = "true") -> bool:
    user = steps.session(dsn)
    found = sql(user, f"SELECT pid FROM pg_stat_replication WHERE state = 'streaming' AND {condition}")
    user.close()
    return bool(found)


@pytest.mark.sample(0)
@pytest.mark.parametrize("published", [False, True], ids=["", "and published again"])
def test_what_a_subscription_applies_is_followed_in_every_phase(primary: Server, dsn: str, published: bool) -> None:
    """The apply worker writes as a replica (session_replication_role), row by row, and truncates."""
    database = Database(dsn)
    if published:
        run_sql(dsn, "CREATE PUBLICATION everything FOR ALL TABLES")
    here = dsn.rsplit("/", 1)[1]
    there = f"{here}_publisher"
    primary.execute(f"CREATE DATABASE {there}")
    publisher = steps.session(primary.dsn(there))
    sql(publisher, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)")
    sql(publisher, "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i")
    sql(publisher, "CREATE PUBLICATION p FOR TABLE t")
    publisher.commit()
    # In one server the slot must exist before: its creation would wait for the subscription's own transaction.
    sql(publisher, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    publisher.commit()
    run_sql(
        dsn,
        f"CREATE SUBSCRIPTION s CONNECTION '{primary.dsn(there)}' PUBLICATION p "
        "WITH (create_slot = false, slot_name = 's', copy_data = false)",
    )

    def applied() -> bool:
        rows = "SELECT id, k, v FROM t ORDER BY id"
        return sql(publisher, rows) == sql(subscriber, rows)

    subscriber = steps.session(dsn)
    subscriber.autocommit = publisher.autocommit = True

    # Each round ends with another value. Otherwise the last round's end would be taken for this one's.
    times = itertools.count()

    def write(phase: str) -> None:
        for statement in (
            "UPDATE t SET k = k || 'x', v = v + 1 WHERE id % 2 = 0",
            "UPDATE t SET id = id + 1000 WHERE id % 7 = 0",
            "DELETE FROM t WHERE id % 5 = 0",
            "BEGIN; DELETE FROM t WHERE id < 9; INSERT INTO t SELECT i, 'again', 0 FROM generate_series(5, 12) i "
            "ON CONFLICT (id) DO UPDATE SET k = 'conflict'; COMMIT",
            "TRUNCATE t",
            f"INSERT INTO t SELECT i, nullif(i % 5, 3)::text, {next(times)} FROM generate_series(1, 60) i",
        ):
            sql(publisher, statement)
        wait_until(applied, "applying")

    try:
        through_modes(database, write, include="v", ignore_publications=published)
        publisher_side = sql(publisher, "SELECT k, id, v FROM t ORDER BY id")
        assert sql(subscriber, "SELECT k, id, v FROM ix ORDER BY id") == publisher_side
    finally:
        run_sql(dsn, "DROP SUBSCRIPTION s")
        publisher.close()
        subscriber.close()
        primary.execute(f"DROP DATABASE {there} WITH (FORCE)")


@pytest.mark.parametrize(
    "phase",
    ["mid-build", *(pytest.param(one, marks=pytest.mark.sample(0)) for one in ("built", "mid-fold", "published"))],
)
def test_the_first_copy_of_a_subscription_is_followed(primary: Server, dsn: str, phase: str) -> None:
    """The worker of the subscription fills the table by COPY, as a replica, in a session of its own."""
    here = dsn.rsplit("/", 1)[1]
    there = f"{here}_publisher"
    primary.execute(f"CREATE DATABASE {there}")
    run_sql(
        primary.dsn(there),
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, 'copied', i FROM generate_series(100, 400) i",
        "CREATE PUBLICATION p FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{here}', 'pgoutput')",
    )
    stage = Stage(Database(dsn), phase)
    run_sql(
        dsn,
        f"CREATE SUBSCRIPTION {here} CONNECTION '{primary.dsn(there)}' PUBLICATION p "
        f"WITH (create_slot = false, slot_name = '{here}', copy_data = true)",
    )
    user = steps.session(dsn)
    user.autocommit = True
    try:
        ready = [("r",)]
        wait_until(lambda: sql(user, "SELECT srsubstate::text FROM pg_subscription_rel") == ready, "the first copy")
        assert sql(user, "SELECT count(*) FROM t") == [(361,)]
        run_sql(primary.dsn(there), "UPDATE t SET k = 'then' WHERE id % 3 = 0", "DELETE FROM t WHERE id % 7 = 0")
        wait_until(lambda: sql(user, "SELECT count(*) FROM t") == [(318,)], "applying")
        stage.finish()
        steps.assert_exact(Database(dsn))
    finally:
        run_sql(dsn, f"DROP SUBSCRIPTION {here}")
        user.close()
        stage.connection.close()
        primary.execute(f"DROP DATABASE {there} WITH (FORCE)")


def test_a_subscriber_of_all_tables_stops_at_the_first_entry_and_goes_on_as_the_warning_says(
    primary: Server, dsn: str
) -> None:
    """Found: a subscriber of all tables stopped at the first entry. It holds: prepare refuses, `roir status` warns."""
    database = Database(dsn)
    there = dsn.rsplit("/", 1)[1] + "_subscriber"
    primary.execute(f"CREATE DATABASE {there}")
    run_sql(primary.dsn(there), "CREATE TABLE t (id int PRIMARY KEY, k text, v int)")
    # The subscription is older than the control schema: later it can't be created.
    run_sql(dsn, "CREATE PUBLICATION everything FOR TABLE t")
    slot = f"slot_{there}"
    run_sql(dsn, f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    run_sql(
        primary.dsn(there),
        # Stops at the first error. Otherwise it would try again every five seconds for good.
        f"CREATE SUBSCRIPTION s CONNECTION '{dsn}' PUBLICATION everything WITH (create_slot = false, "
        f"slot_name = '{slot}', copy_data = false, disable_on_error = true)",
    )
    run_sql(dsn, "DROP PUBLICATION everything", "CREATE PUBLICATION everything FOR ALL TABLES")
    subscriber = steps.session(primary.dsn(there))
    subscriber.autocommit = True
    try:
        with pytest.raises(InvalidInput, match='publication "everything" is for all tables'):
            steps.begin(database)
        steps.make_index(database, ignore_publications=True)
        run_sql(dsn, "UPDATE t SET v = -1")
        wait_until(lambda: sql(subscriber, "SELECT subenabled FROM pg_subscription") == [(False,)], "the error")
        assert sql(subscriber, "SELECT count(*) FROM t") == [(0,)]
        steps.assert_exact(database)
        # The steps of the warning. The subscriber misses the writes that came before the new publication.
        run_sql(dsn, "CREATE PUBLICATION fewer FOR TABLES IN SCHEMA public")
        position = sql(steps.session(dsn), "SELECT pg_current_wal_lsn()")[0][0]
        run_sql(primary.dsn(there), "ALTER SUBSCRIPTION s SET PUBLICATION fewer WITH (refresh = false)")
        wait_until(lambda: not sql(steps.session(dsn), ACTIVE_SLOT, slot), "the slot's release")
        run_sql(dsn, f"SELECT pg_replication_slot_advance('{slot}', '{position}')", "DROP PUBLICATION everything")
        run_sql(primary.dsn(there), "ALTER SUBSCRIPTION s ENABLE")
        run_sql(dsn, "INSERT INTO t SELECT i, 'new', i FROM generate_series(1001, 1009) i")
        wait_until(lambda: sql(subscriber, "SELECT count(*) FROM t") == [(9,)], "applying")
        assert [line for line in clean_up.clean_up(database).warnings if "publication" in line] == []
    finally:
        run_sql(primary.dsn(there), "DROP SUBSCRIPTION s")
        subscriber.close()
        primary.execute(f"DROP DATABASE {there} WITH (FORCE)")


ACTIVE_SLOT = "SELECT FROM pg_replication_slots WHERE slot_name = %s AND active"
