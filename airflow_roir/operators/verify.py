"""The task that compares an index with its source, on Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_roir.engine.control import operations
from airflow_roir.engine.verify import record
from airflow_roir.engine.verify.report import report_of
from airflow_roir.errors import InvalidInput, NotFound, OperationRunning
from airflow_roir.operation import BUILDS, Kind
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.options import VerifyOptions
from airflow_roir.task.form_values import optional_text
from airflow_roir.task.given import given_to, names_of, takes
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.waiting_operator import wait_log
from airflow_roir.task.whole_operation import OPERATION, WholeOperationOperator
from airflow_roir.task.wrong_rows import log_report

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_roir.engine.database import Database

MODES = ("only", "before", "none")
OPTIONS = names_of(VerifyOptions)


class VerifyIndexOperator(WholeOperationOperator):
    """Compares an index with its source on Spark, while users write, and repairs it on request; returns the counts.

    Takes the options of `VerifyOptions` and `WorkOptions`, by their names: numbers and booleans may be given as text,
    durations as `2h`, too; None or '' takes the default there. The task's Task State Store changes the live ones later.

    mode: `only`; `before` if a rebuild follows: the task is skipped if the index isn't published yet or has an
        unfinished build, or if an input can't be used, which the rebuild refuses, too; `none` always skips it.
    build: the arguments of the `PrepareIndexBuildOperator` that follows. If it would refuse them, this task fails with
        all its reasons before it verifies or is skipped.
    spark: see `SparkDrivingOperator`. All of these are templated.
    fail_on_difference: fail, without a retry, if something is still wrong; the XCom has the counts either way.

    The task continues an unfinished verification of the index, with the options that it has. If the DAG is paused, the
    open units end and the task is rescheduled. Every retry continues with the other units; if the verification has
    ended meanwhile, the retry returns its result. The task waits for an unfinished build of the index, for a
    verification that was paused elsewhere, and for one that another run drives.

    Not guaranteed: a task that dies while it reports its result verifies again.
    """

    kinds = (Kind.VERIFY,)
    template_fields: Sequence[str] = (
        *WholeOperationOperator.template_fields,
        *OPTIONS,
        "mode",
        "build",
    )

    @takes(OPTIONS)
    def __init__(
        self,
        *,
        mode: str = "only",
        build: Mapping[str, Any] | None = None,
        fail_on_difference: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mode = mode
        self.build = build
        self.fail_on_difference = fail_on_difference

    def options(self, told: bool = False) -> VerifyOptions:
        """The options that the rendered fields give, defaults for empty ones. Raises InvalidInput.

        told: as for `given_to`.
        """
        return given_to(self, VerifyOptions, told=told)

    def carry_out(self, context: Context) -> dict[str, Any]:
        """Drives the verification to its end, or leaves it; then logs its findings."""
        with failing_clearly():
            mode = optional_text(self.mode)
            if mode not in MODES:
                raise InvalidInput(f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}")
            if self.build is not None and context["task_state_store"].get(OPERATION) is None:
                what = {"index": self.index, "postgres_conn_id": self.postgres_conn_id}
                told = wait_log(context, self.log).is_on
                PrepareIndexBuildOperator(task_id=self.task_id, **what, **self.build).refuse(told)
            if mode == "none":
                raise AirflowSkipException("mode is none: nothing to verify")
            try:
                options = self.options(wait_log(context, self.log).is_on)
                database = self.begin_stretch(context)
                operation = self._operation(context, database, options, mode)
            except InvalidInput as error:
                if mode != "before":
                    raise
                # Which names all that is wrong with its input, this too.
                raise AirflowSkipException(f"not verified, since the build that follows is refused: {error}") from None
        self.drive_to_end(context, database, operation)
        report = report_of(database, operation)
        log_report(self.log, report)
        # Without the discrepancies: values of rows must not be in Airflow's database.
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
        begun_before = self.begun_before(context, "verified")
        if begun_before is not None:
            return begun_before
        try:
            begun = record.begin(database, self.index, options, owner_of(context["ti"]), mode, self.log.info)
        except NotFound as reason:
            if mode == "before":
                raise AirflowSkipException(f"nothing to verify before the build: {reason}") from None
            raise
        except OperationRunning as reason:
            if mode == "before" and operations.find_operation(database, self.index).kind in BUILDS:
                raise AirflowSkipException(
                    f"not verified, since the build continues an unfinished one: {reason}"
                ) from None
            raise self.waiting(context, database, reason) from None
        self.keep(context, begun.operation_id)
        if begun.adopted:
            with database.transaction() as connection:
                found = operations.read_operation(connection, begun.operation_id)
            self.log.info(
                "Continuing unfinished verification %s with the options that it has: %s", found.id, found.options
            )
        else:
            self.log.info("Began verification %s of index %s", begun.operation_id, begun.index)
        return begun.operation_id
