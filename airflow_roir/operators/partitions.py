"""Operators that attach a loaded table to an indexed table, or detach a partition from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_roir.engine.partitions import attach, detach
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


class DetachPartitionOperator(BaseOperator):
    """Detaches a partition from its table and from all indexes of it; returns the number of removed entries.

    One short transaction hides the rows and their entries; then the entries are removed in batches. If the task is
    killed in between, the clean-up removes them, and a retry fails with NotFound: the table is no partition any
    more.

    partition: its name as in SQL. reason: for the `event` table. drop: drop the partition once it is detached.
    postgres_conn_id: the Airflow connection of the database. All but `drop` are templated.
    """

    template_fields: Sequence[str] = ("partition", "reason", "postgres_conn_id")
    ui_color = "#dcebfa"

    def __init__(
        self,
        *,
        partition: str,
        reason: str = "",
        drop: bool = False,
        postgres_conn_id: str = RoirHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.partition = partition
        self.reason = reason
        self.drop = drop
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> int:
        """Detaches the partition."""
        with failing_clearly():
            database = open_database(self.postgres_conn_id, f"roir airflow {self.task_id}")
            owner = owner_of(context["ti"])
            return detach.detach_partition(
                database, self.partition, owner, self.reason, self.drop, report=self.log.info
            )
