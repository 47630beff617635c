"""Resumes one operation; the DAG's own switch resumes what it has paused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_roir.engine.control import requests
from airflow_roir.task.roir_operator import OptionsOperator, failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class ResumeIndexBuildOperator(OptionsOperator):
    """Lifts the pause of an index's operation, so that the DAG run which waits for it continues; returns the id.

    The task drives nothing itself: if no run waits, trigger `rebuild_index` for the index, which adopts the operation.

    Takes the options of `BuildOptions` that can change while an operation lives, by their names, as new values
    (templated): None or '' keeps the operation's own, 0 or `off` is none. Outside of its windows the operation is
    paused again at once, and continues automatically when one opens.
    """

    def execute(self, context: Context) -> int:
        """Resumes the operation. Fails without a retry if it isn't paused, or if an option is bad."""
        with failing_clearly():
            row = requests.resume(self.get_database(), self.index, owner_of(context["ti"]), **self.given_options())
        self.log.info("Operation %s is %s again, with %s workers", row.id, row.status, row.parallelism)
        return int(row.id)
