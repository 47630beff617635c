"""Where and how Spark runs. Imports nothing heavy: Airflow's and the command's processes read it, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_roir.errors import InvalidInput
from airflow_roir.options import MAX_PARALLELISM

# Tasks wait for PostgreSQL nearly all of their time: so local mode has a slot for each worker that may be added later.
# An unused slot costs nothing.
LOCAL_MASTER = f"local[{MAX_PARALLELISM}]"
# As many tries as a cluster gives a task by default.
TASK_FAILURES = 4
# The masters that Spark accepts. With any other its driver would fail at its start, after the index is prepared.
MASTER = re.compile(
    r"local(\[\s*([1-9]\d*|\*)\s*(,\s*[1-9]\d*\s*)?\])?|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|yarn"
    r"|k8s://\S+|sc://\S+|spark://[^\s,]+:\d+(,[^\s,]+:\d+)*"
)
# Spark's own default of `spark.redaction.regex`, plus its spelling with a dot.
_SECRET_NAME = re.compile(r"secret|password|passphrase|token|access[.]?key|credential", re.IGNORECASE)
SECRETS_GO = (
    "Put a setting into spark-defaults.conf on the machine that runs the driver, and Spark Connect's token into the "
    "environment variable SPARK_CONNECT_AUTHENTICATE_TOKEN of the worker or command"
)


@dataclass(frozen=True)
class SparkOptions:
    """Where and how Spark runs.

    master: a master URL as `spark-submit --master` takes it, or a Spark Connect server's `sc://…`; None runs Spark in
        the driver's own process, or where `spark-submit` said. conf: Spark settings, none of them a secret.

    Raises InvalidInput for a text that is no master.
    """

    master: str | None = None
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.master is not None and not MASTER.fullmatch(self.master):
            # Behind a semicolon there may be a token.
            raise InvalidInput(
                f"{self.master.partition(';')[0]!r} is no Spark master. Give local, local[4], spark://host:7077, "
                "sc://host, k8s://https://host:443 or yarn"
            )

    def secrets(self) -> list[str]:
        """The names in address and settings that look like those of secrets."""
        of_address = [part.partition("=")[0].strip() for part in (self.master or "").split(";")[1:]]
        return sorted(name for name in (*of_address, *self.conf) if _SECRET_NAME.search(name))


def is_connect(master: str | None) -> bool:
    """True for a Spark Connect server's address."""
    return master is not None and master.startswith("sc://")


def with_task_failures(master: str) -> str:
    """The master with a number of tries: `local[n]` fails a job with its first lost task; `local[n,4]` tries a task as
    often as a cluster does."""
    if master == "local":
        return f"local[1,{TASK_FAILURES}]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},{TASK_FAILURES}]"
    return master
