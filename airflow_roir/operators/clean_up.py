"""Removes what finished operations left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from airflow_roir.engine import clean_up
from airflow_roir.engine.control.expected import settle_runs
from airflow_roir.engine.schema import schema
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.task.fates import fates
from airflow_roir.task.open_database import open_database
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.waiting_operator import LongPauseCallback, call_long_pause

if TYPE_CHECKING:
    from airflow.sdk import Context


class CleanUpIndexesOperator(BaseOperator):
    """Deletes ghosts, drops empty deltas and retired generations after their revert window, for every index of a
    database (docs/architecture.md#phases); returns counters of the removed things.

    It never touches a generation that is building, and any run of it may be killed and repeated. If the database has no
    control schema, the task is skipped. It also finds out which operations Airflow's runs have left for
    good: these are abandoned, and get the warnings of long pauses.

    postgres_conn_id: the Airflow connection of the database (templated).
    on_long_pause_callback: called with the context for each operation that has been paused for long, once and then once
        a day, and for one that is aborted for that; `context["long_pause"]` is an
        `engine.control.long_pause.LongPause`.
    """

    template_fields: Sequence[str] = ("postgres_conn_id",)
    ui_color = "#dcebfa"

    def __init__(
        self,
        *,
        postgres_conn_id: str = RoirHook.default_conn_name,
        on_long_pause_callback: LongPauseCallback = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id
        self.on_long_pause_callback = on_long_pause_callback

    def execute(self, context: Context) -> dict[str, int]:
        """Cleans up once."""
        with failing_clearly():
            database = open_database(self.postgres_conn_id, f"roir airflow {self.task_id}")
            with database.transaction() as connection:
                if schema.current(connection) is None:
                    raise AirflowSkipException(
                        f"nothing to clean up: the database of connection {self.postgres_conn_id} has no control "
                        "schema yet; `roir init` creates it"
                    )
            # A command can't know of Airflow's runs.
            settle_runs(database, fates(context["ti"]))
            report = clean_up.clean_up(
                database,
                owner_of(context["ti"]),
                report=self.log.info,
                tell=lambda pause: call_long_pause(self.on_long_pause_callback, context, pause, self.log),
            )
        for left in report.waiting:
            self.log.info("Left for the next clean-up: %s", left)
        for warning in report.warnings:
            self.log.warning("%s", warning)
        return {name: count for name, count in report.as_dict().items() if isinstance(count, int)}
