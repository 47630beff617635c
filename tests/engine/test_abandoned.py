"""Abandoned: no run drives an operation, and none will. When that is so, where it is shown, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from airflow_roir.engine import abort, clean_up
from airflow_roir.engine.control import admission, expected, operations, requests
from airflow_roir.engine.control.expected import COMES, ENDED, GRACE_S, Fate, FateOf, Unknown
from airflow_roir.engine.control.long_pause import LongPause
from airflow_roir.engine.control.run import Run, end_run, start_run
from airflow_roir.engine.control.sign_of_life import HEARTBEAT_FRESH_S
from airflow_roir.engine.database import Database
from airflow_roir.engine.metrics.reading import metrics
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.operation import ABANDONED, operation_status, status
from airflow_roir.engine.snapshot.overview import overview
from airflow_roir.engine.snapshot.words import state_of
from airflow_roir.errors import SchemaMissing, SchemaVersionMismatch
from airflow_roir.operation import QUEUED
from tests.conftest import run_sql
from tests.engine import compacting, steps, verifying
from tests.engine.steps import sql

A, B, COMMAND = "airflow nightly run_a", "airflow nightly run_b", "ann@desk pid 4711"


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 200)


def is_now(database: Database, operation: int) -> str:
    return operation_status(database, operation).status


def take(database: Database, owner: str) -> Run:
    return start_run(database, "ix", owner, take_over=True)


def ago(seconds: float | None) -> str:
    """A moment so long ago, or to come, as SQL. None: never; infinity: always to come."""
    if seconds is None:
        return "NULL"
    return "'infinity'" if seconds == float("-inf") else f"clock_timestamp() - interval '{seconds} s'"


def put(dsn: str, **columns: str) -> None:
    run_sql(dsn, f"UPDATE roir.operation SET {', '.join(f'{name} = {value}' for name, value in columns.items())}")


def silent(dsn: str, seconds: float) -> None:
    """No run gives any sign of life for this time."""
    put(dsn, heartbeat_at=ago(seconds), awaited_until=ago(seconds))


HEARTBEATS = (None, 5, HEARTBEAT_FRESH_S + 5, GRACE_S + 5, 500, -3600)
PROMISES = (None, GRACE_S + 5, 500, HEARTBEAT_FRESH_S, -300, float("-inf"))
QUEUES, ENDS, GRACES = (None, 10, GRACE_S + 5), (None, 20), (GRACE_S, 400)


def oracle(
    heartbeat: float | None, promise: float | None, queued: float | None, end: float | None, grace: int
) -> float | None:
    """Since how many seconds it is abandoned; None: it isn't."""
    if heartbeat is not None and abs(heartbeat) < HEARTBEAT_FRESH_S:
        return None
    signs = [one for one in (heartbeat, promise, queued) if one is not None]
    last = min(signs) if signs else None
    is_silent = last is not None and last > grace
    if end is None and not is_silent:
        return None
    return max(one for one in (last, end) if one is not None)


@pytest.mark.sample(0)
def test_each_mix_of_signs_of_life_against_an_oracle(database: Database, dsn: str) -> None:
    """A run that drives, that died a while ago, whose server's clock was set back; one that waits, in the queue too."""
    prepared, _ = steps.begin(database)
    user = steps.session(dsn)
    user.autocommit = True
    wrong = []
    for heartbeat, promise, queued, end, grace in product(HEARTBEATS, PROMISES, QUEUES, ENDS, GRACES):
        at = {"heartbeat_at": heartbeat, "awaited_until": promise, "queued_seen_at": queued, "run_ended_at": end}
        values = ", ".join(f"{name} = {ago(value)}" for name, value in at.items())
        sql(user, f"UPDATE roir.operation SET {values}, grace_s = {grace}")
        seconds = "extract(epoch FROM clock_timestamp() - abandoned_since)::float8"
        [(state, since)] = sql(user, f"SELECT state, {seconds} FROM roir.resumable_operations")
        meant = oracle(heartbeat, promise, queued, end, grace)
        if state != ("running" if meant is None else ABANDONED) or (since is None) != (meant is None):
            wrong.append((at, grace, state, meant))
        elif meant is not None and since != pytest.approx(meant, abs=5):
            wrong.append((at, grace, since, meant))
    assert wrong == []
    assert prepared.operation_id == 1


@pytest.mark.sample(0)
@pytest.mark.parametrize("way", ["paused", "failed", "aborting", "aborted", "completed"])
def test_what_has_another_status_is_never_abandoned(database: Database, dsn: str, way: str) -> None:
    """A failed one can't continue; of one that is being aborted a clean-up removes the rest."""
    _, run = steps.begin(database)
    if way == "completed":
        steps.build_all(database, run)
        steps.seal_all(database, run)
        steps.finish_all(database, run)
    elif way == "paused":
        requests.pause(database, "ix", "ann")
    elif way == "failed":
        with database.transaction() as connection:
            row = operations.read_operation(connection, run.operation_id)
            operations.fail(connection, row, "test", "the table is another one", run.epoch)
    else:
        requests.request_abort(database, "ix", "ann")
        if way == "aborted":
            abort.finish_abort(database, run.operation_id, "ann")
    silent(dsn, 9000)
    put(dsn, run_ended_at=ago(9000))
    found = operation_status(database, run.operation_id)
    assert (found.status, found.abandoned_since) == (way, None)


def begun(database: Database, dsn: str, kind: str) -> Run:
    if kind == "create":
        return steps.begin(database)[1]
    steps.make_index(database, segments=2)
    if kind == "verify":
        return verifying.begin(database)
    if kind == "compact":
        return compacting.begin(database, compacting.act("rewrite", 1))
    return steps.begin(database, table=None, keys=None)[1]


KINDS = ["create", "rebuild", "verify", "compact"]


@pytest.mark.sample(0)
@pytest.mark.parametrize("kind", KINDS)
def test_every_surface_says_it_and_what_helps(database: Database, dsn: str, kind: str) -> None:
    """Found: a build whose run was over was *Running* for two hours, and nothing warned of it."""
    run = begun(database, dsn, kind)
    silent(dsn, 7200)
    found = operation_status(database, run.operation_id)
    assert (found.kind, found.status, found.driven, found.seconds_left_low) == (kind, ABANDONED, False, None)
    state = state_of(found)
    assert (state.name, state.word) == (ABANDONED, "Abandoned")
    assert str(state) == (
        "abandoned: no run has driven it for 2 h, and none will; continue it with: roir resume public.ix, or abort it "
        "with: roir abort public.ix"
    )
    looked = progress(database, "ix")
    assert looked.held_up is not None
    assert (looked.status, looked.held_up.by) == (ABANDONED, "no run")
    assert "none will; continue it with: roir resume public.ix" in looked.held_up.text
    # A view doesn't wait for an operation that won't move.
    assert not overview(database, "ix").moves
    [as_json] = overview(database, "ix").as_dict()["operations"]
    assert (as_json["status"], as_json["driven"]) == (ABANDONED, False)
    assert json.dumps(as_json["abandoned_since"], default=str)
    of = str(run.operation_id)
    values = measured(database)
    assert values[("roir_operation_state", ABANDONED, kind, of)] == 1
    assert values[("roir_operation_state", "running", kind, of)] == 0
    assert values[("roir_operation_abandoned_seconds", None, kind, of)] == pytest.approx(7200, abs=60)
    [warning] = [line for line in clean_up.clean_up(database).warnings if ABANDONED in line]
    assert warning.startswith(f"index public.ix: operation {run.operation_id} is abandoned: no run has driven it for 2")
    assert warning.endswith("Continue it: roir resume public.ix, or abort it: roir abort public.ix")
    # Any run may take it up.
    assert take(database, COMMAND).operation_id == run.operation_id
    assert is_now(database, run.operation_id) == "running"


def measured(database: Database) -> Mapping[Any, float]:
    families, _ = metrics(database)
    return {
        (one.name, one.labels.get("state"), one.labels.get("kind"), one.labels.get("operation")): one.value
        for family in families
        for one in family.samples
    }


def test_a_stale_notice_of_a_run_that_is_gone_is_not_shown(database: Database, dsn: str) -> None:
    """A command that waited in the queue, and died there, was shown as *Waiting* for ever."""
    _, run = steps.begin(database)
    put(dsn, notice=f"'{QUEUED}place 2 of 2; 1 running'", heartbeat_at="NULL", queued_seen_at=ago(20))
    assert state_of(operation_status(database, run.operation_id)).name == "queued"
    put(dsn, queued_seen_at=ago(200), awaited_until="NULL")
    found = operation_status(database, run.operation_id)
    assert (found.status, found.notice) == (ABANDONED, None)


# --- what a run writes of its return


def test_a_command_is_gone_after_a_minute_and_a_run_after_what_it_has_said(database: Database, dsn: str) -> None:
    """Airflow finds a dead task after five minutes, waits for `retry_delay`, and tries again."""
    prepared, run = steps.begin(database)
    silent(dsn, GRACE_S + 5)
    assert is_now(database, run.operation_id) == ABANDONED
    expected.expect(database, prepared.operation_id, A, 180, 700)
    assert is_now(database, run.operation_id) == "running"
    take(database, A)
    silent(dsn, 650)
    assert is_now(database, run.operation_id) == "running"
    silent(dsn, 705)
    assert is_now(database, run.operation_id) == ABANDONED
    # A command takes it over, and promises nothing.
    take(database, COMMAND)
    silent(dsn, GRACE_S + 5)
    assert is_now(database, run.operation_id) == ABANDONED


def test_a_run_that_leaves_in_order_counts_from_then_on(database: Database, dsn: str) -> None:
    """Its heartbeat is forgotten: without this the operation was as silent as its last event is old."""
    prepared, run = steps.begin(database)
    silent(dsn, 5000)
    end_run(database, run)
    assert is_now(database, prepared.operation_id) == "running"
    expected.expect(database, prepared.operation_id, A, 300)
    end_run(database, run)
    put(dsn, awaited_until="awaited_until - interval '330 s'")
    assert is_now(database, prepared.operation_id) == "running"


def test_a_resume_begins_anew(database: Database, dsn: str) -> None:
    """Paused for days by a run that has ended since, then resumed by SQL: the days of the pause don't count."""
    prepared, run = steps.begin(database, abort_after_s=86_400)
    requests.pause(database, "ix", "ann")
    end_run(database, run)
    silent(dsn, 400_000)
    put(dsn, run_ended_at=ago(400_000))
    requests.resume(database, "ix", "ann")
    assert is_now(database, prepared.operation_id) == "running"
    assert told(database) == []
    silent(dsn, 70)
    assert operation_status(database, prepared.operation_id).abandoned_since is not None


def fates(**known: Fate) -> FateOf:
    """By the last part of a run's name; of commands nothing is known."""
    return lambda run: known[run.rpartition("_")[2]] if run.startswith("airflow ") else None


SWITCHED_OFF = Fate(switch="airflow switch of DAG nightly")


def test_what_became_of_the_runs_is_written_and_taken_back(database: Database, dsn: str) -> None:
    """Marked or deleted, and then cleared."""
    prepared, run = steps.begin(database)
    expected.expect(database, prepared.operation_id, A, 180, 400)
    take(database, A)
    expected.settle_runs(database, fates(a=ENDED))
    assert is_now(database, run.operation_id) == "running", "its task is still at work"
    silent(dsn, 40)
    expected.settle_runs(database, fates(a=COMES))
    assert is_now(database, run.operation_id) == "running"
    expected.settle_runs(database, fates(a=ENDED))
    found = operation_status(database, run.operation_id)
    assert found.status == ABANDONED
    assert found.seconds_since(found.abandoned_since) == pytest.approx(40, abs=5)
    # Once noted it stays as it was noted.
    expected.settle_runs(database, fates(a=ENDED))
    assert operation_status(database, run.operation_id).abandoned_since == found.abandoned_since
    expected.settle_runs(database, fates(a=COMES))
    assert is_now(database, run.operation_id) == "running"


def promised(dsn: str) -> str:
    [(until,)] = sql(steps.session(dsn), "SELECT awaited_until::text FROM roir.operation")
    return str(until)


def test_one_that_waits_for_its_turn_is_abandoned_by_the_end_of_its_run_alone(database: Database, dsn: str) -> None:
    """A mapped group prepares all its indexes, and builds one after the other: for hours nothing drives the last."""
    prepared, _ = steps.begin(database)
    put(dsn, owner="NULL", created_by=f"'{A}'", heartbeat_at="NULL", epoch="0")
    expected.expect(database, prepared.operation_id, A, None, 400)
    run_sql(dsn, "UPDATE roir.operation SET started_at = started_at - interval '9 h'")
    for fate in (COMES, SWITCHED_OFF, Fate(waits=True)):
        expected.settle_runs(database, fates(a=fate))
        assert promised(dsn) == "infinity"
    assert is_now(database, prepared.operation_id) == "running"
    state = state_of(operation_status(database, 1))
    assert (state.word, state.note) == ("Waiting", "Its run's task begins when its turn comes; nothing is lost")
    assert "roir resume" not in str(state)
    expected.settle_runs(database, fates(a=ENDED))
    found = operation_status(database, prepared.operation_id)
    # Its nine hours of waiting were nobody's fault.
    assert found.status == ABANDONED
    assert found.seconds_since(found.abandoned_since) < 60


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("owner", "awaited", "a", "b", "state"),
    [
        (A, None, ENDED, COMES, ABANDONED),
        (A, B, ENDED, COMES, "running"),
        (A, B, COMES, ENDED, "running"),
        (A, B, ENDED, ENDED, ABANDONED),
        (COMMAND, B, COMES, COMES, "running"),
        (COMMAND, B, COMES, ENDED, ABANDONED),
        (COMMAND, None, ENDED, ENDED, "running"),
        (A, None, SWITCHED_OFF, COMES, "paused"),
        (A, B, SWITCHED_OFF, COMES, "running"),
        (A, B, ENDED, SWITCHED_OFF, "paused"),
        (A, None, Fate(waits=True), COMES, "running"),
    ],
)
def test_of_two_runs_one_is_enough(
    database: Database, dsn: str, owner: str, awaited: str | None, a: Fate, b: Fate, state: str
) -> None:
    """A run has driven it, and another one waits for it. A run whose DAG is paused looks no more: then it is paused."""
    prepared, _ = steps.begin(database)
    put(dsn, owner=f"'{owner}'", grace_s="400")
    if awaited:
        expected.expect(database, prepared.operation_id, awaited, 30)
    silent(dsn, 100)
    expected.settle_runs(database, fates(a=a, b=b))
    found = operation_status(database, prepared.operation_id)
    assert found.status == state
    if state == "paused":
        assert (found.paused_by, found.pause_reason) == (SWITCHED_OFF.switch, "the DAG is paused in Airflow")


def test_a_run_that_waits_for_a_free_slot_is_waited_for(database: Database, dsn: str) -> None:
    """Airflow may have more to do for hours than it has slots."""
    prepared, _ = steps.begin(database)
    put(dsn, owner=f"'{A}'", grace_s="400")
    silent(dsn, 3600)
    assert is_now(database, prepared.operation_id) == ABANDONED
    expected.settle_runs(database, fates(a=Fate(waits=True)))
    assert is_now(database, prepared.operation_id) == "running"
    until = promised(dsn)
    expected.settle_runs(database, fates(a=Fate(waits=True)))
    assert promised(dsn) == until, "a page that looks each second doesn't write each second"
    put(dsn, awaited_until="awaited_until - interval '3700 s'")
    assert is_now(database, prepared.operation_id) == "running", "till the next clean-up"


def test_nothing_is_written_of_what_isnt_known_or_has_changed(database: Database, dsn: str) -> None:
    def unknown(run: str) -> Fate | None:
        raise Unknown("Airflow's server doesn't answer")

    prepared, _ = steps.begin(database)
    put(dsn, owner=f"'{A}'", grace_s="400")
    silent(dsn, 100)
    expected.settle_runs(database, unknown)
    with database.transaction() as connection:
        found = expected.changes(connection, fates(a=ENDED))
    take(database, B)
    expected.apply(database, found)
    silent(dsn, 40)
    assert is_now(database, prepared.operation_id) == "running"


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("DROP SCHEMA roir CASCADE", SchemaMissing),
        (
            "UPDATE roir.schema_version SET version_num = '9999'; ALTER TABLE roir.operation DROP awaited_by CASCADE",
            SchemaVersionMismatch,
        ),
    ],
    ids=["none", "another version"],
)
def test_another_control_schema_is_named_before_its_columns_are_read(
    database: Database, dsn: str, change: str, refused: type[SchemaVersionMismatch]
) -> None:
    """Found: the page *Indexes* said of a database that had lost its control schema that it is of another version."""
    run_sql(dsn, change)
    with pytest.raises(refused):
        expected.settle_runs(database, fates(a=ENDED))


def test_who_waits_in_the_queue_is_no_run_that_has_left(database: Database, dsn: str) -> None:
    """A command took over from a run that had ended, and waits for its place."""
    prepared, run = steps.begin(database)
    end_run(database, run)
    put(dsn, owner=f"'{A}'")
    steps.begin(database, index="iy")
    admission.set_most(database, 1)
    with database.transaction() as connection:
        assert admission.ask_for(connection, prepared.operation_id) is not None
    expected.settle_runs(database, fates(a=ENDED))
    assert state_of(operation_status(database, prepared.operation_id)).name == "queued"


# --- its end, by the rules of a long pause


def told(database: Database) -> list[LongPause]:
    heard: list[LongPause] = []
    abort.settle_pauses(database, "clean-up", tell=heard.append)
    return heard


def later(dsn: str, seconds: int) -> None:
    """So much time passes: all that was is that much older."""
    for name in ("heartbeat_at", "awaited_until", "run_ended_at"):
        run_sql(dsn, f"UPDATE roir.operation SET {name} = {name} - interval '{seconds} s'")
    run_sql(dsn, f"UPDATE roir.event SET at = at - interval '{seconds} s'")


@pytest.mark.sample(0)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_warned_of_once_a_day_and_ended_by_the_rules_of_a_long_pause(
    database: Database, dsn: str, kind: str
) -> None:
    """Seen with `warn_after_s` 20 and `abort_after_s` 60: after eight minutes neither a warning nor an abort."""
    run = begun(database, dsn, kind)
    put(dsn, warn_after_s="20", abort_after_s="60")
    silent(dsn, 25)
    assert told(database) == []
    later(dsn, 500)
    [pause] = told(database)
    assert (pause.abandoned, pause.aborted, pause.paused_by) == (True, False, "")
    assert pause.seconds == pytest.approx(525, abs=60)
    assert pause.aborts_in == pytest.approx(15, abs=5)
    assert f"operation {run.operation_id} is abandoned: no run has driven it for 8 min" in pause.text
    assert ("still captures writes" in pause.text) == (kind != "verify")
    assert told(database) == [], "once"
    assert operation_status(database, run.operation_id).long_pause is not None
    later(dsn, 20)
    [pause] = told(database)
    assert pause.aborted
    assert is_now(database, run.operation_id) == "aborted"
    [(detail,)] = sql(steps.session(dsn), "SELECT detail FROM roir.event WHERE action = 'abort'")
    assert detail.startswith("abandoned for 9 min")
    assert "longer than abort_after_s" in detail


def test_it_warns_anew_each_day_and_never_of_a_former_time(database: Database, dsn: str) -> None:
    prepared, _ = steps.begin(database)
    silent(dsn, 90_000)
    assert len(told(database)) == 1
    assert told(database) == []
    later(dsn, 86_400)
    assert len(told(database)) == 1
    take(database, COMMAND)
    assert told(database) == []
    silent(dsn, 100)
    assert told(database) == []
    assert is_now(database, prepared.operation_id) == ABANDONED


def test_a_run_that_comes_just_before_the_abort_wins(database: Database, dsn: str) -> None:
    prepared, _ = steps.begin(database, abort_after_s=3600)
    silent(dsn, 3700)
    assert [one.aborted for one in told(database)] == [False]
    later(dsn, 3700)
    take(database, A)
    assert told(database) == []
    assert is_now(database, prepared.operation_id) == "running"


def test_a_server_that_slept_aborts_nothing_that_lives(database: Database, dsn: str) -> None:
    """Its clock jumps over days when it wakes; the run beats again within seconds, the abort would come a quarter of
    its time after the first warning."""
    _, run = steps.begin(database, abort_after_s=3600)
    silent(dsn, 4 * 86_400)
    told(database)
    with database.transaction() as connection:
        operations.sign_of_life.tick(connection, run.operation_id, run.epoch)
    assert told(database) == []
    assert [one.status for one in status(database)] == ["running"]
