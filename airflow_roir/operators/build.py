"""The task that builds and seals, on Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_roir.operation import Phase
from airflow_roir.task.roir_operator import failing_clearly
from airflow_roir.task.spark_task import SparkDrivingOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class BuildIndexOperator(SparkDrivingOperator):
    """Copies every range and seals every segment on Spark (docs/architecture.md#phases); returns the
    operation's id.

    batch_rows: the most rows per batch, to start with (templated). Like the parallelism it can be changed in the
        task's Task State Store; a change takes effect at the next batch.
    parallelism, spark: see `SparkDrivingOperator`.

    If the DAG is paused, the build stops after its open batches, and the task is rescheduled, which costs no retry.
    Every retry continues from the watermarks. The task waits in the same way for an operation that was paused
    elsewhere, or that another run drives.
    """

    template_fields: Sequence[str] = (*SparkDrivingOperator.template_fields, "batch_rows")
    done_phases = frozenset({Phase.FOLD, Phase.PUBLISH, Phase.DONE})
    live_options = ("parallelism", "batch_rows")

    def __init__(self, *, batch_rows: int | str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batch_rows = batch_rows

    def execute(self, context: Context) -> int:
        """Drive the operation until it is sealed, or leave."""
        self.offer_live_options(context)
        with failing_clearly():
            database = self.get_database()
            row = self.take_turn(database, context["ti"])
            if row is None:
                return int(self.read(database).id)
        self.drive_on_spark(context, database, row)
        return int(row.id)
