"""Builds or rebuilds one global index of a PostgreSQL table, online. Copy this file into your DAGs folder.

Trigger the DAG and fill in the form. Pause the DAG to pause its builds after their open batches; unpause it to resume
them. Change `parallelism`, `batch_rows`, `max_rows_per_second` and `throttle` at any time: by the DAG `control_index`,
or in the build task's Task State Store. The newest change wins.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import MAX_PARALLELISM, WORK_OPTIONS
from airflow_roir.task.unknown_keys import refuse_unknown_keys

WHAT = "What to build"
HOW = "How to build it"
WHEN = "When, and how hard"
WHERE = "Where"

PARAMS = {
    "index": Param(
        type="string",
        minLength=1,
        title="Index",
        description="Name of the index, with its schema: public.flights_by_tail. Quote what needs quoting, as in "
        "psql. If it exists it is rebuilt, and read as before until the new one is published.",
        section=WHAT,
    ),
    "table": Param(
        None,
        type=["null", "string"],
        title="Source table",
        description="Table to index, with its schema. Empty: rebuild an existing index as it is.",
        section=WHAT,
    ),
    "keys": Param(
        None,
        type=["null", "string"],
        title="Key columns",
        description="In order, separated by commas: tailnum, time_hour. Empty: as in the existing index.",
        section=WHAT,
    ),
    "include": Param(
        None,
        type=["null", "string"],
        title="Included columns",
        description="Read from the index without a look at the table; separated by commas.",
        section=WHAT,
    ),
    "shards": Param(
        None,
        type=["null", "array"],
        # Without examples: of these the form would make the only ones that can be chosen.
        items={"type": "string"},
        title="Shards",
        description="Of an index over tables on other servers: names of shards, or ids of Airflow connections to them, "
        "one a line: orders_0, orders_1. Empty: the table is in this database, or as in the existing index.",
        section=WHAT,
    ),
    "shard_parallelism": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        maximum=MAX_PARALLELISM,
        title="Parallelism per shard",
        description="Of an index over shards: workers that read one shard at the same time. Empty: as many as there "
        "are. You can change it while the build runs.",
        section=HOW,
    ),
    "max_lag_s": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        title="Longest lag at the publish, seconds",
        description="Of an index over shards: it is published when each shard was shipped up to that long ago. "
        "Empty: 60.",
        section=HOW,
    ),
    "unique": Param(
        False,
        type="boolean",
        title="Unique",
        description="No two rows may have the same key, over all partitions, or shards. Rows that do pause the build, "
        "and are listed on its page. A rebuild keeps what the index is.",
        section=WHAT,
    ),
    "nulls_not_distinct": Param(
        False,
        type="boolean",
        title="NULLs not distinct",
        description="Of a unique index: no two rows may have the same NULLs in the key, either.",
        section=WHAT,
    ),
    "parallelism": Param(
        2,
        type="integer",
        minimum=1,
        maximum=MAX_PARALLELISM,
        title="Parallelism",
        description="Workers at the same time. You can change it at any time: DAG control_index, or build task, "
        "Task State Store. The newest change wins.",
        section=HOW,
    ),
    "batch_rows": Param(
        100_000,
        type="integer",
        minimum=1000,
        maximum=10_000_000,
        title="Most rows per batch",
        description="A batch is one transaction, and a pause takes effect at its end. The size adapts so that a batch "
        f"takes about a second. At least {1000:,}: each batch costs a commit.",
        section=HOW,
    ),
    "ranges": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        maximum=100_000,
        title="Ranges",
        description="Pieces of the scan. Empty: the plan chooses.",
        section=HOW,
    ),
    "max_rows_per_second": Param(
        None,
        type=["null", "integer"],
        minimum=100,
        title="Rate limit, rows per second",
        description="For the copy, over all workers. Empty: no limit. You can change it while the build runs.",
        section=HOW,
    ),
    "throttle": Param(
        None,
        type=["null", "string"],
        title="Throttle",
        description="Limits of signals, above which the build works less, or waits: replica_lag=100MB "
        "commit_latency=20ms. Empty: none. You can change them while the build runs.",
        section=HOW,
    ),
    "scan": Param(
        "auto",
        type="string",
        enum=["auto", "key", "block", "index"],
        values_display={
            "auto": "auto: the fastest",
            "key": "key: the table by primary key",
            "block": "block: the table by block",
            "index": "index: the index that is rebuilt",
        },
        title="Scan",
        description="What to copy, and in which order.",
        section=HOW,
    ),
    "ignore_row_security": Param(
        False,
        type="boolean",
        title="Ignore row-level security",
        description="All who may read the view may see rows that the table's policies hide.",
        section=HOW,
    ),
    "ignore_publications": Param(
        False,
        type="boolean",
        title="Ignore publications",
        description="Build although a publication of all tables contains the index's own tables. Its subscribers must "
        "skip unknown tables.",
        section=HOW,
    ),
    "on_duplicate": Param(
        "pause",
        type="string",
        enum=["pause", "stop"],
        values_display={
            "pause": "pause: list all, then pause",
            "stop": "stop: pause at the first",
        },
        title="On duplicates",
        description="Of a unique index. Resume the build once each key is left once.",
        section=HOW,
    ),
    "census": Param(
        False,
        type="boolean",
        title="Census",
        description="Only list the duplicates of a unique index: all that was built is removed.",
        section=HOW,
    ),
    "verify": Param(
        "after",
        type="string",
        enum=["after", "before", "both", "none"],
        values_display={
            "after": "after: the new index, before it is published",
            "before": "before: the index that a rebuild replaces",
            "both": "both",
            "none": "none",
        },
        title="Verify",
        description="After: compare the new index with the table, and publish only if they match. Before: count what "
        "is wrong in the index that a rebuild replaces.",
        section=HOW,
    ),
    "windows": Param(
        None,
        type=["null", "string"],
        title="Windows",
        description="When it may work, as CRON for DURATION in ZONE, several by semicolons: 0 22 * * 1-5 for 8h in "
        "Europe/Berlin. Outside it pauses, inside it continues. Empty: always.",
        section=WHEN,
    ),
    "max_duration_s": Param(
        None,
        type=["null", "string", "integer"],
        title="Longest duration",
        description="Pause after so long since it began or was resumed: 6h, 90min, or seconds. Empty: no limit.",
        section=WHEN,
    ),
    "priority": Param(
        None,
        type=["null", "integer"],
        minimum=-100,
        maximum=100,
        title="Priority",
        description="Where only some operations may run at the same time (roir queue), the greatest goes first. "
        "Empty: 0.",
        section=WHEN,
    ),
    "warn_after_s": Param(
        None,
        type=["null", "string", "integer"],
        title="Warn of a pause after",
        description="A paused build captures all the while. 12h, 2d, or seconds; 0: never. Empty: a day.",
        section=WHEN,
    ),
    "abort_after_s": Param(
        None,
        type=["null", "string", "integer"],
        title="Abort a paused one after",
        description="3d, or seconds. What was built is removed then. Empty: never.",
        section=WHEN,
    ),
    "spark": Param(
        "local",
        type="string",
        minLength=1,
        examples=["local", "local[4]", "spark_default"],
        title="Spark",
        description="local, local[4], or the id of an Airflow connection that holds a Spark's address.",
        section=WHERE,
    ),
    "postgres_conn_id": Param(
        "postgres_default",
        type="string",
        minLength=1,
        examples=["postgres_default"],
        title="PostgreSQL connection",
        description="Id of the Airflow connection of the table's database.",
        section=WHERE,
    ),
}

# An empty field is rendered as None, which takes the default.
WORK = {name: f"{{{{ params.{name} }}}}" for name in WORK_OPTIONS}

with DAG(
    dag_id="rebuild_index",
    description="Build or rebuild a global index online: pause, resume, change the parallelism",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    params=PARAMS,
    # A DAG that is first seen is paused, and here the switch pauses builds.
    is_paused_upon_creation=False,
    # One run is one index. Runs that wait count too, and cost nothing: a paused build must not keep others out.
    # There is no dagrun_timeout on purpose: it would count the time that a build is paused.
    max_active_runs=32,
    tags=["roir"],
    default_args={
        # Else Airflow drops what is misspelt in a run's conf.
        "pre_execute": refuse_unknown_keys,
        "index": "{{ params.index }}",
        "postgres_conn_id": "{{ params.postgres_conn_id }}",
        # Every try goes on from the watermarks; a pause uses none up. Together about half an hour of waiting, enough
        # for a database that restarts or fails over.
        "retries": 6,
        "retry_delay": timedelta(seconds=30),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
    },
) as dag:
    verify_before = VerifyIndexOperator(
        task_id="verify_before",
        mode="{{ 'before' if params.verify in ('before', 'both') else 'none' }}",
        parallelism="{{ params.parallelism }}",
        spark="{{ params.spark }}",
        # What is wrong is what the rebuild is for.
        fail_on_difference=False,
        **WORK,
    )
    prepare = PrepareIndexBuildOperator(
        task_id="prepare",
        # It is skipped where there is nothing to verify.
        trigger_rule="none_failed",
        table="{{ params.table or '' }}",
        keys="{{ params['keys'] or '' }}",
        include="{{ params.include or '' }}",
        shards="{{ (params.shards or []) | map('trim') | select | join(',') }}",
        shard_parallelism="{{ params.shard_parallelism or '' }}",
        max_lag_s="{{ params.max_lag_s or '' }}",
        unique="{{ params.unique }}",
        nulls_not_distinct="{{ params.nulls_not_distinct }}",
        on_duplicate="{{ params.on_duplicate }}",
        census="{{ params.census }}",
        parallelism="{{ params.parallelism }}",
        batch_rows="{{ params.batch_rows }}",
        ranges="{{ params.ranges or '' }}",
        max_rows_per_second="{{ params.max_rows_per_second or '' }}",
        ignore_row_security="{{ params.ignore_row_security }}",
        ignore_publications="{{ params.ignore_publications }}",
        scan="{{ params.scan }}",
        verify="{{ params.verify }}",
        spark="{{ params.spark }}",
        **WORK,
    )
    build = BuildIndexOperator(
        task_id="build",
        operation_id="{{ ti.xcom_pull(task_ids='prepare') }}",
        spark="{{ params.spark }}",
    )
    finalize = FinalizeIndexBuildOperator(
        task_id="finalize",
        operation_id="{{ ti.xcom_pull(task_ids='prepare') }}",
    )

    verify_before >> prepare >> build >> finalize
