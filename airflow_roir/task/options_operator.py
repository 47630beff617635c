"""Base of the operators that give a live operation new options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_roir.options import LIVE_OPTIONS
from airflow_roir.span import seconds
from airflow_roir.task.form_values import optional_text, whole_number
from airflow_roir.task.roir_operator import RoirOperator


class OptionsOperator(RoirOperator):
    """Has the options that change while an operation lives: None or '' keeps the operation's own."""

    template_fields: Sequence[str] = (*RoirOperator.template_fields, *LIVE_OPTIONS)

    def __init__(
        self,
        *,
        parallelism: int | str | None = None,
        batch_rows: int | str | None = None,
        max_rows_per_second: int | str | None = None,
        shard_parallelism: int | str | None = None,
        throttle: str | None = None,
        windows: str | None = None,
        max_duration_s: int | str | None = None,
        priority: int | str | None = None,
        warn_after_s: int | str | None = None,
        abort_after_s: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.parallelism = parallelism
        self.batch_rows = batch_rows
        self.max_rows_per_second = max_rows_per_second
        self.shard_parallelism = shard_parallelism
        self.throttle = throttle
        self.windows = windows
        self.max_duration_s = max_duration_s
        self.priority = priority
        self.warn_after_s = warn_after_s
        self.abort_after_s = abort_after_s

    def given_options(self) -> dict[str, Any]:
        """The options as numbers and texts. Raises InvalidInput."""
        return {name: option_of(name, getattr(self, name)) for name in LIVE_OPTIONS}


def option_of(name: str, value: Any) -> int | str | None:
    """A live option as a form or a template gives it: a number, a text, or a duration (`2h`). Raises InvalidInput."""
    if name in ("throttle", "windows"):
        return optional_text(value)
    return seconds(name, value) if name.endswith("_s") and isinstance(value, str) else whole_number(name, value)
