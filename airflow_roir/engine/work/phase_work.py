"""The work of a phase: pieces that workers claim, one worker's loop over them, and the phase's end.

Ranges of a build, segments of a seal, parts of a fold, units of a verification and of a compaction are all such
pieces. `lifecycle.PHASES` lists the phases; `driver.py` keeps as many workers at them as the operation may have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Connection

from airflow_roir.engine.claims import Pieces, Stop, WorkLeft, why_stop
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.control.run import Report, Run, read_control
from airflow_roir.engine.database import Database
from airflow_roir.engine.work.turn import Turn
from airflow_roir.operation import Phase

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Step:
    """The result of one step of a piece. rest: the hold as it is now; None: the worker no longer holds the piece.

    rows: the copied or read ones. seconds: of work. done: False if the piece must be claimed again. paced: the rows
    that count for the rate limit. rests: False if neither a limit nor a grant can require a rest, which saves a look.
    """

    rows: int
    seconds: float
    rest: Any = None
    done: bool = True
    paced: int = 0
    rests: bool = True


@dataclass(frozen=True)
class WorkerMetrics:
    """The work of one claim of a piece. error: the error that ended the worker instead, for a worker on Spark."""

    worker: int
    phase: str
    ordinal: int | None = None
    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    done: bool = False
    error: str | None = None


class Worker(ABC):
    """One of a phase's parallel workers, with a session of its own. Tests step it by `claim` and `step`."""

    @abstractmethod
    def claim(self) -> Any:
        """A hold on the next piece, first on one that an earlier try of this worker held; or Stop. Raises Fenced."""

    @abstractmethod
    def step(self, hold: Any) -> Step | Stop:
        """Take the next step of a piece. Raises Fenced, with nothing changed. On Stop the worker leaves."""

    def let_go(self) -> None:
        """Give up a snapshot, which the worker must not hold while it waits. By default there is none."""
        return

    def close(self) -> None:
        """Close all that the worker opened. By default that is nothing."""
        return


# Makes a worker with a number, on its session: reads its job, and starts the operation's clock.
MakeWorker = Callable[[Database, Connection, Run, int], Worker]


def begin_work(connection: Connection, run: Run, load: Callable[[Connection, Run], Loaded]) -> Loaded:
    """Load a worker's job, and start the operation's clock. Raises what `load` raises."""
    with connection.begin():
        loaded = load(connection, run)
        sign_of_life.start_clock(connection, run.operation_id, run.epoch)
        return loaded


def no_values(_connection: Connection, _run: Run) -> Mapping[str, Any]:
    """No values, for pieces whose SQL needs only the operation."""
    return {}


def nothing_before(_database: Database, _run: Run, _report: Report) -> bool:
    """Does nothing before the workers come."""
    return True


def nothing_beside(_database: Database, _run: Run) -> AbstractContextManager[None]:
    """Runs nothing beside the workers."""
    return nullcontext()


@dataclass(frozen=True)
class PhaseWork:
    """The work of one phase.

    name: the phase. pieces: those that workers claim. worker: makes a worker. finish: ends the phase, or begins its
    next stage, once no piece is left; raises InvariantViolated if one is. listed: SQL, the pieces of `%(operation)s` as
    (ordinal, rows, seconds, done), for the log. why: the purpose of the phase.
    values: those that the SQL of the pieces needs besides the operation. before: called before the workers come, each
    time that a run enters the phase; returns False if it has ended the operation. beside: runs beside the workers.
    has_stages: pieces come in stages, each with its own numbers.
    """

    name: Phase
    pieces: Pieces
    worker: MakeWorker
    finish: Callable[[Database, Run, Report], None]
    listed: str
    why: str
    values: Callable[[Connection, Run], Mapping[str, Any]] = no_values
    before: Callable[[Database, Run, Report], bool] = nothing_before
    beside: Callable[[Database, Run], AbstractContextManager[None]] = nothing_beside
    has_stages: bool = False

    @property
    def noun(self) -> str:
        """The word for a piece."""
        return self.pieces.noun

    def left(self, connection: Connection, run: Run, busy: Collection[int]) -> WorkLeft:
        """How many pieces are left. busy: the run's workers that are alive; pieces of others become free again."""
        return self.pieces.left(connection, run, busy, self.values(connection, run))

    def work(
        self,
        database: Database,
        run: Run,
        number: int,
        wait: Callable[[float], object] | None = None,
        worked: Callable[[], object] = lambda: None,
    ) -> Iterator[WorkerMetrics]:
        """Claim and do pieces until none is free, the operation is paused, or this worker is one too many.

        Yields the metrics of each piece when the worker leaves it. wait: sleeps, under a limit. worked: called after
        each step. Raises Fenced, SourceChanged, and errors of the database: `worker.work` decides which are transient.
        """
        with database.connect() as connection:
            with connection.begin():
                # A worker that starts after a pause leaves before it reads anything else.
                if why_stop(read_control(connection, run), number, self.name):
                    return
            with closing(self.worker(database, connection, run, number)) as worker:
                turn = Turn(connection, run, number, wait, worker.let_go)
                turn.come()
                while not isinstance(hold := worker.claim(), Stop):
                    total = WorkerMetrics(number, self.name.value, hold.ordinal)
                    at = hold
                    while at is not None:
                        step = worker.step(at)
                        if isinstance(step, Stop):
                            yield total
                            return
                        worked()
                        total = replace(
                            total,
                            rows=total.rows + step.rows,
                            steps=total.steps + 1,
                            seconds=total.seconds + step.seconds,
                            done=step.rest is None and step.done,
                        )
                        if step.rests:
                            turn.rest(step.seconds, step.paced)
                        at = step.rest
                    yield total
