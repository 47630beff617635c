"""Changes one operation's options while it lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_roir.engine import live_options, operations
from airflow_roir.engine.slow import slow_operation
from airflow_roir.task.form_values import whole_number
from airflow_roir.task.roir_operator import RoirOperator, failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class ChangeIndexBuildOperator(RoirOperator):
    """Changes the options of an index's operation, running or paused, whoever drives it; returns the operation's id.

    parallelism, batch_rows, max_rows_per_second: new values (templated); None or '' keeps the operation's own, a rate
        of 0 is no limit. Workers follow at their next batch, and the task that drives the operation shows the values in
        its Task State Store.
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
        """Change them. Fails without a retry if nothing is live, no value is given, or one is bad."""
        with failing_clearly():
            database = self.get_database()
            before = operations.find_operation(database, self.index)
            after = operations.change_options(
                database,
                self.index,
                actor=owner_of(context["ti"]),
                parallelism=whole_number("parallelism", self.parallelism),
                batch_rows=whole_number("batch_rows", self.batch_rows),
                max_rows_per_second=whole_number("max_rows_per_second", self.max_rows_per_second),
            )
        self.log.info("Operation %s: %s", after.id, live_options.told(before, after))
        for line in slow_operation(after):
            self.log.warning("%s", line)
        return int(after.id)
