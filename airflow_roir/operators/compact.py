"""The task that rebuilds aged segments of an index, on Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowSkipException

from airflow_roir.engine.compact import compaction, ranking
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.choosing import choose
from airflow_roir.engine.compact.progress import told
from airflow_roir.engine.control.live_options import check_throttle
from airflow_roir.errors import InvalidInput, OperationRunning
from airflow_roir.operation import Kind
from airflow_roir.options import CompactOptions
from airflow_roir.task.form_values import optional_text, yes_or_no
from airflow_roir.task.given import given_to, names_of, takes
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.waiting_operator import wait_log
from airflow_roir.task.whole_operation import WholeOperationOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_roir.engine.compact.action import Action
    from airflow_roir.engine.database import Database

OPTIONS = names_of(CompactOptions)


class CompactIndexOperator(WholeOperationOperator):
    """Rebuilds the segments of an index that save most for their cost, on Spark, while users read and write.

    budget: the bytes that it may write, with WAL, or the time that one worker may work: `20GB`, `30min`, or both,
        separated by a comma; None or '' is no limit.
    exact: measure the segments with pgstattuple, which reads all entries.
    segment_size: the size that segments should have, `2GB`; None or '': that of their siblings.
    even_if_rebuild_is_cheaper: compact also if a rebuild costs no more. Otherwise the task then suggests a rebuild, in
        the log, the XCom and the table `roir.event`, and is skipped.
    spark: see `SparkDrivingOperator`. All of these are templated; numbers and booleans may be given as text.
    Also the options of `CompactOptions` and `WorkOptions`, by their names: durations may be given as `2h`, too; None or
        '' takes the default there. The task's Task State Store changes the live ones later.

    Returns the segments of each unit, with their sizes. The task is skipped if no segment is worth it. It continues an
    unfinished compaction of the index, with the segments chosen then. If the DAG is paused, the open steps end and the
    task is rescheduled. Every retry continues. The task waits for another unfinished operation of the index, for a
    compaction that was paused elsewhere, and for one that another run drives.
    """

    kinds = (Kind.COMPACT,)
    template_fields: Sequence[str] = (
        *WholeOperationOperator.template_fields,
        "budget",
        "exact",
        "segment_size",
        *OPTIONS,
        "even_if_rebuild_is_cheaper",
    )

    @takes(OPTIONS)
    def __init__(
        self,
        *,
        budget: str | None = None,
        exact: bool | str | None = None,
        segment_size: str | None = None,
        even_if_rebuild_is_cheaper: bool | str | None = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.budget = budget
        self.exact = exact
        self.segment_size = segment_size
        self.even_if_rebuild_is_cheaper = even_if_rebuild_is_cheaper

    def options(self, told: bool = False) -> CompactOptions:
        """The options that the rendered fields give, defaults for empty ones. Raises InvalidInput.

        told: as for `given_to`.
        """
        return given_to(self, CompactOptions, told=told)

    def carry_out(self, context: Context) -> dict[str, Any]:
        """Drives the compaction to its end, or leaves it; then logs its result."""
        with failing_clearly():
            options = self.options(wait_log(context, self.log).is_on)
            database = self.begin_stretch(context)
            operation = self._operation(context, database, options)
        self.drive_to_end(context, database, operation)
        report = compaction.report_of(database, operation)
        for line in told(report):
            self.log.info("%s", line)
        # A note may contain values of rows, which must not be in Airflow's database.
        units = [{name: value for name, value in unit.items() if name != "note"} for unit in report.units]
        return {**report.as_dict(), "units": units}

    def _operation(self, context: Context, database: Database, options: CompactOptions) -> int:
        """The compaction that an earlier stretch or try has begun, or a new one."""
        begun_before = self.begun_before(context, "compacted")
        if begun_before is not None:
            return begun_before
        check_throttle(database, options.throttle)
        try:
            actions = self._chosen(context, database)
            begun = compaction.begin(database, self.index, actions, options, owner_of(context["ti"]), self.log.info)
        except OperationRunning as reason:
            raise self.waiting(context, database, reason) from None
        self.keep(context, begun.operation_id)
        what = "Continuing unfinished compaction" if begun.adopted else "Began compaction"
        self.log.info("%s %s of index %s", what, begun.operation_id, begun.index)
        return begun.operation_id

    def _chosen(self, context: Context, database: Database) -> Sequence[Action]:
        """The segments to compact; none if there is an unfinished operation, which `begin` continues or reports."""
        if compaction.is_unfinished(database, self.index):
            return ()
        budget = Budget.parse(optional_text(self.budget), "budget")
        size = Budget.parse(optional_text(self.segment_size), "segment_size")
        if size.seconds is not None:
            raise InvalidInput(f"segment_size is {self.segment_size!r}; it must be a size, such as 2GB")
        exact = bool(yes_or_no("exact", self.exact))
        even_so = yes_or_no("even_if_rebuild_is_cheaper", self.even_if_rebuild_is_cheaper)
        choice = choose(database, self.index, budget, exact, segment_bytes=size.bytes)
        if not choice.actions:
            raise AirflowSkipException(f"index {self.index}: no segment is worth a compaction within {budget}")
        if choice.rebuild_is_cheaper:
            if even_so is False:
                said = ranking.suggest(database, self.index, choice, owner_of(context["ti"]))
                value = {"index": self.index, "suggestion": said}
                context["ti"].xcom_push(key=BaseXCom.XCOM_RETURN_KEY, value=value)
                raise AirflowSkipException(f"index {self.index}: {said}")
            self.log.warning("A rebuild of index %s would cost no more, or write hardly more", self.index)
        for one in choice.actions:
            self.log.info("%s of segments %s: %s", one.kind.value, ", ".join(map(str, one.ordinals)), one.why)
        return choice.actions
