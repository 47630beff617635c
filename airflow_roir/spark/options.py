"""Where and how Spark runs. Imports nothing heavy: Airflow's and the command's processes read it, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_roir.definition import MAX_PARALLELISM

# Tasks wait for PostgreSQL nearly all of their time: local mode gives them a slot each, however many are asked for
# while running. A slot that isn't used costs nothing.
LOCAL_MASTER = f"local[{MAX_PARALLELISM}]"
# As many tries as a cluster gives a task by default.
TASK_FAILURES = 4


@dataclass(frozen=True)
class SparkOptions:
    """Where and how Spark runs.

    master: a master URL as `spark-submit --master` takes it, or a Spark Connect server's `sc://…`; None runs Spark in
        the driver's own process, or where `spark-submit` said. conf: Spark settings, none of them a secret.
    """

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)


def is_connect(master: str | None) -> bool:
    """True for a Spark Connect server's address."""
    return master is not None and master.startswith("sc://")


def with_task_failures(master: str) -> str:
    """`local[n]` fails a job with its first lost task; `local[n,4]` tries a task as often as a cluster does."""
    if master == "local":
        return f"local[1,{TASK_FAILURES}]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},{TASK_FAILURES}]"
    return master
