"""The queue: no more operations run than may, none waits beside a free place, they start in the order shown."""

from __future__ import annotations

import random

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.control import admission, operations, requests
from airflow_roir.engine.control.run import Run, end_run, settle, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.errors import InvalidInput, OperationQueued, OperationRunning
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(3)

DEAD = "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '1 minute' WHERE id = %s"


def indexes(database: Database, dsn: str, many: int, **options: object) -> list[str]:
    """Prepares `many` operations; their indexes, in the order of their names."""
    names = [f"public.ix{number}" for number in range(many)]
    for number, name in enumerate(names):
        run_sql(dsn, f"CREATE TABLE t{number} (id int PRIMARY KEY, k int)")
        definition = IndexDefinition.parse(name, f"t{number}", "k")
        prepare.prepare(database, definition, BuildOptions(**options), "test")
    return names


def operation(database: Database, name: str) -> int:
    return int(operations.find_operation(database, name).id)


def starts(database: Database, name: str) -> Run | None:
    try:
        return start_run(database, name, f"run of {name}", lift_pause=False)
    except OperationQueued:
        return None


def test_one_starts_after_the_other_in_the_order_in_which_they_came(database: Database, dsn: str) -> None:
    first, second, third = indexes(database, dsn, 3)
    admission.set_most(database, 1)
    run = start_run(database, first, "one")
    for name in (third, second):
        with pytest.raises(OperationQueued, match="1 running"):
            start_run(database, name, "another")
    assert [one.index for one in admission.queue(database).waiting] == [third, second]
    assert (operation_status(database, operation(database, second)).notice or "").startswith("queued: place 2 of 2")
    end_run(database, run)
    # The place is free, but the one that came first takes it.
    assert starts(database, second) is None
    begun = starts(database, third)
    assert begun is not None
    assert operation_status(database, begun.operation_id).notice is None
    assert starts(database, second) is None
    found = admission.queue(database)
    assert [one.index for one in found.running] == [third]
    assert [(one.index, one.place) for one in found.waiting] == [(second, 1)]


def test_the_greatest_priority_goes_first_and_changes_while_it_waits(database: Database, dsn: str) -> None:
    busy, low, high = indexes(database, dsn, 3)
    admission.set_most(database, 1)
    run = start_run(database, busy, "one")
    assert starts(database, low) is None
    assert starts(database, high) is None
    requests.change_options(database, high, actor="somebody", priority=5)
    end_run(database, run)
    assert starts(database, low) is None
    assert starts(database, high) is not None


def test_no_limit_is_the_default_and_comes_back(database: Database, dsn: str) -> None:
    names = indexes(database, dsn, 3)
    assert admission.queue(database).most is None
    assert starts(database, names[0]) is not None
    admission.set_most(database, 1)
    assert starts(database, names[1]) is None
    admission.set_most(database, 0)
    assert starts(database, names[1]) is not None
    assert starts(database, names[2]) is not None
    for wrong in (-1, 10_001, True):
        with pytest.raises(InvalidInput, match="max_running_operations"):
            admission.set_most(database, wrong)


def test_a_driver_whose_heart_has_stopped_frees_its_place_and_may_take_it_again(database: Database, dsn: str) -> None:
    first, second = indexes(database, dsn, 2)
    admission.set_most(database, 1)
    run = start_run(database, first, "one")
    assert starts(database, second) is None
    # A retry under the same name, at once, keeps its place.
    assert start_run(database, first, "one", take_over=True).epoch != run.epoch
    run_sql(dsn, DEAD % run.operation_id)
    assert starts(database, second) is not None
    assert starts(database, first) is None


def test_who_waits_and_dies_is_passed_over_soon(database: Database, dsn: str) -> None:
    busy, dead, alive = indexes(database, dsn, 3)
    admission.set_most(database, 1)
    run = start_run(database, busy, "one")
    assert starts(database, dead) is None
    assert starts(database, alive) is None
    end_run(database, run)
    assert starts(database, alive) is None
    run_sql(
        dsn,
        "UPDATE roir.operation SET queued_seen_at = clock_timestamp() - interval '3 minutes' "
        f"WHERE id = {operation(database, dead)}",
    )
    assert starts(database, alive) is not None
    # It comes back, and its old place is before those that came later.
    assert [one.index for one in admission.queue(database).waiting] == []
    assert starts(database, dead) is None
    assert [one.index for one in admission.queue(database).waiting] == [dead]


def test_a_pause_gives_the_place_up_and_a_resume_queues_anew(database: Database, dsn: str) -> None:
    first, second = indexes(database, dsn, 2)
    admission.set_most(database, 1)
    run = start_run(database, first, "one")
    assert starts(database, second) is None
    requests.pause(database, first, "somebody")
    end_run(database, run)
    assert starts(database, second) is not None
    requests.resume(database, first, "somebody")
    assert starts(database, first) is None
    # A pause in the queue takes the place too, also if the operation is paused already and would have started.
    for _ in range(2):
        requests.pause(database, first, "somebody")
        assert admission.queue(database).waiting == ()
        assert operation_status(database, operation(database, first)).notice is None
        with pytest.raises(OperationQueued):
            start_run(database, first, "one")


def test_who_ends_needs_no_place_and_takes_one(database: Database, dsn: str) -> None:
    first, second = indexes(database, dsn, 2)
    run = start_run(database, first, "one")
    steps.build_all(database, run)
    steps.seal_all(database, run)
    end_run(database, run)
    admission.set_most(database, 1)
    other = start_run(database, second, "other")
    # The operation is sealed: if it waited, it would capture for longer.
    ending = start_run(database, first, "one")
    end_run(database, other)
    assert starts(database, second) is None
    steps.fold_all(database, ending)
    steps.publish_all(database, ending)
    assert starts(database, second) is not None


def test_who_was_told_to_begin_keeps_its_place_until_spark_has_started(database: Database, dsn: str) -> None:
    first, second = indexes(database, dsn, 2)
    admission.set_most(database, 1)
    assert admission.ask(database, operation(database, first)) is None
    wait = admission.ask(database, operation(database, second))
    assert wait is not None
    assert wait.is_queued
    assert starts(database, first) is not None


def test_two_who_start_at_once_dont_both_take_the_last_place(database: Database, dsn: str) -> None:
    """The first one's transaction is open. The second one waits for it, and then sees its effect."""
    first, second = indexes(database, dsn, 2)
    admission.set_most(database, 1)
    with database.transaction() as connection:
        assert admission.ask_for(connection, operation(database, first)) is None
        user = steps.session(dsn)
        # The setting's row is locked, so a driver would wait.
        with pytest.raises(Exception, match="lock"):
            steps.sql(user, "SELECT * FROM roir.setting FOR UPDATE NOWAIT")
    assert starts(database, second) is None


@pytest.mark.sample(0)
@pytest.mark.parametrize("seed", range(40))
def test_the_queue_holds_over_any_order_of_steps(database: Database, dsn: str, seed: int) -> None:
    """Never more run than may. If a place is free, the first one that waits starts, and none before it."""
    chance = random.Random(seed)
    names = indexes(database, dsn, 5)
    most = chance.randint(1, 3)
    admission.set_most(database, most)
    running: dict[str, Run] = {}
    for _ in range(60):
        name = chance.choice(names)
        step = chance.random()
        before = admission.queue(database)
        if name in running and step < 0.25:
            end_run(database, running.pop(name))
        elif name in running and step < 0.35:
            settle(database, running[name], OSError("the disk has gone"), fatal=False)
            end_run(database, running.pop(name))
        elif name in running and step < 0.45:
            run_sql(dsn, DEAD % running.pop(name).operation_id)
        elif name in running and step < 0.55:
            requests.pause(database, name, "somebody")
            end_run(database, running.pop(name))
            requests.resume(database, name, "somebody")
        elif step < 0.65:
            requests.change_options(database, name, actor="somebody", priority=chance.randint(-1, 1))
        elif step < 0.7:
            most = chance.randint(1, 3)
            admission.set_most(database, most)
        else:
            try:
                run = starts(database, name)
            except OperationRunning:
                assert name in running
                continue
            others = [one for one in before.waiting if one.index != name]
            mine = next((one for one in before.waiting if one.index == name), None)
            priority = operations.find_operation(database, name).priority
            ahead = [
                one
                for one in others
                if one.priority > priority or (one.priority == priority and (mine is None or one.place < mine.place))
            ]
            assert (run is not None) == (len(before.running) + len(ahead) < most)
            if run is not None:
                running[name] = run
                assert len(running) <= most
        assert {one.index for one in admission.queue(database).running} == running.keys()
    # In the end each operation that waits starts.
    for name in list(running):
        end_run(database, running.pop(name))
    for place in admission.queue(database).waiting:
        run = starts(database, place.index)
        assert run is not None
        end_run(database, run)
