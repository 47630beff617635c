"""Transactions that are prepared in one phase and end in a later one: drains wait and name them, nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from airflow_roir.engine import fold, publish, switch
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.errors import LockNotAcquired
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

# The steps of an operation in order. A drain waits for every transaction that was prepared before it.
STEPS = ("prepare", "batch", "build", "seal", "switch", "fold step", "fold", "publish")
DRAINS = ("prepare", "switch", "publish")
# Pairs of a step before which a transaction is prepared, and one before which it ends, without a drain between them.
PAIRS = [
    (begun, ended)
    for begun, ended in itertools.combinations((*STEPS, "end"), 2)
    if not any(step in DRAINS for step in STEPS[STEPS.index(begun) : (*STEPS, "end").index(ended)])
]
WRITES = {
    "rows": (
        "UPDATE t SET k = 'prepared', v = -1 WHERE id % 6 = 0; UPDATE t SET v = -2 WHERE id % 6 = 1; "
        "DELETE FROM t WHERE id % 6 = 2; UPDATE t SET id = id + 1000 WHERE id % 6 = 3; "
        "INSERT INTO t SELECT i, 'p', 0 FROM generate_series(200, 210) i; "
        "INSERT INTO t VALUES (4, 'c', 0) ON CONFLICT (id) DO UPDATE SET k = 'twice'; UPDATE t SET v = 3 WHERE id = 4"
    ),
    "leaf": "UPDATE t1 SET k = 'prepared' WHERE id % 3 = 0; DELETE FROM t1 WHERE id % 3 = 1",
}
SOURCES = {
    "rows": ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)",),
    "leaf": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (31)",
        "CREATE TABLE t2 PARTITION OF t DEFAULT",
    ),
}


class Operation:
    """An operation, step by step."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.run: Run | None = None

    def steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        database = self.database
        yield "prepare", self._prepare
        run = self.run
        assert run is not None
        yield "batch", self._batch
        yield "build", lambda: steps.build_all(database, run)
        yield "seal", lambda: steps.seal_all(database, run)
        yield "switch", lambda: switch.switch(database, run)
        yield "fold step", lambda: fold.fold_here(database, run)
        yield "fold", lambda: steps.fold_delta(database, run)
        yield "publish", lambda: publish.publish(database, run)

    def _prepare(self) -> None:
        definition = {"include": "v", "ranges": 3, "segments": 2, "batch_rows": 7}
        _, self.run = steps.begin(self.database, **definition, lock_patience_s=0, lock_timeout_ms=50)

    def _batch(self) -> None:
        assert self.run is not None
        worker = steps.worker(self.database, self.run)
        claim = worker.claim()
        assert not isinstance(claim, Stop)
        worker.step(claim)
        worker.connection.close()


@pytest.fixture
def gid(dsn: str) -> str:
    """A name that no other test has."""
    return "prepared in " + dsn.split("?")[0].rsplit("/", 1)[1]


def put_by(dsn: str, gid: str, statement: str) -> None:
    """Writes, and prepares the transaction."""
    user = steps.session(dsn)
    sql(user, statement)
    sql(user, f"PREPARE TRANSACTION '{gid}'")
    user.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize(("begun", "ended"), PAIRS)
def test_prepared_in_one_phase_and_ended_in_another(
    database: Database, dsn: str, gid: str, kind: str, begun: str, ended: str, ending: str
) -> None:
    run_sql(dsn, *SOURCES[kind], "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 60) i")
    operation = Operation(database)
    done = set()
    for name, step in operation.steps():
        if name == begun:
            put_by(dsn, gid, WRITES[kind])
        if name == ended:
            run_sql(dsn, f"{ending} PREPARED '{gid}'")
        step()
        done.add(name)
    if ended == "end":
        run_sql(dsn, f"{ending} PREPARED '{gid}'")
    assert done == set(STEPS)
    steps.assert_exact(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("drain", DRAINS)
def test_each_drain_names_all_of_them_and_goes_on_when_they_have_ended(
    database: Database, dsn: str, gid: str, kind: str, drain: str, ending: str
) -> None:
    """One session prepares several, so that their transactions alone distinguish their locks."""
    run_sql(dsn, *SOURCES[kind], "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 60) i")
    operation = Operation(database)
    for name, step in operation.steps():
        if name == drain:
            user = steps.session(dsn)
            for number in range(3):
                sql(user, f"UPDATE {'t1' if kind == 'leaf' else 't'} SET v = -1, k = 'p' WHERE id = {number + 1}")
                sql(user, f"PREPARE TRANSACTION '{gid} {number}'")
                user.commit()  # the driver doesn't know that the transaction has ended
            user.close()
            for number in range(3):
                with pytest.raises(LockNotAcquired) as refused:
                    step()
                for other in range(3):
                    assert (f"prepared transaction ({gid} {other}," in str(refused.value)) == (other >= number)
                run_sql(dsn, f"{ending} PREPARED '{gid} {number}'")
        step()
    steps.assert_exact(database)
