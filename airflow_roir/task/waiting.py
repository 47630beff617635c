"""The waits of a task, which is a new process at each look: what it has logged is kept in its Task State Store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it

from airflow_roir.engine.control.wait_log import WaitLog

KEY = "waits"


def wait_log(context: Mapping[str, Any], log: Any) -> WaitLog:
    """The wait log of the task with this context. log: its logger."""
    store = context["task_state_store"]

    def keep(kept: dict[str, Any] | None) -> None:
        if kept is None:
            store.delete(KEY)
        else:
            store.set(KEY, kept, retention=NEVER_EXPIRE)

    return WaitLog(store.get(KEY), keep, lambda line: log.info("%s", line), context["ti"].try_number)
