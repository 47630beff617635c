"""Keeps the options that can change while an operation lives the same in its row and in the task's Task State Store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it

from airflow_roir.errors import InvalidInput
from airflow_roir.options import LIVE, check_live_options
from airflow_roir.task.form_values import optional_text, whole_number

if TYPE_CHECKING:
    from airflow.sdk.execution_time.context import TaskStateStoreAccessor

log = logging.getLogger(__name__)

# The key under which the store holds the options that row and store last had in common: a value that differs from them
# was changed since. Also for people who read the store.
IN_EFFECT = "in_effect"
# An option of text that is not set is shown as this word: an empty field changes nothing.
TEXTS = tuple(name for name, option in LIVE.items() if option.kind.is_text)
OFF = "off"


class Apply(Protocol):
    """Puts changed options into effect."""

    def __call__(self, **options: int | str) -> Mapping[str, int | str]:
        """Returns the values in effect, as they are shown. Raises InvalidInput for a value that can't be used."""


class LiveOptions:
    """Keeps the Task State Store and the operation's row the same. A change in either is carried to the other.

    in_effect: the store's value of that key; None or anything but a mapping: no task has followed the operation yet.
    refused: called with each refusal, besides the log.

    The newest change wins, in the store or in the row. If both changed while no task looked, the order of the changes
    isn't known; then the store's value is taken.
    """

    def __init__(self, in_effect: Any = None, refused: Callable[[str], object] = lambda _refusal: None) -> None:
        self.in_effect: dict[str, int | str] = dict(in_effect) if isinstance(in_effect, Mapping) else {}
        self._tell_refused = refused

    def settle(self, stored: Mapping[str, Any], row: Mapping[str, int | str], apply: Apply) -> dict[str, Any]:
        """Compares both sides; returns the values to write to the store, by key.

        stored: the store's values; a missing or empty one changes nothing. row: the operation's, of the options that
            may change; no limit is 0, no text `off`. apply: called once per change of the store, with
            that option as keyword.
        """
        writes: dict[str, Any] = {}
        agreed: dict[str, int | str] = {}
        for key, now in row.items():
            wish, value = self._wish(key, stored.get(key), now), now
            if wish not in (None, now, self.in_effect.get(key, now)):
                value = self._apply(key, wish, now, apply)
            elif now != self.in_effect.get(key, now):
                log.info("%s is %s now, not %s: changed outside of this task", key, now, self.in_effect[key])
            if wish != value:
                writes[key] = value
            agreed[key] = value
        # At the end: after an error in between, no value may count as agreed that the store won't get.
        if agreed != self.in_effect or stored.get(IN_EFFECT) is None:
            self.in_effect = agreed
            writes[IN_EFFECT] = agreed
        return writes

    def _wish(self, key: str, raw: Any, now: int | str) -> int | str | None:
        """The stored value; None if there is none, or none that can be used."""
        value: int | str | None
        try:
            if key in TEXTS:
                if not isinstance(raw, str | None):
                    raise InvalidInput(f"{key} is {str(raw)[:80]}; it must be text")
                value = optional_text(raw)
            else:
                value = whole_number(key, raw)
            check_live_options({key: value})
        except InvalidInput as refusal:
            self._refuse(key, refusal, now)
            return None
        return value

    def _apply(self, key: str, wish: int | str | None, now: int | str, apply: Apply) -> int | str:
        assert wish is not None
        try:
            # A text is shown as the server writes it.
            value = apply(**{key: wish}).get(key, wish)
        except InvalidInput as refusal:
            self._refuse(key, refusal, now)
            return now
        log.info("%s changes from %s to %s: changed in the Task State Store", key, now, value)
        return value

    def _refuse(self, key: str, refusal: InvalidInput, now: int | str) -> None:
        said = f"Refused a value of the Task State Store: {refusal}. {key} stays at {now}"
        log.warning("%s", said)
        self._tell_refused(said)


def write(store: TaskStateStoreAccessor, values: Mapping[str, Any]) -> None:
    """Writes into the store without expiry: the default of thirty days is shorter than a long pause."""
    for key, value in values.items():
        store.set(key, value, retention=NEVER_EXPIRE)
