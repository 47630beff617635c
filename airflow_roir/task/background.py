"""Runs a call into the engine in a thread, so that the task's main thread can wait for it or leave it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Runs `work` in a daemon thread: when the task leaves, its process ends and the server rolls back."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name="roir-engine", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # handed on whole: result() raises it in the main thread
            self._future.set_exception(error)

    def wait(self, seconds: float) -> bool:
        """Waits at most this many seconds; True when the call has ended, by a return or an error."""
        return bool(wait([self._future], seconds).done)

    def result(self) -> T:
        """The result of the call. If the call raised an error, raises it."""
        return self._future.result()
