"""An index build as a group of tasks for your own DAGs, for one index or mapped over many.

from airflow_roir.groups import rebuild_index_group

load() >> rebuild_index_group(index="shop.orders_by_customer")
rebuild_indexes_group(indexes=["shop.orders_by_customer", "shop.orders_by_number"])    # one scan of their table
rebuild_index_group.override(group_id="nightly").partial(spark="spark_cluster").expand(index=names())
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import TaskGroup, task, task_group
from airflow.sdk.definitions._internal.contextmanager import DagContext, TaskGroupContext

from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import SOURCE, WORK_OPTIONS
from airflow_roir.task.waiting_operator import LongPauseCallback

# Every try continues after the last one's batches, and a pause uses up no try. Together the tries wait about half an
# hour, enough for a database that restarts or fails over.
RETRIES: dict[str, Any] = {
    "retries": 6,
    "retry_delay": timedelta(seconds=30),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=10),
}

# In a mapped group, Airflow's UI shows each task by its index.
NAMED = "{{ task.index }}"


@task_group  # type: ignore[untyped-decorator]
def rebuild_index_group(
    index: str,
    table: str | None = None,
    keys: str | Sequence[str] | None = None,
    include: str | Sequence[str] | None = None,
    where: str | None = None,
    unique: bool | str | None = None,
    nulls_not_distinct: bool | str | None = None,
    on_duplicate: str | None = None,
    census: bool | str | None = None,
    postgres_conn_id: str = RoirHook.default_conn_name,
    spark: str | None = None,
    verify: str = "after",
    verify_before: bool = False,
    builds_at_once: int | None = None,
    options: dict[str, Any] | None = None,
    on_long_pause_callback: LongPauseCallback = None,
    throttle_query: str | None = None,
    replica_conn_ids: Sequence[str] = (),
) -> None:
    """Prepares, builds and publishes an index, as the DAG `rebuild_index` does.

    All but `verify_before`, `builds_at_once`, `throttle_query`, `replica_conn_ids` and the names in `options` may be
    templates or the output of another task.

    index, table, keys, include, where: as of `PrepareIndexBuildOperator`; without a table an existing index is rebuilt.
    unique, nulls_not_distinct, on_duplicate, census: as of `PrepareIndexBuildOperator`, too.
    postgres_conn_id: the Airflow connection of the database.
    spark: see `SparkDrivingOperator`.
    verify: `after` compares the new index with the table, and publishes it only if they match; `none`.
    verify_before: compare the index that is rebuilt, too, to know what the rebuild repairs.
    builds_at_once: the most indexes of a mapped group, in one DAG run, that are built at the same time; None is no
        limit. All of them are still prepared at once, and from then on writers to their tables maintain the new ones.
    options: other arguments of `PrepareIndexBuildOperator`, parallelism or throttle for example. When and how hard the
        operation may work (windows, throttle, …) holds for the comparison before, too.
    on_long_pause_callback: see `DrivingOperator`; called by the build and by finalize.
    throttle_query, replica_conn_ids: as of `BuildIndexOperator`.

    The tasks are retried for about half an hour; `default_args` of the DAG or of a group around this one, or
    `rebuild_index_group.override(default_args=…)`, change that.
    """
    _retry_by_default()
    shapes = isinstance(verify_before, bool) and isinstance(options, dict | None)
    if not (shapes and isinstance(throttle_query, str | None) and isinstance(replica_conn_ids, list | tuple)):
        raise InvalidInput(
            "give verify_before, builds_at_once, options, throttle_query and replica_conn_ids by partial(): they shape "
            "the group itself"
        )
    known: dict[str, Any] = {"throttle_query": throttle_query, "replica_conn_ids": replica_conn_ids}
    what: dict[str, Any] = {"index": index, "postgres_conn_id": postgres_conn_id, "map_index_template": NAMED}
    given = options or {}
    to_build: dict[str, Any] = {
        "table": table,
        "keys": keys,
        "include": include,
        "where": where,
        "unique": unique,
        "nulls_not_distinct": nulls_not_distinct,
        "on_duplicate": on_duplicate,
        "census": census,
        "verify": verify,
        "spark": spark,
        "replica_conn_ids": replica_conn_ids,
        **given,
    }
    prepare = PrepareIndexBuildOperator(
        task_id="prepare",
        # The comparison before is skipped if there is nothing to compare.
        trigger_rule="none_failed" if verify_before else "all_success",
        **what,
        **to_build,
    )
    # Not a template: in a mapped group it is the id of the same index.
    operation: Any = prepare.output
    build = BuildIndexOperator(
        task_id="build",
        operation_id=operation,
        spark=spark,
        max_active_tis_per_dagrun=builds_at_once,
        on_long_pause_callback=on_long_pause_callback,
        **what,
        **known,
    )
    finalize = FinalizeIndexBuildOperator(
        task_id="finalize", operation_id=operation, on_long_pause_callback=on_long_pause_callback, **what, **known
    )
    if verify_before:
        compare = VerifyIndexOperator(
            task_id="verify_before",
            mode="before",
            build=to_build,
            spark=spark,
            fail_on_difference=False,
            **{name: given[name] for name in WORK_OPTIONS if name in given},
            **what,
            **known,
        )
        compare >> prepare
    prepare >> build >> finalize


@task_group  # type: ignore[untyped-decorator]
def rebuild_indexes_group(
    indexes: Sequence[str],
    postgres_conn_id: str = RoirHook.default_conn_name,
    spark: str | None = None,
    verify: str = "after",
    options: dict[str, Any] | None = None,
) -> None:
    """Rebuilds several indexes of one table by one scan of it: all are prepared before the first is built.

    indexes: their names, which shape the group. Each index has a group of its own, and one that fails leaves the others
    alone; the whole group fails if one of them does. The other arguments are as of `rebuild_index_group`, for all.
    """
    _retry_by_default()
    names = list(indexes) if isinstance(indexes, list | tuple) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidInput("indexes shape the group itself: give a list of names, or map rebuild_index_group over them")
    if len(set(names)) < len(names):
        raise InvalidInput("indexes names an index twice")

    # The failure of one prepare task doesn't keep the other indexes from being built.
    @task(trigger_rule="all_done")  # type: ignore[untyped-decorator]
    def all_are_prepared() -> None:
        pass

    prepared = all_are_prepared()
    for number, index in enumerate(names, start=1):
        what: dict[str, Any] = {"index": index, "postgres_conn_id": postgres_conn_id}
        with TaskGroup(f"index_{number}", tooltip=index):
            given = {"scan": SOURCE, **(options or {})}
            prepare = PrepareIndexBuildOperator(task_id="prepare", verify=verify, spark=spark, **what, **given)
            operation: Any = prepare.output
            build = BuildIndexOperator(task_id="build", operation_id=operation, spark=spark, **what)
            finalize = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **what)
        prepare >> [prepared, build]
        prepared >> build >> finalize


def _retry_by_default() -> None:
    """Gives the group, in whose function this is called, `RETRIES` where neither it nor its DAG has a value."""
    group, dag = TaskGroupContext.get_current(), DagContext.get_current()
    given = {**(dag.default_args if dag is not None else {}), **(group.default_args if group is not None else {})}
    if group is not None:
        group.default_args |= {name: value for name, value in RETRIES.items() if name not in given}
