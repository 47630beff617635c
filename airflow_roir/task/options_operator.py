"""Base of the operators that give a live operation new options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_roir.options import LIVE, LIVE_OPTIONS
from airflow_roir.task.given import takes, value_of
from airflow_roir.task.roir_operator import RoirOperator


class OptionsOperator(RoirOperator):
    """Has the options that change while an operation lives: None or '' keeps the operation's own."""

    template_fields: Sequence[str] = (*RoirOperator.template_fields, *LIVE_OPTIONS)

    @takes(LIVE_OPTIONS)
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def given_options(self) -> dict[str, Any]:
        """The options as numbers and texts. Raises InvalidInput."""
        return {name: value_of(option, getattr(self, name)) for name, option in LIVE.items()}
