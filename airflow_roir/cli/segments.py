"""Prints `roir status INDEX --segments`: a row for each segment, first those whose compaction would free most."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow_roir.cli.cells import fitted, printable, wrapped
from airflow_roir.engine.compact.segment import worst_first
from airflow_roir.engine.compact.segments import EMPTY_TREE
from airflow_roir.quantity import counted, duration, percent, size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from airflow_roir.engine.compact.segment import Segment
    from airflow_roir.engine.snapshot.index import IndexFacts

COLUMNS = (
    "segment",
    "keys",
    "rows",
    "table",
    "B-tree",
    "if built now",
    "leaves full",
    "dead",
    "growth",
    "reads/day",
    "sealed",
)
TEXTS = 2
# The length at which a bound is cut: it may be a text of any length.
SHORT = 20


def segment_lines(facts: IndexFacts, cells: int | None = None) -> Iterator[str]:
    """The segments of one index, with their sum. cells: the terminal's width, None without one."""
    name = printable(facts.index)
    if facts.generation is None or facts.published_at is None or facts.age_seconds is None:
        yield from wrapped(f"index {name} isn't published: its segments are told while readers see it", cells)
        return
    if not facts.segments:
        yield from wrapped(f"index {name}: its tables are gone", cells)
        return
    now = facts.published_at + timedelta(seconds=facts.age_seconds)
    measured = "measured by pgstattuple" if all(one.exact for one in facts.segments) else "by estimates"
    yield from wrapped(
        f"{counted(len(facts.segments), 'segment')} of {name}, {measured}; "
        "first those that would give most back if they were built now",
        cells,
    )
    found = worst_first(facts.segments)
    rows = [_row(one, now) for one in found]
    if len(found) > 1:
        rows.append(_total(found))
    yield from fitted(COLUMNS, TEXTS, rows, [[] for _ in rows], cells)
    for note in dict.fromkeys(part for one in found for part in (one.note or "").split("; ")):
        if note and note != EMPTY_TREE:
            yield from wrapped(f"segments: {printable(note)}", cells)


def _row(one: Segment, now: datetime) -> tuple[str, ...]:
    return (
        str(one.ordinal),
        bounds(one),
        f"{one.rows:,}" if one.rows is not None else "",
        size(one.heap_bytes),
        size(one.tree_bytes),
        size(one.needed) if one.needed is not None else "",
        percent(100 * one.leaf_density) if one.leaf_density is not None else "",
        f"{one.dead_rows:,}",
        f"{one.growth:.1f} x" if one.growth is not None else "",
        _reads(one, now),
        f"{duration((now - one.sealed_at).total_seconds())} ago" if one.sealed_at is not None else "",
    )


def _total(found: Sequence[Segment]) -> tuple[str, ...]:
    rows = [one.rows for one in found if one.rows is not None]
    needed = [one.needed for one in found if one.needed is not None]
    return (
        "all",
        "",
        f"{sum(rows):,}" if len(rows) == len(found) else "",
        size(sum(one.heap_bytes for one in found)),
        size(sum(one.tree_bytes for one in found)),
        size(sum(needed)) if len(needed) == len(found) else "",
        "",
        f"{sum(one.dead_rows for one in found):,}",
        "",
        "",
        "",
    )


def _reads(one: Segment, now: datetime) -> str:
    """The scans a day; for less than a day, the number so far: that of the rest isn't known."""
    if one.since is None:
        return ""
    days = max(1.0, (now - one.since).total_seconds() / 86_400)
    return f"{one.scans / days:,.0f}"


def bounds(one: Segment) -> str:
    """The keys of a segment: `7 to 12`, `below 7`, `from 12 on`, `all`, and `NULL` of the default segment."""
    if one.lower is None and one.upper is None:
        return "NULL" if one.ordinal == 0 else "all"
    if one.lower is None:
        return f"below {_bound(one.upper)}"
    return f"from {_bound(one.lower)} on" if one.upper is None else f"{_bound(one.lower)} to {_bound(one.upper)}"


def _bound(values: tuple[str, ...] | None) -> str:
    text = printable(", ".join(values or ()))
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"
