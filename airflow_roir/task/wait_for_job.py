"""The loop of a task that waits for a long job while users pause it, change it or kill it.

A free function over callables; the operators bind it.
"""

from __future__ import annotations

from collections.abc import Callable

from airflow.sdk.exceptions import AirflowException

from airflow_roir.task.ui_requests import Watcher

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
