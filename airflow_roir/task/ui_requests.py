"""Reads what a user asks of a running task in Airflow's UI: the DAG's switch and edits of its store; in a thread.

A read blocks while the API server can't be reached, and the build must go on meanwhile: the task's main loop only
uses the result of the last read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it
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

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        """Stores a value."""


class Watcher:
    """Looks at the DAG's switch and at keys of the Task State Store, about once a second.

    ti: the running task instance; store: its Task State Store, None to watch the switch only; keys: of the store, to be
    read. Used as a context manager, or stepped by `look()` alone. `write` sends values to the store at the next look,
    unless the user has changed the value since the last one.

    `paused` and `found()` are of the last look that succeeded. `orphaned`: the task's supervisor is gone, so no request
    reaches this task any more, and its result gets lost.
    """

    def __init__(self, ti: RuntimeTaskInstanceProtocol, store: Store | None = None, keys: tuple[str, ...] = ()) -> None:
        self.ti = ti
        self.store = store
        self.keys = keys
        self.paused = False
        self.orphaned = False
        self.values: Mapping[str, Any] | None = None
        self._writes: dict[str, tuple[Any, Any]] = {}
        self._stop = threading.Event()
        # A daemon: a look that blocks must not keep the task's process alive.
        self._thread = threading.Thread(target=self._run, name="roir-watcher", daemon=True)

    def look(self) -> None:
        """Looks once. If the API server doesn't answer, the last look's findings stay; that raises nothing."""
        try:
            paused = is_dag_paused(self.ti)
            if paused is not None:
                self.paused = paused
            if self.store is not None:
                self._look_into(self.store)
        except AirflowRuntimeError:
            return
        except (EOFError, OSError):
            self.orphaned = True

    def _look_into(self, store: Store) -> None:
        writes = dict(self._writes)
        for key, (seen, value) in writes.items():
            if store.get(key) == seen:
                store.set(key, value, retention=NEVER_EXPIRE)
        self.values = {key: store.get(key) for key in self.keys}
        # After the values: `found` must never return values older than a write that it no longer waits for.
        for key, written in writes.items():
            if self._writes.get(key) is written:
                del self._writes[key]

    def found(self) -> Mapping[str, Any] | None:
        """The store's values at the last look; None before the first one, and while values are to be written."""
        return None if self._writes else self.values

    def write(self, values: Mapping[str, Any]) -> None:
        """Makes the thread write values to the store, since a write can block, as a look can."""
        found = self.values or {}
        self._writes |= {key: (found.get(key), value) for key, value in values.items()}

    def _run(self) -> None:
        while not self._stop.is_set() and not self.orphaned:
            self.look()
            self._stop.wait(INTERVAL_S)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
