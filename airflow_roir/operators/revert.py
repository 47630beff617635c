"""Reverts an index to the generation that a rebuild replaced, as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_roir.engine import revert
from airflow_roir.task.roir_operator import RoirOperator, failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class RevertIndexOperator(RoirOperator):
    """Shows readers the generation that the last rebuild replaced (docs/architecture.md#phases); returns its id.

    Nothing is lost: every write has maintained that generation. Fails without a retry if the revert window is over.

    reason: for the `event` table (templated).
    """

    template_fields: Sequence[str] = (*RoirOperator.template_fields, "reason")

    def __init__(self, *, reason: str = "reverted by an Airflow task", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason = reason

    def execute(self, context: Context) -> int:
        """Points the view back."""
        with failing_clearly():
            actor = owner_of(context["ti"])
            done = revert.revert(self.get_database(), self.index, actor, self.reason, self.log.info)
        self.log.info("Index %s shows the replaced generation again", done.index)
        return done.shown
