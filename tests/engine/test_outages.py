"""Every fault of a server in the middle of every phase: the operation goes on, automatically or by a resume, and is
right.

Users write before the fault and after it, and read the index meanwhile: they see exactly the table.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import clean_up, lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import driving, heartbeat, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import RoirError
from airflow_roir.operation import LONG, Phase
from airflow_roir.spark import task
from servers.killable import Server
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.pair import Pair, pair
from tests.engine.steps import sql
from tests.engine.test_replication import BOUNDS, PARTITIONED, replayed, wait_until
from tests.engine.test_replication import dsn as dsn
from tests.engine.test_replication import primary as primary

pytestmark = pytest.mark.sample(0)

# For each phase: the statement before which the fault comes, in the middle of a transaction, and which of those that
# begin like this.
PLACES = {
    "build": ("INSERT INTO roir_data.g2 ", 2),
    "seal": ("CREATE UNIQUE INDEX g2_s", 2),
    "switch": ("UPDATE roir.generation SET", 1),
    "fold": ("SELECT state, nulls", 1),
    "verify": ("UPDATE roir.verification_unit p", 2),
    "publish": ("CREATE OR REPLACE VIEW", 1),
    "attach": ("SELECT roir.finish_attach", 1),
    "clean-up": ("LOCK TABLE roir_data.", 1),
}
WAIT_S = 30.0


class Scene:
    """A rebuild of a partitioned table's index. The server fails once; users write before the fault and after it."""

    def __init__(self, both: Pair, locked: bool) -> None:
        """locked: it happens under the drain lock, which users would wait for."""
        self.both = both
        self.locked = locked
        self.over = False
        run_sql(both.here, *PARTITIONED, "INSERT INTO t SELECT i % 10, i, 'k' FROM generate_series(100, 400) i")
        steps.make_index(Database(both.here), segments=2, ranges=2, batch_rows=40)
        self.database = Database(both.dsn, limits=Limits(outage_s=WAIT_S))

    def write(self, dsn: str) -> None:
        """Writes and commits. The writes are lost if the fault loses commits."""
        run_sql(
            dsn,
            "UPDATE t SET k = k || 'x' WHERE id % 3 = 0 AND d < 10",
            "DELETE FROM t WHERE id % 11 = 5",
            f"INSERT INTO t SELECT i % 10, i, 'new' FROM generate_series({10_000 + 100 * self.over}, {10_050}) i "
            "ON CONFLICT DO NOTHING",
        )

    def read(self) -> None:
        """Readers see exactly the table."""
        user = steps.session(self.both.dsn)
        try:
            sides = "SELECT k, d, id FROM ix", "SELECT k, d, id FROM t"
            for one, other in (sides, sides[::-1]):
                assert sql(user, f"{one} EXCEPT ALL {other}") == []
        finally:
            user.close()

    def fault(self, happens: Callable[[Scene], None]) -> None:
        """Lets users write, the fault happen, and users write again once the server is back."""
        if not self.locked:
            self.write(self.both.here)
        happens(self)
        self.over = True
        if happens is not stays_away:
            self.write(self.both.dsn)
            self.read()


def restart(scene: Scene) -> None:
    scene.both.primary.close()
    scene.both.primary.start()


def crash(scene: Scene) -> None:
    scene.both.primary.kill()
    scene.both.primary.start()


def backend_crash(scene: Scene) -> None:
    """One backend dies; the server disconnects all others and recovers."""
    user = steps.session(scene.both.here)
    [(pid,)] = sql(user, "SELECT pg_backend_pid()")
    os.kill(int(pid), signal.SIGKILL)

    def answers() -> bool:
        try:
            run_sql(scene.both.here, "SELECT 1")
        except psycopg2.OperationalError:
            return False
        return True

    wait_until(lambda: not answers(), "the crash")
    wait_until(answers, "the recovery")


def stays_away(scene: Scene) -> None:
    """The server stays away longer than the operation waits: no pause can be recorded."""
    scene.both.primary.kill()


def fail_over(scene: Scene) -> None:
    replayed(scene.both.here, scene.both.there)
    scene.both.fail_over()


def fail_over_losing(scene: Scene) -> None:
    """All commits since the begin of the operation are lost, as by a restore to an earlier moment."""
    scene.both.fail_over()


FAULTS = (restart, crash, backend_crash, stays_away, fail_over, fail_over_losing)


def carry(database: Database, begun: Callable[[], object] = lambda: None) -> None:
    """Drives the operation to its end, as the driver and then finalize do, by one worker and without Spark."""
    run = start_run(database, "ix", "test", take_over=True)
    begun()
    with driving(database, run), heartbeat(database, run):
        while (phase := database.retry(lambda: operations.find_operation(database, "ix").phase)) in LONG:
            for metrics in task.work(database, run, phase, 0):
                if metrics.error is not None:
                    raise RoirError(metrics.error)
            finish = lifecycle.PHASES[Phase(phase)].finish
            database.retry(lambda finish=finish: finish(database, run, lambda line: None))  # type: ignore[misc]
        lifecycle.run_phases(database, run)


@pytest.fixture
def both(primary: Server, dsn: str) -> Iterator[Pair]:
    with pair(primary, dsn) as found:
        yield found


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("happens", FAULTS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("phase", PLACES)
def test_an_operation_goes_on_after_every_fault_in_every_phase(
    both: Pair, phase: str, happens: Callable[[Scene], None]
) -> None:
    scene = Scene(both, locked=phase in ("switch", "publish"))
    database = scene.database
    if happens is stays_away:
        database = Database(both.dsn, limits=Limits(outage_s=1))
    if phase not in ("attach", "clean-up"):
        steps.begin(database, table=None, keys=None, ranges=3, segments=2, batch_rows=40, parallelism=1)

    def work() -> None:
        if phase == "attach":
            attach.attach_partition(database, "t", "t1", BOUNDS, "test")
        elif phase == "clean-up":
            clean_up.clean_up(database)
        else:
            carry(database, both.lose if loses else lambda: None)

    loses = happens is fail_over_losing
    if loses and phase in ("attach", "clean-up"):
        both.lose()
    by_itself, why = True, ""
    statement, at = PLACES[phase]
    with before(database, statement, lambda: scene.fault(happens), at):
        try:
            work()
        except (RoirError, DBAPIError) as error:
            by_itself, why = False, str(error)
    print(f"{phase}, {happens.__name__}: {'went on by itself' if by_itself else why}")
    # Commands that don't wait are run again. So is a run that waited long enough, or whose pause says why. If copied
    # rows are lost after the seal, the finalize says so, and Spark is needed again.
    assert by_itself or phase in ("attach", "clean-up") or happens is stays_away or "has lost its last commits" in why
    if happens is stays_away:
        assert why
        both.primary.start()
        scene.write(both.dsn)
    loses = False
    if not by_itself:
        work()
    database = scene.database
    if phase == "attach":
        assert steps.assert_exact(database).rows > 300
    elif phase != "clean-up":
        assert operations.find_operation(database, "ix").status == "completed"
    scene.read()
    clean_up.clean_up(database)
    steps.assert_exact(database)
    scene.write(both.dsn)
    steps.assert_exact(database)
    assert clean_up.clean_up(database).warnings == []
