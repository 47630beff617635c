"""Throttle: limits as users write them, signals of a real server, the governor's decisions, the workers' reactions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import psycopg2.errors
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, fold, seal, switch
from airflow_roir.engine.compact import worker as compacter
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.operations import read_operation
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.dry_run import run as dry_run
from airflow_roir.engine.governor.governing import Governor
from airflow_roir.engine.governor.readings import SignalReader
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.engine.work import turn
from airflow_roir.engine.work.turn import Turn
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions
from airflow_roir.signals import SIGNALS, throttle_text
from tests.conftest import run_sql
from tests.engine import compacting, steps, verifying
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(10)

GIVEN = {
    "replica_lag=100MB": {"replica_lag": 100 << 20},
    "replica_delay=30s; replicas=r1,r2": {"replica_delay": 30, "replicas": ["r1", "r2"]},
    "slot_wal=5GB\nslot_room=1GB": {"slot_wal": 5 << 30, "slot_room": 1 << 30},
    "commit_latency=20ms": {"commit_latency": 0.02},
    "oldest_transaction=10min": {"oldest_transaction": 600},
    "wal_rate=50MB/s active_sessions=8 lock_waits=2.5": {"wal_rate": 50 << 20, "active_sessions": 8, "lock_waits": 2.5},
    "query=0": {"query": 0},
    "": {},
    "off": {},
    "replica_lag=1kB replica_lag=off": {},
    "replica_lag=1kB off query=3": {"query": 3},
    "replicas=r1 replicas=all": {},
}
BAD = ["replica_lag", "replica_lag=", "lag=3", "replica_lag=-1", "commit_latency=fast", "query=NaN", "checkpoints=0"]
BAD += ["commit_latency=infinity", "replica_lag=1e30", "x y", "=3", "replica_lag=1MB,wal_rate=2MB", "roir.signal=1"]
BAD += ["replicas=", "replicas=,", "replicas=,,", "replicas=r1,", "replicas=,r1", "replicas=r1,,r2"]


@pytest.fixture
def governed(database: Database, dsn: str) -> Database:
    steps.make_table(dsn)
    return database


@pytest.mark.parametrize("text", GIVEN)
def test_limits_are_read_as_they_are_written_and_shown_as_they_are_read(dsn: str, text: str) -> None:
    user = steps.session(dsn)
    [(found,)] = sql(user, "SELECT roir.throttle_of(%s)", text)
    assert found == GIVEN[text]
    [(shown,)] = sql(user, "SELECT coalesce(roir.throttle_text(%s::jsonb), '')", json.dumps(found))
    assert sql(user, "SELECT roir.throttle_of(%s)", shown) == [(found,)]
    assert shown == throttle_text(found)


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_limit_is_refused_by_sql_and_by_the_commands(governed: Database, dsn: str, text: str) -> None:
    """Found: `replicas=,,` was a limit, of replicas without a name. It holds: refused."""
    with pytest.raises(psycopg2.errors.InvalidParameterValue, match="throttle"):
        sql(steps.session(dsn), "SELECT roir.throttle_of(%s)", text)
    with pytest.raises(InvalidInput, match="throttle"):
        steps.begin(governed, throttle=text)
    assert sql(steps.session(dsn), "SELECT count(*) FROM roir.operation") == [(0,)]


def test_the_signals_of_sql_are_those_of_the_code(dsn: str) -> None:
    found = dict(sql(steps.session(dsn), "SELECT name, unit FROM roir.signals()"))
    assert found == {name: signal.unit for name, signal in SIGNALS.items()}


def test_a_limit_is_changed_alone_while_it_runs_and_each_change_is_an_event(governed: Database, dsn: str) -> None:
    steps.begin(governed, throttle="replica_lag=100MB commit_latency=20ms")
    requests.change_options(governed, "ix", actor="ann", throttle="replica_lag=50MB")
    requests.change_options(governed, "ix", actor="ann", throttle="commit_latency=off")
    user = steps.session(dsn)
    user.autocommit = True
    sql(user, "SELECT roir.change('ix', throttle => 'query=4', actor => 'ann')")
    assert read(governed).throttle == {"replica_lag": 50 << 20, "query": 4}
    changes = [e.detail for e in operations.events(governed, "ix") if e.action == "change throttle"]
    assert changes[-1] == "replica_lag=50MB -> query=4 replica_lag=50MB"
    with pytest.raises(InvalidInput, match="there is no signal nothing; there are"):
        requests.change_options(governed, "ix", actor="ann", throttle="nothing=1")
    requests.change_options(governed, "ix", actor="ann", throttle="off")
    assert read(governed).throttle == {}


def read(database: Database) -> Any:
    with database.transaction() as connection:
        return operations.live_or_last(connection, operations.parse_name("ix", "index"))


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("limit", ["query=6", None])
@pytest.mark.parametrize("over", [True, False])
def test_a_query_of_the_users_own_holds_the_work_and_lets_it_go(
    governed: Database, dsn: str, over: bool, limit: str | None
) -> None:
    run_sql(dsn, "CREATE TABLE busy (n numeric)", f"INSERT INTO busy VALUES ({7 if over else 5})")
    _, run = steps.begin(governed, batch_rows=7, throttle=limit)
    clock = Clock()
    asked = "SELECT n FROM public.busy" if limit else "SELECT n > 6 FROM public.busy"
    governor = Governor(governed, run, Surroundings(query=asked), clock=clock)
    waits: list[float] = []
    with governed.connect() as connection, governed.connect() as other:
        governor.look(connection)
        assert bool(read(governed).throttled) is over

        def wait(seconds: float) -> None:
            waits.append(seconds)
            clock.now += seconds
            if len(waits) == 3:
                run_sql(dsn, "UPDATE busy SET n = 1")
            governor.look(connection)

        Turn(other, run, 0, wait).come()
        row = read(governed)
    assert (row.granted, row.throttled, bool(waits)) == (2, None, over)
    lost = dict(sql(steps.session(dsn), "SELECT cause, round(seconds::numeric, 3)::float8 FROM roir.throttle_time"))
    assert lost == ({"query": 1.0} if over else {})
    governor.close()


def test_a_grant_that_is_not_renewed_is_a_hold_and_a_pause_ends_it(governed: Database, dsn: str) -> None:
    """The governor, which reads the signals, may die: then their present values are unknown."""
    _, run = steps.begin(governed, throttle="lock_waits=4")
    looks: list[float] = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            requests.pause(governed, "ix", "ann")

    with governed.connect() as connection:
        governor = Governor(governed, run, Surroundings())
        governor.look(connection)
        run_sql(dsn, "UPDATE roir.operation SET granted_at = clock_timestamp() - interval '16 s'")
        assert list(build.PHASE.work(governed, run, 0, wait)) == []
    assert len(looks) == 3
    governor.close()


def test_a_paced_worker_rests_for_as_long_as_its_share_says(governed: Database, dsn: str) -> None:
    _, run = steps.begin(governed, throttle="lock_waits=4")
    run_sql(dsn, "UPDATE roir.operation SET granted = 0.25, granted_at = clock_timestamp()")
    rests: list[float] = []
    with governed.connect() as connection:
        Turn(connection, run, 0, rests.append).rest(0.4)
        assert sum(rests) == pytest.approx(1.2)
        rests.clear()
        # Four threads together get one worker's share.
        Turn(connection, run, 0, rests.append, among=4).rest(0.1)
        assert sum(rests) == pytest.approx(1.5)


def test_a_signal_that_cannot_be_read_holds_then_pauses_with_the_reason(governed: Database) -> None:
    _, run = steps.begin(governed, throttle="query=1")
    clock = Clock()
    governor = Governor(governed, run, Surroundings(), clock=clock)
    with governed.connect() as connection:
        for _ in range(3):
            governor.look(connection)
            clock.now += 1
        assert read(governed).granted == 0
        assert read(governed).throttled == (
            "throttled: query can't be read: the run has no query: set ROIR_THROTTLE_QUERY, or the operator's "
            "throttle_query"
        )
        clock.now += governed.limits.unreadable_s
        governor.look(connection)
    row = read(governed)
    assert (row.status, row.paused_by) == ("paused", "governor")
    assert "query can't be read" in row.pause_reason
    governor.close()


READABLE = "slot_wal=1GB slot_room=1MB oldest_transaction=1h commit_latency=10s active_sessions=50 lock_waits=50"
READABLE += " wal_rate=1TB/s checkpoints=100000 replica_lag=1MB replica_delay=1s"


def test_every_signal_is_read_at_a_real_server(governed: Database, dsn: str) -> None:
    clock = Clock()
    reader = SignalReader(governed, Surroundings(), clock)
    [(throttle,)] = sql(steps.session(dsn), "SELECT roir.throttle_of(%s)", READABLE)
    with governed.connect() as connection:
        reader.read(connection, throttle)
        clock.now += 1
        run_sql(dsn, "UPDATE t SET v = v + 1")
        found = {reading.signal.name: reading for reading in reader.read(connection, throttle)}
    # No replica streams, and no slot has a limit: these signals don't exist.
    assert set(found) == set(throttle) - {"replica_lag", "replica_delay", "slot_room"}
    assert {name: reading.problem for name, reading in found.items() if reading.value is None} == {}
    assert found["wal_rate"].value
    assert found["commit_latency"].value
    reader.close()


@pytest.mark.parametrize("signal", ["oldest_transaction=1h", "active_sessions=9"])
def test_a_role_that_may_not_see_others_holds_and_is_told_the_grant(governed: Database, dsn: str, signal: str) -> None:
    run_sql(dsn, "CREATE ROLE blind LOGIN")
    try:
        user = steps.session(dsn)
        sql(user, "SELECT 1")
        blind = Database(dsn.replace("postgres@", "blind@") if "postgres@" in dsn else f"{dsn}&user=blind")
        [(throttle,)] = sql(user, "SELECT roir.throttle_of(%s)", signal)
        reader = SignalReader(blind, Surroundings())
        with blind.connect() as connection:
            [found] = reader.read(connection, throttle)
        assert found.value is None
        assert "GRANT pg_read_all_stats TO blind" in found.problem
        reader.close()
    finally:
        run_sql(dsn, "DROP ROLE blind")


def test_a_transaction_that_is_open_for_long_is_named(governed: Database, dsn: str) -> None:
    user = steps.old_session(dsn)
    [(pid,)] = sql(user, "SELECT pg_backend_pid()")
    reader = SignalReader(governed, Surroundings())
    with governed.connect() as connection:
        [found] = reader.read(connection, {"oldest_transaction": 0.000001})
    assert found.is_over
    assert f"pid {pid} of" in str(found)
    user.rollback()
    reader.close()


def test_nobody_sees_the_query_or_a_dsn_in_a_table(governed: Database, dsn: str) -> None:
    secret = Surroundings({"r2": "host=nowhere.invalid password=hunter2"}, "SELECT 'hunter3' IS NULL")
    _, run = steps.begin(governed, throttle="replica_lag=1MB replicas=r2")
    with governed.connect() as connection:
        governor = Governor(governed, run, secret)
        governor.look(connection)
        governor.close()
    held = sql(steps.session(dsn), "SELECT row_to_json(o)::text FROM roir.operation o")
    held += sql(steps.session(dsn), "SELECT row_to_json(s)::text FROM roir.signal_sample s")
    assert "hunter" not in str(held)
    assert "replica r2" in str(held)
    with governed.transaction() as connection:
        assert read_operation(connection, run.operation_id).granted == 0


def test_the_next_run_takes_the_grant_over_and_no_reason_is_left_behind(governed: Database, dsn: str) -> None:
    """A build ends with a grant that its server can bear; its comparison needn't find that grant again."""
    _, run = steps.begin(governed, parallelism=4, throttle="commit_latency=60s")
    clock = Clock()
    first, second = (Governor(governed, run, Surroundings(), clock=clock) for _ in range(2))
    with governed.connect() as connection:
        grants = []
        while not grants or grants[-1] < 2:
            grant = first.look(connection)
            assert grant is not None
            grants.append(grant.workers)
            clock.now += 1
        assert read(governed).throttled is not None
        first.close()
        assert read(governed).throttled is None
        again = second.look(connection)
    second.close()
    assert (grants[0], again and again.workers) == (0.25, 2)


PHASES: dict[str, Callable[[Database, Run], object]] = {
    "build": lambda database, run: list(build.PHASE.work(database, run, 0, turn.time.sleep)),
    "seal": lambda database, run: list(seal.PHASE.work(database, run, 0)),
    "fold": lambda database, run: _fold(database, run),
    "verify": lambda database, run: _verify(database, run),
    "verify alone": lambda database, run: verifying.go_through(database, run, 2),
    "compact": lambda database, run: list(compacter.PHASE.work(database, run, 0)),
}


def _fold(database: Database, run: Run) -> None:
    fold.begin(database, run)
    list(fold.PHASE.work(database, run, 0, turn.time.sleep))
    fold.finish(database, run)


def _verify(database: Database, run: Run) -> None:
    verifying.of_build(database, run, turn.time.sleep)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", PHASES)
def test_whoever_waits_holds_nothing(governed: Database, dsn: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spirit #1093: a verification waited for a replica's lag, and its open snapshot caused that lag."""
    if phase == "verify alone":
        steps.make_index(governed, ranges=3, segments=2)
        run_sql(dsn, "UPDATE t SET v = v + 1 WHERE id < 5")
        run = verifying.begin(governed)
    elif phase == "compact":
        steps.make_index(governed, ranges=3, segments=2)
        run = compacting.begin(governed, compacting.act("merge", 1, 2))
    else:
        _, run = steps.begin(governed, ranges=3, segments=2, batch_rows=30, parallelism=1)
    if phase in ("seal", "fold", "verify"):
        steps.build_all(governed, run)
    if phase in ("fold", "verify"):
        run_sql(dsn, "UPDATE t SET k = 'x' WHERE id % 3 = 0")
        steps.seal_all(governed, run)
        switch.switch(governed, run)
    if phase == "verify":
        steps.fold_delta(governed, run)
    watch = steps.session(dsn)
    watch.autocommit = True
    hold = "UPDATE roir.operation SET throttle = '{\"query\": 1}', granted = %s, granted_at = clock_timestamp()"
    sql(watch, hold, 0)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        held = sql(
            watch,
            "SELECT application_name, state FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend' AND pid <> pg_backend_pid() "
            "AND (xact_start IS NOT NULL OR backend_xmin IS NOT NULL)",
        )
        assert held == []
        # One piece of work, then the next hold, and so on to the end.
        sql(watch, hold, 0 if len(waits) % 3 else 1 / 16)

    monkeypatch.setattr(turn.time, "sleep", wait)
    if phase == "verify alone":
        monkeypatch.setattr(VerifyWorker, "unit", with_a_hold(VerifyWorker.unit, lambda: sql(watch, hold, 0)))
    PHASES[phase](governed, run)
    assert len(waits) > 2
    sql(watch, "UPDATE roir.operation SET throttle = '{}', granted = NULL, granted_at = NULL")
    monkeypatch.undo()
    if phase == "compact":
        compacter.finish(governed, run)
    elif phase != "verify alone":
        steps.through(governed, run)
    steps.assert_exact(governed)


def with_a_hold(work: Callable[..., Any], hold: Callable[[], object]) -> Callable[..., Any]:
    """Does the work, and then sets a hold."""

    def held(*arguments: Any) -> Any:
        result = work(*arguments)
        hold()
        return result

    return held


def test_segments_are_smaller_under_a_throttle_since_no_worker_rests_within_one(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE big (id int PRIMARY KEY, k text)",
        "INSERT INTO big SELECT i, i::text FROM generate_series(1, 3000) i",
        "ANALYZE big",
        # The plan uses the statistics: a million rows.
        "UPDATE pg_class SET reltuples = 1000000 WHERE oid = 'big'::regclass",
    )

    def segments(throttle: str | None) -> int:
        definition = IndexDefinition.parse("ix", "big", "k")
        return dry_run(database, definition, BuildOptions(throttle=throttle)).plan.segments

    assert segments(None) == segments("off") < segments("commit_latency=20ms") == 10


def test_free_space_is_the_file_systems_over_a_socket_and_unknown_over_a_network(governed: Database, dsn: str) -> None:
    [(folder, local)] = sql(steps.session(dsn), "SELECT current_setting('data_directory'), inet_server_addr() IS NULL")
    reader = SignalReader(governed, Surroundings())
    with governed.connect() as connection:
        [found] = reader.read(connection, {"free_space": 1 << 50})
    reader.close()
    if not local:
        assert "report free space" in found.problem
        return
    here = os.statvfs(folder)
    assert found.value == pytest.approx(here.f_bavail * here.f_frsize, rel=0.2)
    assert found.is_over, "there is less than a petabyte"
    assert "are free on" in str(found)
