"""Drives one phase of a run: keeps as many workers at its pieces as the operation may have, and takes their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from airflow_roir.engine.claims import WorkLeft, granted_workers
from airflow_roir.engine.control.run import Run, read_now, settle, start_clock
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.control.slow_options import slow
from airflow_roir.engine.database import Database
from airflow_roir.engine.scan import sharing
from airflow_roir.engine.sessions.kept_session import close_kept
from airflow_roir.engine.sessions.room import Room, room_of
from airflow_roir.engine.work import worker
from airflow_roir.engine.work.phase_log import PhaseLog
from airflow_roir.engine.work.phase_work import PhaseWork
from airflow_roir.engine.work.pool import Ended, Pool
from airflow_roir.errors import DuplicatesFound, HistoryChanged, OperationFailed, OperationPaused
from airflow_roir.operation import Phase, Status
from airflow_roir.quantity import counted

T = TypeVar("T")

# How soon the driver follows a raised parallelism, or a grant.
WATCH_EVERY_S = 1.0


class PhaseDriver:
    """Drives one phase of a run, with the workers of a pool.

    report: takes the lines of the log.
    """

    def __init__(
        self,
        database: Database,
        run: Run,
        phase: PhaseWork,
        pool: Pool,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._database = database
        self._run = run
        self._phase = phase
        self._pool = pool
        self._log = PhaseLog(database, run, phase, report)
        self._report = report
        self._shares_scan_with: set[str] = set()
        self._room: Room  # as the phase begins
        self._crowded: str | None = None

    def run(self) -> None:
        """Return when the phase, or a stage of it, is done. Raises OperationPaused, OperationFailed, Fenced.

        Raises WorkerFailed, or the pool's own error, once every other worker has left.
        """
        row = self._control()
        if row.phase != self._phase.name:
            return
        if self._work_left().undone:
            self._room = self._persist(self._read_room)
            self._log.begin(min(row.parallelism, self._room.workers))
            if self._phase.name == Phase.BUILD:
                # The other warnings come when the options are given.
                for line in slow(row, 0, cores=self._pool.shared_cores):
                    self._log.say(line)
            with self._phase.beside(self._database, self._run):
                row = self._work()
            self._log.pieces(last=True)
            if row.status == Status.PAUSED:
                raise OperationPaused(f"index {self._run.index}: paused by {row.paused_by}: {row.pause_reason}")
            if row.status == Status.FAILED:
                raise OperationFailed(f"index {self._run.index}: {row.error}")
        close_kept(self._database)
        try:
            self._persist(lambda: self._phase.finish(self._database, self._run, self._report))
        except DuplicatesFound:
            self._log.duplicates()
            raise
        # The end of a phase is that of the server to which the address leads now.
        close_kept(self._database)
        row = self._control()
        # A fold has several passes, a comparison several stages.
        if row.phase != self._phase.name:
            # The time that the status shows: the time of this stretch would include Spark's start.
            self._log.over(row.phase_seconds.get(self._phase.name.value, 0))

    def _work(self) -> Any:
        """Work until nothing is left, or the operation isn't running; returns its row."""
        while True:
            try:
                self._follow()
            except HistoryChanged as error:
                # The phase begins again, with the state that this server has.
                self._leave(error)
                raise
            except BaseException as error:
                # Written down first: otherwise the other workers would work to the end of the phase before they learn
                # of it.
                self._settle(error)
                if isinstance(error, KeyboardInterrupt) and self._pool.busy:
                    self._log.say(f"interrupted; waiting for the open batches of {self._busy}")
                self._leave(error)
                raise
            row = self._control()
            # If it was paused, and resumed while its workers were still leaving, this run continues.
            if row.status != Status.RUNNING or row.phase != self._phase.name or not self._work_left().undone:
                return row

    def _follow(self) -> None:
        """Follow the operation's row: start workers as long as there is work for them and the operation runs."""
        pool = self._pool
        while True:
            row = self._control()
            if failures := self._hear(pool.collect()):
                raise failures[0]
            if row.status == Status.PAUSED and pool.busy:
                self._log.say(f"paused by {row.paused_by}; waiting for the open batches of {self._busy}")
            self._log.pieces()
            if row.status != Status.RUNNING or row.phase != self._phase.name:
                break
            self._log.workers(min(row.parallelism, self._room.workers))
            if (crowded := self._room.warning(row.parallelism)) and crowded != self._crowded:
                self._crowded = crowded
                self._log.say(crowded)
            left = self._work_left()
            self._tell_of_one_scan(left)
            # Under a hold no worker starts; those that have started wait.
            wanted = 0 if row.granted == 0 else min(granted_workers(row), self._room.workers)
            missing = sorted(set(range(wanted)) - pool.busy)
            # A worker that is busy without a piece is starting: reserve one for it.
            for number in missing[: max(0, min(left.free, left.undone - len(pool.busy)))]:
                pool.start(
                    number,
                    f"{self._run.index}: {self._phase.name.shown}, worker {number} of {row.parallelism}, "
                    f"{left.free} {self._phase.noun}s unclaimed",
                )
            if not left.undone and not (pool.busy and self._persist(self._at_work) & pool.busy):
                # All is done: don't wait for workers that got no place or are lost. The session of a lost worker proves
                # nothing: a server may take hours to notice that a machine is gone.
                break
            pool.look(self._log, lambda: self._persist(self._at_work))
            pool.wait(WATCH_EVERY_S)
        self._leave(None)

    def _read_room(self) -> Room:
        with self._database.transaction() as connection:
            return room_of(connection)

    def _tell_of_one_scan(self, left: WorkLeft) -> None:
        """Report other operations that share the scan, which may leave workers of this one nothing to claim."""
        if self._phase.name != Phase.BUILD:
            return

        def read() -> tuple[str, ...]:
            with self._database.transaction() as connection:
                return sharing.others(connection, [self._run.operation_id]).get(self._run.operation_id, ())

        names = self._persist(read)
        if set(names) - self._shares_scan_with:
            self._shares_scan_with |= set(names)
            self._log.say(sharing.told(names))
        if names and left.undone and not left.free and not self._pool.busy:
            # Workers of other operations work for this one: its clock runs.
            self._database.retry(lambda: start_clock(self._database, self._run))

    def _leave(self, cause: BaseException | None) -> None:
        """Wait for the workers that are still at work; raise the first error of theirs, unless there is a `cause`."""
        failures = self._hear(self._pool.leave(self._at_work, self._database.limits.outage_s), leaving=True)
        if failures and cause is None:
            raise failures[0]

    def _hear(self, ended: list[Ended], leaving: bool = False) -> list[BaseException]:
        """The workers' errors. Records each with the operation, so that no error hides another."""
        failures = [failure for one in ended if (failure := self._pool.failure(one, self._log, leaving)) is not None]
        for failure in failures:
            self._log.say(str(failure))
            self._settle(failure)
        return failures

    def _settle(self, error: BaseException) -> None:
        settle(self._database, self._run, error, fatal=False)

    @property
    def _busy(self) -> str:
        return counted(len(self._pool.busy), "worker")

    def _control(self) -> Any:
        return self._persist(lambda: read_now(self._database, self._run))

    def _persist(self, work: Callable[[], T]) -> T:
        return persist(self._database, self._run, work, self._log.say)

    def _at_work(self) -> set[int]:
        with self._database.transaction() as connection:
            return worker.workers_at_work(connection, self._run)

    def _work_left(self) -> WorkLeft:
        def read() -> WorkLeft:
            with self._database.transaction() as connection:
                return self._phase.left(connection, self._run, self._pool.busy)

        return self._persist(read)
