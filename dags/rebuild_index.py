"""Builds or rebuilds one global index of a PostgreSQL table, online. Copy this file into your DAGs folder.

Trigger the DAG and fill in the form. The run's tab Index build pauses and resumes the build; so does the DAG's switch
for all builds of the DAG. Change `parallelism`, `batch_rows`, `max_rows_per_second` and `throttle` at any time: by the
DAG `control_index`, or in the build task's Task State Store. The newest change wins.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import WORK_OPTIONS, BuildOptions
from airflow_roir.task.formats import COLUMNS, CONDITION, NAME, NAME_IF_ANY
from airflow_roir.task.forms import fields_of, names_in_form, templates_of
from airflow_roir.task.unknown_keys import refuse_unknown_keys

# Airflow opens the section of the fields without one, and no other: there is what a first build needs.
HOW = "How to build it"
WHEN = "When, and how hard"
WHERE = "Where"

PARAMS = {
    "index": Param(
        type="string",
        minLength=1,
        format=NAME,
        title="Index",
        description="Name of the index, with its schema: shop.orders_by_customer. Quote what needs quoting, as in "
        "psql. If the index exists, it is rebuilt; users read the old one until the new one is published.",
    ),
    "table": Param(
        None,
        type=["null", "string"],
        format=NAME_IF_ANY,
        title="Source table",
        description="Table to index, with its schema. Empty: rebuild an existing index as it is.",
    ),
    "keys": Param(
        None,
        type=["null", "string"],
        format=COLUMNS,
        title="Key columns",
        description="Columns or expressions in order, separated by commas: tailnum, lower(email). Empty: as in the "
        "existing index.",
    ),
    "include": Param(
        None,
        type=["null", "string"],
        format=COLUMNS,
        title="Included columns",
        description="Columns that users can read from the index alone; separated by commas.",
    ),
    "where": Param(
        None,
        type=["null", "string"],
        format=CONDITION,
        title="Condition",
        description="Only rows that satisfy it are in the index: deleted_at IS NULL. Empty: all rows, or as in the "
        "existing index.",
    ),
    "unique": Param(
        False,
        type="boolean",
        title="Unique",
        description="No two rows may have the same key, over all partitions, or shards. If rows share a key, the build "
        "pauses, and its page lists them. A rebuild doesn't change this.",
    ),
    "postgres_conn_id": Param(
        "postgres_default",
        type="string",
        minLength=1,
        examples=["postgres_default"],
        title="PostgreSQL connection",
        description="Id of the Airflow connection of the table's database.",
    ),
    "nulls_not_distinct": Param(
        False,
        type="boolean",
        title="NULLs not distinct",
        description="In a unique index, no two rows may have the same NULLs in the key, either.",
    ),
    **fields_of(BuildOptions, how=HOW, when=WHEN),
    "shards": Param(
        None,
        type=["null", "array"],
        # Without examples: of these the form would make the only ones that can be chosen.
        items={"type": "string"},
        title="Shards",
        description="For an index over tables on other servers: names of shards, one a line: orders_0, orders_1. The "
        "PostgreSQL connection's extra roir_shards can name their connections. Empty: the table is in this database, "
        "or as in the existing index.",
        section=WHERE,
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
}

BUILD = {
    "table": "{{ params.table or '' }}",
    "keys": "{{ params['keys'] or '' }}",
    "include": "{{ params.include or '' }}",
    "where": "{{ params.where or '' }}",
    "shards": "{{ (params.shards or []) | map('trim') | select | join(',') }}",
    "unique": "{{ params.unique }}",
    "nulls_not_distinct": "{{ params.nulls_not_distinct }}",
    "spark": "{{ params.spark }}",
    **templates_of(names_in_form(BuildOptions)),
}

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
        # As the first task, it refuses what the build would refuse.
        build=BUILD,
        spark="{{ params.spark }}",
        # The rebuild is there to repair differences.
        fail_on_difference=False,
        **templates_of(("parallelism", *WORK_OPTIONS)),
    )
    prepare = PrepareIndexBuildOperator(
        task_id="prepare",
        # It is skipped where there is nothing to verify.
        trigger_rule="none_failed",
        **BUILD,
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
