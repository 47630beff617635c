"""Pauses, resumes or aborts the build or verification of one index, or reverts its last rebuild.

Copy this file into your DAGs folder. Trigger it and fill in the form. The switch of `rebuild_index`
pauses every build of that DAG; this DAG acts on a single operation, also one that was started from a command line. If a
DAG run drives an operation that you pause here, the run waits, and continues once you resume the operation.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param, task

from airflow_roir.definition import MAX_PARALLELISM
from airflow_roir.operators.abort import AbortIndexBuildOperator
from airflow_roir.operators.pause import PauseIndexBuildOperator
from airflow_roir.operators.resume import ResumeIndexBuildOperator
from airflow_roir.operators.revert import RevertIndexOperator

with DAG(
    dag_id="control_index",
    description="Pause, resume or abort the build or verification of one index, or revert its last rebuild",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    is_paused_upon_creation=False,
    params={
        "index": Param(
            type="string",
            minLength=1,
            title="Index",
            description="Name of the index, with its schema: public.flights_by_tail.",
        ),
        "action": Param(
            "pause",
            type="string",
            enum=["pause", "resume", "abort", "revert"],
            title="Action",
            description="Abort removes what was built so far; the table and the published index stay as they are. "
            "Revert shows readers the generation that the last rebuild replaced.",
        ),
        "reason": Param(
            None,
            type=["null", "string"],
            title="Reason",
            description="Kept with the operation, for other users. Not used by resume.",
        ),
        "parallelism": Param(
            None,
            type=["null", "integer"],
            minimum=1,
            maximum=MAX_PARALLELISM,
            title="Parallelism",
            description="For resume: workers at the same time. Empty: as many as before.",
        ),
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            minLength=1,
            title="PostgreSQL connection",
            description="Id of the Airflow connection of the index's database.",
        ),
    },
    tags=["roir"],
    default_args={"index": "{{ params.index }}", "postgres_conn_id": "{{ params.postgres_conn_id }}"},
) as dag:

    @task.branch
    def choose(params: dict[str, str]) -> str:
        """The action is the name of the task that does it."""
        return params["action"]

    choose() >> [
        PauseIndexBuildOperator(task_id="pause", reason="{{ params.reason or 'from the DAG control_index' }}"),
        ResumeIndexBuildOperator(task_id="resume", parallelism="{{ params.parallelism or '' }}"),
        AbortIndexBuildOperator(task_id="abort", reason="{{ params.reason or 'from the DAG control_index' }}"),
        RevertIndexOperator(task_id="revert", reason="{{ params.reason or 'from the DAG control_index' }}"),
    ]
