"""What a user asks of a running task in Airflow's UI; a thread looks it up.

A look blocks while the API server can't be reached, and the build must go on meanwhile: the task's main loop only
reads what the last look found.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from airflow.sdk.exceptions import AirflowRuntimeError

from airflow_roir.task.dag_switch import is_dag_paused

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

# The goal for a pause by the switch is one batch plus two seconds, and a look takes some 30 ms.
INTERVAL_S = 1.0


class Store(Protocol):
    """The part of Airflow's Task State Store that is used here."""

    def get(self, key: str, default: Any = None) -> Any:
        """The stored value, or the default."""


class Watcher:
    """Looks at the DAG's switch and at keys of the Task State Store, about once a second.

    ti: the running task instance; store: its Task State Store, None to watch the switch only; keys: what to read
    there. Used as a context manager, or stepped by `look()` alone.

    `paused` and `values` are what the last look that succeeded found. `orphaned` says that the task's supervisor is
    gone: no request reaches this task any more, and its result reaches no one.
    """

    def __init__(self, ti: RuntimeTaskInstanceProtocol, store: Store | None = None, keys: tuple[str, ...] = ()) -> None:
        self.ti = ti
        self.store = store
        self.keys = keys
        self.paused = False
        self.orphaned = False
        self.values: Mapping[str, Any] = {}
        self._stop = threading.Event()
        # A daemon: a look that blocks must not keep the task's process alive.
        self._thread = threading.Thread(target=self._run, name="roir-watcher", daemon=True)

    def look(self) -> None:
        """Look once. If the API server doesn't answer, the last look's findings stay; that raises nothing."""
        try:
            paused = is_dag_paused(self.ti)
            if paused is not None:
                self.paused = paused
            if self.store is not None:
                self.values = {key: self.store.get(key) for key in self.keys}
        except AirflowRuntimeError:
            return
        except (EOFError, OSError):
            self.orphaned = True

    def _run(self) -> None:
        while not self._stop.is_set() and not self.orphaned:
            self.look()
            self._stop.wait(INTERVAL_S)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
