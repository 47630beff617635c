"""Runs the detector of duplicates in a thread of the run's driver. Its errors never stop the build."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.patience import LONGEST_WAIT_S
from airflow_roir.engine.retry.trouble import Trouble, reason_of, trouble_of
from airflow_roir.errors import DuplicatesFound, Fenced, RoirError
from airflow_roir.operation import Phase


@contextmanager
def detecting(database: Database, run: Run) -> Iterator[None]:
    """Look for duplicates of a unique index in a thread, while the block with the build's workers runs.

    The end of the block waits for a last look; if an error ends the block, only for the transaction that is under way.
    The phase's log tells of what is found.
    """
    halt, done = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=_watch, args=(database, run, halt, done), name="roir-early", daemon=True
    )  # fmt: skip
    thread.start()
    try:
        yield
        done.set()
    finally:
        halt.set()
        thread.join()


def _watch(database: Database, run: Run, halt: threading.Event, done: threading.Event) -> None:
    while not halt.is_set():
        try:
            _detect(database, run, halt, done)
            return
        except (Fenced, DuplicatesFound):
            # A newer run has a detector of its own; or the operation is paused, with the reason.
            return
        except DBAPIError as error:
            if (trouble := trouble_of(error)) is None:
                _give_up(database, run, reason_of(error))
                return
            if trouble is not Trouble.LOST:
                halt.wait(LONGEST_WAIT_S)
        except RoirError as error:
            # An error that ends the workers, too; they report it.
            _give_up(database, run, str(error))
            return
        except Exception as error:
            # Out of memory, or a bug: without an event the thread would end silently.
            _give_up(database, run, f"{type(error).__name__}: {error}")
            return
        halt.wait(database.limits.early_every_s)


def _detect(database: Database, run: Run, halt: threading.Event, done: threading.Event) -> None:
    with database.connect() as connection:
        with connection.begin():
            row = read_control(connection, run)
            if row.phase != Phase.BUILD:
                return
            job = load_job(connection, run)
        if not job.entry.enforced:
            return
        if halt.is_set():
            return
        # Imported here: numpy takes a tenth of a second to import, which builds without a unique key must not wait for.
        from airflow_roir.engine.early.detector import Detector, NoHash

        try:
            detector = Detector(database, connection, job, halted=halt.is_set)
        except NoHash:
            return
        ended = False
        while not ended:
            ended = halt.wait(database.limits.early_every_s)
            if not ended:
                detector.step()
            elif done.is_set():
                detector.last()


def _give_up(database: Database, run: Run, why: str) -> None:
    said = why.strip().split("\n", 1)[0]
    try:
        with database.transaction() as connection:
            row = read_control(connection, run)
            operations.record_event(
                connection, row.index_id, row.id, run.owner, "early", f"duplicates are told by the seal alone: {said}"
            )
    except (DBAPIError, RoirError):
        return
