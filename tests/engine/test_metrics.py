"""The metrics, on a real server, beside a real build in each of its phases: their text, values and rights."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2.errors
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from airflow_roir.cli.metrics_text import Found
from airflow_roir.engine import abort, clean_up, drop, lifecycle
from airflow_roir.engine.build import Claim
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.metrics.families import FAMILIES
from airflow_roir.engine.metrics.reading import metrics
from airflow_roir.operation import Phase, Status
from airflow_roir.options import VerifyOptions
from tests.conftest import database_dsn, run_sql
from tests.engine import compacting, steps, verifying
from tests.engine.steps import sql
from tests.engine.test_guide import grants

pytestmark = pytest.mark.sample(2)

Labels = frozenset[tuple[str, str]]


class Scrape:
    """A scrape, parsed as Prometheus reads it."""

    def __init__(self, database: Database) -> None:
        found, self.problem = metrics(database)
        self.text = generate_latest(Found(found)).decode()
        self.samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                of = self.samples.setdefault(sample.name, {})
                key = frozenset(sample.labels.items())
                assert key not in of, f"{sample.name} twice with the same labels"
                of[key] = sample.value

    def values(self, name: str, **labels: object) -> list[float]:
        """The values with these labels, and any others."""
        wanted = {(key, str(value)) for key, value in labels.items()}
        return [value for key, value in self.samples.get(name, {}).items() if wanted <= key]

    def one(self, name: str, **labels: object) -> float:
        """The only value with these labels."""
        [value] = self.values(name, **labels)
        return value

    def label(self, name: str, label: str) -> set[str]:
        """All values of a label."""
        return {dict(key)[label] for key in self.samples.get(name, {})}


@pytest.fixture
def table(dsn: str) -> None:
    steps.make_table(dsn, 400)


def row(dsn: str, statement: str) -> tuple[Any, ...]:
    [found] = sql(steps.session(dsn), statement)
    return found


def newest(dsn: str) -> dict[str, Any]:
    """The newest operation, as the control tables have it."""
    names = "id", "kind", "state", "phase", "rows", "percent", "parallelism", "batches", "keys", "delta"
    values = row(
        dsn,
        """SELECT o.id, o.kind, o.status, o.phase, r.rows, r.percent_complete::float8, o.parallelism,
                  (SELECT coalesce(sum(x.batches), 0)::int FROM roir.scan_range x WHERE x.operation_id = o.id),
                  r.duplicate_keys, pg_relation_size(to_regclass(format('roir_data.g%s_delta', o.generation_id)))
             FROM roir.operation o JOIN roir.resumable_operations r ON r.operation_id = o.id
            WHERE o.id = (SELECT max(id) FROM roir.operation)""",
    )
    return dict(zip(names, values, strict=True))


def assert_tells(dsn: str, database: Database) -> Scrape:
    """Checks that a scrape equals the control tables."""
    seen, true = Scrape(database), newest(dsn)
    labels = {"operation": true["id"], "kind": true["kind"], "index": "public.ix"}
    assert seen.one("roir_up") == 1
    assert seen.values("roir_problem") == []
    for states, what in ((Status, "state"), (Phase, "phase")):
        for one in states:
            assert seen.one(f"roir_operation_{what}", **labels, **{what: one.value}) == (one.value == true[what])
    assert seen.one("roir_operation_rows_total", **labels) == true["rows"]
    assert seen.one("roir_operation_percent", **labels) == true["percent"]
    assert seen.one("roir_operation_parallelism", **labels) == true["parallelism"]
    assert seen.values("roir_operation_batches_total", **labels) == (
        [] if true["kind"] == "verify" else [true["batches"]]
    )
    ended = true["phase"] == "done" or true["kind"] == "verify"
    assert seen.values("roir_operation_delta_bytes", **labels) == ([] if ended else [true["delta"]])
    return seen


@pytest.mark.by_hand("sweeps")
def test_each_phase_of_a_build_and_of_a_verification(database: Database, dsn: str, table: None) -> None:
    _, run = steps.begin(database, unique=True, include="v", keys="id")
    seen = assert_tells(dsn, database)
    assert seen.one("roir_index_published") == 0
    assert seen.one("roir_operation_driven") == 1
    worker, claim = steps.claimed(database, run)
    assert assert_tells(dsn, database).one("roir_operation_workers") == 1
    worker.step(claim)
    worker.connection.close()
    seen = assert_tells(dsn, database)
    assert seen.one("roir_operation_rows_total") > 0
    assert seen.one("roir_operation_batches_total") == 1
    steps.build_all(database, run)
    run_sql(dsn, "UPDATE t SET v = -v WHERE id < 50")
    assert assert_tells(dsn, database).one("roir_operation_phase", phase="seal") == 1
    steps.seal_all(database, run)
    assert assert_tells(dsn, database).one("roir_operation_phase", phase="fold") == 1
    steps.fold_all(database, run)
    assert assert_tells(dsn, database).one("roir_operation_phase", phase="publish") == 1
    steps.publish_all(database, run)
    seen = assert_tells(dsn, database)
    assert seen.one("roir_operation_state", state="completed") == 1
    assert (seen.one("roir_index_published"), seen.one("roir_index_unique")) == (1, 1)
    assert seen.one("roir_operation_duplicate_keys") == 0
    assert seen.one("roir_capture_faults") == 0
    verify = verifying.begin(database)
    assert_tells(dsn, database)
    verifying.go_through(database, verify)
    seen = assert_tells(dsn, database)
    # The metrics show the build too.
    assert seen.one("roir_operation_state", kind="create", state="completed") == 1


def counters(seen: Scrape) -> dict[tuple[str, Labels], float]:
    return {
        (name, labels): value
        for name, of in seen.samples.items()
        if name.endswith("_total")
        for labels, value in of.items()
    }


@pytest.mark.by_hand("sweeps")
def test_counters_never_fall_over_pause_resume_kill_and_verify(database: Database, dsn: str, table: None) -> None:
    last: dict[tuple[str, Labels], float] = {}

    def look() -> Scrape:
        seen = Scrape(database)
        now = counters(seen)
        fallen = {key: (last[key], value) for key, value in now.items() if value < last.get(key, 0)}
        assert not fallen
        last.update(now)
        return seen

    _, run = steps.begin(database, ranges=4, segments=2)
    run_sql(dsn, f"INSERT INTO roir.throttle_time VALUES ({run.operation_id}, 'replica_lag', 2.5)")
    worker, claim = steps.claimed(database, run)
    worker.step(claim)
    assert look().one("roir_operation_throttled_seconds_total", cause="replica_lag") == 2.5
    requests.pause(database, "ix", "test", "lunch")
    seen = look()
    assert seen.one("roir_operation_state", state="paused") == 1
    end_run(database, run)
    assert look().one("roir_operation_workers") == 0
    requests.resume(database, "ix", "test")
    assert look().one("roir_operation_paused_seconds") == 0
    # A run that was killed while it held a range, and has no heartbeat.
    run = start_run(database, "ix", "killed", take_over=True)
    dead = steps.worker(database, run)
    assert isinstance(dead.claim(), Claim)
    assert look().one("roir_operation_workers") == 1
    dead.connection.close()
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = heartbeat_at - interval '1 hour'")
    seen = look()
    assert (seen.one("roir_operation_workers"), seen.one("roir_operation_driven")) == (0, 0)
    assert seen.one("roir_operation_heartbeat_age_seconds") > 3000
    run = start_run(database, "ix", "next", take_over=True)
    steps.build_all(database, run)
    look()
    steps.seal_all(database, run)
    look()
    steps.fold_all(database, run)
    look()
    steps.publish_all(database, run)
    assert look().one("roir_operation_rows_total") == 400
    verify = verifying.begin(database)
    look()
    verifying.go_through(database, verify)
    look()
    assert {key[0] for key in last} == {
        "roir_operation_rows_total",
        "roir_operation_batches_total",
        "roir_operation_worked_seconds_total",
        "roir_operation_throttled_seconds_total",
    }


HOSTILE = 'a"b\\c\nd{e="f"} 1\n# TYPE x'


def test_hostile_names_stay_labels(dsn: str, database: Database) -> None:
    table, index = HOSTILE.replace('"', '""'), HOSTILE[::-1].replace('"', '""')
    connection = steps.session(dsn)
    sql(connection, f'CREATE SCHEMA "{table}"')
    sql(connection, f'CREATE TABLE "{table}"."{table}" (id int PRIMARY KEY, "{table}" text)')
    connection.commit()
    _, run = steps.begin(database, f'"{table}"."{index}"', f'"{table}"."{table}"', f'"{table}"')
    readings = {"replica_lag": {"limit": 5, "value": 7, "of": HOSTILE, "problem": None}}
    sql(connection, "SELECT roir.keep_signals(%s, 0, %s)", run.operation_id, to_json(readings))
    sql(connection, "INSERT INTO roir.throttle_time VALUES (%s, %s, 1)", run.operation_id, HOSTILE)
    connection.commit()
    seen = Scrape(database)
    assert seen.label("roir_operation_percent", "index") == {f'"{table}"."{index}"'}
    assert seen.one("roir_signal_value", of=HOSTILE) == 7
    assert seen.one("roir_operation_throttled_seconds_total", cause=HOSTILE) == 1
    assert not seen.samples.keys() - FAMILIES.keys()


@pytest.mark.sample(0)
def test_what_the_governor_read_and_granted(dsn: str, database: Database, table: None) -> None:
    _, run = steps.begin(database)
    assert Scrape(database).values("roir_operation_granted_workers") == []
    requests.change_options(
        database,
        "ix",
        actor="test",
        throttle="replica_lag=100MB oldest_transaction=10min free_space=1GB replicas=r1,r2",
    )
    seen = Scrape(database)
    # No grant yet is a grant of 0.
    assert seen.one("roir_operation_granted_workers") == 0
    assert seen.one("roir_signal_limit", signal="replica_lag") == 100 * 2**20
    assert seen.values("roir_signal_value") == []
    readings = {
        "replica_lag": {"limit": 100, "value": 340, "of": "r2", "problem": None},
        "oldest_transaction": {"limit": 600, "value": 60, "of": "pid 4711", "problem": None},
        "free_space": {"limit": 1000, "value": 500, "of": "/data", "problem": None},
        "commit_latency": {"limit": 0.02, "value": None, "of": None, "problem": "no connection"},
    }
    user = steps.session(dsn)
    sql(user, "SELECT roir.keep_signals(%s, 1.5, %s)", run.operation_id, to_json(readings))
    sql(
        user,
        "UPDATE roir.operation SET granted = 1.5, granted_at = clock_timestamp(), throttled = 'replica r2 is behind', "
        "throttled_since = clock_timestamp()",
    )
    user.commit()
    seen = Scrape(database)
    assert seen.one("roir_operation_granted_workers") == 1.5
    assert seen.one("roir_operation_throttled") == 1
    assert seen.one("roir_signal_value", signal="replica_lag", of="r2") == 340
    assert seen.one("roir_signal_load_ratio", signal="replica_lag") == 3.4
    assert seen.one("roir_signal_load_ratio", signal="free_space", of="/data") == 2
    # A process id would be a new label each time.
    assert seen.one("roir_signal_value", signal="oldest_transaction", of="") == 60
    assert seen.one("roir_signal_unreadable", signal="commit_latency") == 1
    assert seen.values("roir_signal_value", signal="commit_latency") == []
    # An old reading isn't shown.
    run_sql(dsn, "UPDATE roir.signal_sample SET at = at - interval '1 minute'")
    assert Scrape(database).values("roir_signal_value") == []


@pytest.mark.by_hand("sweeps")
def test_each_metric_is_printed_by_some_scrape(dsn: str, database: Database, table: None) -> None:
    steps.make_index(database, unique=True, keys="id")
    compacting.compact(database, compacting.act("rewrite", 1))
    _, run = steps.begin(database, table=None, keys=None, throttle="replica_lag=1MB commit_latency=20ms", ranges=4)
    readings = {
        "replica_lag": {"limit": 2**20, "value": 7, "of": "r1", "problem": None},
        "commit_latency": {"limit": 0.02, "value": None, "of": None, "problem": "no connection"},
    }
    worker, claim = steps.claimed(database, run)
    worker.step(claim)
    worker.connection.close()
    user = steps.session(dsn)
    sql(user, "SELECT roir.keep_signals(%s, 1.5, %s)", run.operation_id, to_json(readings))
    sql(user, "INSERT INTO roir.throttle_time VALUES (%s, 'replica_lag', 1)", run.operation_id)
    sql(
        user,
        "INSERT INTO roir.progress_sample VALUES (%s, now() - interval '1 hour', 'build', 0, 0, 0, 0, 2)",
        run.operation_id,
    )
    sql(user, "UPDATE roir.operation SET ticked_at = clock_timestamp() - interval '5 s'")
    sql(user, "UPDATE roir.setting SET max_running_operations = 3")
    sql(
        user,
        "WITH s AS (INSERT INTO roir.shard (name, dsn) VALUES ('s0', 'host=s0') RETURNING id) "
        "INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid, captured_at, fresh_at, pending, "
        "pending_bytes, oldest_at) SELECT g.id, s.id, 'o_1', 1, now(), now(), 1, 1, now() FROM s, roir.generation g "
        "WHERE g.status = 'active'",
    )
    sql(user, "UPDATE roir.generation SET unique_mode = 'off' WHERE status = 'active'")
    user.commit()
    seen = Scrape(database).samples.keys()
    sql(user, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
    seen |= Scrape(database).samples.keys()
    user.rollback()
    assert seen == FAMILIES.keys()


def test_the_queue_and_pauses(dsn: str, database: Database, table: None) -> None:
    steps.begin(database)
    run_sql(
        dsn,
        "UPDATE roir.setting SET max_running_operations = 3",
        "UPDATE roir.operation SET queued_at = clock_timestamp() - interval '1 minute', "
        "queued_seen_at = clock_timestamp()",
    )
    seen = Scrape(database)
    assert (seen.one("roir_running_operations"), seen.one("roir_running_operations_limit")) == (1, 3)
    assert 60 <= seen.one("roir_operation_queued_seconds") < 3600
    requests.pause(database, "ix", "test", "lunch")
    run_sql(
        dsn,
        "UPDATE roir.operation SET paused_at = paused_at - interval '1 hour', "
        "queued_seen_at = queued_seen_at - interval '1 hour'",
    )
    seen = Scrape(database)
    assert seen.one("roir_operation_queued_seconds") == 0
    assert seen.one("roir_operation_paused_seconds") >= 3600
    assert seen.one("roir_operation_pause_warning_seconds") == 86_400
    assert seen.one("roir_running_operations") == 0


@pytest.mark.by_hand("sweeps")
def test_faults_of_the_capture_and_differences(dsn: str, database: Database, table: None) -> None:
    steps.make_index(database)
    rows, _ = steps.capture_triggers(dsn)
    assert Scrape(database).one("roir_capture_faults") == 0
    run_sql(dsn, f"ALTER TABLE t DISABLE TRIGGER {rows}", "DELETE FROM t WHERE id < 4")
    seen = Scrape(database)
    assert seen.one("roir_capture_faults") == 1
    assert seen.one("roir_index_discrepancies") == 0
    run_sql(dsn, f"ALTER TABLE t ENABLE ALWAYS TRIGGER {rows}")
    lifecycle.verify(database, "ix", VerifyOptions())
    assert Scrape(database).one("roir_index_discrepancies") == 3


@pytest.mark.by_hand("sweeps")
def test_what_is_dropped_or_was_aborted_is_no_series_any_more(dsn: str, database: Database, table: None) -> None:
    steps.make_index(database, "gone")
    steps.make_index(database)
    steps.make_index(database, table=None, keys=None)
    assert Scrape(database).label("roir_operation_percent", "index") == {"public.gone", "public.ix"}
    # Each index has the series of its newest build alone: a rebuild each night adds no series.
    assert len(Scrape(database).values("roir_operation_percent", index="public.ix")) == 1
    drop.drop_index(database, "gone", "test")
    steps.begin(database, "never")
    abort.abort(database, "never", "test")
    clean_up.clean_up(database)
    seen = Scrape(database)
    assert all(dict(key).get("index", "public.ix") in ("public.ix", "") for of in seen.samples.values() for key in of)


def test_no_rights_no_schema_no_server(server: str, dsn: str, database: Database, stranger: str, table: None) -> None:
    steps.begin(database)
    name = dsn.rsplit("/", 1)[1].split("?")[0]
    for other, reason in (
        (stranger, "refused"),
        (database_dsn(server, "postgres"), "no schema"),
        (f"host=/nowhere dbname={name}", "unreachable"),
    ):
        seen = Scrape(Database(other))
        assert seen.samples.keys() == {"roir_up", "roir_problem"}
        assert seen.one("roir_up") == 0
        assert seen.one("roir_problem", part="database", reason=reason) == 1
        assert seen.problem
    assert seen.one("roir_up", database=name) == 0


@pytest.mark.sample(0)
def test_a_monitoring_role_sees_what_the_owner_sees(dsn: str, database: Database, stranger: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (1000)",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 400) i",
    )
    steps.make_index(database)
    steps.begin(database, table=None, keys=None, throttle="replica_lag=100MB")
    run_sql(dsn, "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (1000) TO (2000)")
    role = str(sql(steps.session(stranger), "SELECT current_user")[0][0])
    given = grants("monitor", role)
    run_sql(dsn, *given)
    seen, owners = Scrape(Database(stranger)), Scrape(database)
    assert seen.problem is None
    assert seen.samples.get("roir_problem", {}) == {}
    assert {name: of.keys() for name, of in seen.samples.items()} == {
        name: of.keys() for name, of in owners.samples.items()
    }
    assert seen.one("roir_capture_faults") == owners.one("roir_capture_faults") == 1
    # Without one of these rights the other metrics are there, and a metric names what is missing.
    run_sql(dsn, f"REVOKE SELECT ON roir.throttle_time FROM {role}")
    seen = Scrape(Database(stranger))
    assert seen.one("roir_problem", part="throttle", reason="refused") == 1
    assert seen.one("roir_operation_percent") == 0
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        sql(steps.session(stranger), "SELECT * FROM roir.scan_range")


@pytest.mark.sample(0)
def test_an_index_that_can_not_be_checked_hides_no_fault_of_others(dsn: str, database: Database, table: None) -> None:
    """One look checks all indexes; a lock, or an error, concerns one of them."""
    for name in ("ix", "faulty", "locked", "failing"):
        run_sql(dsn, f"CREATE TABLE of_{name} (LIKE t INCLUDING ALL)")
        steps.make_index(database, f"public.{name}", f"of_{name}")
    run_sql(dsn, f"ALTER TABLE of_faulty DISABLE TRIGGER {steps.capture_triggers(dsn, 'of_faulty')[0]}")
    # The last generation is that of the last index.
    body = "SELECT 1 / ((SELECT max(id) FROM roir.generation) - generation) * 0"
    settings = "LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp"
    run_sql(
        dsn, f"CREATE OR REPLACE FUNCTION roir.view_faults(generation bigint) RETURNS bigint {settings} AS '{body}'"
    )
    with closing(steps.session(dsn)) as user:
        sql(user, "ALTER VIEW public.locked SET SCHEMA public")
        seen = Scrape(database)
    assert [seen.one("roir_capture_faults", index=f"public.{name}") for name in ("ix", "faulty")] == [0, 1]
    assert seen.one("roir_problem", part="capture", reason="locked", index="public.locked") == 1
    assert seen.one("roir_problem", part="capture", reason="error", index="public.failing") == 1
    assert len(seen.values("roir_capture_faults")) == len(seen.values("roir_problem")) == 2


@pytest.mark.sample(0)
@pytest.mark.parametrize("unique", [False, True])
def test_a_time_out_names_its_index_and_hides_no_other(dsn: str, database: Database, table: None, unique: bool) -> None:
    """Found: the time-out of one statement lost a whole group of indexes, with `index=""`."""
    for name in ("a", "b", "slow", "c"):
        run_sql(dsn, f"CREATE TABLE of_{name} (LIKE t INCLUDING ALL)")
        steps.make_index(database, f"public.{name}", f"of_{name}", keys=("id",), unique=unique)
    body = "BEGIN IF generation = 3 THEN RAISE query_canceled; END IF; RETURN 0; END"
    settings = "LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp"
    run_sql(
        dsn, f"CREATE OR REPLACE FUNCTION roir.view_faults(generation bigint) RETURNS bigint {settings} AS '{body}'"
    )
    seen = Scrape(database)
    for name in "abc":
        assert seen.one("roir_capture_faults", index=f"public.{name}") == 0
    assert seen.one("roir_problem", part="capture", reason="too slow", index="public.slow") == 1
    assert seen.values("roir_problem", index="", part="capture") == []


@pytest.mark.sample(0)
@pytest.mark.parametrize("held", ["t", "delta", "roir.operation", "roir.throttle_time"])
def test_a_scrape_never_waits_behind_a_lock(dsn: str, database: Database, table: None, held: str) -> None:
    steps.make_index(database)
    prepared, _ = steps.begin(database, table=None, keys=None)
    name = physical.delta(prepared.generation_id) if held == "delta" else held
    user = steps.session(dsn)
    sql(user, f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
    seen = Scrape(database)
    user.rollback()
    if held == "roir.operation":
        assert (seen.one("roir_up"), seen.one("roir_problem", reason="locked")) == (0, 1)
        return
    assert seen.one("roir_up") == 1
    # The view of operations reads the lost table, too.
    assert seen.values("roir_operation_percent") == ([] if held == "roir.throttle_time" else [0])
    if held == "t":
        assert seen.one("roir_problem", part="capture", reason="locked", index="public.ix") == 1
        assert seen.values("roir_capture_faults") == []
    if held == "roir.throttle_time":
        assert {1.0} == set(seen.values("roir_problem", reason="locked"))
    assert Scrape(database).values("roir_problem") == []


@pytest.mark.sample(0)
def test_a_look_that_takes_too_long_leaves_the_rest_out(database: Database, table: None) -> None:
    steps.make_index(database)
    clock = iter([0.0, *[1.0] * 3, *[9.0] * 100])
    found, problem = metrics(database, lambda: next(clock))
    assert problem is None
    names = {one.name for one in found}
    assert "roir_index_published" in names
    [problems] = [one for one in found if one.name == "roir_problem"]
    assert {one.labels["reason"] for one in problems.samples} == {"too slow"}
    assert {one.labels["index"] for one in problems.samples if one.labels["part"] == "capture"} == {"public.ix"}


def test_a_look_writes_nothing(dsn: str, database: Database, table: None) -> None:
    steps.begin(database)
    user = steps.session(dsn)

    def takes_no_number() -> bool:
        before = sql(user, "SELECT txid_snapshot_xmax(txid_current_snapshot())")
        Scrape(database)
        user.rollback()
        return sql(user, "SELECT txid_snapshot_xmax(txid_current_snapshot())") == before

    # An autovacuum of any database may draw a number meanwhile, but not each time.
    assert any(takes_no_number() for _ in range(20))
