"""Attacks on the governor: the user's query, replicas that hang, values that can't be written. The governor never lets
work go on unseen, never waits without saying why, and pauses in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2.errors
import pytest

from airflow_roir.engine import fold, lifecycle, switch
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.governor import replicas
from airflow_roir.engine.governor.governing import Governor, governing
from airflow_roir.engine.governor.readings import SignalReader
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.errors import InvalidInput
from airflow_roir.signals import Reading
from airflow_roir.windows import parse_windows
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.steps import sql
from tests.engine.test_replication import wait_until
from tests.engine.test_throttle import Clock, read

pytestmark = pytest.mark.sample(3)


@pytest.fixture
def governed(database: Database, dsn: str) -> Database:
    steps.make_table(dsn)
    return database


@pytest.fixture
def asked(governed: Database) -> Iterator[Callable[[str], Reading]]:
    """A function that gives the reading of a query. All its calls use one reader."""
    readers: list[SignalReader] = []
    session = governed.engine.connect()

    def ask(query: str) -> Reading:
        if not readers:
            readers.append(SignalReader(governed, Surroundings(query=query)))
        reader = readers[0]
        reader._surroundings = Surroundings(query=query)
        [found] = reader.read(session, {})
        return found

    ask.session = session  # type: ignore[attr-defined]
    yield ask
    for one in readers:
        one.close()
    session.close()


NO_VALUE = {
    "nothing": "SELECT NULL",
    "no row": "SELECT 1 WHERE false",
    "no result": "SET work_mem = '1MB'",
    "not a number": "SELECT 'NaN'::float8",
    "not a number, numeric": "SELECT 'NaN'::numeric",
    "not a number, text": "SELECT 'nan'",
    "infinite": "SELECT 'infinity'::float8",
    "below all": "SELECT '-infinity'::float8",
    "huge": "SELECT 1e400::numeric",
    "text": "SELECT repeat('x', 1000000)",
    "an array": "SELECT ARRAY[1]",
    "an interval": "SELECT interval '1 s'",
    "a date of no calendar": "SELECT '20000-01-01'::date",
    "an error": "SELECT 1 / 0",
    "a write": "CREATE TABLE public.of_the_query ()",
    "its end": "SELECT pg_terminate_backend(pg_backend_pid())",
    "a commit": "COMMIT",
    "a rollback": "ROLLBACK; SET SESSION AUTHORIZATION DEFAULT",
    "an exception": "DO $$ BEGIN RAISE 'no' USING ERRCODE = '57P01'; END $$",
    "a copy": "COPY (SELECT 1) TO STDOUT",
    "nothing at all": ";",
}


@pytest.mark.parametrize("case", NO_VALUE)
def test_what_is_no_number_is_no_reading(asked: Callable[[str], Reading], case: str) -> None:
    found = asked(NO_VALUE[case])
    assert (found.value, bool(found.problem)) == (None, True)
    assert len(found.problem) < 400
    # The next query works.
    assert asked("SELECT 7").value == 7


OUTLIVING = {
    "a setting": "SELECT set_config('search_path', 'nowhere', false), 1",
    "a time-out": "SELECT set_config('statement_timeout', '1', false), 1",
    "a role": "SELECT set_config('role', 'pg_monitor', false), 1",
    "a lock": "SELECT pg_advisory_lock(7), 1",
    "a statement": "PREPARE p AS SELECT 1; SELECT 1",
    "a table": "CREATE TEMP TABLE x (); SELECT 1",
    "its own transaction": "COMMIT; SET search_path = nowhere; BEGIN; SELECT 1",
    "a cursor": "COMMIT; BEGIN; DECLARE c CURSOR WITH HOLD FOR SELECT 1; COMMIT; SELECT 1",
}
LEFT = """
SELECT current_setting('search_path'), current_setting('statement_timeout'), current_user,
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database =
          (SELECT oid FROM pg_database WHERE datname = current_database())),
       (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors WHERE is_holdable),
       pg_my_temp_schema() <> 0 AND EXISTS (SELECT FROM pg_class WHERE relnamespace = pg_my_temp_schema())
"""


@pytest.mark.parametrize("case", OUTLIVING)
def test_nothing_of_the_query_outlives_its_look(asked: Any, case: str) -> None:
    def left() -> Any:
        with asked.session.begin():
            return asked.session.exec_driver_sql(LEFT).one()

    before = left()
    asked(OUTLIVING[case])
    assert left() == before
    # The effect doesn't reach the session of the next query either.
    setting = "SELECT (current_setting('search_path') LIKE '%nowhere%' OR current_user = 'pg_monitor')::int"
    assert asked(setting).value == 0


def test_a_query_that_takes_its_time_out_away_holds_nobody_up(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_roir.engine.governor import own_query

    monkeypatch.setattr(own_query, "PATIENCE_S", 0.2)
    found = asked("SET statement_timeout = 0; SELECT pg_sleep(600)")
    assert (found.value, "hasn't answered" in found.problem) == (None, True)
    wait_until(lambda: asked("SELECT 7").value == 7, "the end of the query that was cancelled")


@pytest.mark.parametrize("query", ["SELECT 'NaN'::float8", "SET work_mem = '1MB'", "SELECT 1 / 0"])
def test_a_query_that_says_nothing_holds_and_then_pauses(governed: Database, query: str) -> None:
    _, run = steps.begin(governed)
    clock = Clock()
    governor = Governor(governed, run, Surroundings(query=query), clock=clock)
    with governed.connect() as connection:
        for _ in range(4):
            governor.look(connection)
            assert "query can't be read" in read(governed).throttled
            assert granted(governed, run) == 0
            clock.now += 1
        clock.now += governed.limits.unreadable_s
        governor.look(connection)
    governor.close()
    assert read(governed).paused_by == "governor"


def granted(database: Database, run: Run) -> Any:
    with database.transaction() as connection:
        return connection.exec_driver_sql(
            f"SELECT roir.granted(o) FROM roir.operation o WHERE o.id = {run.operation_id}"
        ).scalar_one()


def test_a_governor_that_cannot_write_holds_says_so_and_pauses(governed: Database, dsn: str) -> None:
    _, run = steps.begin(governed, throttle="lock_waits=4")
    run_sql(
        dsn,
        "CREATE FUNCTION roir.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not me'; END $$",
        "CREATE TRIGGER refuse BEFORE INSERT ON roir.signal_sample EXECUTE FUNCTION roir.refuse()",
    )
    from dataclasses import replace

    hasty = Database(dsn, limits=replace(governed.limits, unreadable_s=0.0))
    said: list[str] = []
    is_paused = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        is_paused.set()

    with governing(hasty, run, say, Surroundings()):
        assert is_paused.wait(30)
        wait_until(lambda: read(governed).status == "paused", "the pause")
    assert any("not me" in line for line in said)
    row = read(governed)
    assert (row.paused_by, "not me" in row.pause_reason) == ("governor", True)


def test_a_query_of_the_run_holds_before_the_governor_has_looked(governed: Database) -> None:
    _, run = steps.begin(governed)
    seen: list[Any] = []

    class Lost(Governor):
        def look(self, connection: Any) -> Any:
            seen.append(granted(governed, run))
            raise ValueError("lost")

    from airflow_roir.engine.governor import governing as module

    before = module.Governor
    module.Governor = Lost  # type: ignore[misc]
    try:
        with governing(governed, run, lambda line: None, Surroundings(query="SELECT 0")):
            assert granted(governed, run) == 0
    finally:
        module.Governor = before  # type: ignore[misc]


def test_off_takes_the_reason_away(governed: Database) -> None:
    _, run = steps.begin(governed, throttle="query=1")
    clock = Clock()
    governor = Governor(governed, run, Surroundings(), clock=clock)
    with governed.connect() as connection:
        governor.look(connection)
        assert read(governed).throttled
        requests.change_options(governed, "ix", actor="ann", throttle="off")
        governor.look(connection)
        assert (read(governed).throttled, read(governed).throttled_since) == (None, None)
        # A reading that failed long ago says nothing about the present.
        clock.now += 2 * governed.limits.unreadable_s
        requests.change_options(governed, "ix", actor="ann", throttle="query=1")
        governor.look(connection)
        row = read(governed)
    assert (row.status, row.throttled_since is not None) == ("running", True)
    governor.close()


@pytest.mark.parametrize("limit", ["wal_rate=1TB", "checkpoints=100000"])
def test_a_rate_that_is_not_known_yet_lets_nobody_work(governed: Database, limit: str) -> None:
    _, run = steps.begin(governed, parallelism=4, throttle=limit)
    clock = Clock()
    governor = Governor(governed, run, Surroundings(), clock=clock)
    grants = []
    with governed.connect() as connection:
        for _ in range(3):
            grant = governor.look(connection)
            assert grant is not None
            grants.append(grant.workers)
            clock.now += 1
    governor.close()
    assert grants == [0, 0.25, 0.25]


SECRETS = [
    "host=nowhere.invalid password=my hunter2",
    "postgresql://u:hun/ter2@nowhere.invalid/db",
    "postgresql://u:p@hunter2@nowhere.invalid/db",
    "postgresql://u:p:hunter2@h:hunter2/db",
    "host=nowhere.invalid password=p\0hunter2",
    "hunter2",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_no_part_of_a_dsn_that_cannot_be_read_is_told(governed: Database, secret: str) -> None:
    reader = SignalReader(governed, Surroundings({"r2": secret}))
    with governed.connect() as connection:
        [found] = reader.read(connection, {"replica_lag": 1, "replicas": ["r2"]})
    reader.close()
    assert found.value is None
    assert "r2" in found.problem
    assert "hun" not in found.problem
    assert "ter2" not in found.problem


def test_a_replica_that_hangs_holds_nobody_up(governed: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica takes the question and doesn't answer, like a process that was stopped."""
    import socket

    monkeypatch.setattr(replicas, "PATIENCE_S", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        port = deaf.getsockname()[1]
        reader = SignalReader(governed, Surroundings({"r2": f"host=127.0.0.1 port={port} dbname=x"}))
        with governed.connect() as connection:
            for _ in range(2):
                [found] = reader.read(connection, {"replica_lag": 1, "replicas": ["r2"]})
                assert "no answer" in found.problem
        reader.close()


BAD_WINDOWS = {
    "too long for a number": f"0 0 * * * for {'9' * 5000}d",
    "too long for a time": "0 0 * * * for 99999999999999d",
    "much of nothing": "0 0" + " " * 30_000 + "x for 3",
    "much": "0 0 * * * for 1h;" * 20_000 + "0 0 * * * for 1h",
    "fields": "*/0 * * * * for 1h",
    "names": "0 0 * foo * for 1h",
    "a folder": "0 0 * * * for 1h in Europe",
    "another folder": "0 0 * * * for 1h in ../../../etc/passwd",
    "a long zone": f"0 0 * * * for 1h in {'x' * 10_000}",
    "never": "0 0 31 2 * for 1h",
}


@pytest.mark.parametrize("case", BAD_WINDOWS)
def test_windows_that_cannot_be_read_are_refused_and_hold(governed: Database, dsn: str, case: str) -> None:
    text = BAD_WINDOWS[case]
    with pytest.raises(InvalidInput, match="windows"):
        parse_windows(text)
    _, run = steps.begin(governed)
    sql(user := steps.session(dsn), "UPDATE roir.operation SET windows = %s", text)
    user.commit()
    governor = Governor(governed, run, Surroundings())
    with governed.connect() as connection:
        governor.look(connection)
    governor.close()
    row = read(governed)
    assert (row.status, row.paused_by, len(row.pause_reason) < 1_000) == ("paused", "window", True)


GRANT = "UPDATE roir.operation SET throttle = '{\"lock_waits\": 4}', granted = %s, granted_at = clock_timestamp()"


def test_a_verification_by_threads_follows_a_grant_that_grows(
    governed: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant begins with a quarter of a worker: the workers that leave come again."""
    steps.make_index(governed, ranges=6, segments=6)
    run = verifying.begin(governed, parallelism=3)
    user = steps.session(dsn)
    user.autocommit = True
    sql(user, GRANT, 0.25)
    others = threading.Event()
    unit = VerifyWorker.unit
    numbers: list[int] = []

    def noted(worker: VerifyWorker, claim: Any) -> Any:
        numbers.append(worker.worker)
        if worker.worker:
            others.set()
        elif len(numbers) > 1:
            sql(user, GRANT, 3)
            assert others.wait(20)
        return unit(worker, claim)

    monkeypatch.setattr(VerifyWorker, "unit", noted)
    lifecycle.run_phases(governed, run)
    assert numbers[:2] == [0, 0]


def test_a_fold_that_begins_with_little_has_all_its_workers_later(
    governed: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = steps.built(governed, ranges=3, segments=2, parallelism=3)
    run_sql(dsn, "UPDATE t SET k = 'x' WHERE id % 3 = 0")
    steps.seal_all(governed, run)
    switch.switch(governed, run)
    user = steps.session(dsn)
    user.autocommit = True
    sql(user, GRANT, 0.25)
    others = threading.Event()
    step = fold.FoldWorker.step
    numbers: list[int] = []

    def noted(worker: fold.FoldWorker, hold: Any) -> Any:
        numbers.append(worker.worker)
        if worker.worker:
            others.set()
        else:
            sql(user, GRANT, 3)
            assert others.wait(20)
        return step(worker, hold)

    monkeypatch.setattr(fold.FoldWorker, "step", noted)
    monkeypatch.setattr(fold, "BLOCKS_PER_STEP", 1)
    run_sql(dsn, "INSERT INTO t SELECT i, 'y', i FROM generate_series(10_000, 15_000) i")
    lifecycle.run_phases(governed, run)
    assert numbers[0] == 0


NO_LIMITS = ["[]", "null", "5", '"x"', '{"lock_waits": "x"}', '{"lock_waits": null}', '{"lock_waits": [1]}']
NO_LIMITS += ['{"replicas": 5}', '{"replicas": [1]}', '{"replicas": [["r"]]}', '{"replicas": {}}']
NO_LIMITS += ['{"lock_waits": true}', '{"lock_waits": {}}']


@pytest.mark.parametrize("throttle", NO_LIMITS)
def test_no_row_can_spoil_the_view_of_all(governed: Database, dsn: str, throttle: str) -> None:
    """A role that may pause may update rows, and the view shows the throttles of all operations."""
    steps.begin(governed, throttle="lock_waits=4 replicas=r1,r2")
    user = steps.session(dsn)
    with pytest.raises(psycopg2.errors.CheckViolation, match="operation_throttle"):
        sql(user, "UPDATE roir.operation SET throttle = %s", throttle)


@pytest.mark.parametrize("granted", ["NaN", "infinity", "-1"])
def test_no_grant_is_beyond_all_numbers(governed: Database, dsn: str, granted: str) -> None:
    steps.begin(governed)
    with pytest.raises(psycopg2.errors.CheckViolation, match="operation_granted"):
        sql(steps.session(dsn), "UPDATE roir.operation SET granted = %s", granted)
