"""Changes one operation's options while it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_roir.engine.control import live_options, operations, requests
from airflow_roir.engine.control.slow_options import slow_operation
from airflow_roir.task.roir_operator import OptionsOperator, failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class ChangeIndexBuildOperator(OptionsOperator):
    """Changes the options of an index's running or paused operation; returns the operation's id.

    The operation may be driven by another DAG run or by a command. Takes the options of `BuildOptions` that can change
    while an operation lives, by their names, as new values (templated): None or '' keeps the operation's own, 0 or
    `off` is none. Limits of a throttle are merged into the present ones. Workers follow at their next batch, and the
    task that drives the operation shows the values in its Task State Store.
    """

    def execute(self, context: Context) -> int:
        """Changes the options. Fails without a retry if no operation is live, no value is given, or one is bad."""
        with failing_clearly():
            database = self.get_database()
            before = operations.find_operation(database, self.index)
            after = requests.change_options(
                database,
                self.index,
                actor=owner_of(context["ti"]),
                **self.given_options(),
            )
        self.log.info("Operation %s: %s", after.id, live_options.told(before, after))
        for line in slow_operation(database, after):
            self.log.warning("%s", line)
        return int(after.id)
