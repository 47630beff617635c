"""The state machine: one table with its index, its users, and all that can happen to an operation, step by step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg2.errors
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, apply_delta, build, prepare, publish, revert, seal, switch
from airflow_roir.engine.build import BuildWorker, Claim
from airflow_roir.engine.capture import installation
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import Fenced, LockNotAcquired
from airflow_roir.operation import Phase, Status
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.disturbance import Disturbance, Disturber, disturbances
from tests.engine.stages import differences
from tests.engine.users import ROWS, Users, Write, sessions, writes

WORKERS = 3
# The steps from one beginning to the next: build, seal, switch, fold, publish, prepare.
PHASES = 6
# With more aborts an example would reach nothing else.
ABORTS = 2
ZOMBIES = 3
_numbers = itertools.count(1)

meanwhile_of_a_batch = disturbances(12)
meanwhile = disturbances(30)


class KeptSessions(Database):
    """A database that reuses its sessions, which doubles the steps per second. They don't wait long for locks."""

    def __init__(self, dsn: str) -> None:
        impatient = Limits(table_lock_ms=20, attempt_ms=20, outage_s=0)
        super().__init__(dsn, "roir tests", impatient, poolclass=QueuePool, max_overflow=-1)
        event.listen(self.engine, "checkout", _wait_little)


# Shorter than values that are stored out of line, and incompressible.
FILLER = (
    "CREATE OR REPLACE FUNCTION filler(n int) RETURNS text IMMUTABLE LANGUAGE sql AS "
    "$$ SELECT string_agg(md5((n * 100 + i)::text), '') FROM generate_series(1, 50) i $$"
)


def _wait_little(session: Any, *_: Any) -> None:
    with session.cursor() as cursor:
        cursor.execute("SET lock_timeout = '100ms'")
    session.commit()


class Machine(RuleBasedStateMachine):
    """The state machine. The test sets `database`. reached: counts of phases and of ends of operations."""

    database: KeptSessions
    reached: Counter[str] = Counter()
    # The scans of creates and rebuilds. If they are by blocks, rows and entries are so wide that most updates move
    # them.
    scans = ("key", "key")
    table_of = "(id int PRIMARY KEY, k text, v int)"
    include = "v"

    def __init__(self) -> None:
        super().__init__()
        number = next(_numbers)
        self.table, self.index = f"t{number}", f"ix{number}"
        dsn = self.database.dsn
        run_sql(
            dsn,
            f"CREATE TABLE {self.table} {self.table_of}",
            self._rows(),
        )
        self.users = self._make_users(dsn)
        self.disturber = Disturber(self.database, self.users)
        # The machine's own connection is never disturbed.
        self.connection = Database(dsn, "roir machine").engine.connect()
        self.workers: dict[int, tuple[BuildWorker, Claim]] = {}
        self.zombies: list[tuple[BuildWorker, Claim]] = []
        self.aborts = 0
        self.patience_s = 0
        self._begin(created=True)
        self._take_up()
        self._look()

    def _rows(self) -> str:
        return f"INSERT INTO {self.table} SELECT i, (i % 3)::text, i FROM generate_series(1, {ROWS}) i"

    def _make_users(self, dsn: str) -> Users:
        return Users(dsn, self.table, self.index)

    @initialize(published=st.integers(0, 2), phases=st.integers(0, 4))
    def start(self, published: int, phases: int) -> None:
        """Starts in any phase of a create, of a rebuild, or of a second rebuild, with a generation to revert to."""
        self.go_on(published * PHASES + phases, written=[], commit=True)

    # -- users

    @rule(write=writes)
    def write(self, write: Write) -> None:
        self.users.write(write)

    @rule(session=sessions, commit=st.booleans())
    def end(self, session: int, commit: bool) -> None:
        if commit:
            self.users.commit(session)
        else:
            self.users.sessions[session].rollback()

    @rule(session=sessions, index=st.booleans())
    def read(self, session: int, index: bool) -> None:
        """Reads the index if `index`. Else only takes a snapshot."""
        if index:
            self.users.read(session)
        else:
            steps.sql(self.users.sessions[session], "SELECT 1")

    # -- workers of the build

    @precondition(lambda self: self.row.status == Status.RUNNING and self.row.phase == Phase.BUILD)
    @rule(number=st.integers(0, WORKERS - 1), meanwhile=meanwhile_of_a_batch)
    def work(self, number: int, meanwhile: list[Disturbance]) -> None:
        """Claims a range and copies a batch, or copies a batch of the worker's range."""
        if number not in self.workers:
            worker = steps.worker(self.database, self.run, number)
            found = worker.claim()
            if not isinstance(found, Claim):
                worker.connection.close()
                return
            self.workers[number] = worker, found
        worker, claim = self.workers[number]
        with self._disturbed(meanwhile):
            outcome = worker.step(claim)
            del self.workers[number]
            if isinstance(outcome, Step) and outcome.rest is not None:
                self.workers[number] = worker, outcome.rest
            else:
                worker.connection.close()

    @precondition(lambda self: self.workers)
    @rule(number=st.integers(0, WORKERS - 1))
    def lose(self, number: int) -> None:
        """Takes a worker for dead and gives its claims back. The worker may come back."""
        if number in self.workers:
            self.zombies.append(self.workers.pop(number))
        with self.connection.begin():
            build.PHASE.left(self.connection, self.run, busy=list(self.workers))

    @precondition(lambda self: self.zombies)
    @rule(meanwhile=meanwhile_of_a_batch)
    def come_back(self, meanwhile: list[Disturbance]) -> None:
        worker, claim = self.zombies.pop(0)
        with self._disturbed(meanwhile):
            try:
                worker.step(claim)
            except Fenced:
                self.reached["zombie fenced"] += 1
        worker.connection.close()

    # -- the operation

    @precondition(lambda self: self.row.status == Status.RUNNING)
    @rule()
    def pause(self) -> None:
        requests.pause(self.database, self.index, "test", "by chance")
        self._look()

    @precondition(lambda self: self.row.status in (Status.RUNNING, Status.PAUSED))
    @rule(parallelism=st.integers(1, WORKERS))
    def resume(self, parallelism: int) -> None:
        """Starts another run, after a paused one or one that is alive."""
        self.run = steps.start_with(self.database, parallelism, self.index, take_over=True)
        self._leave()
        self._look()

    @rule(meanwhile=meanwhile)
    def step(self, meanwhile: list[Disturbance]) -> None:
        """Does one piece of the phase (a range, a segment, …), if open transactions don't hold it up."""
        with self._disturbed(meanwhile):
            self._advance(whole=False)

    @rule(meanwhile=meanwhile)
    def advance(self, meanwhile: list[Disturbance]) -> None:
        """Does the rest of a phase."""
        with self._disturbed(meanwhile):
            self._advance(whole=True)

    @rule(phases=st.integers(1, 4), written=st.lists(writes, max_size=2), commit=st.booleans())
    def go_on(self, phases: int, written: list[Write], commit: bool) -> None:
        """Goes through this many phases. No transaction is open but those of `written`, which end afterwards."""
        self.users.commit_all()
        for write in written:
            self.users.write(replace(write, commit=False))
        for _ in range(phases):
            self.advance(meanwhile=[])
            self.is_right()
        for write in written:
            self.end(write.session, commit)

    @precondition(lambda self: self.aborts < ABORTS and self.row.status in (Status.RUNNING, Status.PAUSED))
    @rule(meanwhile=meanwhile)
    def abort(self, meanwhile: list[Disturbance]) -> None:
        self.aborts += 1
        self._leave()
        with self._disturbed(meanwhile):
            abort.abort(self.database, self.index, "test", patience_s=0)

    @precondition(lambda self: "retired" in self.generations.values())
    @rule(alone=st.booleans(), meanwhile=meanwhile)
    def go_back(self, alone: bool, meanwhile: list[Disturbance]) -> None:
        """Reverts: readers see the replaced generation again; after another revert, the newer one."""
        if alone:
            self.users.commit_all()
        with self._disturbed(meanwhile):
            revert.revert(self.database, self.index, "test", patience_s=0)
            self.reached["revert"] += 1

    def _advance(self, whole: bool) -> None:
        database, run = self.database, self.run
        match self.row.status, self.row.phase:
            case ((Status.COMPLETED | Status.ABORTED), _):
                self._begin(created="active" not in self.generations.values())
            case Status.ABORTING, _:
                abort.finish_abort(database, self.row.id, "test", patience_s=self.patience_s)
            case Status.PAUSED, _:
                self.resume(parallelism=2)
            case _, Phase.BUILD:
                self._leave()
                with self.connection.begin():
                    build.PHASE.left(self.connection, run, busy=[])
                for _ in build.PHASE.work(database, run, 0):
                    if not whole:
                        return
                build.finish(database, run)
            case _, Phase.SEAL:
                for _ in seal.PHASE.work(database, run, 0):
                    if not whole:
                        return
                seal.finish(database, run)
            case _, Phase.FOLD if self.mode == "capture":
                switch.switch(database, run)
            case _, Phase.FOLD if whole:
                steps.fold_delta(database, run)
            case _, Phase.FOLD:
                with database.connect() as connection:
                    steps.fold_blocks(
                        connection, apply_delta.Folding(connection, self.job.generation_id, self.job.entry), 0, 1
                    )
            case _, Phase.PUBLISH:
                publish.publish(database, run)

    def _begin(self, created: bool) -> None:
        table, key, included = (self.table, "k", self.include) if created else (None, None, None)
        scan = self.scans[not created]
        options = BuildOptions(ranges=3, segments=2, batch_rows=2, scan=scan, lock_timeout_ms=20, lock_patience_s=0)
        prepare.prepare(self.database, IndexDefinition.parse(self.index, table, key, included), options)

    def _take_up(self) -> None:
        self._leave()
        self.run = steps.start_with(self.database, WORKERS, self.index, take_over=True)
        with self.connection.begin():
            self.job = load_job(self.connection, self.run)
        self.delta: set[str] | None = None

    def _leave(self) -> None:
        """Makes zombies of the run's workers: each is fenced, or will be, and doesn't know it."""
        self.zombies += self.workers.values()
        self.workers.clear()
        for worker, _ in self.zombies[ZOMBIES:]:
            worker.connection.close()
        del self.zombies[ZOMBIES:]

    @contextmanager
    def _disturbed(self, meanwhile: list[Disturbance]) -> Iterator[None]:
        """Surrounds a step of the engine. If the step is held up or killed, the next step continues from there."""
        self.disturber.arm(meanwhile)
        try:
            yield
        except LockNotAcquired:
            self.reached["held up"] += 1  # by open transactions
        except DBAPIError as error:
            waited = isinstance(error.orig, psycopg2.errors.LockNotAvailable)
            if not self.disturber.died and not (waited and self._is_truncated()):
                raise
        died = self.disturber.died
        self.disturber.arm([])
        self._look()
        self.reached["death"] += died

    def _is_truncated(self) -> bool:
        """True if an open TRUNCATE holds the whole table. The build may wait for that alone (I6)."""
        pids = [session.info.backend_pid for session in self.users.sessions]
        held = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted AND pid = ANY (%(pids)s)"
        with self.connection.begin():
            return bool(execute(self.connection, held + " AND locktype = 'relation'", {"pids": pids}).scalar_one())

    def _look(self) -> None:
        """Reads the operation's state after each step of the machine. Only the machine changes it."""
        with self.connection.begin():
            newest = (
                "SELECT max(o.id) FROM roir.operation o JOIN roir.index i ON i.id = o.index_id "
                "WHERE i.name = %(i)s AND o.kind <> 'verify'"
            )
            number = execute(self.connection, newest, {"i": self.index}).scalar_one()
        if number != self.run.operation_id:
            self._take_up()
        with self.connection.begin():
            self.row = row = operations.read_operation(self.connection, number)
            self.mode = installation.mode(self.connection, row.generation_id)
            rows = "SELECT id, status FROM roir.generation WHERE index_id = %(index)s AND status <> 'dropped'"
            self.generations = {r.id: r.status for r in execute(self.connection, rows, {"index": row.index_id})}
        ended = row.status in (Status.PAUSED, Status.ABORTING, Status.ABORTED)
        here = f"{row.kind}, {row.status if ended else self.mode if row.phase == Phase.FOLD else row.phase}"
        if here != getattr(self, "here", ""):
            self.here = here
            self.reached[here] += 1

    @invariant()
    def is_right(self) -> None:
        """Checks I1 for the entries that readers see, and would see after a revert; I3 and I5 for the build's."""
        try:
            with self.connection.begin():
                execute(self.connection, "SET LOCAL lock_timeout = '20ms'")
                for number, status in self.generations.items():
                    job = replace(self.job, generation_id=number)
                    published = status != "building"
                    assert differences(self.connection, job, published) == [], f"generation {number}, {status}"
                if self.mode == "direct":
                    delta = physical.delta(self.job.generation_id)
                    rows = set(execute(self.connection, f"SELECT (c1, c2)::text FROM {delta}").scalars())
                    grown = rows - self.delta if self.delta is not None else set()
                    assert not grown, "the delta has grown after the switch (I5)"
                    self.delta = rows
        except DBAPIError as error:
            if not isinstance(error.orig, psycopg2.errors.LockNotAvailable) or not self._is_truncated():
                raise

    def teardown(self) -> None:
        """Carries everything to its end, and checks that the index is exact."""
        self.reached["examples"] += 1
        self.users.commit_all()
        for session in self.users.sessions:
            session.close()
        for worker, _ in [*self.workers.values(), *self.zombies]:
            worker.connection.close()
        # The server ends the backends of closed connections, and with them their locks, at its own pace.
        self.patience_s = 60
        patience = "UPDATE roir.operation SET options = jsonb_set(options, '{lock_patience_s}', '60')"
        with self.connection.begin():
            execute(self.connection, patience)
        try:
            while self.row.status not in (Status.COMPLETED, Status.ABORTED):
                self._finish()
                self._look()
            self.is_right()
        finally:
            self.connection.close()
            self.disturber.close()

    def _finish(self) -> None:
        """Does the rest of a phase without a disturbance."""
        self._advance(whole=True)


class BlockMachine(Machine):
    """The same machine, with creates and rebuilds that scan by blocks. Needs `FILLER`."""

    scans = ("block", "block")
    table_of = "(id int PRIMARY KEY, k text, v int, pad text GENERATED ALWAYS AS (filler(id)) STORED)"
    include = "v, pad"


class IndexMachine(BlockMachine):
    """The same machine, with rebuilds that read the index."""

    scans = ("block", "index")
