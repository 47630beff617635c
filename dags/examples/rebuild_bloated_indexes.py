"""Rebuilds each night the indexes that would win most by it, one after the other.

An example: copy this file into your DAGs folder, change what you like, and unpause the DAG. An index is taken if at
least `least_win` per cent of its size would go with a rebuild, by the estimate that `roir status` shows, too. Pause the
DAG to pause the builds; unpause it to resume them.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_roir.groups import rebuild_index_group
from airflow_roir.options import BuildOptions
from airflow_roir.task.forms import fields_of

with DAG(
    dag_id="rebuild_bloated_indexes",
    description="Rebuild the most bloated indexes, every night",
    doc_md=__doc__,
    schedule="0 1 * * *",
    catchup=False,
    # A night that takes longer than a day is not joined by the next one.
    max_active_runs=1,
    is_paused_upon_creation=True,
    params={
        "least_win": Param(
            30,
            type="number",
            # Not as the field's own bounds: Airflow's form moves a number to them without a word.
            allOf=[{"exclusiveMinimum": 0, "maximum": 100}],
            title="Least win, per cent",
            description="Rebuild an index if at least this share of its size would go. More than 0, at most 100.",
        ),
        "most": Param(
            5,
            type="integer",
            allOf=[{"minimum": 1, "maximum": 1_000}],
            title="Most indexes",
            description="Those that would win most come first; the others wait for the next night. All of them are "
            "prepared at once, and from then on writes to their tables cost more. 1 to 1,000.",
        ),
        **fields_of(BuildOptions, ("parallelism",)),
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
) as dag:

    @task
    def bloated(params: dict[str, Any]) -> list[str]:
        """The indexes to rebuild, those that win most first. One that has an unfinished operation is left alone."""
        from airflow_roir.engine.snapshot.index import indexes
        from airflow_roir.task.open_database import open_database
        from airflow_roir.task.roir_operator import failing_clearly

        with failing_clearly():
            found = indexes(open_database(params["postgres_conn_id"], "roir airflow bloated"))
        worth = [
            (facts.bloat.win_bytes or 0, facts.index)
            for facts in found
            if facts.bloat is not None
            and facts.operation is None
            and (facts.bloat.win_share or 0) * 100 >= params["least_win"]
        ]
        return [index for _, index in sorted(worth, reverse=True)[: params["most"]]]

    rebuild_index_group.override(group_id="rebuild").partial(
        postgres_conn_id="{{ params.postgres_conn_id }}",
        spark="{{ params.spark }}",
        options={"parallelism": "{{ params.parallelism }}"},
        builds_at_once=1,
    ).expand(index=bloated())
