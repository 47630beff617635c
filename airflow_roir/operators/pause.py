"""Pauses one operation; the DAG's own switch pauses all builds of a DAG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_roir.engine.control import requests
from airflow_roir.task.roir_operator import RoirOperator, failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class PauseIndexBuildOperator(RoirOperator):
    """Pauses the running operation of an index, also one that a command or another DAG run drives; returns its id.

    Workers commit their open batch, then stop. A DAG run that drives the operation waits, rescheduled, and continues
    once the operation is resumed.

    reason: shown in the status and kept in the `event` table (templated).
    """

    template_fields: Sequence[str] = (*RoirOperator.template_fields, "reason")

    def __init__(self, *, reason: str = "paused by an Airflow task", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason = reason

    def execute(self, context: Context) -> int:
        """Pauses the operation. Fails without a retry if none is running."""
        with failing_clearly():
            row = requests.pause(self.get_database(), self.index, owner_of(context["ti"]), self.reason)
        self.log.info("Operation %s is %s", row.id, row.status)
        return int(row.id)
