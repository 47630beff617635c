"""If anything runs out anywhere, the operation waits, says why and continues automatically; the index is exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2.extensions import make_dsn
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import clean_up, install, lifecycle
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import heartbeat
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry import patience
from airflow_roir.engine.retry.trouble import LACKS
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import WorkerFailed
from airflow_roir.options import CompactOptions
from tests.conftest import database_dsn, run_sql
from tests.engine import compacting, steps
from tests.engine.interposed import before, changed
from tests.engine.running_out import CAUSES, RAISED, SCENES, STRIDE, Faults, Life
from tests.engine.steps import sql


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Skips all waits; the list of their lengths."""
    naps: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", naps.append)
    return naps


@pytest.mark.sample(0)
@pytest.mark.parametrize("offset", range(STRIDE))
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("scene", SCENES)
def test_each_statement_may_fail_once(dsn: str, hasty: list[float], scene: str, cause: str, offset: int) -> None:
    """Found: a verification whose last commit's answer was lost ended with "no unfinished verification". It holds: it
    is over.
    """
    run_sql(dsn, *SCENES[scene])
    database = Database(dsn, "roir tests")
    life = Life(database, dsn, scene)
    faults = Faults(database, cause, offset)
    with faults.happening():
        life.live()
    assert faults.made
    steps.assert_exact(database)
    # A command reports at once that it found no server. The clean-up's and the partitions' commands are called again.
    assert not [said for said in life.failed if said.startswith("drive") and cause in RAISED]


@pytest.mark.sample(0)
@pytest.mark.parametrize("offset", range(STRIDE))
@pytest.mark.parametrize("cause", [*RAISED, "terminated"])
def test_each_statement_of_a_compaction_may_fail_once(dsn: str, hasty: list[float], cause: str, offset: int) -> None:
    """It continues automatically, and its report is there at the end."""
    steps.make_table(dsn, 300)
    database = Database(dsn, "roir tests", limits=Limits(compaction_blocks=1, table_lock_ms=20))
    steps.make_index(database, keys="k,v", segments=3)
    actions = [compacting.act("merge", 1, 2), compacting.act("rewrite", 0), compacting.act("split", 3, parts=2)]
    begun = compaction.begin(database, "ix", actions, CompactOptions(parallelism=1), "test")
    compacting.writes(dsn, 40)
    faults = Faults(database, cause, offset)
    with faults.happening():
        try:
            lifecycle.drive(database, begun.index, "test")
        except DBAPIError:
            # The command reports at once that it found no server.
            assert cause == "terminated"
            assert len(faults.made) == 1
            lifecycle.drive(database, begun.index, "test")
    assert faults.made
    report = compaction.report_of(database, begun.operation_id)
    assert [unit["status"] for unit in report.units] == ["done"] * 3
    assert sql(steps.session(dsn), "SELECT DISTINCT throttled, throttled_since FROM roir.operation") == [(None, None)]
    compacting.is_right(database)


# For each phase, the beginning of the statement in its middle that fails.
PLACES = {"build": "INSERT INTO roir_data", "seal": "VACUUM", "fold": "WITH gone"}


@pytest.mark.sample(0)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cause", RAISED)
def test_what_does_not_pass_pauses_with_its_reason(dsn: str, hasty: list[float], cause: str, place: str) -> None:
    run_sql(dsn, *SCENES["plain"])
    database = Database(dsn, "roir tests")
    life = Life(database, dsn, "plain")
    state, message = RAISED[cause]
    fails = f"DO $$ BEGIN RAISE EXCEPTION '{message}' USING ERRCODE = '{state}'; END $$"
    with changed(database, f"(?s)^{PLACES[place]}.*", fails), pytest.raises((WorkerFailed, DBAPIError)):
        life.live_once()
    row = operations.find_operation(database, "ix")
    assert (row.status, row.throttled) == ("paused", None)
    begins = "somebody cancels statements of ours" if cause == "cancelled" else "the server has "
    assert begins in row.pause_reason
    assert message in row.pause_reason
    # The worker doesn't ask again and again while nothing changes.
    assert len(hasty) <= 200
    assert max(hasty) <= patience.LONGEST_WAIT_S
    limit = database.limits.exhausted_s
    assert sum(hasty) <= limit
    if cause != "cancelled":
        assert sum(hasty) > limit - 2 * patience.EXHAUSTED_LONGEST_S
    user = steps.session(dsn)
    kind = "cancelled" if cause == "cancelled" else "exhausted"
    # Found: "a lack of disk, memory or connections", whichever it was.
    assert sql(user, "SELECT cause FROM roir.throttle_time") == [(LACKS.get(state, kind),)]
    assert sql(user, "SELECT actor, detail LIKE %s FROM roir.event WHERE action = %s", f"%{message}%", kind) == [
        ("test", True)
    ]
    life.drive()
    assert life.failed == []
    steps.assert_exact(database)


# Settings that a DBA may have chosen, as short as a busy machine of tests allows.
SETTINGS = {
    "statement_timeout": "500ms",
    "idle_in_transaction_session_timeout": "500ms",
    "idle_session_timeout": "500ms",
    "transaction_timeout": "500ms",
    "lock_timeout": "500ms",
    "deadlock_timeout": "20ms",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "tcp_user_timeout": "500ms",
    "client_connection_check_interval": "20ms",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("place", ["INSERT INTO roir_data", "VACUUM", "WITH gone", "CREATE OR REPLACE VIEW"])
@pytest.mark.parametrize("way", ["role", "database", "reload"])
def test_settings_that_change_meanwhile_change_nothing_for_us(dsn: str, server: str, way: str, place: str) -> None:
    """For sessions that are open, between two statements and in one, and for new sessions."""
    run_sql(dsn, *SCENES["unique"])
    name = dsn.split("?")[0].rsplit("/", 1)[1]
    known = [name for (name,) in sql(steps.session(dsn), "SELECT name FROM pg_settings")]
    of = {
        "role": f"ALTER ROLE postgres IN DATABASE {name}",
        "database": f"ALTER DATABASE {name}",
        "reload": "ALTER SYSTEM",
    }
    wanted = {setting: value for setting, value in SETTINGS.items() if setting in known}
    database = Database(dsn, "roir tests")
    # Sessions of users keep the settings with which they began.
    life = Life(
        database, f"{dsn}&options=-c%20default_transaction_read_only%3Doff%20-c%20statement_timeout%3D0", "unique"
    )

    def change() -> None:
        # The sessions of a test find the server like this: writable for those that ask for it.
        run_sql(server, *(f"{of[way]} SET {setting} = '{value}'" for setting, value in wanted.items()))
        run_sql(server, "SELECT pg_reload_conf()")

    try:
        with before(database, place, change):
            life.live()
    finally:
        writable = f"{server}&options=-c%20default_transaction_read_only%3Doff"
        run_sql(writable, *(f"{of[way]} RESET {setting}" for setting in wanted), "SELECT pg_reload_conf()")
    assert life.failed == []
    assert not [said for said in life.said if said.startswith("waiting: ")]


@pytest.fixture
def kept(server: str) -> Iterator[str]:
    """The DSN of a database whose owner is no superuser: limits of connections count for this role."""
    run_sql(server, "CREATE ROLE counted LOGIN", "CREATE DATABASE counted OWNER counted")
    run_sql(database_dsn(server, "counted"), "GRANT CREATE ON SCHEMA public TO counted")
    dsn = make_dsn(database_dsn(server, "counted"), user="counted")
    install.init(Database(dsn, "roir tests"))
    yield dsn
    run_sql(server, "DROP DATABASE counted WITH (FORCE)", "DROP ROLE counted")


LIMITS = {
    "role": ("ALTER ROLE counted CONNECTION LIMIT 0", "ALTER ROLE counted CONNECTION LIMIT -1"),
    "database": ("ALTER DATABASE counted CONNECTION LIMIT 0", "ALTER DATABASE counted CONNECTION LIMIT -1"),
    "login": ("ALTER DATABASE counted ALLOW_CONNECTIONS false", "ALTER DATABASE counted ALLOW_CONNECTIONS true"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["INSERT INTO roir.generation", "INSERT INTO roir_data", "VACUUM", "WITH gone"])
@pytest.mark.parametrize("whose", ["role", "database"])
def test_no_connection_left_is_waited_for(
    kept: str, server: str, monkeypatch: pytest.MonkeyPatch, whose: str, place: str
) -> None:
    run_sql(kept, *SCENES["plain"])
    database = Database(kept, "roir tests")
    life = Life(database, database_dsn(server, "counted"), "plain")
    none, enough = LIMITS[whose]
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            run_sql(server, enough)

    monkeypatch.setattr(patience.time, "sleep", nap)
    with before(database, place, lambda: run_sql(server, none)):
        life.live()
    assert life.failed == []
    assert len(naps) >= 3
    told = [said for said in life.said if "the server has no connection left: too many connections for" in said]
    assert told or place == "VACUUM"
    with database.connect():
        pass


def test_the_heart_beats_where_no_connection_is_left(kept: str, server: str) -> None:
    """Found: if no connection was left, a run's heartbeat stopped, and another could take over the run at work. It
    holds: the heartbeat keeps its session.
    """
    run_sql(kept, *SCENES["plain"])
    database = Database(kept, "roir tests", Limits(heartbeat_every_s=0.01))
    _, run = steps.begin(database)
    user = steps.session(database_dsn(server, "counted"))
    user.autocommit = True

    def beat(after: object) -> object:
        for _ in range(2000):
            [(now,)] = sql(user, "SELECT heartbeat_at FROM roir.operation")
            if now != after:
                return now
        raise AssertionError("the heart stands still")

    with heartbeat(database, run):
        last = beat(None)
        last = beat(last)
        sql(user, LIMITS["role"][0])
        for _ in range(3):
            last = beat(last)
        sql(user, LIMITS["role"][1])


@pytest.mark.sample(0)
def test_a_clean_up_without_room_says_so(dsn: str) -> None:
    """Nothing is wrong with the index, so no message advises to rebuild it."""
    run_sql(dsn, *SCENES["plain"])
    database = Database(dsn, "roir tests")
    steps.make_index(database)
    state, message = RAISED["disk"]
    fails = f"DO $$ BEGIN RAISE EXCEPTION '{message}' USING ERRCODE = '{state}'; END $$"
    with changed(database, "(?s)^DROP TABLE.*", fails):
        report = clean_up.clean_up(database)
    assert report.warnings == []
    assert report.waiting == [f"index public.ix: the server has no room: {message}"]
    assert clean_up.clean_up(database).deltas_dropped == 1
