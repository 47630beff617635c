"""Base of the operators that give a live operation new options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_roir.task.form_values import optional_text, whole_number
from airflow_roir.task.roir_operator import RoirOperator


class OptionsOperator(RoirOperator):
    """Has the options that change while an operation lives: None or '' keeps the operation's own."""

    template_fields: Sequence[str] = (
        *RoirOperator.template_fields,
        "parallelism",
        "batch_rows",
        "max_rows_per_second",
        "throttle",
    )

    def __init__(
        self,
        *,
        parallelism: int | str | None = None,
        batch_rows: int | str | None = None,
        max_rows_per_second: int | str | None = None,
        throttle: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.parallelism = parallelism
        self.batch_rows = batch_rows
        self.max_rows_per_second = max_rows_per_second
        self.throttle = throttle

    def given_options(self) -> dict[str, int | str | None]:
        """The options as numbers and texts. Raises InvalidInput."""
        return {
            "parallelism": whole_number("parallelism", self.parallelism),
            "batch_rows": whole_number("batch_rows", self.batch_rows),
            "max_rows_per_second": whole_number("max_rows_per_second", self.max_rows_per_second),
            "throttle": optional_text(self.throttle),
        }
