"""The folder of a task's log, where Spark's own log goes, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

# Replaced, so that every file system takes the name and the path leads nowhere else.
UNSAFE = re.compile(r"[^\w.~:+=@-]|^\.+$")


def log_folder_of(ti: RuntimeTaskInstanceProtocol) -> Path:
    """The folder beside the task's log, by Airflow's default template of names; another template doesn't move it."""
    names = (f"dag_id={ti.dag_id}", f"run_id={ti.run_id}", f"task_id={ti.task_id}")
    folder = Path(conf.get("logging", "base_log_folder"))
    return folder.joinpath(*(UNSAFE.sub("_", name) for name in names))
