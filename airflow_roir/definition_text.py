"""The definition of an index in one line for people: `on public.users by lower(email) AS address, unique`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_roir import key_text
from airflow_roir.definition import key_list


def defined(source: str | None, index: Any) -> str:
    """The definition of an index: table, key and included columns as users write them, condition, UNIQUE.

    source: the table's name, None if it was dropped. index: a row with the columns of `roir.index`.
    """
    texts = dict(index.expressions)
    parts = [f"on {source or 'a table that was dropped'} by {key_list(index.key_columns, texts)}"]
    parts += [f"including {key_list(index.included_columns, texts)}"] if index.included_columns else []
    parts += [f"where {bare(index.condition)}"] if index.condition else []
    parts += ["unique"] if index.is_unique else []
    parts += ["NULLs not distinct"] if index.nulls_not_distinct else []
    return ", ".join(parts)


def listed(names: Sequence[str], expressions: Mapping[str, str]) -> tuple[str, ...]:
    """Key or included columns, each as a user writes it."""
    return tuple(key_list([name], expressions) for name in names)


def bare(condition: str) -> str:
    """A condition without the brackets that the server puts around it."""
    outer = condition.startswith("(") and key_text.end_of_brackets(condition, 0) == len(condition)
    return condition[1:-1] if outer else condition
