"""Aborts an operation, as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_roir.engine import abort
from airflow_roir.engine.control import operations
from airflow_roir.task.roir_operator import RoirOperator, failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class AbortIndexBuildOperator(RoirOperator):
    """Aborts the unfinished operation of an index (docs/architecture.md#phases); returns the operation's id.

    The source and the active generation stay as they were. It also works while another run drives the operation, and
    while the DAG that started it is paused.

    reason: for the `event` table (templated).
    """

    template_fields: Sequence[str] = (*RoirOperator.template_fields, "reason")

    def __init__(self, *, reason: str = "aborted by an Airflow task", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason = reason

    def execute(self, context: Context) -> int:
        """Aborts the operation. Fails without a retry if the index has none."""
        with failing_clearly():
            database = self.get_database()
            operation = operations.find_operation(database, self.index)
            abort.abort(database, self.index, owner_of(context["ti"]), reason=self.reason, report=self.log.info)
        return int(operation.id)
