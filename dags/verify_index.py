"""Verifies one global index against its table, under writers, and mends it on request. Copy this file into your DAGs
folder.

Trigger it and fill in the form. Pause the DAG to pause the verification, unpause it to go on; change `parallelism` in
the task's Task State Store at any time. A run fails where something is wrong still; its log says what, and the table
`roir.discrepancy` has it all.

To walk all of an index once a month, copy the file once more, with another `dag_id`, `schedule="@daily"`,
`max_active_runs=1`, and these defaults of its parameters: `index` the name, `slices` 30. Each run goes on where the
last one stopped.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_roir.definition import MAX_PARALLELISM, MAX_SLICES
from airflow_roir.operators.verify import VerifyIndexOperator

WHAT = "What to verify"
HOW = "How to verify it"
WHERE = "Where"

PARAMS = {
    "index": Param(
        type="string",
        minLength=1,
        title="Index",
        description="Name of the index, with its schema: public.flights_by_tail. An unfinished verification of it is "
        "gone on with, as it was begun.",
        section=WHAT,
    ),
    "sample": Param(
        None,
        type=["null", "number"],
        exclusiveMinimum=0,
        maximum=100,
        title="Sample, per cent",
        description="Look at so much of it only, chosen at random. Empty: all of it.",
        section=WHAT,
    ),
    "slices": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        maximum=MAX_SLICES,
        title="Slices",
        description="Walk the index in so many verifications; each goes on where the last one stopped. Empty: in one.",
        section=WHAT,
    ),
    "repair": Param(
        False,
        type="boolean",
        title="Repair",
        description="Mend what is found, one short transaction each.",
        section=HOW,
    ),
    "amcheck": Param(
        False,
        type="boolean",
        title="Check the B-trees",
        description="Check the structure of the index's B-trees, too. Needs PostgreSQL's extension amcheck.",
        section=HOW,
    ),
    "parallelism": Param(
        2,
        type="integer",
        minimum=1,
        maximum=MAX_PARALLELISM,
        title="Parallelism",
        description="Workers at the same time. Can be changed while it runs: verify task, Task State Store.",
        section=HOW,
    ),
    "max_duration": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        title="Longest duration, seconds",
        description="Stop after so many seconds of work; what is left is not looked at. Empty: no limit.",
        section=HOW,
    ),
    "spark": Param(
        "local",
        type="string",
        minLength=1,
        title="Spark",
        description="Id of an Airflow connection that holds a Spark master, or a master: local, local[4], "
        "spark://host:7077, k8s://https://host:443, yarn.",
        section=WHERE,
    ),
    "postgres_conn_id": Param(
        "postgres_default",
        type="string",
        minLength=1,
        title="PostgreSQL connection",
        description="Id of the Airflow connection of the index's database.",
        section=WHERE,
    ),
}

with DAG(
    dag_id="verify_index",
    description="Verify a global index against its table, online, and mend it",
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
        "index": "{{ params.index }}",
        "postgres_conn_id": "{{ params.postgres_conn_id }}",
        # Every try goes on with the units that are left; a pause uses none up. Together about half an hour of waiting,
        # enough for a database that restarts or fails over.
        "retries": 6,
        "retry_delay": timedelta(seconds=30),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
    },
) as dag:
    VerifyIndexOperator(
        task_id="verify",
        sample="{{ params.sample or '' }}",
        max_seconds="{{ params.max_duration or '' }}",
        slices="{{ params.slices or '' }}",
        repair="{{ params.repair }}",
        amcheck="{{ params.amcheck }}",
        parallelism="{{ params.parallelism }}",
        spark="{{ params.spark }}",
    )
