"""The lag of replicas, read at real ones: streaming, stopped, cascaded, named, gone, and the rights that show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.governor import replicas
from airflow_roir.engine.governor.readings import SignalReader
from airflow_roir.engine.governor.replicas import AWAY_S, LagClock
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.signals import Reading
from servers.killable import Server
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_replication import dsn as dsn
from tests.engine.test_replication import primary as primary
from tests.engine.test_replication import replayed, standby_of, wait_until
from tests.engine.test_throttle import Clock

pytestmark = pytest.mark.sample(2)

LAG = {"replica_lag": 64 << 10, "replica_delay": 5}
WRITE = "UPDATE t SET v = v + 1 FROM generate_series(1, 20)"


class Watch:
    """Readings of one run, by the test's clock."""

    def __init__(self, dsn: str, surroundings: Surroundings | None = None) -> None:
        self.clock = Clock()
        self.reader = SignalReader(Database(dsn), surroundings or Surroundings(), self.clock)
        self.connection = Database(dsn).engine.connect()

    def look(self, **limits: object) -> dict[tuple[str, str], Reading]:
        self.clock.now += 1
        found = self.reader.read(self.connection, LAG | limits)
        return {(one.signal.name, one.of): one for one in found}

    def of(self, name: str, **limits: object) -> Reading:
        return self.look(**limits)["replica_lag", name]


@contextmanager
def stopped(standby: str) -> Iterator[None]:
    """In the block, the replica receives, and replays nothing."""
    run_sql(standby, "SELECT pg_wal_replay_pause()")
    wait_until(lambda: paused(standby), "the end of the replay")
    try:
        yield
    finally:
        run_sql(standby, "SELECT pg_wal_replay_resume()")


def paused(standby: str) -> bool:
    user = steps.session(standby)
    [(state,)] = sql(user, "SELECT pg_get_wal_replay_pause_state()")
    user.close()
    return bool(state == "paused")


def much(dsn: str) -> None:
    """Writes a megabyte of WAL."""
    run_sql(dsn, "SELECT pg_logical_emit_message(false, 'x', repeat('x', 1 << 20))", WRITE)


def reported(watch: Watch, name: str) -> None:
    """Waits until the replica has reported its position to the primary."""
    wait_until(lambda: not watch.of(name).is_over, "the replica's word")


NAME = "walreceiver"


def test_a_replica_that_stops_is_behind_in_bytes_and_in_seconds_and_catches_up(primary: Server, dsn: str) -> None:
    with standby_of(primary) as standby:
        watch = Watch(dsn)
        replayed(dsn, standby)
        reported(watch, NAME)
        with stopped(standby):
            much(dsn)
            wait_until(lambda: watch.of(NAME).is_over, "the lag")
            run_sql(dsn, WRITE)
            before = watch.look()["replica_delay", NAME].value
            assert before is not None
            watch.clock.now += 30
            later = watch.look()["replica_delay", NAME]
            assert later.value == pytest.approx(before + 31)
            assert str(watch.of(NAME)).startswith(f"replica {NAME} is 1.")
        replayed(dsn, standby)
        reported(watch, NAME)
        assert not watch.look()["replica_delay", NAME].is_over


@pytest.mark.sample(0)
def test_only_replicas_that_are_named_count_and_who_is_missing_cannot_be_read(primary: Server, dsn: str) -> None:
    """gh-ost #361 and #1745: replicas off the list remained in force, and irrelevant hosts were asked."""
    asked: list[str] = []

    class Asked(replicas._Own):
        def ask(self) -> tuple[int | None, float | None, str]:
            asked.append(self._dsn)
            return super().ask()

    with standby_of(primary) as standby, pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_Own", Asked)
        watch = Watch(dsn, Surroundings({"far": "host=nowhere.invalid"}))
        with stopped(standby):
            much(dsn)
            wait_until(lambda: (("replica_lag", NAME)) in watch.look(replicas=[NAME]), "the replica")
            assert asked == []
            found = watch.look(replicas=["other"])
            assert {of for _, of in found} == {"other"}
            missing = "replica other isn't connected, and the run has no DSN of it"
            assert {(reading.value, reading.problem) for reading in found.values()} == {(None, missing)}
            assert asked == []
            assert all(reading.value is None for key, reading in watch.look(replicas=["far"]).items())
            assert asked == ["host=nowhere.invalid"]


@pytest.mark.sample(0)
def test_a_cascaded_replica_is_asked_by_its_own_dsn(primary: Server, dsn: str) -> None:
    with standby_of(primary) as first, standby_of(primary, first, "port = 5998\n") as second:
        cascaded = second.replace("5999", "5998")
        watch = Watch(dsn, Surroundings({"second": cascaded}))
        replayed(dsn, cascaded)
        wait_until(lambda: not watch.of("second").is_over, "the cascaded replica")
        with stopped(cascaded):
            much(dsn)
            replayed(dsn, first)
            found = watch.look()
            assert found["replica_lag", "second"].is_over
            wait_until(lambda: not watch.of(NAME).is_over, "the first one's word")
        replayed(dsn, cascaded)
        wait_until(lambda: not watch.of("second").is_over, "the cascaded replica")
        run_sql(cascaded, "SELECT pg_promote()")
        wait_until(lambda: "it is not in recovery" in watch.of("second").problem, "the promotion")
        watch.reader.close()


def test_a_replica_that_is_away_is_a_hold_for_a_minute_and_then_counts_no_more(primary: Server, dsn: str) -> None:
    watch = Watch(dsn)
    with standby_of(primary) as standby:
        replayed(dsn, standby)
        wait_until(lambda: ("replica_lag", NAME) in watch.look(), "the replica")
    wait_until(lambda: watch.of(NAME).value is None, "its end")
    assert watch.of(NAME).problem == f"replica {NAME} is no longer connected"
    watch.clock.now += AWAY_S
    assert watch.look() == {}


def test_a_role_without_the_right_sees_no_lag_and_that_is_not_no_lag(primary: Server, dsn: str) -> None:
    """Spirit #1035: lag that couldn't be seen counted as none."""
    run_sql(dsn, "CREATE ROLE blind LOGIN")
    try:
        with standby_of(primary) as standby:
            replayed(dsn, standby)
            watch = Watch(dsn.replace("postgres@", "blind@"))
            found = watch.look()
            assert found
            assert all(reading.value is None for reading in found.values())
            assert all('GRANT pg_read_all_stats TO "blind"' in reading.problem for reading in found.values())
            run_sql(dsn, "GRANT pg_read_all_stats TO blind")
            wait_until(lambda: watch.of(NAME).value is not None, "the right")
            watch.connection.close()
    finally:
        run_sql(dsn, "DROP ROLE blind")


def test_wal_that_a_slot_keeps_and_the_room_that_it_has_left(primary: Server, dsn: str) -> None:
    run_sql(dsn, "SELECT pg_create_physical_replication_slot('keeps', true)")
    watch = Watch(dsn)
    try:
        much(dsn)
        limits = {"slot_wal": 1 << 20, "slot_room": 1 << 40}
        found = watch.look(**limits)
        assert found["slot_wal", "keeps"].is_over
        # Without max_slot_wal_keep_size there is no limit to reach.
        assert not any(name == "slot_room" for name, _ in found)
        run_sql(dsn, "ALTER SYSTEM SET max_slot_wal_keep_size = '64MB'", "SELECT pg_reload_conf()")
        wait_until(lambda: ("slot_room", "keeps") in watch.look(**limits), "the setting")
        assert watch.look(**limits)["slot_room", "keeps"].is_over
        assert not watch.look(slot_room=1)["slot_room", "keeps"].is_over
    finally:
        run_sql(dsn, "ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
        run_sql(dsn, "SELECT pg_drop_replication_slot('keeps')")


def test_a_replica_that_lacks_nothing_is_not_behind_however_long_nothing_is_written() -> None:
    clock = LagClock()
    clock.wrote(0.0, 100)
    clock.wrote(10.0, 200)
    clock.wrote(500.0, 200)
    assert clock.behind(500.0, 200) == 0
    assert clock.behind(500.0, 150) == 490
    assert clock.behind(500.0, 50) == 500
