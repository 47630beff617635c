"""Compares one global index with its table while users write, and repairs it on request.

Copy this file into your DAGs folder. Trigger the DAG and fill in the form. The run's tab Index build pauses and
resumes the verification; so does the DAG's switch for all. Change `parallelism` at any time, by the DAG
`control_index` or in the verify task's Task State Store.

If something is still wrong at the end, the run fails. Its log names the first discrepancies; the table
`roir.discrepancy` has all of them.

To compare all of an index once a month, copy the file again, with another `dag_id`, `schedule="@daily"`,
`max_active_runs=1`, the index's name as the default of the parameter `index`, and `fields_of(…, slices=30)`. Each run
continues where the last one stopped.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import VerifyOptions
from airflow_roir.task.formats import NAME
from airflow_roir.task.forms import fields_of, names_in_form, templates_of
from airflow_roir.task.unknown_keys import refuse_unknown_keys

# Airflow opens the section of the fields without one, and no other.
HOW = "How to verify it"
WHEN = "When, and how hard"
WHERE = "Where"
# A longest duration ends a verification: `max_seconds`.
FIELDS = names_in_form(VerifyOptions, without=("max_duration_s",))

PARAMS = {
    "index": Param(
        type="string",
        minLength=1,
        format=NAME,
        title="Index",
        description="Name of the index, with its schema: shop.orders_by_customer. If it has an unfinished "
        "verification, the run continues that one, with its options.",
    ),
    "postgres_conn_id": Param(
        "postgres_default",
        type="string",
        minLength=1,
        examples=["postgres_default"],
        title="PostgreSQL connection",
        description="Id of the Airflow connection of the index's database.",
    ),
    **fields_of(VerifyOptions, FIELDS, how=HOW, when=WHEN),
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

with DAG(
    dag_id="verify_index",
    description="Compare a global index with its table, online, and repair it",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    params=PARAMS,
    # A DAG that is first seen is paused, and here the switch pauses verifications.
    is_paused_upon_creation=False,
    # One run is one index. Runs that wait count too, and cost nothing.
    max_active_runs=32,
    tags=["roir"],
    default_args={
        # Else Airflow drops what is misspelt in a run's conf.
        "pre_execute": refuse_unknown_keys,
        "index": "{{ params.index }}",
        "postgres_conn_id": "{{ params.postgres_conn_id }}",
        # Every try continues with the units that are left; a pause uses none up. Together they wait about half an hour,
        # enough for a database that restarts or fails over.
        "retries": 6,
        "retry_delay": timedelta(seconds=30),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
    },
) as dag:
    VerifyIndexOperator(
        task_id="verify",
        spark="{{ params.spark }}",
        **templates_of(FIELDS),
    )
