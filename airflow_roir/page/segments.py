"""The segments of an index, as the page Indexes gets them: their sum, and the worst of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_roir.engine.compact.segment import Segment, worst_first

# An index may have hundreds; those that would give most back if they were built now are worth a row.
MOST_SEGMENTS = 20


def shown_segments(found: Sequence[Segment]) -> dict[str, Any] | None:
    """For JSON; None if nothing is published."""
    if not found:
        return None
    rows = [one.rows for one in found if one.rows is not None]
    needed = [one.needed for one in found if one.needed is not None]
    return {
        "count": len(found),
        "rows": sum(rows) if len(rows) == len(found) else None,
        "bytes": sum(one.bytes for one in found),
        "needed": sum(needed) if len(needed) == len(found) else None,
        "worst": [one.as_dict() for one in worst_first(found)[:MOST_SEGMENTS]],
    }
