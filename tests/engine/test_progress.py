"""The data for the page of an index build: the contract, every state, what holds it up, and how little a look costs."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extras
import pytest
from sqlalchemy import event

from airflow_roir.engine import abort
from airflow_roir.engine.control import requests, sign_of_life
from airflow_roir.engine.control.remedies import remedy
from airflow_roir.engine.control.run import Run, end_run, settle, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot import bars, words
from airflow_roir.engine.snapshot.details import MOST_SAMPLES, progress
from airflow_roir.engine.snapshot.operation import OperationStatus
from airflow_roir.engine.snapshot.parts import NextTask
from airflow_roir.engine.snapshot.report import markdown
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.engine.work.worker import session_name
from airflow_roir.errors import LockNotAcquired, NotFound, SourceChanged, SparkFailed
from airflow_roir.operation import Phase
from airflow_roir.options import LIVE, MAX_PARALLELISM
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(2)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 400)


def look(database: Database) -> OperationStatus:
    return progress(database, "ix")


def begin_to_work(dsn: str, run: Run) -> None:
    run_sql(dsn, f"UPDATE roir.operation SET ticked_at = clock_timestamp() WHERE id = {run.operation_id}")


def step(database: Database, run: Run, number: int = 0) -> Any:
    """Copies a batch by a worker that is named as Spark's are; returns the worker."""
    worker, claim = steps.claimed(database.named(session_name(run, number)), run, number)
    assert isinstance(worker.step(claim), Step)
    return worker


NUMBER = (int, float)
OR_NONE = type(None)
MAYBE_NUMBER, MAYBE_TEXT = (*NUMBER, OR_NONE), (str, OR_NONE)
CONTRACT: dict[str, Any] = {
    "now": str,
    "index": str,
    "source": str,
    "operation_id": int,
    "kind": str,
    "status": str,
    "phase": str,
    "percent_complete": NUMBER,
    "rows": int,
    "rows_estimate": int,
    "rows_per_second": MAYBE_NUMBER,
    "rows_per_second_now": MAYBE_NUMBER,
    "seconds_left": MAYBE_NUMBER,
    "seconds_left_low": MAYBE_NUMBER,
    "seconds_left_high": MAYBE_NUMBER,
    "total_execution_time": NUMBER,
    "phase_seconds": dict,
    "ranges_done": int,
    "ranges": int,
    "segments_sealed": int,
    "segments": int,
    "owner": MAYBE_TEXT,
    "spark_ui": MAYBE_TEXT,
    "driven": bool,
    "silent_seconds": MAYBE_NUMBER,
    "started_at": str,
    "paused_at": MAYBE_TEXT,
    "abandoned_since": MAYBE_TEXT,
    "expected_at": MAYBE_TEXT,
    "last_try": bool,
    "finished_at": MAYBE_TEXT,
    "pause_reason": MAYBE_TEXT,
    "paused_by": MAYBE_TEXT,
    "ended_by": MAYBE_TEXT,
    "end_reason": MAYBE_TEXT,
    "error": MAYBE_TEXT,
    "notice": MAYBE_TEXT,
    "worth": MAYBE_TEXT,
    "unique": bool,
    "census": bool,
    "has_duplicates": bool,
    "duplicate_keys": int,
    "duplicate_rows": int,
    "differences": MAYBE_NUMBER,
    "differences_left": MAYBE_NUMBER,
    "throttled": MAYBE_TEXT,
    "throttled_since": MAYBE_TEXT,
    "granted": MAYBE_NUMBER,
    "throttle_seconds": dict,
    "key": [str],
    "include": [str],
    "where": str,
    "definition": str,
    "compaction": OR_NONE,
    "phases": [{"name": str, "state": str, "seconds": MAYBE_NUMBER}],
    "bars": {
        "of": str,
        "count": int,
        "done": int,
        "items": [{"from": int, "to": int, "state": str, "done": NUMBER, "workers": [int], "rows": (int, OR_NONE)}],
    },
    "workers": {
        "wanted": int,
        "alive": int,
        "list": [{"worker": int, "holds": MAYBE_TEXT, "state": str, "waits_for": MAYBE_TEXT}],
    },
    "held_up": {"by": str, "text": str},
    "delta": {"rows": int, "regular": int, "antimatter": int, "ghosts": int, "bytes": int, "sampled": bool},
    "governor": OR_NONE,
    "samples": [list],
    "pauses": [{"at": str, "by": str, "why": str, "until": MAYBE_TEXT}],
    "errors": [{"at": str, "text": str, "remedy": str, "continued_at": MAYBE_TEXT, "continued_by": MAYBE_TEXT}],
    "events": [{"at": str, "actor": str, "action": str, "detail": MAYBE_TEXT}],
    "shards": [
        {
            "shard": str,
            "problem": MAYBE_TEXT,
            "doubt": MAYBE_TEXT,
            "captured": bool,
            "ranges": int,
            "ranges_done": int,
            "rows": int,
            "readers": int,
            "lag_seconds": MAYBE_NUMBER,
            "pending": (int, OR_NONE),
            "is_shipped": bool,
        }
    ],
    "queries": [str],
    **{name: (str if option.kind.is_text else int, OR_NONE) for name, option in LIVE.items()},
}


def check(value: Any, shape: Any, path: str = "") -> None:
    if isinstance(shape, dict):
        assert list(value) == list(shape), path
        for name, one in shape.items():
            check(value[name], one, f"{path}.{name}")
    elif isinstance(shape, list):
        for one in value:
            check(one, shape[0], path)
    else:
        assert isinstance(value, shape), (path, value)


def test_the_json_is_as_promised_from_begin_to_end(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, include="v", ranges=4, segments=2, batch_rows=60, parallelism=2)
    run_sql(dsn, "UPDATE t SET k = 'new' WHERE id < 9", "DELETE FROM t WHERE id = 100")
    begin_to_work(dsn, run)
    worker = step(database, run)
    said = json.loads(json.dumps(look(database).as_dict(whole=True)))
    check(said, CONTRACT)
    assert [one["state"] for one in said["phases"]] == ["done", "now", "ahead", "ahead", "ahead", "ahead"]
    assert (said["source"], said["rows"], said["bars"]["count"]) == ("public.t", 60, 4)
    assert said["bars"]["items"][0] == {
        "from": 0,
        "to": 0,
        "state": "working",
        "done": 0.6,
        "workers": [0],
        "rows": 60,
    }
    assert said["workers"]["list"][0]["holds"] == "range 0"
    assert (said["delta"]["regular"], said["delta"]["antimatter"]) == (8, 9)
    assert said["seconds_left_low"] <= said["seconds_left"] <= said["seconds_left_high"]
    worker.connection.close()
    requests.pause(database, "ix", "me", "lunch\x1b[31m")
    end_run(database, run)
    said = look(database).as_dict(whole=True)
    assert said["pauses"][0]["why"] == "lunch [31m"
    assert said["pauses"][0]["until"] is None
    run = steps.start_with(database, 2)
    steps.build_all(database, run)
    assert look(database).bars.of == "segments"
    steps.seal_all(database, run)
    steps.fold_all(database, run)
    steps.publish_all(database, run)
    said = json.loads(json.dumps(progress(database, operation_id=run.operation_id).as_dict(whole=True)))
    check({**said, "delta": {}}, {**CONTRACT, "delta": {}})
    assert (said["status"], said["percent_complete"], said["seconds_left"], said["delta"]) == (
        "completed",
        100.0,
        None,
        None,
    )
    assert {one["state"] for one in said["phases"]} == {"done"}
    assert said["pauses"][0]["until"] is not None
    assert said["held_up"]["by"] == "nothing"


def test_what_isnt_there_is_said(database: Database) -> None:
    with pytest.raises(NotFound, match="no operation yet"):
        progress(database)
    with pytest.raises(NotFound, match="operation 7"):
        progress(database, operation_id=7)
    with pytest.raises(NotFound, match="no index"):
        look(database)


def test_what_holds_it_up_is_named(database: Database, dsn: str) -> None:
    """One state after the other: starting, a limit, a lock and its holder, no run, a pause not yet seen by workers."""
    _, run = steps.begin(database, ranges=4, batch_rows=50, parallelism=2)
    assert look(database).held_up.by == "starting"
    begin_to_work(dsn, run)
    worker = step(database, run)
    assert (look(database).held_up.by, look(database).workers.alive) == ("nothing", 1)
    run_sql(dsn, "UPDATE roir.operation SET max_rows_per_second = 100")
    limited = look(database).held_up
    assert (limited.by, limited.text) == ("rate limit", "the limit of 100 rows/s")
    with database.transaction() as connection:
        sign_of_life.note_wait(
            connection, run.operation_id, run.epoch, "waiting for a lock on t, blocked by pid 7 (app)"
        )
    assert look(database).held_up.by == "lock"
    assert "pid 7 (app)" in look(database).held_up.text
    with database.transaction() as connection:
        sign_of_life.note_wait(connection, run.operation_id, run.epoch, None)
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = heartbeat_at - interval '40 seconds'")
    assert look(database).held_up.by == "no run"
    requests.pause(database, "ix", "me", "lunch")
    assert (look(database).status, look(database).held_up.text) == ("pausing", "paused by me: lunch")
    worker.connection.close()
    end_run(database, run)
    run_sql(dsn, "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE 'roir 1.%'")
    assert (look(database).status, look(database).workers.alive) == ("paused", 0)
    requests.request_abort(database, "ix", "me")
    assert look(database).status == "aborting"
    abort.abort(database, "ix", "me")


def test_no_time_is_left_of_a_build_that_waits_for_its_user(database: Database, dsn: str) -> None:
    """Found: a time left of builds that wait for a user. It holds: none on any surface, but what it waits for."""
    _, run = steps.begin(database, ranges=4, batch_rows=50, parallelism=2)
    begin_to_work(dsn, run)
    worker = step(database, run)
    now = look(database)
    assert now.seconds_left is not None
    assert words.time_left(now).endswith("left")
    shown = "SELECT seconds_left, seconds_left_low, seconds_left_high FROM roir.resumable_operations"
    [(left, _, _)] = sql(session(dsn), shown)
    assert left is not None
    requests.pause(database, "ix", "me", "lunch")
    for status in ("pausing", "paused"):
        now = look(database)
        assert (now.status, now.seconds_left, now.seconds_left_low, now.seconds_left_high) == (status, *[None] * 3)
        assert words.time_left(now) == "paused by me: lunch"
        assert not any("left" in one for one in words.figures(now))
        assert sql(session(dsn), shown) == [(None, None, None)]
        if status == "pausing":
            worker.connection.close()
            end_run(database, run)


def test_a_limit_out_of_reach_and_a_worker_between_two_statements_hold_nothing_up(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, ranges=4, batch_rows=50, parallelism=2, max_rows_per_second=1_000_000_000)
    begin_to_work(dsn, run)
    run_sql(
        dsn,
        "INSERT INTO roir.progress_sample "
        "SELECT id, clock_timestamp(), 'build', 0, 0, 0, 0, 2, roir.slowed_by(o) FROM roir.operation o",
    )
    worker = step(database, run)
    idle = psycopg2.connect(dsn, application_name=session_name(run, 1))
    sql(idle, "SELECT 1")
    idle.commit()
    worker.connection.close()
    until_gone_of(dsn, 0)
    seen = look(database)
    assert [one.state for one in seen.workers.list] == ["idle"]
    assert (seen.held_up.by, seen.held_up.text) == ("nothing", "")
    idle.close()


def until_gone_of(dsn: str, number: int) -> None:
    """Waits until that worker's session has ended."""
    user = steps.session(dsn)
    query = f"SELECT count(*) FROM pg_stat_activity WHERE application_name ~ '^roir .* worker {number} '"
    while sql(user, query, ()) != [(0,)]:
        user.rollback()
    user.close()


def test_a_lock_is_shown_with_who_holds_it_and_whether_that_is_us(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, ranges=4, parallelism=2)
    begin_to_work(dsn, run)
    for name, by in (("app", "lock"), ("roir 2.1 worker 7 public.other", "another run")):
        holder = psycopg2.connect(dsn, application_name=name)
        sql(holder, "SELECT pg_advisory_lock(42)")
        waiter = psycopg2.connect(dsn, application_name=session_name(run, 1), async_=1)
        wait(waiter)
        cursor = waiter.cursor()
        cursor.execute("SELECT pg_advisory_lock(42)")
        seen = until(database, "lock")
        [one] = seen.workers.list
        assert (seen.held_up.by, one.worker) == (by, 1)
        assert f"({name} of postgres)" in seen.held_up.text
        assert f"({name} of postgres)" in str(one.waits_for)
        holder.close()
        wait(waiter)
        waiter.close()
        until_gone(dsn)


def wait(connection: Any) -> None:
    psycopg2.extras.wait_select(connection)


def until(database: Database, state: str) -> OperationStatus:
    """The first look in which a worker is in that state: a session needs a moment for it."""
    while True:
        seen = look(database)
        if state in {one.state for one in seen.workers.list}:
            return seen


def until_gone(dsn: str) -> None:
    user = steps.session(dsn)
    while sql(user, "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ '^roir .* worker|^app$'", ()) != [
        (0,)
    ]:
        user.rollback()
    user.close()


def test_a_strangers_session_is_no_worker_whatever_its_name(database: Database, dsn: str, stranger: str) -> None:
    _, run = steps.begin(database, ranges=4, parallelism=2)
    begin_to_work(dsn, run)
    worker = step(database, run)
    liar = psycopg2.connect(stranger, application_name=session_name(run, 1))
    assert [one.worker for one in look(database).workers.list] == [0]
    liar.close()
    worker.connection.close()


def test_nobody_but_us_may_call_or_attach_what_keeps_the_samples(database: Database, dsn: str, stranger: str) -> None:
    """The function runs with our rights. A role that may pause an operation has no rights on its samples."""
    _, run = steps.begin(database)
    [(role,)] = sql(steps.session(stranger), "SELECT current_user")
    user = steps.session(stranger)
    for statement in (
        "SELECT roir.take_sample()",
        "CREATE TEMP TABLE x (id bigint, status text, phase text); "
        "CREATE TRIGGER s AFTER UPDATE ON x FOR EACH ROW EXECUTE FUNCTION roir.take_sample()",
    ):
        with pytest.raises((psycopg2.errors.InsufficientPrivilege, psycopg2.errors.FeatureNotSupported)):
            sql(user, statement)
        user.rollback()
    run_sql(
        dsn,
        f"GRANT SELECT, UPDATE ON roir.operation TO {role}",
        f"GRANT SELECT ON roir.index, roir.resumable_operations TO {role}",
        f"GRANT INSERT ON roir.event TO {role}",
    )
    sql(user, "SELECT roir.pause('ix', 'enough')")
    assert sql(user, "SELECT state, percent_complete FROM roir.resumable_operations") == [("paused", 0)]
    user.commit()
    assert len(look(database).samples) > 0
    end_run(database, run)


def test_an_empty_table_is_looked_at_in_each_phase(database: Database, dsn: str) -> None:
    """If nothing was copied, no rate can be measured."""
    run_sql(dsn, "TRUNCATE t", "ANALYZE t")
    _, run = steps.begin(database)
    seen = []
    for phase in (steps.build_all, steps.seal_all, steps.fold_all, steps.publish_all):
        seen.append(look(database))
        phase(database, run)
    assert [one.phase for one in seen] == ["build", "seal", "fold", "publish"]
    assert all(one.seconds_left is not None for one in seen[1:])
    assert look(database).percent_complete == 100


def test_of_a_run_that_was_killed_a_moment_counts_as_work(database: Database, dsn: str) -> None:
    """Found: after a kill, 30 seconds in which nothing worked were in the time of work, and the rate was too low."""
    steps.begin(database)
    run_sql(dsn, "UPDATE roir.operation SET ticked_at = clock_timestamp() - interval '45 s'")
    before = look(database).total_execution_time
    run_sql(dsn, "SELECT roir.abort('ix')")
    assert look(database).total_execution_time - before == pytest.approx(sign_of_life.LONGEST_TICK_S)


def test_samples_stay_few_whatever_the_operation_lasts(database: Database, dsn: str) -> None:
    """Days of samples: recent ones dense, older ones thin; the first and last are kept, rows and percent never fall."""
    _, run = steps.begin(database)
    with database.transaction() as connection:
        for days in range(3):
            execute(
                connection,
                "INSERT INTO roir.progress_sample SELECT id, clock_timestamp() - interval '1 day' * (3 - %(days)s) "
                "+ i * interval '5 minutes', 'build', 1000 * %(days)s + i, 10 * %(days)s, 0, 300 * i, 2 "
                "FROM roir.operation, generate_series(1, 250) i",
                {"days": days},
            )
            assert sign_of_life.tick(connection, run.operation_id, run.epoch)
            execute(connection, "UPDATE roir.progress_sample SET at = at - interval '2 minutes'")
    seen = look(database).samples
    assert 50 < len(seen) <= MOST_SAMPLES
    # The samples that `tick` wrote have no rows here.
    kept = [one[1:] for one in seen if one[1]]
    assert kept == sorted(kept)


ERRORS = {
    "no lock on t within 5 s, blocked by pid 7": "End the transaction",
    'could not extend file "base/1": No space left on device': "Make room",
    "server closed the connection unexpectedly": "PostgreSQL is up",
    "division by zero": "Remove the cause",
    "permission denied for table connections": "Give roir's role",
    "permission denied for table partition": "Give roir's role",
    "index public.flights_by_partition_key: 3 units aren't done yet; run: roir resume ix": "Remove the cause",
    "partition t_1 of t was dropped or detached without roir; run: roir sync-partitions t": "sync",
    "Spark can't be started at spark://s:7077: connection refused": "Spark's log",
    "worker 3: range 7: permission denied for function partition": "Give roir's role",
}


def test_errors_come_with_what_to_do(database: Database, dsn: str) -> None:
    """Found: the page's remedy for an error went by words in a table's name: "permission denied for table connections"
    advised to look whether PostgreSQL is up, an index called `…_by_partition_key` to run `sync-partitions`; a Spark
    that couldn't be reached was taken for PostgreSQL. It holds: a missing right and Spark come first, and names don't
    count.
    """
    _, run = steps.begin(database)
    for said, what in ERRORS.items():
        assert what in remedy(said, "public.ix", failed=False)
    settle(database, run, LockNotAcquired("no lock on t within 5 s, blocked by pid 7"), fatal=False)
    [one] = look(database).errors
    assert (one.text, one.remedy) == (
        "no lock on t within 5 s, blocked by pid 7",
        "End the transaction that is named. Then: roir resume public.ix",
    )
    run = steps.start_with(database, 2)
    settle(database, run, SourceChanged("table t was altered" + "!" * 9000), fatal=True)
    last = look(database)
    assert "roir abort" in last.errors[-1].remedy
    assert len(last.errors[-1].text) < 600
    assert last.status == "failed"


def test_an_error_that_is_over_says_who_continued_and_no_remedy(database: Database) -> None:
    """The list still advised `Remove the cause. Then: roir resume` while the next try was at work."""
    steps.begin(database)
    run = start_run(database, "ix", "airflow rebuild manual__1", take_over=True)
    settle(database, run, SparkFailed("its process has died"), fatal=False)
    # Found while the operation is paused: the pause's own remedy is enough.
    settle(database, run, OSError("a disk is broken"), fatal=False)
    first, second = look(database).errors
    assert first.remedy.startswith("Goes on by itself at the next try, within ")
    assert second.remedy == ""
    end_run(database, run)
    at = datetime.now(timezone.utc) + timedelta(minutes=5)
    [waiting, _] = progress(database, "ix", next_task=NextTask("build", False, True, at)).errors
    assert waiting.remedy.startswith("Goes on by itself: task build is tried again about ")
    start_run(database, "ix", "try 2", take_over=True)
    for one in (seen := look(database)).errors:
        assert (one.remedy, one.continued_by) == ("", "try 2")
        assert one.continued_at is not None
    assert markdown(seen, None).count(" UTC by try 2") == 2
    requests.pause(database, "ix", "ann", "lunch")
    assert {one.remedy for one in look(database).errors} == {""}


def counted(database: Database) -> tuple[OperationStatus, int]:
    """A look, and the number of statements that it sent."""
    statements: list[str] = []

    def count(*given: Any) -> None:
        statements.append(given[2])

    event.listen(database.engine, "before_cursor_execute", count)
    seen = look(database)
    event.remove(database.engine, "before_cursor_execute", count)
    return seen, len(statements)


def test_a_look_at_ten_thousand_ranges_is_as_many_statements_and_few_bars(database: Database, dsn: str) -> None:
    """An operation's long reads happen once, and nothing in Python grows with the number of ranges."""
    _, run = steps.begin(database, ranges=4, parallelism=2)
    sizes = []
    for _ in range(2):
        seen, statements = counted(database)
        sizes.append(statements)
        run_sql(
            dsn,
            "INSERT INTO roir.scan_range (operation_id, ordinal, relation, rows, done) "
            "SELECT id, i, 't'::regclass::oid, 0, i % 3 = 0 FROM roir.operation, generate_series(0, 9999) i "
            "ON CONFLICT DO NOTHING",
            f"UPDATE roir.scan_range SET claim_worker = ordinal, claim_epoch = {run.epoch} WHERE ordinal < 8",
        )
    seen = look(database)
    assert sizes[0] == sizes[1] <= 25
    assert (seen.bars.count, seen.bars.done, len(seen.workers.list)) == (10_000, 3332, 8)
    assert len(seen.bars.items) <= bars.MOST_BARS
    assert seen.bars.items[0].workers == tuple(range(8))
    assert [one.first for one in seen.bars.items[1:]] == [one.last + 1 for one in seen.bars.items[:-1]]
    assert bars.HELD > MAX_PARALLELISM
    with database.transaction() as connection:
        plan = "\n".join(
            execute(connection, "EXPLAIN SELECT * FROM roir.operation_work WHERE operation_id = 1").scalars()
        )
    assert (plan.count("on scan_range x"), plan.count("Only Scan Backward")) == (1, 1), "and the highest number"


def test_a_phase_that_sql_does_not_know_has_no_percentage(dsn: str, database: Database) -> None:
    """Otherwise it would be taken for a verification's comparison."""
    user = steps.session(dsn)
    for phase in Phase:
        if phase is not Phase.DONE:
            assert sql(user, "SELECT roir.percent_of('create', 'running', %s, 0, 0, 0) < 100", phase.value) == [(True,)]
    with pytest.raises(psycopg2.errors.CaseNotFound):
        sql(user, "SELECT roir.percent_of('create', 'running', 'nothing', 0, 0, 0)")
