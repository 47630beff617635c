"""Any interleaving of users' writes, readers and an operation's steps: a state machine draws them, by Hypothesis.

`make test-stateful` runs more and longer examples, at random.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import BuildOptions, IndexDefinition
from airflow_roir.engine import abort, build, capture, control, fold, prepare, publish, revert
from airflow_roir.engine.build import Batch, BuildWorker, Claim
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.run import load_job, start_run
from airflow_roir.errors import Fenced, LockNotAcquired, NotFound
from airflow_roir.operation import Phase as OperationPhase
from airflow_roir.operation import Status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import differences
from tests.engine.steps import sql

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
STEPS = 60 if EXAMPLES else 40

ROWS = 24
SESSIONS = 3
WORKERS = 3
WRITES = (
    "UPDATE {t} SET k = '{k}' WHERE id = {i}",
    "UPDATE {t} SET k = '{k}' WHERE id = {i}; UPDATE {t} SET k = (id % 3)::text WHERE id = {i}",
    "UPDATE {t} SET k = NULL WHERE id BETWEEN {i} AND {i} + 3",
    "UPDATE {t} SET v = v + 1 WHERE id = {i}",
    "DELETE FROM {t} WHERE id = {i}",
    "INSERT INTO {t} VALUES ({i}, '{k}', 0)",
    "INSERT INTO {t} VALUES ({i}, '{k}', 0) ON CONFLICT (id) DO UPDATE SET k = excluded.k",
    "DELETE FROM {t} WHERE id = {i}; INSERT INTO {t} VALUES ({i}, '{k}', 7)",
    "UPDATE {t} SET id = {j} WHERE id = {i}",
    "MERGE INTO {t} USING (VALUES ({i}), ({j})) s (i) ON id = s.i WHEN MATCHED AND v > 5 THEN DELETE "
    "WHEN MATCHED THEN UPDATE SET v = v + 3 WHEN NOT MATCHED THEN INSERT VALUES (s.i, '{k}', 1)",
    "UPDATE {t} SET k = '{k}' WHERE id = {i} RETURNING touch('{t}', {j})",
    "SAVEPOINT s; DELETE FROM {t} WHERE id IN ({i}, {j}); ROLLBACK TO s; UPDATE {t} SET v = 0 WHERE id = {j}",
    "TRUNCATE {t}",
    "COPY {t} FROM PROGRAM 'echo {i},{k},5' (FORMAT csv)",
)
# What a user's statement may meet beside others'. A write that would wait gives up.
EXPECTED = (
    psycopg2.errors.LockNotAvailable,
    psycopg2.errors.SerializationFailure,
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.CardinalityViolation,
)
ids = st.integers(1, ROWS + 6)
keys = st.sampled_from("0123")
_numbers = itertools.count(1)


class Machine(RuleBasedStateMachine):
    """One table with its index, three sessions of users, three workers. The database is set by the test."""

    dsn: str

    def __init__(self) -> None:
        super().__init__()
        number = next(_numbers)
        self.table, self.index = f"t{number}", f"ix{number}"
        self.database = Database(self.dsn, "roir tests")
        run_sql(
            self.dsn,
            f"CREATE TABLE {self.table} (id int PRIMARY KEY, k text, v int)",
            f"INSERT INTO {self.table} SELECT i, (i % 3)::text, i FROM generate_series(1, {ROWS}) i",
        )
        isolations = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
        self.users = [steps.session(self.dsn, isolation) for isolation in isolations]
        for user in self.users:
            sql(user, "SET lock_timeout = '20ms'")
            user.commit()
        self.connection = self.database._engine.connect()
        self.workers: dict[int, tuple[BuildWorker, Claim]] = {}
        self.zombies: list[tuple[BuildWorker, Claim]] = []
        self._begin()

    @initialize(published=st.integers(0, 2))
    def start(self, published: int) -> None:
        """At the beginning of a create, of a rebuild, or of a second one, when there is a generation to go back to."""
        for _ in range(published):
            steps.finish_all(self.database, self.run)
            self._begin(created=False)

    def _begin(self, created: bool = True) -> None:
        table, key = (self.table, "k") if created else (None, None)
        options = BuildOptions(ranges=3, segments=2, batch_rows=4, lock_timeout_ms=20, lock_patience_s=0)
        prepare.prepare(self.database, IndexDefinition.parse(self.index, table, key, "v" if created else None), options)
        self.run = start_run(self.database, self.index, "test", take_over=True, parallelism=WORKERS)
        with self.connection.begin():
            self.job = load_job(self.connection, self.run)
            self.direct = False
        self._look()

    def _look(self) -> None:
        """Only the machine changes the operation: looked at after each of its steps, not before each rule."""
        with self.connection.begin():
            self.row = control.read_operation(self.connection, self.run.operation_id)

    def _is(self, *phases: OperationPhase) -> bool:
        return self.row.status == Status.RUNNING and self.row.phase in phases

    def _locked(self, work: Callable[[], object]) -> bool:
        """Whether a step under the drain lock was done: open transactions hold it up."""
        try:
            work()
        except LockNotAcquired:
            return False
        return True

    @rule(session=st.integers(0, SESSIONS - 1), write=st.sampled_from(WRITES), i=ids, j=ids, k=keys)
    def write(self, session: int, write: str, i: int, j: int, k: str) -> None:
        user = self.users[session]
        try:
            sql(user, write.format(t=self.table, i=i, j=j, k=k))
        except EXPECTED:
            user.rollback()

    @rule(session=st.integers(0, SESSIONS - 1))
    def commit(self, session: int) -> None:
        with suppress(*EXPECTED):
            self.users[session].commit()

    @rule(session=st.integers(0, SESSIONS - 1))
    def roll_back(self, session: int) -> None:
        self.users[session].rollback()

    @rule(session=st.integers(0, SESSIONS - 1))
    def hold(self, session: int) -> None:
        """A snapshot, and no lock."""
        sql(self.users[session], "SELECT 1")

    @rule(session=st.integers(0, SESSIONS - 1))
    def read(self, session: int) -> None:
        """In one snapshot, the reader's own uncommitted writes in it, index and source agree; or he is too old."""
        user = self.users[session]
        ((there,),) = sql(user, "SELECT to_regclass(%s) IS NOT NULL", self.index)
        if not there:
            return
        one, other = f"SELECT k, id, v FROM {self.index}", f"SELECT k, id, v FROM {self.table}"
        try:
            different = sql(user, f"({one} EXCEPT ALL {other}) UNION ALL ({other} EXCEPT ALL {one})")
        except EXPECTED:
            user.rollback()
            return
        assert different == [], "index and source differ in one snapshot (I1)"

    @precondition(lambda self: self._is(OperationPhase.BUILD))
    @rule(number=st.integers(0, WORKERS - 1))
    def work(self, number: int) -> None:
        """A claim, or a batch of what is claimed."""
        if number not in self.workers:
            worker = steps.worker(self.database, self.run, number)
            claim = worker.claim()
            if isinstance(claim, Claim):
                self.workers[number] = (worker, claim)
            else:
                worker.connection.close()
            return
        worker, claim = self.workers.pop(number)
        try:
            outcome = worker.batch(claim)
        except DBAPIError as error:
            self._expect_truncate(error)
            self.workers[number] = (worker, claim)
            return
        if isinstance(outcome, Batch) and outcome.claim is not None:
            self.workers[number] = (worker, outcome.claim)
        else:
            worker.connection.close()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """A worker dies, or seems to: what it has not committed is gone, and it may come back."""
        number = data.draw(st.sampled_from(sorted(self.workers)))
        self.zombies.append(self.workers.pop(number))
        with self.connection.begin():
            build.work_left(self.connection, self.run, busy=list(self.workers))

    @precondition(lambda self: self.zombies)
    @rule()
    def come_back(self) -> None:
        worker, claim = self.zombies.pop(0)
        try:
            worker.batch(claim)
        except Fenced:
            pass
        except DBAPIError as error:
            self._expect_truncate(error)
        worker.connection.close()

    def _expect_truncate(self, error: DBAPIError) -> None:
        """One that is open holds the whole table."""
        if not isinstance(error.orig, psycopg2.errors.LockNotAvailable):
            raise error

    @precondition(lambda self: self.row.status == Status.RUNNING)
    @rule()
    def pause(self) -> None:
        control.pause(self.database, self.index, "test", "by chance")
        self._look()

    @precondition(lambda self: self.row.status == Status.PAUSED)
    @rule(parallelism=st.integers(1, WORKERS))
    def resume(self, parallelism: int) -> None:
        self.run = start_run(self.database, self.index, "test", take_over=True, parallelism=parallelism)
        self._leave()
        self._look()

    def _leave(self) -> None:
        self.zombies += self.workers.values()
        self.workers.clear()

    @precondition(lambda self: self.row.status in (Status.RUNNING, Status.COMPLETED))
    @rule(whole=st.booleans())
    def advance(self, whole: bool) -> None:
        """The next big step, if whatever holds it up lets it. whole: the rest of the build, or of the fold, in one."""
        try:
            self._advance(whole)
        except DBAPIError as error:
            self._expect_truncate(error)
        self._look()

    def _advance(self, whole: bool) -> None:
        match self.row.status, self.row.phase:
            case Status.COMPLETED, _:
                self._locked(lambda: self._begin(created=False))
            case _, OperationPhase.BUILD:
                self._leave()
                with self.connection.begin():
                    build.work_left(self.connection, self.run, busy=[])
                steps.build_all(self.database, self.run)
            case _, OperationPhase.SEAL:
                steps.seal_all(self.database, self.run)
            case _, OperationPhase.FOLD if not self.direct:
                self.direct = self._locked(lambda: fold.switch(self.database, self.run))
            case _, OperationPhase.FOLD if whole:
                fold.finish(self.database, self.run, fold.work(self.database, self.run))
            case _, OperationPhase.FOLD:
                with self.database.connect() as connection:
                    fold.FoldWorker(connection, self.job.generation_id, self.job.entry).step(0, 1)
            case _, OperationPhase.PUBLISH:
                self._locked(lambda: publish.publish(self.database, self.run))

    @precondition(lambda self: self.row.kind == "rebuild" and self.row.status in (Status.RUNNING, Status.PAUSED))
    @rule()
    def abort(self) -> None:
        abort.abort(self.database, self.index, "test", patience_s=0)
        self._leave()
        self._look()

    @precondition(lambda self: self.row.kind == "rebuild" and self.row.status != Status.ABORTING)
    @rule()
    def go_back(self) -> None:
        """Readers see the generation again that was replaced, right at once; or forth to what they saw before."""
        try:
            if self._locked(lambda: revert.revert(self.database, self.index, "test", patience_s=0)):
                steps.assert_exact(self.database, self.index)
        except NotFound:
            pass  # nothing was replaced yet
        except DBAPIError as error:
            self._expect_truncate(error)

    @precondition(lambda self: self.row.status == Status.ABORTED)
    @rule()
    def begin_again(self) -> None:
        self._locked(lambda: self._begin(created=False))

    @rule()
    def check(self) -> None:
        if self.row.status in (Status.ABORTING, Status.ABORTED):
            return
        try:
            with self.connection.begin():
                execute(self.connection, "SET LOCAL lock_timeout = '20ms'")
                different = differences(self.connection, self.job, self.row.status == Status.COMPLETED)
        except DBAPIError as error:
            self._expect_truncate(error)
            return
        assert different == []

    def teardown(self) -> None:
        """Everything comes to its end, and the index is exact."""
        for user in self.users:
            with suppress(*EXPECTED):
                user.commit()
            user.close()
        for worker, _ in [*self.workers.values(), *self.zombies]:
            worker.connection.close()
        try:
            row = self.row
            if row.status == Status.ABORTING:
                abort.finish_abort(self.database, row.id, "test")
            elif row.status in (Status.RUNNING, Status.PAUSED):
                self.run = start_run(self.database, self.index, "test", take_over=True, parallelism=1)
                steps.build_all(self.database, self.run)
                steps.seal_all(self.database, self.run)
                steps.finalize.finalize_run(self.database, self.run)
            if row.kind == "rebuild" or row.status != Status.ABORTED:
                steps.assert_exact(self.database, self.index)
        finally:
            self.connection.close()


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that finds the table locked by a TRUNCATE gives up at once."""
    monkeypatch.setattr(build, "TABLE_LOCK_WAIT", "20ms")
    monkeypatch.setattr(revert, "LOCK_TIMEOUT_MS", 20)


def run_machine(dsn: str, examples: int, steps_each: int, shrink: bool = True) -> None:
    run_sql(
        dsn,
        "CREATE OR REPLACE FUNCTION touch(t text, i int) RETURNS void LANGUAGE plpgsql AS "
        "$$ BEGIN EXECUTE format('UPDATE %I SET k = ''inner'', v = v + 1 WHERE id = $1', t) USING i; END $$",
    )
    Machine.dsn = dsn
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps_each,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            phases=phases,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_index_is_right_whatever_comes_between(dsn: str) -> None:
    run_machine(dsn, EXAMPLES or 10, STEPS)


def forgets_moved_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture trusts every event, whatever the transaction has done to the row since."""
    monkeypatch.setattr(capture, "_IS_TOUCHED_AGAIN", "false")


def forgets_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold marks all antimatter as ghosts: deleted rows come back to life."""

    def ghosts(self: fold.FoldWorker, nulls: str, tids: list[str]) -> fold.Folded:
        execute(
            self.connection, f"UPDATE {self.delta} SET state = 'ghost' WHERE ctid = ANY (%(t)s::tid[])", {"t": tids}
        )
        return fold.Folded(ghosts=len(tids))

    monkeypatch.setattr(fold.FoldWorker, "_annihilate", ghosts)


def forgets_the_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold takes regular entries away without writing them."""

    def drop(self: fold.FoldWorker, tids: list[str]) -> int:
        taking = f"DELETE FROM {self.delta} WHERE ctid = ANY (%(tids)s::tid[])"
        return execute(self.connection, taking, {"tids": tids}).rowcount

    monkeypatch.setattr(fold.FoldWorker, "_upsert", drop)


def forgets_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch commits whoever holds its range by now."""
    begin, end = "AND r.claim_token", "AND o.id"
    broken = build.COMMIT_BATCH
    broken = broken[: broken.index(begin)] + broken[broken.index(end) :].replace("AND o.epoch = %(epoch)s", "")
    monkeypatch.setattr(build, "COMMIT_BATCH", broken)


def forgets_old_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view shows a generation to whom can't see it."""
    show = publish.view.show
    monkeypatch.setattr(publish.view, "show", lambda *arguments: show(*arguments, guarded=False))


@pytest.mark.parametrize("broken", [forgets_the_base, forgets_the_delta], ids=lambda f: f.__name__)
def test_its_check_sees_what_was_broken_on_purpose(
    dsn: str, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """By a schedule of five rules, as it prints them."""
    broken(monkeypatch)
    Machine.dsn = dsn
    state = Machine()
    state.start(published=False)
    state.advance(whole=True)
    state.write(session=0, write="DELETE FROM {t} WHERE id = {i}", i=1, j=1, k="0")
    state.write(session=0, write="UPDATE {t} SET v = v + 1 WHERE id = {i}", i=2, j=1, k="0")
    state.commit(session=0)
    for _ in range(3):  # seal, switch, fold
        state.check()
        state.advance(whole=True)
    with pytest.raises(AssertionError, match=r"extra|missing"):
        state.check()
    with suppress(AssertionError):
        state.teardown()


@pytest.mark.soak
@pytest.mark.parametrize(
    "broken",
    [forgets_the_base, forgets_the_delta, forgets_moved_keys, forgets_the_fence, forgets_old_snapshots],
    ids=lambda f: f.__name__,
)
def test_it_finds_what_was_broken_on_purpose(
    dsn: str, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    broken(monkeypatch)
    with pytest.raises(Exception, match=r"differ|missing|extra|duplicate|unique"):
        run_machine(dsn, 2000, STEPS, shrink=False)
