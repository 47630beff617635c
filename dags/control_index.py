"""Pauses, resumes, changes or aborts the build, verification or compaction of one index, or reverts its last rebuild.

Copy this file into your DAGs folder. Trigger it and fill in the form. The switch of `rebuild_index`
pauses every build of that DAG; this DAG acts on a single operation, also one that was started from a command line. If a
DAG run drives an operation that you pause here, the run waits, and continues once you resume the operation.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param, task

from airflow_roir.operators.abort import AbortIndexBuildOperator
from airflow_roir.operators.change import ChangeIndexBuildOperator
from airflow_roir.operators.pause import PauseIndexBuildOperator
from airflow_roir.operators.resume import ResumeIndexBuildOperator
from airflow_roir.operators.revert import RevertIndexOperator
from airflow_roir.options import LIVE_OPTIONS, MAX_PARALLELISM
from airflow_roir.task.unknown_keys import refuse_unknown_keys

# An empty field is rendered as None, which keeps the operation's own value.
OPTIONS = {name: f"{{{{ params.{name} }}}}" for name in LIVE_OPTIONS}

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
            title="Index",
            description="Name of the index, with its schema: public.flights_by_tail.",
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
                "revert": "revert: show the generation before the last rebuild",
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
        "parallelism": Param(
            None,
            type=["null", "integer"],
            minimum=1,
            maximum=MAX_PARALLELISM,
            title="Parallelism",
            description="For resume and change: workers at the same time. Empty: as many as before. The newest change "
            "wins, wherever it was made: the build task shows the number in its Task State Store.",
        ),
        "batch_rows": Param(
            None,
            type=["null", "integer"],
            minimum=1000,
            maximum=10_000_000,
            title="Most rows per batch",
            description="For resume and change. Empty: as before.",
        ),
        "max_rows_per_second": Param(
            None,
            type=["null", "integer"],
            minimum=0,
            title="Rate limit, rows per second",
            description=f"For resume and change: over all workers, at least {100}. 0: no limit. Empty: as before.",
        ),
        "shard_parallelism": Param(
            None,
            type=["null", "integer"],
            minimum=0,
            maximum=MAX_PARALLELISM,
            title="Parallelism per shard",
            description="For resume and change, of an index over shards: workers that read one shard at the same time. "
            "0: no limit. Empty: as before.",
        ),
        "windows": Param(
            None,
            type=["null", "string"],
            title="Windows",
            description="For resume and change: when it may work, as CRON for DURATION in ZONE, several by semicolons: "
            "0 22 * * 1-5 for 8h in Europe/Berlin. Outside it pauses, inside it continues. "
            "off: always. Empty: as before.",
        ),
        "throttle": Param(
            None,
            type=["null", "string"],
            title="Throttle",
            description="For resume and change: limits of signals, replica_lag=50MB. Others stay; replica_lag=off "
            "takes one away, off all. Empty: as before.",
        ),
        "max_duration_s": Param(
            None,
            type=["null", "string", "integer"],
            title="Longest duration",
            description="For resume and change: pause after so long since it began or was resumed: 6h, 90min, or "
            "seconds. 0: no limit. Empty: as before.",
        ),
        "priority": Param(
            None,
            type=["null", "integer"],
            minimum=-100,
            maximum=100,
            title="Priority",
            description="For resume and change: where only some operations may run at the same time, the greatest goes "
            "first. Empty: as before.",
        ),
        "warn_after_s": Param(
            None,
            type=["null", "string", "integer"],
            title="Warn of a pause after",
            description="For resume and change: a paused build captures all the while. 12h, 2d, or "
            "seconds; 0: never. Empty: as before.",
        ),
        "abort_after_s": Param(
            None,
            type=["null", "string", "integer"],
            title="Abort a paused one after",
            description="For resume and change: 3d, or seconds. What was built is removed then. 0: never. "
            "Empty: as before.",
        ),
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
        ResumeIndexBuildOperator(task_id="resume", **OPTIONS),
        ChangeIndexBuildOperator(task_id="change", **OPTIONS),
        AbortIndexBuildOperator(task_id="abort", reason="{{ params.reason or 'from the DAG control_index' }}"),
        RevertIndexOperator(task_id="revert", reason="{{ params.reason or 'from the DAG control_index' }}"),
    ]
