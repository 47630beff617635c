"""A range of the source in scan order, its watermark, and the SQL that scans it by key (docs/architecture.md#scan)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_roir.definition import quote

Key = list[str]


@dataclass(frozen=True)
class ScanRange:
    """A half-open range `[lower, upper)`; None is unbounded. watermark: the last *done* key; work continues after it.

    Keys are lists of the columns' text output under pinned settings, which reads back as the same value. If a range is
    a piece of a file, keys are block numbers, and filenode identifies the file.
    """

    lower: Key | None
    upper: Key | None
    watermark: Key | None = None
    filenode: int | None = None

    def condition(self, columns: Sequence[str], casts: Sequence[str], last: Key | None, values: dict[str, str]) -> str:
        """SQL for the rows after the watermark, up to and with `last`, or up to the upper bound if it is None.

        columns: names of the scan key; casts: the types to compare them as. Puts the values to bind into `values`.
        PostgreSQL itself compares, row-wise, so any type and collation is in the right order.
        """
        terms = []
        if self.watermark is not None:
            terms.append(_compare(columns, casts, ">", self.watermark, "w", values))
        elif self.lower is not None:
            terms.append(_compare(columns, casts, ">=", self.lower, "l", values))
        if last is not None:
            terms.append(_compare(columns, casts, "<=", last, "k", values))
        elif self.upper is not None:
            terms.append(_compare(columns, casts, "<", self.upper, "u", values))
        return " AND ".join(terms) or "true"


def _compare(
    columns: Sequence[str], casts: Sequence[str], operator: str, key: Key, prefix: str, values: dict[str, str]
) -> str:
    bound = []
    for i, (value, cast) in enumerate(zip(key, casts, strict=True)):
        values[f"{prefix}{i}"] = value
        bound.append(f"%({prefix}{i})s::{cast}")
    # Cast on the left, too, which is free and leaves the index usable: a domain isn't comparable with each base type.
    left = ", ".join(f"{quote(column)}::{cast}" for column, cast in zip(columns, casts, strict=True))
    if len(columns) == 1:
        return f"{left} {operator} {bound[0]}"
    # The planner can't use the bounds of a row; from those of the leading column it estimates the number of rows.
    leading = f"{quote(columns[0])}::{casts[0]} {operator[0]}= {bound[0]}"
    return f"{leading} AND ({left}) {operator} ({', '.join(bound)})"
