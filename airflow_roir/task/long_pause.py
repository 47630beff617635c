"""Calls callbacks for operations that have been paused for long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airflow_roir.engine.control.long_pause import LongPause

LongPauseCallback = Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None


def call_long_pause(
    callbacks: LongPauseCallback, context: Mapping[str, Any], pause: LongPause, log: logging.Logger | Any
) -> None:
    """Calls each with the context, as Airflow calls its own; `context["long_pause"]` is the pause.

    An error of a callback is logged: the task goes on, and the others are called.
    """
    if callbacks is None:
        return
    for callback in [callbacks] if callable(callbacks) else callbacks:
        try:
            callback({**context, "long_pause": pause})
        except Exception as error:  # the user's code
            log.error("on_long_pause_callback failed: %s: %s", type(error).__name__, error)
