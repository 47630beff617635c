"""Asks a server that may never answer, and waits only for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class InTime(Generic[T]):
    """Asks in a thread, and doesn't ask again before the answer has come."""

    def __init__(self, ask: Callable[[], T], name: str) -> None:
        """name: the thread's. ask: its errors are raised to the caller."""
        self._ask = ask
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def is_owed(self) -> bool:
        """True if the thread still waits for the answer."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, patience_s: float) -> T:
        """The answer. Raises what `ask` raises, and TimeoutError if no answer came within `patience_s`."""
        if self.is_owed:
            raise TimeoutError
        answers: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(self._ask())
            except BaseException as error:  # the caller's
                errors.append(error)

        self._thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._thread.start()
        self._thread.join(patience_s)
        if errors:
            raise errors[0]
        if not answers:
            raise TimeoutError
        return answers[0]
