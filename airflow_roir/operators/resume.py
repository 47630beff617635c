"""Resumes one operation; the DAG's own switch resumes what it has paused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_roir.engine import operations
from airflow_roir.task.form_values import whole_number
from airflow_roir.task.roir_operator import RoirOperator, failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class ResumeIndexBuildOperator(RoirOperator):
    """Lifts the pause of an index's operation, so that the DAG run which waits for it continues; returns the id.

    The task drives nothing itself: if no run waits, trigger `rebuild_index` for the index, which adopts the operation.

    parallelism, batch_rows, max_rows_per_second: new values (templated); None keeps the operation's own, a rate of 0 is
        no limit.
    """

    template_fields: Sequence[str] = (*RoirOperator.template_fields, "parallelism", "batch_rows", "max_rows_per_second")

    def __init__(
        self,
        *,
        parallelism: int | str | None = None,
        batch_rows: int | str | None = None,
        max_rows_per_second: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.parallelism = parallelism
        self.batch_rows = batch_rows
        self.max_rows_per_second = max_rows_per_second

    def execute(self, context: Context) -> int:
        """Resume the operation. Fails without a retry if it isn't paused, or if an option is bad."""
        with failing_clearly():
            row = operations.resume(
                self.get_database(),
                self.index,
                owner_of(context["ti"]),
                whole_number("parallelism", self.parallelism),
                whole_number("batch_rows", self.batch_rows),
                whole_number("max_rows_per_second", self.max_rows_per_second),
            )
        self.log.info("Operation %s is %s again, with %s workers", row.id, row.status, row.parallelism)
        return int(row.id)
