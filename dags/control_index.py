"""Pauses, resumes, changes or aborts the build, verification or compaction of one index, or reverts its last rebuild.

Copy this file into your DAGs folder. Trigger it and fill in the form. It acts on a single operation, also one that was
started from a command line. If a DAG run drives an operation that you pause here, the run waits, and continues once
you resume the operation.

A new throttle changes only the limits that it names: `replica_lag=50MB` sets one, `replica_lag=off` removes it, `off`
removes all.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param, task

from airflow_roir.operators.control import (
    AbortIndexBuildOperator,
    ChangeIndexBuildOperator,
    PauseIndexBuildOperator,
    ResumeIndexBuildOperator,
    RevertIndexOperator,
)
from airflow_roir.options import LIVE_OPTIONS, BuildOptions
from airflow_roir.task.formats import NAME
from airflow_roir.task.forms import fields_of, templates_of
from airflow_roir.task.unknown_keys import refuse_unknown_keys

with DAG(
    dag_id="control_index",
    description="Pause, resume, change or abort the operation of one index, or revert its last rebuild",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    is_paused_upon_creation=False,
    params={
        "index": Param(
            type="string",
            minLength=1,
            format=NAME,
            title="Index",
            description="Name of the index, with its schema: shop.orders_by_customer.",
        ),
        "action": Param(
            "pause",
            type="string",
            enum=["pause", "resume", "change", "abort", "revert"],
            values_display={
                "pause": "pause: stop after the open batches",
                "resume": "resume: continue, with other options if given",
                "change": "change: other options, running or paused",
                "abort": "abort: remove what was built so far",
                "revert": "revert: undo the last rebuild; readers see the generation before it",
            },
            title="Action",
            description="Abort leaves the table and the published index as they are.",
        ),
        "reason": Param(
            None,
            type=["null", "string"],
            title="Reason",
            description="Kept with the operation, for other users. Not used by resume and change.",
        ),
        **fields_of(BuildOptions, LIVE_OPTIONS, changes=True),
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            minLength=1,
            examples=["postgres_default"],
            title="PostgreSQL connection",
            description="Id of the Airflow connection of the index's database.",
        ),
    },
    tags=["roir"],
    default_args={
        "index": "{{ params.index }}",
        "postgres_conn_id": "{{ params.postgres_conn_id }}",
        "pre_execute": refuse_unknown_keys,
    },
) as dag:

    @task.branch
    def choose(params: dict[str, str]) -> str:
        """The action is the name of the task that does it."""
        return params["action"]

    choose() >> [
        PauseIndexBuildOperator(task_id="pause", reason="{{ params.reason or 'from the DAG control_index' }}"),
        ResumeIndexBuildOperator(task_id="resume", **templates_of(LIVE_OPTIONS)),
        ChangeIndexBuildOperator(task_id="change", **templates_of(LIVE_OPTIONS)),
        AbortIndexBuildOperator(task_id="abort", reason="{{ params.reason or 'from the DAG control_index' }}"),
        RevertIndexOperator(task_id="revert", reason="{{ params.reason or 'from the DAG control_index' }}"),
    ]
