"""Waits for a long job, a call in a thread or another process, while users pause it, change it or kill the task.

The loop is a free function over callables; the operators bind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from airflow.sdk.exceptions import AirflowException

from airflow_roir.task.ui_requests import Watcher

T = TypeVar("T")


class Background(Generic[T]):
    """Runs `work` in a daemon thread: when the task leaves, its process ends and the server rolls back."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name="roir-engine", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # handed on whole: result() raises it in the main thread
            self._future.set_exception(error)

    def wait(self, seconds: float) -> bool:
        """Waits at most this many seconds; True when the call has ended, by a return or an error."""
        return bool(wait([self._future], seconds).done)

    def result(self) -> T:
        """The result of the call. If the call raised an error, raises it."""
        return self._future.result()


# The time of one wait for the job: a kill must be noticed well within the five seconds that Airflow allows.
POLL_S = 0.5


class Interrupted(AirflowException):
    """The task was killed, or its supervisor is gone. All committed work stays; the next try continues after it."""


def follow(
    wait: Callable[[float], bool],
    watcher: Watcher,
    is_killed: Callable[[], bool],
    request_pause: Callable[[], None],
    turn: Callable[[], object],
) -> None:
    """Returns when the job has ended; raises Interrupted if the task must leave it.

    wait: waits for the job, at most this many seconds; True when it has ended.
    request_pause: called at every turn while the DAG's switch is off, not once: a driver that was just starting
        may have resumed the operation after an earlier request. The job then ends, at the end of a batch.
    turn: called at every turn.
    """
    while not wait(POLL_S):
        if is_killed():
            raise Interrupted("the task was killed; all committed work stays")
        if watcher.orphaned:
            raise Interrupted("the task's supervisor is gone; all committed work stays")
        if watcher.paused:
            request_pause()
        turn()
    # A signal that ended the job may have been meant for the task.
    if is_killed():
        raise Interrupted("the task was killed; all committed work stays")
