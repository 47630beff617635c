"""The part that verify and compact share: one task begins an operation, drives it to its end and reports on it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it
from airflow.sdk.exceptions import AirflowFailException

from airflow_roir.operation import Phase
from airflow_roir.task.dag_switch import LEAVE_S, is_dag_paused, leave, look_again_s
from airflow_roir.task.fates import look_at_others
from airflow_roir.task.form_values import whole_number
from airflow_roir.task.roir_operator import failing_clearly
from airflow_roir.task.spark_task import SparkDrivingOperator, spark_of
from airflow_roir.task.waiting_operator import wait_log

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.exceptions import AirflowRescheduleException

    from airflow_roir.engine.database import Database
    from airflow_roir.errors import OperationRunning

# The key of the Task State Store for the id of the operation that this task has begun.
OPERATION = "operation_id"


class WholeOperationOperator(SparkDrivingOperator):
    """Base of the operators whose one task is a whole operation, which they begin themselves."""

    done_phases = frozenset({Phase.DONE})

    def execute(self, context: Context) -> dict[str, Any]:
        """Drives the operation to its end, or leaves it; returns its result."""
        store = context["task_state_store"]
        try:
            with failing_clearly():
                result = self.carry_out(context)
        except AirflowFailException:
            # The task has reported its result: if it is cleared, it begins another operation.
            store.delete(OPERATION)
            raise
        store.delete(OPERATION)
        return result

    @abstractmethod
    def carry_out(self, context: Context) -> dict[str, Any]:
        """Begins the operation, or finds the one that was begun, drives it to its end and returns its result."""

    def begun_before(self, context: Context, done: str) -> int | None:
        """The operation that an earlier stretch or try has begun; None: this one must begin it.

        done: the participle for the log, `verified`. Raises AirflowRescheduleException if the DAG is paused, and
        AirflowFailException if `spark` leads to no Spark, so that no operation begins that can't be driven.
        """
        ti = context["ti"]
        begun = whole_number(OPERATION, context["task_state_store"].get(OPERATION))
        if begun is not None:
            return begun
        if is_dag_paused(ti):
            why = f"DAG {ti.dag_id} is paused; nothing is {done} yet. Unpause the DAG to continue"
            raise leave(look_again_s(wait_log(context, self.log).waits(why, why), LEAVE_S))
        spark_of(self.spark)
        return None

    def keep(self, context: Context, operation_id: int) -> None:
        """Keeps the id of the operation that has begun, for the next stretch or try."""
        context["task_state_store"].set(OPERATION, operation_id, retention=NEVER_EXPIRE)

    def waiting(self, context: Context, database: Database, reason: OperationRunning) -> AirflowRescheduleException:
        """Logs the reason why the task waits before it can begin; returns the exception to raise."""
        waited = wait_log(context, self.log).waits(reason.by, f"Waiting: {reason}")
        look_at_others(database, self.index, context["ti"], self.log)
        return leave(look_again_s(waited))

    def drive_to_end(self, context: Context, database: Database, operation_id: int) -> None:
        """Drives that operation to its end, unless it is there already. Raises as `take_turn` and `drive_on_spark`."""
        with failing_clearly():
            self.operation_id = operation_id
            self.offer_live_options(context, database)
            row = self.take_turn(database, context["ti"])
        if row is not None:
            self.drive_on_spark(context, database, row)
