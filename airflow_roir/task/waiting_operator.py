"""The base of tasks that wait for a user, a window or another run: each look is a short stretch, which costs no try.

A stretch is a new process: what it has logged of its wait is kept in the Task State Store.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it
from airflow.sdk.exceptions import AirflowFailException

from airflow_roir.actor import Way, way_of
from airflow_roir.engine import abort
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.long_pause import LongPause
from airflow_roir.engine.control.wait_log import WaitLog
from airflow_roir.engine.retry.patience import OutageLog
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.snapshot.words import way_on
from airflow_roir.operation import Status
from airflow_roir.task.dag_switch import LEAVE_S, LOOK_AGAIN_S, actor_of_switch, leave, look_again_s
from airflow_roir.task.fates import expect
from airflow_roir.task.next_step import was_aborted
from airflow_roir.task.roir_operator import RoirOperator, owner_of

if TYPE_CHECKING:
    from airflow_roir.engine.control.operations import OperationRow
    from airflow_roir.engine.database import Database
    from airflow_roir.engine.snapshot.operation import OperationStatus

# The key of the Task State Store for what the stretches have logged.
KEY = "waits"
# The reasons to wait that say themselves how the pause ends, as that by the task's own switch does.
BY_ITSELF = (Way.WINDOW, Way.RUN)

LongPauseCallback = Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None


def wait_log(context: Mapping[str, Any], log: Any) -> WaitLog:
    """The wait log of the task with this context. log: its logger."""
    store = context["task_state_store"]

    def keep(kept: dict[str, Any] | None) -> None:
        if kept is None:
            store.delete(KEY)
        else:
            store.set(KEY, kept, retention=NEVER_EXPIRE)

    return WaitLog(store.get(KEY), keep, lambda line: log.info("%s", line), context["ti"].try_number)


def call_long_pause(
    callbacks: LongPauseCallback, context: Mapping[str, Any], pause: LongPause, log: logging.Logger | Any
) -> None:
    """Calls each with the context, as Airflow calls its own; `context["long_pause"]` is the pause.

    An error of a callback is logged: the task goes on, and the others are called.
    """
    if callbacks is None:
        return
    for callback in [callbacks] if callable(callbacks) else callbacks:
        try:
            callback({**context, "long_pause": pause})
        except Exception as error:  # the user's code
            log.error("on_long_pause_callback failed: %s: %s", type(error).__name__, error)


class WaitingOperator(RoirOperator):
    """Base of the operators that wait before they drive an operation.

    on_long_pause_callback: called with the context when the operation has been paused for long, once and then once a
        day, and when it is aborted for that; `context["long_pause"]` is an
        `engine.control.long_pause.LongPause`. One callable, a notifier for example, or a list of them.
    """

    def __init__(self, *, on_long_pause_callback: LongPauseCallback = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.on_long_pause_callback = on_long_pause_callback
        self._context: Any = {}
        self._waits: WaitLog | None = None

    @cached_property
    def outage(self) -> OutageLog:
        """Logs that the server is out of reach."""
        return OutageLog(lambda line: self.log.warning("%s", line))

    @abstractmethod
    def read(self, database: Database) -> OperationRow:
        """The operation as it is now."""

    def begin_stretch(self, context: Any) -> Database:
        """The first step of `execute`: the database, and what the stretch before has logged of its wait."""
        self._context = context
        self._waits = wait_log(context, self.log)
        return self.get_database(again=self._waits.is_on)

    def aborted(self, database: Database, row: OperationRow) -> str | None:
        """The name of the actor who aborted the operation, with the reason; None if it wasn't aborted."""
        if row.status not in operations.ABORT:
            return None
        with database.transaction() as connection:
            return operations.aborted_by(connection, row)

    def end_wait(self) -> None:
        """Logs the end of the wait, if the task has waited."""
        if self._waits is not None:
            self._waits.over()

    def wait_for(
        self,
        database: Database,
        why: str,
        least: int = LOOK_AGAIN_S,
        most: int | None = None,
        by: str | None = None,
    ) -> NoReturn:
        """Ends this stretch. Logs the reason, and the operation's progress, when the wait begins, and once an hour.

        least, most: the seconds until the next look, at first and at last. by: what is waited for, if `why` says more.
        """
        row = self.read(database)
        if row.status == Status.PAUSED:
            actor = owner_of(self._context["ti"]) if "ti" in self._context else "airflow"
            abort.settle_pauses(database, actor, row.id, self._tell_long_pause, self.log.info)
            row = self.read(database)
            if row.status in operations.ABORT:
                raise AirflowFailException(was_aborted(row.id, self.aborted(database, row)))
        now = operation_status(database, row.id)
        line = f"Operation on index {self.index} at {now.percent_complete:.0f} %, {why}"
        if now.status == Status.PAUSED and self._needs_user(now):
            line += f"; {way_on(now)}"
        waited = 0.0 if self._waits is None else self._waits.waits(by or why, line)
        seconds = look_again_s(waited, least) if most is None else most
        if "ti" in self._context:
            expect(database, row.id, self, self._context["ti"], max(seconds, LEAVE_S))
        raise leave(seconds)

    def _needs_user(self, paused: OperationStatus) -> bool:
        by = paused.paused_by or ""
        own = actor_of_switch(self._context["ti"].dag_id) if "ti" in self._context else None
        return by != own and way_of(by, paused.owner) not in BY_ITSELF

    def _tell_long_pause(self, pause: LongPause) -> None:
        self.log.warning("%s", pause.text)
        call_long_pause(self.on_long_pause_callback, self._context, pause, self.log)
