"""Removes what finished index builds leave: deltas, and replaced generations after their revert window.

Copy this file into your DAGs folder. It cleans up one database. For another database copy it again, with another
`dag_id` and connection.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_roir.operators.clean_up import CleanUpIndexesOperator
from airflow_roir.task.unknown_keys import refuse_unknown_keys

with DAG(
    dag_id="clean_up_indexes",
    description="Remove what finished index builds leave",
    doc_md=__doc__,
    # A revert window is an hour by default; what is left over costs disk and, for a retired generation, writes.
    schedule=timedelta(hours=1),
    catchup=False,
    # Twice at the same time would only wait for itself.
    max_active_runs=1,
    is_paused_upon_creation=False,
    params={
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            minLength=1,
            examples=["postgres_default"],
            title="PostgreSQL connection",
            description="Id of the Airflow connection of the database to clean up.",
        )
    },
    tags=["roir"],
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1), "pre_execute": refuse_unknown_keys},
) as dag:
    CleanUpIndexesOperator(task_id="clean_up", postgres_conn_id="{{ params.postgres_conn_id }}")
