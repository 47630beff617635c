"""The task that makes aged segments of an index again, on Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_roir.definition import WORK_OPTIONS
from airflow_roir.engine.compact import compaction, ranking
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.choosing import choose
from airflow_roir.engine.compact.compaction import CompactOptions
from airflow_roir.engine.compact.telling import told
from airflow_roir.errors import InvalidInput, OperationRunning
from airflow_roir.operation import Phase
from airflow_roir.task.dag_switch import LEAVE_S, LOOK_AGAIN_S, is_dag_paused, leave
from airflow_roir.task.form_values import optional_text, whole_number, yes_or_no
from airflow_roir.task.options_operator import option_of
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.spark_task import SparkDrivingOperator, spark_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Actions

    from airflow.sdk import Context

    from airflow_roir.engine.compact.action import Action
    from airflow_roir.engine.database import Database

# Where the Task State Store keeps which compaction this task has begun.
OPERATION = "operation_id"


class CompactIndexOperator(SparkDrivingOperator):
    """Makes those segments of an index again that save most for what that costs, on Spark, while users read and write.

    budget: what it may write, with WAL, or how long one worker may work: `20GB`, `30min`, or both, by a comma; None
        or '' is no limit.
    exact: measure the segments with pgstattuple, which reads all entries.
    segment_size: the size that segments should have, `2GB`; None or '': as their siblings.
    verify: compare new segments with the old ones before they are swapped in.
    even_if_rebuild_is_cheaper: if not, a rebuild that costs no more is suggested, in the log, the XCom and the table
        `roir.event`, and the task is skipped.
    parallelism, throttle: how many workers to start with, and the limits of signals; the task's Task State Store
        changes them later.
    spark: see `SparkDrivingOperator`. All of these are templated; numbers and booleans may be given as text.
    windows, max_duration_s, priority, warn_after_s, abort_after_s: see `WorkOptions`; seconds may be given as
        `2h`, too.

    Returns what was done, of each unit its segments and their sizes. The task is skipped if nothing is worth it. It
    continues an unfinished compaction of the index, with what was chosen for that. If the DAG is paused, the open steps
    end and the task is rescheduled. Every retry continues. The task waits for another unfinished operation of the
    index, for a compaction that was paused elsewhere, and for one that another run drives.
    """

    template_fields: Sequence[str] = (
        *SparkDrivingOperator.template_fields,
        "budget",
        "exact",
        "segment_size",
        "verify",
        "even_if_rebuild_is_cheaper",
        "parallelism",
        *WORK_OPTIONS,
    )
    done_phases = frozenset({Phase.DONE})

    def __init__(
        self,
        *,
        budget: str | None = None,
        exact: bool | str | None = None,
        segment_size: str | None = None,
        verify: bool | str | None = None,
        even_if_rebuild_is_cheaper: bool | str | None = True,
        parallelism: int | str | None = None,
        throttle: str | None = None,
        windows: str | None = None,
        max_duration_s: int | str | None = None,
        priority: int | str | None = None,
        warn_after_s: int | str | None = None,
        abort_after_s: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.budget = budget
        self.exact = exact
        self.segment_size = segment_size
        self.verify = verify
        self.even_if_rebuild_is_cheaper = even_if_rebuild_is_cheaper
        self.parallelism = parallelism
        self.throttle = throttle
        self.windows = windows
        self.max_duration_s = max_duration_s
        self.priority = priority
        self.warn_after_s = warn_after_s
        self.abort_after_s = abort_after_s

    def execute(self, context: Context) -> dict[str, Any]:
        """Drive the compaction to its end, or leave; then say what it did."""
        store = context["task_state_store"]
        try:
            done = self._compact(context)
        except AirflowFailException:
            # It has said how it ended: who clears it wants another compaction.
            store.delete(OPERATION)
            raise
        store.delete(OPERATION)
        return done

    def options(self) -> CompactOptions:
        """The options that the rendered fields give, defaults for empty ones. Raises InvalidInput."""
        given: dict[str, Any] = {"parallelism": whole_number("parallelism", self.parallelism)}
        given["verify"] = yes_or_no("verify", self.verify)
        given |= {name: option_of(name, getattr(self, name)) for name in WORK_OPTIONS}
        return CompactOptions(**{name: value for name, value in given.items() if value is not None})

    def _compact(self, context: Context) -> dict[str, Any]:
        with failing_clearly():
            options = self.options()
            database = self.get_database()
            self.operation_id = operation = self._operation(context, database, options)
            self.offer_live_options(context, database)
            row = self.take_turn(database, context["ti"])
        if row is not None:
            self.drive_on_spark(context, database, row)
        report = compaction.report_of(database, operation)
        for line in told(report):
            self.log.info("%s", line)
        # A note may have values of rows, which have no place in Airflow's database.
        units = [{name: value for name, value in unit.items() if name != "note"} for unit in report.units]
        return {**report.as_dict(), "units": units}

    def _operation(self, context: Context, database: Database, options: CompactOptions) -> int:
        """The compaction that an earlier stretch or try has begun, or a new one."""
        ti, store = context["ti"], context["task_state_store"]
        begun_before = whole_number(OPERATION, store.get(OPERATION))
        if begun_before is not None:
            return begun_before
        if is_dag_paused(ti):
            self.log.info("DAG %s is paused; nothing is compacted yet. Unpause the DAG to continue", ti.dag_id)
            raise leave(LEAVE_S)
        # Before anything begins that nobody could drive.
        spark_of(self.spark)
        try:
            actions = self._chosen(context, database)
            begun = compaction.begin(database, self.index, actions, options, owner_of(ti))
        except OperationRunning as reason:
            self.log.info("Waiting: %s", reason)
            raise leave(LOOK_AGAIN_S) from None
        store.set(OPERATION, begun.operation_id, retention=NEVER_EXPIRE)
        what = "Continuing unfinished compaction" if begun.adopted else "Began compaction"
        self.log.info("%s %s of index %s: %s units", what, begun.operation_id, begun.index, begun.units)
        return begun.operation_id

    def _chosen(self, context: Context, database: Database) -> Actions[Action]:
        """What to do; nothing if there is an unfinished operation, which `begin` continues or tells of."""
        if compaction.is_unfinished(database, self.index):
            return ()
        budget = Budget.parse(optional_text(self.budget), "budget")
        size = Budget.parse(optional_text(self.segment_size), "segment_size")
        if size.seconds is not None:
            raise InvalidInput(f"segment_size is {self.segment_size!r}; it must be a size, such as 2GB")
        exact = bool(yes_or_no("exact", self.exact))
        choice = choose(database, self.index, budget, exact, segment_bytes=size.bytes)
        if not choice.actions:
            raise AirflowSkipException(f"nothing of index {self.index} is worth a compaction within {budget}")
        even_so = yes_or_no("even_if_rebuild_is_cheaper", self.even_if_rebuild_is_cheaper)
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
