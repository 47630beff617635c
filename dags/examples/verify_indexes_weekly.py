"""Compares every published index with its table once a week: each night a seventh of each, one after the other.

An example: copy this file into your DAGs folder, change what you like, and unpause the DAG. Each night continues where
the last one stopped. If something is wrong, the run fails; its log and the table `roir.discrepancy` name the rows.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import VerifyOptions
from airflow_roir.task.forms import fields_of

with DAG(
    dag_id="verify_indexes_weekly",
    description="Compare all indexes with their tables, a seventh each night",
    doc_md=__doc__,
    schedule="0 3 * * *",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=True,
    params={
        "slices": Param(
            7,
            type="integer",
            # Not as the field's own bounds: Airflow's form moves a number to them without a word.
            allOf=[{"minimum": 1, "maximum": 10_000}],
            title="Slices",
            description="In how many runs all of an index is compared: 7 nights are a week. 1 to 10,000.",
        ),
        **fields_of(VerifyOptions, ("repair",)),
        "spark": Param(
            "local",
            type="string",
            minLength=1,
            title="Spark",
            description="local, local[4], or the id of an Airflow connection that holds a Spark's address.",
        ),
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            minLength=1,
            title="PostgreSQL connection",
            description="Id of the Airflow connection of the indexes' database.",
        ),
    },
    tags=["roir"],
    default_args={
        "retries": 6,
        "retry_delay": timedelta(seconds=30),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
    },
) as dag:

    @task
    def published(params: dict[str, Any]) -> list[str]:
        """The indexes that readers see. The comparison of one that is being rebuilt waits for that."""
        from airflow_roir.engine.snapshot.index import indexes
        from airflow_roir.task.open_database import open_database
        from airflow_roir.task.roir_operator import failing_clearly

        with failing_clearly():
            database = open_database(params["postgres_conn_id"], "roir airflow published")
            return [facts.index for facts in indexes(database) if facts.state == "published"]

    VerifyIndexOperator.partial(
        task_id="verify",
        slices="{{ params.slices }}",
        repair="{{ params.repair }}",
        spark="{{ params.spark }}",
        postgres_conn_id="{{ params.postgres_conn_id }}",
        max_active_tis_per_dagrun=1,
        map_index_template="{{ task.index }}",
    ).expand(index=published())
