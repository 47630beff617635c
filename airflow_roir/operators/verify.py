"""The task that compares an index with its source, on Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_roir.definition import WORK_OPTIONS, VerifyOptions
from airflow_roir.engine import operations
from airflow_roir.engine.verify import verification
from airflow_roir.engine.verify.report import report_of
from airflow_roir.errors import InvalidInput, NotFound, OperationRunning
from airflow_roir.operation import BUILDS, Phase
from airflow_roir.task.dag_switch import LEAVE_S, LOOK_AGAIN_S, is_dag_paused, leave
from airflow_roir.task.discrepancies import log_report
from airflow_roir.task.form_values import number, optional_text, whole_number, yes_or_no
from airflow_roir.task.options_operator import option_of
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.spark_task import SparkDrivingOperator, spark_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_roir.engine.database import Database

# Where the Task State Store keeps which verification this task has begun.
OPERATION = "operation_id"
MODES = ("only", "before", "none")


class VerifyIndexOperator(SparkDrivingOperator):
    """Compares an index with its source on Spark, while users write, and repairs it on request; returns the counts.

    sample, max_seconds, slices, repair, amcheck: see `VerifyOptions`; numbers and booleans may be given as text; None
        or '' takes the default there.
    mode: `only`; `before` if a rebuild follows: the task is skipped if the index isn't published yet or has an
        unfinished build; `none` always skips it.
    parallelism, throttle: how many workers to start with, and the limits of signals; the task's Task State Store
        changes them later.
    spark: see `SparkDrivingOperator`. All of these are templated.
    windows, max_duration_s, priority, warn_after_s, abort_after_s: see `WorkOptions`; seconds may be given as
        `2h`, too.
    fail_on_difference: fail, without a retry, if something is still wrong; the XCom has the counts either way.

    The task continues an unfinished verification of the index, with the options that it has. If the DAG is paused, the
    open units end and the task is rescheduled. Every retry continues with the other units; if the verification has
    ended meanwhile, the retry returns its result. The task waits for an unfinished build of the index, for a
    verification that was paused elsewhere, and for one that another run drives.

    Not guaranteed: a task that dies while it reports its result verifies again.
    """

    template_fields: Sequence[str] = (
        *SparkDrivingOperator.template_fields,
        "parallelism",
        "sample",
        "max_seconds",
        "slices",
        "repair",
        "amcheck",
        "mode",
        *WORK_OPTIONS,
    )
    done_phases = frozenset({Phase.DONE})

    def __init__(
        self,
        *,
        parallelism: int | str | None = None,
        sample: float | str | None = None,
        max_seconds: int | str | None = None,
        slices: int | str | None = None,
        repair: bool | str | None = None,
        amcheck: bool | str | None = None,
        mode: str = "only",
        fail_on_difference: bool = True,
        throttle: str | None = None,
        windows: str | None = None,
        max_duration_s: int | str | None = None,
        priority: int | str | None = None,
        warn_after_s: int | str | None = None,
        abort_after_s: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.parallelism = parallelism
        self.sample = sample
        self.max_seconds = max_seconds
        self.slices = slices
        self.repair = repair
        self.amcheck = amcheck
        self.mode = mode
        self.fail_on_difference = fail_on_difference
        self.throttle = throttle
        self.windows = windows
        self.max_duration_s = max_duration_s
        self.priority = priority
        self.warn_after_s = warn_after_s
        self.abort_after_s = abort_after_s

    def execute(self, context: Context) -> dict[str, Any]:
        """Drive the verification to its end, or leave; then say what it found."""
        store = context["task_state_store"]
        try:
            counts = self._verify(context)
        except AirflowFailException:
            # It has said how it ended: who clears it wants another verification.
            store.delete(OPERATION)
            raise
        store.delete(OPERATION)
        return counts

    def options(self) -> VerifyOptions:
        """The options that the rendered fields give, defaults for empty ones. Raises InvalidInput."""
        given: dict[str, Any] = {
            name: whole_number(name, getattr(self, name)) for name in ("parallelism", "max_seconds", "slices")
        }
        given["sample"] = number("sample", self.sample)
        given |= {name: yes_or_no(name, getattr(self, name)) for name in ("repair", "amcheck")}
        given |= {name: option_of(name, getattr(self, name)) for name in WORK_OPTIONS}
        return VerifyOptions(**{name: value for name, value in given.items() if value is not None})

    def _verify(self, context: Context) -> dict[str, Any]:
        with failing_clearly():
            options, mode = self.options(), optional_text(self.mode)
            if mode not in MODES:
                raise InvalidInput(f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}")
            if mode == "none":
                raise AirflowSkipException("mode is none: nothing to verify")
            database = self.get_database()
            self.operation_id = operation = self._operation(context, database, options, mode)
            self.offer_live_options(context, database)
            row = self.take_turn(database, context["ti"])
        if row is not None:
            self.drive_on_spark(context, database, row)
        report = report_of(database, operation)
        log_report(self.log, report)
        # Without the discrepancies themselves: rows' values have no place in Airflow's database.
        counts = {name: value for name, value in report.as_dict().items() if name != "first"}
        if report.is_exact or not self.fail_on_difference:
            return counts
        context["ti"].xcom_push(key=BaseXCom.XCOM_RETURN_KEY, value=counts)
        raise AirflowFailException(
            f"index {report.index} differs from its table ({report}): see the table roir.discrepancy, verification "
            f"{report.verification_id}. Verify it with repair, or rebuild it"
        )

    def _operation(self, context: Context, database: Database, options: VerifyOptions, mode: str) -> int:
        """The verification that an earlier stretch or try has begun, or a new one."""
        ti, store = context["ti"], context["task_state_store"]
        begun_before = whole_number(OPERATION, store.get(OPERATION))
        if begun_before is not None:
            return begun_before
        if is_dag_paused(ti):
            self.log.info("DAG %s is paused; nothing is verified yet. Unpause the DAG to continue", ti.dag_id)
            raise leave(LEAVE_S)
        # Before anything begins that nobody could drive.
        spark_of(self.spark)
        try:
            begun = verification.begin(database, self.index, options, owner_of(ti), mode)
        except NotFound as reason:
            if mode == "before":
                raise AirflowSkipException(f"nothing to verify before the build: {reason}") from None
            raise
        except OperationRunning as reason:
            if mode == "before" and operations.find_operation(database, self.index).kind in BUILDS:
                raise AirflowSkipException(
                    f"not verified, since the build continues an unfinished one: {reason}"
                ) from None
            self.log.info("Waiting: %s", reason)
            raise leave(LOOK_AGAIN_S) from None
        store.set(OPERATION, begun.operation_id, retention=NEVER_EXPIRE)
        if begun.adopted:
            with database.transaction() as connection:
                found = operations.read_operation(connection, begun.operation_id)
            self.log.info(
                "Continuing unfinished verification %s with the options that it has: %s", found.id, found.options
            )
        else:
            self.log.info("Began verification %s of index %s", begun.operation_id, begun.index)
        return begun.operation_id
