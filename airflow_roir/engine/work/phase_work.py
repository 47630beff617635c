"""The work of a phase: pieces that workers claim, one worker's loop over them, and what ends it.

Ranges of a build, segments of a seal, blocks of a fold, units of a verification and of a compaction are all such
pieces. `lifecycle.PHASES` lists the phases; `driver.py` keeps as many workers at them as the operation is to have.
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
    """What one step of a piece did. rest: the hold as it is now; None: the worker holds the piece no longer.

    rows: that were copied or read. seconds: of work. done: False if the piece is to be claimed again. paced: the rows
    that count for the rate limit. rests: False if neither limit nor grant asks for a rest, which saves a look.
    """

    rows: int
    seconds: float
    rest: Any = None
    done: bool = True
    paced: int = 0
    rests: bool = True


@dataclass(frozen=True)
class WorkerMetrics:
    """What a worker did on one claim of a piece. error: what ended the worker instead, of a worker on Spark."""

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
        """A hold on the next piece, the one that an earlier try of this worker held first; or Stop. Raises Fenced."""

    @abstractmethod
    def step(self, hold: Any) -> Step | Stop:
        """The next step of a piece. Raises Fenced, with nothing changed. On Stop the worker leaves."""

    def let_go(self) -> None:
        """Give up what must not be held while the worker waits: a snapshot. By default nothing is."""
        return

    def close(self) -> None:
        """Give up all that the worker opened. By default that is nothing."""
        return


# Makes a worker by its number, on its session: reads what it needs, and starts the operation's clock.
MakeWorker = Callable[[Database, Connection, Run, int], Worker]


def begin_work(connection: Connection, run: Run, load: Callable[[Connection, Run], Loaded]) -> Loaded:
    """What a worker needs to know; the operation's clock runs from then on. Raises what `load` raises."""
    with connection.begin():
        loaded = load(connection, run)
        sign_of_life.start_clock(connection, run.operation_id, run.epoch)
        return loaded


def no_values(_connection: Connection, _run: Run) -> Mapping[str, Any]:
    """Pieces whose SQL names nothing but the operation."""
    return {}


def nothing_before(_database: Database, _run: Run, _report: Report) -> bool:
    """A phase that needs nothing done before its workers come."""
    return True


def nothing_beside(_database: Database, _run: Run, _report: Report) -> AbstractContextManager[None]:
    """A phase beside whose workers nothing runs."""
    return nullcontext()


@dataclass(frozen=True)
class PhaseWork:
    """The work of one phase.

    name: the phase. pieces: what workers claim. worker: makes one. finish: ends the phase, or begins its next stage,
    once no piece is left; raises InvariantViolated where one is. listed: SQL, the pieces of `%(operation)s` as
    (ordinal, rows, seconds, done), for the log. why: what the phase is for.
    values: what the SQL of the pieces names beside the operation. before: is called before the workers come, each time
    that a run enters the phase; False if it has ended the operation. beside: runs beside the workers.
    has_stages: pieces come in stages, each with numbers of its own.
    """

    name: Phase
    pieces: Pieces
    worker: MakeWorker
    finish: Callable[[Database, Run, Report], None]
    listed: str
    why: str
    values: Callable[[Connection, Run], Mapping[str, Any]] = no_values
    before: Callable[[Database, Run, Report], bool] = nothing_before
    beside: Callable[[Database, Run, Report], AbstractContextManager[None]] = nothing_beside
    has_stages: bool = False

    @property
    def noun(self) -> str:
        """What a piece is called."""
        return self.pieces.noun

    def left(self, connection: Connection, run: Run, busy: Collection[int]) -> WorkLeft:
        """How many pieces are left. busy: the run's workers that are alive; what others held is free again."""
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

        Yields what was done on each piece, as it is left. wait: how to sleep under a limit. worked: called after each
        step. Raises Fenced, SourceChanged, and whatever the database raises: `worker.work` decides what is transient.
        """
        with database.connect() as connection:
            with connection.begin():
                # One that comes up after a pause leaves before it reads anything else.
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
