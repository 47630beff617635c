"""The task that builds and seals, on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_roir.engine.generation.feeds import is_apart
from airflow_roir.operation import Phase
from airflow_roir.options import LIVE
from airflow_roir.task.roir_operator import failing_clearly
from airflow_roir.task.spark_task import SparkDrivingOperator
from airflow_roir.task.wrong_rows import push_duplicates

if TYPE_CHECKING:
    from airflow.sdk import Context


class BuildIndexOperator(SparkDrivingOperator):
    """Copies every range and seals every segment on Spark (docs/architecture.md#phases); returns the
    operation's id.

    spark: see `SparkDrivingOperator`. The operation's row holds the parallelism, the rows per batch, the limits of
    its throttle and so on, as prepare wrote them. They can be changed in the task's Task State Store; for an index over
    shards, so can the parallelism per shard. A change takes effect at the next batch.

    If the DAG is paused, the build stops after its open batches, and the task is rescheduled, which costs no retry.
    Every retry continues from the watermarks. The task also waits, rescheduled, while the operation is paused from
    elsewhere or by rows that share a key of a unique index, until a resume; and while another run drives it. If the
    index is unique, the XCom `duplicates` has the numbers of such keys and rows, and the first 20 keys.
    """

    done_phases = frozenset({Phase.FOLD, Phase.PUBLISH, Phase.DONE})
    live_options: tuple[str, ...] = tuple(name for name, one in LIVE.items() if one.in_store and not one.apart)

    def execute(self, context: Context) -> int:
        """Drives the operation until it is sealed, or leaves it."""
        with failing_clearly():
            database = self.begin_stretch(context)
            self.settle_operation(database, context["ti"])
            generation = self.read(database).generation_id
            with database.transaction() as connection:
                if is_apart(connection, generation):
                    self.live_options = tuple(name for name, one in LIVE.items() if one.in_store)
            self.offer_live_options(context, database)
            row = self.take_turn(database, context["ti"])
            driven = row is None
            row = row or self.read(database)
        if not driven:
            self.drive_on_spark(context, database, row)
        push_duplicates(database, context["ti"], row)
        self.log.info(
            "Operation %s is built. The task that finalizes applies the writes of meanwhile, compares index and table, "
            "and publishes",
            row.id,
        )
        return int(row.id)
