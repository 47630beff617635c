"""Compacts the aged segments of a database's indexes each night, within budgets, the worst index first.

Copy this file into your DAGs folder, give the budgets that your nights allow, and unpause the DAG. Each night it
chooses in each index the segments whose compaction saves most for its cost, and orders the indexes by that. The run's
tab Index build pauses and resumes a compaction; so does the DAG's switch for all.

If a rebuild costs no more than the compaction, the DAG leaves the index alone: the log of the task `choose`, its XCom
`suggestions` and the table `roir.event` suggest the rebuild.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_roir.operators.compact import CompactIndexOperator
from airflow_roir.options import CompactOptions
from airflow_roir.task.formats import BUDGET
from airflow_roir.task.forms import fields_of, templates_of
from airflow_roir.task.unknown_keys import refuse_unknown_keys

# At two each night, in Airflow's default time zone.
SCHEDULE = "0 2 * * *"
# Airflow opens the section of the fields without one, and no other.
HOW = "How much, and how hard"
WHERE = "Where"
OPTIONS = ("parallelism", "throttle", "windows")

with DAG(
    dag_id="keep_indexes_young",
    description="Compact the aged segments of all indexes, within budgets, every night",
    doc_md=__doc__,
    schedule=SCHEDULE,
    catchup=False,
    # A night that takes longer than a day is not joined by the next one.
    max_active_runs=1,
    # It has to know what a night may cost.
    is_paused_upon_creation=True,
    params={
        "indexes": Param(
            None,
            type=["null", "array"],
            items={"type": "string"},
            title="Indexes",
            description="Names of indexes, one a line. Empty: all that are published.",
        ),
        "exact": Param(
            False,
            type="boolean",
            title="Measure",
            description="Measure segments with PostgreSQL's extension pgstattuple, which reads all entries of all "
            "these indexes. Otherwise the DAG estimates their bloat.",
        ),
        "even_if_rebuild_is_cheaper": Param(
            False,
            type="boolean",
            title="Compact even if a rebuild is cheaper",
            description="Otherwise the DAG only suggests a rebuild of such an index.",
        ),
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            minLength=1,
            examples=["postgres_default"],
            title="PostgreSQL connection",
            description="Id of the Airflow connection of the indexes' database.",
        ),
        "budget_of_index": Param(
            "20GB",
            type=["null", "string"],
            format=BUDGET,
            title="Budget of an index",
            description="The bytes that a night may write of one index, with WAL, or how long one worker may work on "
            "it: 20GB, 30min. Empty: no limit.",
            section=HOW,
        ),
        "budget_of_run": Param(
            "100GB",
            type=["null", "string"],
            format=BUDGET,
            title="Budget of a night",
            description="As above, for all indexes together. Indexes that gain most for their cost come first. Empty: "
            "no limit.",
            section=HOW,
        ),
        **fields_of(CompactOptions, OPTIONS, how=HOW),
        "spark": Param(
            "local",
            type="string",
            minLength=1,
            examples=["local", "local[4]", "spark_default"],
            title="Spark",
            description="local, local[4], or the id of an Airflow connection that holds a Spark's address.",
            section=WHERE,
        ),
    },
    tags=["roir"],
    default_args={
        # Else Airflow drops what is misspelt in a run's conf.
        "pre_execute": refuse_unknown_keys,
        # Every try continues with what is left; a pause uses none up.
        "retries": 6,
        "retry_delay": timedelta(seconds=30),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
    },
) as dag:

    @task
    def choose(params: dict[str, Any], ti: Any) -> list[dict[str, str]]:
        """Index and budget of each compaction, the worst index first. It logs why the others are left out."""
        from airflow_roir.task.ranked_indexes import ranked_indexes

        return ranked_indexes(params, ti)

    CompactIndexOperator.partial(
        task_id="compact",
        exact="{{ params.exact }}",
        even_if_rebuild_is_cheaper="{{ params.even_if_rebuild_is_cheaper }}",
        **templates_of(OPTIONS),
        spark="{{ params.spark }}",
        postgres_conn_id="{{ params.postgres_conn_id }}",
        max_active_tis_per_dagrun=1,
        map_index_template="{{ task.index }}",
    ).expand_kwargs(choose())
