"""Options as the user edits them in the Task State Store while an operation runs or is paused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it

from airflow_roir.definition import BuildOptions
from airflow_roir.errors import InvalidInput
from airflow_roir.task.form_values import whole_number

if TYPE_CHECKING:
    from airflow.sdk.execution_time.context import TaskStateStoreAccessor

log = logging.getLogger(__name__)


class Apply(Protocol):
    """Puts changed options into effect."""

    def __call__(self, **options: int) -> object:
        """Raises InvalidInput for a value that can't be used."""


def seed(store: TaskStateStoreAccessor, values: Mapping[str, int | None]) -> None:
    """Write the values of the trigger form into the store, unless it has them already.

    They never expire: the default of thirty days is shorter than a long pause.
    """
    for key, value in values.items():
        if value is not None and store.get(key) is None:
            store.set(key, value, retention=NEVER_EXPIRE)


class LiveOptions:
    """Follows the stored values: tells what changed, refuses once what can't be used, and keeps the old value.

    refused: told of each refusal, besides the log.
    current: the options in effect; no others are followed. A key that is missing from the store, or was deleted
    there, changes nothing.
    """

    def __init__(
        self, current: Mapping[str, int | None], refused: Callable[[str], object] = lambda _refusal: None
    ) -> None:
        self._tell_refused = refused
        self._keys = tuple(current)
        self.current = {key: value for key, value in current.items() if value is not None}
        # As text: to Python, True equals 1, and only one of them is a number of workers.
        self._refused: dict[str, str] = {}

    def follow(self, stored: Mapping[str, Any], apply: Apply | None = None) -> dict[str, int]:
        """Compare the stored values with those in effect; returns the changes that are in effect now.

        apply: called once per change, with that option as keyword. None only validates: the caller puts the result
            into effect by starting with it.
        """
        changes: dict[str, int] = {}
        for key in self._keys:
            value = stored.get(key)
            if value is None or self._refused.get(key) == repr(value):
                continue
            try:
                number = whole_number(key, value)
                if number is None or number == self.current.get(key):
                    self._refused.pop(key, None)
                    continue
                BuildOptions(**{key: number})  # type: ignore[arg-type]  # validates
                if apply is not None:
                    apply(**{key: number})
            except InvalidInput as refusal:
                self._refused[key] = repr(value)
                kept = self.current.get(key, "its old value")
                said = f"Refused a value of the Task State Store: {refusal}. {key} stays at {kept}"
                log.warning("%s", said)
                self._tell_refused(said)
                continue
            log.info("%s changes from %s to %s", key, self.current.get(key, "its old value"), number)
            self.current[key] = changes[key] = number
            self._refused.pop(key, None)
        return changes
