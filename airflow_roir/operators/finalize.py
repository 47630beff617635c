"""The last task of a build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_roir.assets import index_asset, published_alias
from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import leave_run
from airflow_roir.engine.retry.trouble import is_permanent
from airflow_roir.engine.snapshot.querying import lines, queries
from airflow_roir.engine.unique import duplicate_report
from airflow_roir.engine.verify.report import report_of
from airflow_roir.errors import DuplicatesFound, Fenced, OperationPaused, OperationRunning, VerificationFailed
from airflow_roir.operation import LONG, Status
from airflow_roir.quantity import shared
from airflow_roir.spark.driver_process import SETTLE_S
from airflow_roir.task.fates import is_last_try
from airflow_roir.task.lineage import Lineage, as_operator_lineage, lineage
from airflow_roir.task.metrics import sending
from airflow_roir.task.operation_task import DrivingOperator
from airflow_roir.task.published import claim_announcement, has_event, published_facts
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.ui_requests import Watcher
from airflow_roir.task.wait_for_job import Background
from airflow_roir.task.wrong_rows import log_report, push_duplicates

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from airflow_roir.engine.control.operations import OperationRow
    from airflow_roir.engine.control.run import Run
    from airflow_roir.engine.database import Database


class FinalizeIndexBuildOperator(DrivingOperator):
    """Folds the delta, marks the ghosts, compares the generation with its table and publishes it; returns the
    operation's id (docs/architecture.md#phases).

    A published index is reported as an event of its asset (`assets.index_asset`), so that other DAGs can follow it; the
    event's extra has the `published_facts`. OpenLineage gets the source and the index. If several runs share an
    operation, one of them sends the event, once, even if its task is cleared; none does once readers see another
    generation. A census publishes nothing: the task is skipped, and so are tasks behind it by the default rule. Rows
    that share a key of a unique index pause the operation: the task waits until it is resumed. Its XCom `duplicates` is
    like the build's. Pausing the DAG stops it between two batches of the fold, as in the build. If the new generation
    differs from the source, it isn't published, and the task fails without a retry: to compare again, clear the task.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.outlets: list[Any] = [*self.outlets, published_alias()]
        self._lineage: Lineage | None = None

    def execute(self, context: Context) -> int:
        """Drives the operation until it is published, or leaves it."""
        ti = context["ti"]
        with failing_clearly():
            database = self.begin_stretch(context)
            self.settle_operation(database, ti)
            row = self.take_turn(database, ti)
            if row is not None:
                if row.phase in LONG:
                    why = self._why_unbuilt(ti)
                    raise AirflowFailException(
                        f"index {self.index}: operation {row.id} is still in phase {row.phase}; nothing is published: "
                        f"{why}. Clear the build task with those that follow it (Downstream): it continues"
                    )
                owner = owner_of(ti)
                # A fresh heartbeat under our own name is of a try that was killed moments ago.
                ours = row.owner == owner
                known = self.surroundings()
                # A handle of its own: the task's other sessions may be in another history of the server.
                own = database.named(database.application_name)
                runs: list[Run] = []
                wish: dict[str, Any] = {"take_over": ours, "surroundings": known, "operation": row.id}
                wish["began"] = runs.append
                work = Background(lambda: lifecycle.finalize(own, self.index, owner, report=self.log.info, **wish))
                with sending(database, row.id, ti) as send, Watcher(ti) as watcher:
                    try:
                        self.drive(work.wait, database, ti, watcher, send)
                    except BaseException:
                        # The run ends with this process, but would seem to be at work for a while.
                        if runs:
                            Background(lambda: leave_run(own, runs[0], SystemExit())).wait(SETTLE_S)
                        self.note_cause(database, ti)
                        raise
                try:
                    ended = work.result()
                except (OperationPaused, OperationRunning, Fenced, DuplicatesFound) as reason:
                    self.leave_or_fail(database, ti, str(reason), asked_to=True)
                except Exception as error:
                    if isinstance(error, VerificationFailed):
                        log_report(self.log, report_of(database, row.id))
                    if is_last_try(ti) or is_permanent(error):
                        self.give_up(database, ti)
                    raise
                if ended.status != Status.COMPLETED and not ended.census:
                    self.leave_or_fail(database, ti, "it ended unpublished", asked_to=True)
            row = self.read(database)
            push_duplicates(database, ti, row)
            if operations.has_outcome(row):
                raise AirflowSkipException(self._outcome(database, row))
            facts = published_facts(database, row.id)
            # With the schema, which the user's name may lack.
            name = facts["index"]
            asset = index_asset(name, self.postgres_conn_id)
            self._log_queries(database, row)
            silent = claim_announcement(database, row.id, owner_of(ti), lambda: has_event(asset, facts))
        if silent is not None:
            self.log.info("Operation %s of index %s is complete. No asset event is sent: %s", row.id, name, silent)
            return int(row.id)
        self._lineage = lineage(database.dsn, name, facts["source"])
        context["outlet_events"][published_alias()].add(asset, extra=facts)
        self.log.info("Published index %s: asset %s", name, asset.uri)
        return int(row.id)

    def _log_queries(self, database: Database, row: OperationRow) -> None:
        """Logs how to query the index."""
        with database.transaction() as connection:
            for line in lines(queries(connection, row.id)):
                self.log.info("%s", line)

    def _why_unbuilt(self, ti: RuntimeTaskInstanceProtocol) -> str:
        """Why this task began before the build's end: a build returns a value at its end, a mark doesn't."""
        marked = "its build task was marked as success before it had ended"
        lost = "the server has lost its last commits, by a failover or a restore"
        before = self.get_direct_relatives(upstream=True) if self.has_dag() else ()
        mapped: dict[str, Any] = {} if ti.map_index is None or ti.map_index < 0 else {"map_indexes": ti.map_index}
        builds = [one.task_id for one in before if one.task_type == "BuildIndexOperator"]
        if not builds:
            return f"{marked}, or {lost}"
        return lost if all(ti.xcom_pull(task_ids=one, **mapped) is not None for one in builds) else marked

    def _outcome(self, database: Database, row: OperationRow) -> str:
        """Logs the first rows that share a key; returns the result of the census in one line."""
        for line in duplicate_report.first_lines(database, row.id):
            self.log.warning("%s", line)
        found, _ = duplicate_report.first(database, row.id)
        return f"census of index {found.index}: {shared(found.groups, found.rows)}; nothing is published"

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """The source and the index, for Airflow's OpenLineage provider; None before the publish."""
        return None if self._lineage is None else as_operator_lineage(self._lineage)
