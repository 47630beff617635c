"""Ships the changes of shards to the indexes over them, all the time: each run ships for ten minutes.

Copy this file into your DAGs folder, if no `roir ship` runs as a service. If you pause the DAG, shipping ends with the
present run; the shards keep their changes until you unpause it. If a shard is too far behind at the end of a run, the
run's task fails: give the task an `on_failure_callback` that tells you. For another index server copy the file again,
with another `dag_id` and connection.
"""

from __future__ import annotations

from datetime import datetime, timezone

from airflow.sdk import DAG, Param

from airflow_roir.operators.ship import ShipChangesOperator
from airflow_roir.task.formats import DURATION
from airflow_roir.task.unknown_keys import refuse_unknown_keys

with DAG(
    dag_id="ship_changes",
    description="Ship the changes of shards to the indexes over them",
    doc_md=__doc__,
    schedule="@continuous",
    # Without one the first run's interval is empty, the second would have the first one's date, and never comes.
    start_date=datetime(2025, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    max_active_runs=1,
    # Without shards there is nothing to ship.
    is_paused_upon_creation=True,
    params={
        "postgres_conn_id": Param(
            "postgres_default",
            type="string",
            minLength=1,
            examples=["postgres_default"],
            title="PostgreSQL connection",
            description="Id of the Airflow connection of the index server.",
        ),
        "ship_for": Param(
            "10min",
            type="string",
            format=DURATION,
            title="Time of a run",
            description="Then the next run continues: 10min, 1h.",
        ),
        "warn_age": Param(
            "5min",
            type="string",
            format=DURATION,
            title="Too far behind",
            description="If a shard is further behind than this, the task fails; off: never.",
        ),
    },
    tags=["roir"],
    default_args={"pre_execute": refuse_unknown_keys},
) as dag:
    ShipChangesOperator(
        task_id="ship",
        postgres_conn_id="{{ params.postgres_conn_id }}",
        ship_for="{{ params.ship_for }}",
        warn_age="{{ params.warn_age }}",
    )
