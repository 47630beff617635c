"""Compares one global index with its table while users write, and repairs it on request.

Copy this file into your DAGs folder. Trigger the DAG and fill in the form. Pause the DAG to pause its verifications;
unpause it to resume them. Change `parallelism` at any time, by the DAG `control_index` or in the verify task's Task
State Store.

If something is still wrong at the end, the run fails. Its log names the first discrepancies; the table
`roir.discrepancy` has all of them.

To compare all of an index once a month, copy the file again, with another `dag_id`, `schedule="@daily"`,
`max_active_runs=1`, and these defaults of its parameters: `index` the name, `slices` 30. Each run continues where the
last one stopped.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import MAX_PARALLELISM, WORK_OPTIONS
from airflow_roir.task.unknown_keys import refuse_unknown_keys

WHAT = "What to verify"
HOW = "How to verify it"
WHEN = "When, and how hard"
WHERE = "Where"

PARAMS = {
    "index": Param(
        type="string",
        minLength=1,
        title="Index",
        description="Name of the index, with its schema: public.flights_by_tail. If it has an unfinished verification, "
        "the run continues that one, with its options.",
        section=WHAT,
    ),
    "sample": Param(
        None,
        type=["null", "number"],
        exclusiveMinimum=0,
        maximum=100,
        title="Sample, per cent",
        description="Compare only this percentage of the index, chosen at random. Empty: all of it.",
        section=WHAT,
    ),
    "slices": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        maximum=10_000,
        title="Slices",
        description="Compare the index in this many runs; each continues where the last one stopped. Empty: in one "
        "run.",
        section=WHAT,
    ),
    "repair": Param(
        False,
        type="boolean",
        title="Repair",
        description="Repair each discrepancy in a short transaction.",
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
        description="Workers at the same time. You can change the number at any time: DAG control_index, or "
        "verify task, Task State Store. The newest change wins.",
        section=HOW,
    ),
    "throttle": Param(
        None,
        type=["null", "string"],
        title="Throttle",
        description="Limits of signals, above which it works less, or waits: active_sessions=8 commit_latency=20ms. "
        "Empty: none. You can change them while it runs.",
        section=HOW,
    ),
    "max_duration": Param(
        None,
        type=["null", "integer"],
        minimum=1,
        title="Longest duration, seconds",
        description="Stop after this many seconds of work; the rest is not compared. Empty: no limit.",
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
        description="Id of the Airflow connection of the index's database.",
        section=WHERE,
    ),
}

# An empty field is rendered as None, which takes the default. A longest duration ends a verification.
WORK = {name: f"{{{{ params.{name} }}}}" for name in WORK_OPTIONS if name != "max_duration_s"}

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
        sample="{{ params.sample or '' }}",
        max_seconds="{{ params.max_duration or '' }}",
        slices="{{ params.slices or '' }}",
        repair="{{ params.repair }}",
        amcheck="{{ params.amcheck }}",
        parallelism="{{ params.parallelism }}",
        spark="{{ params.spark }}",
        **WORK,
    )
