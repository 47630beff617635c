"""Attaches a loaded table to an indexed table, as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_roir.engine.partitions import attach
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.task.open_database import open_database
from airflow_roir.task.roir_operator import failing_clearly, owner_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class AttachPartitionOperator(BaseOperator):
    """Attaches a loaded table to an indexed one; returns the number of copied entries. A retry continues.

    table: the source, or a partition of it with partitions of its own. partition: the loaded table. bounds: as in
    ATTACH PARTITION, `FOR VALUES …` or `DEFAULT`. postgres_conn_id: the Airflow connection of the database. All are
    templated.
    """

    template_fields: Sequence[str] = ("table", "partition", "bounds", "postgres_conn_id")
    ui_color = "#dcebfa"

    def __init__(
        self,
        *,
        table: str,
        partition: str,
        bounds: str,
        postgres_conn_id: str = RoirHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.partition = partition
        self.bounds = bounds
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> int:
        """Attaches the table."""
        with failing_clearly():
            database = open_database(self.postgres_conn_id, f"roir airflow {self.task_id}")
            owner = owner_of(context["ti"])
            return attach.attach_partition(
                database, self.table, self.partition, self.bounds, owner, report=self.log.info
            )
