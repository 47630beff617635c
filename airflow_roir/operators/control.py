"""Operators that pause, resume, change or abort one operation, or revert an index's last rebuild.

The DAG's own switch pauses all builds of a DAG, and resumes what it has paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_roir.engine import abort, revert
from airflow_roir.engine.control import live_options, operations, requests
from airflow_roir.engine.control.slow_options import slow_operation
from airflow_roir.task.roir_operator import OptionsOperator, RoirOperator, failing_clearly, owner_of

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
        self.log.info("Index %s: operation %s is %s", self.index, row.id, row.status)
        return int(row.id)


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
        self.log.info(
            "Index %s: operation %s is %s again, with %s workers", self.index, row.id, row.status, row.parallelism
        )
        return int(row.id)


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
        self.log.info("Index %s: operation %s: %s", self.index, after.id, live_options.told(before, after))
        for line in slow_operation(database, after):
            self.log.warning("%s", line)
        return int(after.id)


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
