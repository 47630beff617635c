"""The words of a run whose operation was aborted, completed or taken up by another run, at each of its looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_roir.engine import abort, build, drop, lifecycle, revert
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import Run, read_now, start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import Fenced, IllegalTransition, OperationAborted
from tests.engine import compacting, steps, verifying

pytestmark = pytest.mark.sample(1)

ABORTED = r"^index public\.ix: operation {} was aborted by ann@desk: too slow; {} stops"


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 200)


def create(database: Database) -> Run:
    return steps.begin(database)[1]


def rebuild(database: Database) -> Run:
    steps.make_index(database)
    return steps.begin(database, table=None, keys=None)[1]


def verify(database: Database) -> Run:
    steps.make_index(database)
    return verifying.begin(database)


def compact(database: Database) -> Run:
    steps.make_index(database)
    return compacting.begin(database, compacting.act("rewrite", 1))


def looks(database: Database, run: Run) -> dict[str, Callable[[], object]]:
    """The ways by which a run learns that it is over."""

    def advance() -> None:
        with database.transaction() as connection:
            row = operations.read_operation(connection, run.operation_id)
            operations.pause_operation(connection, row, run.owner, "an error", run.epoch)

    return {
        "looks": lambda: read_now(database, run),
        "works": lambda: lifecycle.run_phases(database, run),
        "moves on": advance,
        "begins": lambda: start_run(database, "ix", run.owner, operation=run.operation_id),
    }


@pytest.mark.parametrize("begin", [create, rebuild, verify, compact])
def test_after_an_abort_it_says_by_whom_and_why(database: Database, begin: Callable[[Database], Run]) -> None:
    """Found: it said that the role which had aborted its operation drives it now."""
    run = begin(database)
    requests.request_abort(database, "ix", "ann@desk", "too slow")

    def each() -> None:
        for look in looks(database, run).values():
            with pytest.raises(OperationAborted, match=ABORTED.format(run.operation_id, "(test|this run)")) as said:
                look()
            assert said.value.exit_code == 4
            assert " drives " not in str(said.value)

    each()
    abort.finish_abort(database, run.operation_id, "ann@desk")
    each()
    if begin is create:
        return
    # Another one has begun since.
    newer = steps.begin(database, table=None, keys=None)[1]
    with pytest.raises(OperationAborted, match=rf"; operation {newer.operation_id} \(rebuild\) has begun since$"):
        read_now(database, run)
    each()


def test_a_worker_says_it_too(database: Database) -> None:
    run = create(database)
    worker, claim = steps.claimed(database, run)
    requests.request_abort(database, "ix", "ann@desk", "too slow")
    with pytest.raises(OperationAborted, match=ABORTED.format(run.operation_id, "test")):
        worker.step(claim)
    worker.connection.close()
    with pytest.raises(OperationAborted, match=ABORTED.format(run.operation_id, "test")):
        build.finish(database, run)


def test_after_another_run_has_taken_it_up_it_names_that_run(database: Database) -> None:
    run = create(database)
    newer = start_run(database, "ix", "bob@desk pid 7", take_over=True)
    with pytest.raises(Fenced, match=r"^index public\.ix: bob@desk pid 7 drives operation 1 now; test stops$"):
        read_now(database, run)
    steps.finish_all(database, newer)
    done = r"^index public\.ix: bob@desk pid 7 has completed operation 1; test stops$"
    with pytest.raises(Fenced, match=done):
        read_now(database, run)
    with pytest.raises(IllegalTransition, match="its last one is completed"):
        start_run(database, "ix", "test", operation=run.operation_id)
    # The later life of the index doesn't concern it.
    again = steps.begin(database, table=None, keys=None)[1]
    steps.finish_all(database, again)
    revert.revert(database, "ix", "ann@desk")
    with pytest.raises(Fenced, match=done):
        read_now(database, run)
    drop.drop_index(database, "ix", "ann@desk")
    with pytest.raises(Fenced, match=done):
        read_now(database, run)
