"""Pause, resume, abort and change one operation for a user of Airflow's UI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import MAX_PARALLELISM, parse_name
from airflow_roir.engine import operations
from airflow_roir.engine.database import Database, execute, said, sqlstate
from airflow_roir.engine.governor.signals import throttle_text
from airflow_roir.engine.schema import check_schema
from airflow_roir.errors import IllegalTransition, InvalidInput, NotFound, OperationRunning, RoirError
from airflow_roir.page.settings import CLEAN_UP_DAG, DEFAULT_CONNECTION
from airflow_roir.page.targets import Found, Run, find
from airflow_roir.quantity import counted
from airflow_roir.task.dag_switch import actor_of_switch

# What the functions in migrations/sql/operations.sql raise.
REFUSALS: dict[str, type[RoirError]] = {
    "P0002": NotFound,
    "55000": IllegalTransition,
    "42P09": InvalidInput,
    "22023": InvalidInput,
}


@dataclass(frozen=True)
class Change:
    """A change of the operation that a run drives.

    user: of Airflow; the operation's events name it. operation: the one that the user saw. If another one has begun
    since, nothing is changed.
    """

    database: Database
    connection_id: str
    run: Run
    operation: int
    user: str

    @property
    def actor(self) -> str:
        """The name that events and the status show."""
        return f"airflow user {self.user}"

    def pause(self, reason: str) -> str:
        """Pause it. Raises as `_call`; returns what to tell the user."""
        said = self._call("pause", {"reason": reason or "on the page Index build", "actor": self.actor})
        if said.startswith("already"):
            # Another tab, another user, or the switch: their reason stays.
            return f"It is {said}"
        return "Paused. The workers finish their open batches."

    def resume(self) -> str:
        """Lift the pause. Raises as `_call`."""
        self._call("resume", {"actor": self.actor})
        if self.run.switch_off:
            return f"Resumed. Turn the switch of {self.run.dag_id} on: until then Airflow starts no task of it."
        return "Resumed. The task continues within half a minute."

    def abort(self, reason: str) -> str:
        """Fence the workers. The next clean-up removes what was built; Airflow's API has no time for that."""
        said = self._call("abort", {"reason": reason or "on the page Index build", "actor": self.actor})
        what = "It is being aborted already" if said.startswith("being") else "Aborted: no worker commits any more"
        by = f"The next run of {CLEAN_UP_DAG}"
        if self.connection_id != DEFAULT_CONNECTION:
            # Its schedule is the default connection's.
            by = f"A run of {CLEAN_UP_DAG} for connection {self.connection_id}"
        return f"{what}. {by} removes what was built."

    def set_workers(self, number: int) -> str:
        """Set the parallelism, live. Raises as `_call`, InvalidInput."""
        if not 1 <= number <= MAX_PARALLELISM:
            raise InvalidInput(f"the number of workers must be from 1 to {MAX_PARALLELISM}")
        with self.database.transaction() as connection:
            index = self._found(connection).index
        # The task carries it to its Task State Store.
        operations.change_options(self.database, index, actor=self.actor, operation=self.operation, parallelism=number)
        return f"{counted(number, 'worker')} from now on"

    def set_limits(self, throttle: str) -> str:
        """Set the limits of signals, live: these and no others. Raises as `_call`, InvalidInput."""
        with self.database.transaction() as connection:
            index = self._found(connection).index
        row = operations.change_options(
            self.database, index, actor=self.actor, operation=self.operation, throttle=f"off {throttle}"
        )
        return f"Limits from now on: {throttle_text(row.throttle) or 'none'}"

    def _found(self, connection: Connection) -> Found:
        check_schema(connection)
        for one in find(connection, self.connection_id, self.run):
            if one.operation == self.operation:
                if not one.drives:
                    break
                return one
        raise OperationRunning(
            f"run {self.run.run_id} of DAG {self.run.dag_id} doesn't drive operation {self.operation} (any more)"
        )

    def _call(self, function: str, values: dict[str, Any]) -> str:
        """Call one of the functions that users have in SQL, on this operation alone; what it says.

        Raises NotFound, IllegalTransition, InvalidInput, OperationRunning (the run doesn't drive it).
        """
        try:
            with self.database.transaction() as connection:
                index = parse_name(self._found(connection).index, "index").sql
                operations.expect(connection, index, self.operation)
                named = ", ".join(f"{name} => %({name})s" for name in values)
                call = f"SELECT roir.{function}(%(index)s, {named})"
                return str(execute(connection, call, {"index": index, **values}).scalar_one())
        except DBAPIError as error:
            refusal = REFUSALS.get(sqlstate(error))
            if refusal is None:
                raise
            raise refusal(said(error)) from None


def is_paused_by_switch(run: Run, paused_by: str | None) -> bool:
    """Whether the operation was paused by the switch of the run's DAG, and so ends its pause with it."""
    return paused_by == actor_of_switch(run.dag_id)
