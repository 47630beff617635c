"""Pause, resume, abort and change one operation for a user of Airflow's UI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_roir.actor import PAGE
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.remedies import moment
from airflow_roir.engine.database import Database
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.snapshot.operation import operation_soon
from airflow_roir.engine.snapshot.parts import NextTask
from airflow_roir.engine.snapshot.words import coming, state_of
from airflow_roir.errors import InvalidInput, OperationRunning
from airflow_roir.options import MAX_PARALLELISM
from airflow_roir.page.settings import CLEAN_UP_DAG, DEFAULT_CONNECTION
from airflow_roir.page.targets import Found, Run, find
from airflow_roir.quantity import counted, rate
from airflow_roir.signals import throttle_text
from airflow_roir.task.dag_switch import actor_of_switch

# The reason of a user who gives none.
ON_THE_PAGE = "on the page Index build"


@dataclass(frozen=True)
class Change:
    """A change of the operation that a run drives.

    user: of Airflow, named in the operation's events. operation: the one that the user saw. If another one has begun
    since, nothing is changed. next_task: finds the task that will drive it.
    """

    database: Database
    connection_id: str
    run: Run
    operation: int
    user: str
    next_task: Callable[[Run, Found], NextTask | None] = lambda *_: None

    @property
    def actor(self) -> str:
        """The name that events and the status show."""
        return f"{PAGE}{self.user}"

    def pause(self, reason: str) -> str:
        """Pauses it; returns a message if it was paused before, else ''. Raises as `requests.pause` and `_found`."""
        reason = reason or ON_THE_PAGE
        row = requests.pause(self.database, self._index(), self.actor, reason, self.operation)
        if (row.paused_by, row.pause_reason) != (self.actor, reason):
            # Another tab, another user or the switch has paused it: that reason stays.
            since = "" if row.paused_at is None else f" since {moment(row.paused_at)},"
            return f"It is already paused{since} by {row.paused_by}: {row.pause_reason}"
        return ""

    def resume(self) -> str:
        """Lifts the pause. Raises as `pause`."""
        one = self._found()
        requests.resume(self.database, one.index, self.actor, self.operation)
        if self.run.left_behind(one):
            return f"Resumed. {self.run.how_to_go_on(one)}."
        if self.run.switch_off:
            return f"Resumed. Turn the switch of {self.run.dag_id} on: until then Airflow starts no task of it."
        then = self._then(one)
        return f"Resumed. {then[0].upper()}{then[1:]}."

    def _then(self, one: Found) -> str:
        """The task that continues the operation, and when, as the page shows it; else what the user can do."""
        task = self.next_task(self.run, one)
        if task is not None:
            return coming(task) if task.at is None else f"{coming(task)}, and continues"
        if one.left:
            return self.run.how_to_go_on(one)
        seen = operation_soon(self.database, self.operation)
        if seen.expected_at is not None:
            return f"its task continues, at the latest about {moment(seen.expected_at)}"
        return state_of(seen).remedy or "its task continues"

    def abort(self, reason: str) -> str:
        """Fences the workers. The next clean-up removes what was built; Airflow's API has no time for that."""
        requests.request_abort(self.database, self._index(), self.actor, reason or ON_THE_PAGE, self.operation)
        by = f"The next run of {CLEAN_UP_DAG}"
        if self.connection_id != DEFAULT_CONNECTION:
            # The DAG's schedule only runs for the default connection.
            by = f"A run of {CLEAN_UP_DAG} for connection {self.connection_id}"
        return f"Aborted: the workers can't commit any more. {by} removes the unfinished work."

    def set_workers(self, number: int) -> str:
        """Sets the parallelism, live. Raises as `pause`, InvalidInput."""
        if not 1 <= number <= MAX_PARALLELISM:
            raise InvalidInput(f"the number of workers must be from 1 to {MAX_PARALLELISM}")
        # The task then shows the value in its Task State Store.
        requests.change_options(
            self.database, self._index(), actor=self.actor, operation=self.operation, parallelism=number
        )
        return f"{counted(number, 'worker')} from now on"

    def set_rate(self, rows_per_second: int) -> str:
        """Sets the rate limit of all workers together, live; 0 is none. Raises as `pause`, InvalidInput."""
        row = requests.change_options(
            self.database,
            self._index(),
            actor=self.actor,
            operation=self.operation,
            max_rows_per_second=rows_per_second,
        )
        limit = row.max_rows_per_second
        return f"At most {rate(limit)} from now on" if limit else "No rate limit from now on"

    def set_limits(self, throttle: str) -> str:
        """Sets the limits of signals, live: these and no others. Raises as `pause`, InvalidInput."""
        row = requests.change_options(
            self.database, self._index(), actor=self.actor, operation=self.operation, throttle=f"off {throttle}"
        )
        return f"Limits from now on: {throttle_text(row.throttle) or 'none'}"

    def _index(self) -> str:
        """The index of the operation. Raises as `_found`."""
        return self._found().index

    def _found(self) -> Found:
        """The operation, as the run is about it. Raises OperationRunning if the run doesn't drive it."""
        with self.database.transaction() as connection:
            check_schema(connection)
            found = [one for one in find(connection, self.connection_id, self.run) if one.operation == self.operation]
        if found and found[0].drives:
            return found[0]
        raise OperationRunning(
            f"run {self.run.run_id} of DAG {self.run.dag_id} doesn't drive operation {self.operation} (any more)"
        )


def is_paused_by_switch(run: Run, paused_by: str | None) -> bool:
    """True if the operation was paused by the switch of the run's DAG, and so ends its pause with it."""
    return paused_by == actor_of_switch(run.dag_id)
