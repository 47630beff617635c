"""Prints `roir status`: two parts, the indexes and their operations. It doesn't use rich, which is slow to import.

Nothing is cut. Without a terminal lines may have any length. On a terminal a table that is too wide becomes a paragraph
for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from airflow_roir.cli.app import print_json, show, terminal_width
from airflow_roir.cli.cells import fitted, printable, wrapped
from airflow_roir.definition import argument, quote
from airflow_roir.definition_text import bare
from airflow_roir.engine.scan import sharing
from airflow_roir.engine.snapshot.operation import LIVE
from airflow_roir.engine.snapshot.words import figures, noun, state_of
from airflow_roir.operation import Status
from airflow_roir.quantity import duration, left, lost, percent, rate, shared, size

if TYPE_CHECKING:
    from airflow_roir.engine.snapshot.index import IndexFacts
    from airflow_roir.engine.snapshot.operation import OperationStatus
    from airflow_roir.engine.snapshot.overview import Overview

INDEX_COLUMNS = ("index", "published", "verified", "rows", "size", "of a table of")
INDEX_TEXTS = 3
OPERATION_COLUMNS = ("index", "operation", "state", "phase", "done", "rate", "time left", "worked")
OPERATION_TEXTS = 4
# The causes that hold a run up but don't show in its rate.
WORTH_SAYING = ("lock", "rate limit", "starting", "another run", "server", "throttled")


def print_overview(seen: Overview, as_json: bool) -> None:
    """Prints both parts, as JSON or as text."""
    if as_json:
        print_json(seen.as_dict())
        return
    for line in overview_lines(seen, terminal_width()):
        show(line)


def overview_lines(seen: Overview, cells: int | None = None) -> Iterator[str]:
    """The two parts. cells: the terminal's width, None without one."""
    indexes, operations = seen.indexes, seen.operations
    if not indexes and not seen.waits:
        yield "no index yet; make one with: roir build INDEX --table TABLE --keys COLUMNS"
        return
    if indexes:
        yield "indexes"
        rows = [_index_row(one) for one in indexes]
        notes = [list(index_notes(one)) for one in indexes]
        yield from fitted(INDEX_COLUMNS, INDEX_TEXTS, rows, notes, cells)
    waiting = seen.not_begun()
    if operations or waiting:
        if indexes:
            yield ""
        yield "operations"
        rows = [_operation_row(one) for one in operations]
        notes = [list(operation_notes(seen, one)) for one in operations]
        if operations:
            yield from fitted(OPERATION_COLUMNS, OPERATION_TEXTS, rows, notes, cells)
        for wait in waiting:
            yield from wrapped(printable(str(wait)), cells)


def _index_row(one: IndexFacts) -> tuple[str, ...]:
    return (
        printable(one.index),
        f"{duration(one.age_seconds)} ago" if one.age_seconds is not None else one.state,
        verified(one) if one.generation is not None else "",
        f"{one.rows:,}" if one.rows is not None else "",
        size(one.bytes) if one.bytes else "",
        "dropped" if one.source is None else "in shards" if one.apart else size(one.source_bytes),
    )


def verified(one: IndexFacts) -> str:
    """The time of the index's last verification, with its result."""
    last = one.verified
    if last is None or one.published_at is None or one.age_seconds is None:
        return "never"
    ago = max(0.0, one.age_seconds + (one.published_at - last.at).total_seconds())
    return f"{duration(ago)} ago, {last.outcome}"


def index_notes(one: IndexFacts) -> Iterator[str]:
    """Yields the notes on an index, as lines."""
    name = argument(one.index)
    yield printable(one.definition)
    if one.unique:
        nulls = ", NULLs not distinct" if one.nulls_not_distinct else ""
        yield f"unique{nulls}: {_enforced(one)}"
    if one.rows_view is not None:
        yield f"whole rows: view {printable(one.rows_view)}"
    for reference in one.references:
        yield f"foreign key: {printable(reference)}"
    if one.revert_until is not None:
        old = next((g for g in one.generations if g.status == "retired"), None)
        if old is not None:
            yield (
                f"the replaced generation ({size(old.bytes)}) is kept until {one.revert_until:%Y-%m-%d %H:%M} UTC: "
                f"roir revert {name}"
            )
    last = one.verified
    if last is not None and last.differences_left:
        kinds = ("missing", "extra", "different", "corrupt", "damaged", "duplicate")
        found = ", ".join(f"{kind} {getattr(last, kind):,}" for kind in kinds if getattr(last, kind))
        yield f"the verification found {found}; repaired {last.repaired:,}: roir verify {name} --repair"
        if last.duplicate:
            yield "duplicate rows are yours to change or delete first: roir.discrepancy has them"
    if one.bloat is not None and one.bloat.win_bytes:
        about = "" if one.bloat.exact else "about "
        yield (
            f"a rebuild would win {about}{size(one.bloat.win_bytes)}, {percent(100 * (one.bloat.win_share or 0))} of "
            f"its size: roir build {name}"
        )
    if one.bloat is not None and one.bloat.exact and not one.bloat.win_bytes:
        yield "a rebuild would win nothing that is worth it"
    if one.bloat is not None and one.bloat.note:
        yield f"bloat: {printable(one.bloat.note)}"
    if one.apart:
        yield printable(_strict_note(one))
    for shard in one.shards:
        if shard.generation == "active":
            yield printable(str(shard))
        if shard.problem is not None:
            yield f"problem: shard {printable(quote(shard.shard))}: {printable(shard.problem)}"
        if shard.doubt is not None:
            yield f"entries may be wrong: {printable(shard.doubt)}: roir verify {name} --repair"
    for line in one.warnings:
        yield f"warning: {printable(line)}"


def _enforced(one: IndexFacts) -> str:
    if one.generation is None:
        return "not enforced yet"
    if one.unique_problem is not None or (one.apart and one.unique_since is None):
        problem = (one.unique_problem or "").replace("roir announce INDEX", f"roir announce {argument(one.index)}")
        return f"not enforced: {printable(problem)}"
    if not one.apart:
        return "enforced over all partitions" + (f", for rows where {printable(bare(one.where))}" if one.where else "")
    return f"enforced since {one.unique_since:%Y-%m-%d %H:%M} UTC over all shards"


def _strict_note(one: IndexFacts) -> str:
    """A note that says whether the index can be read strictly, and which side announces the writes in the shards."""
    if one.announced_by is None:
        return f"no strict reads: its writes aren't announced (roir announce {argument(one.index)} --by server)"
    who = "the shards' servers announce its writes" if one.announced_by == "server" else "clients announce its writes"
    if one.strict_problem is None:
        return f"strict reads are possible: {who}"
    problem = one.strict_problem.replace("roir announce INDEX", f"roir announce {argument(one.index)}")
    return f"no strict reads now, though {who}: {problem}"


def _operation_row(one: OperationStatus) -> tuple[str, ...]:
    now = one.rows_per_second_now
    remaining = left(one.seconds_left, one.seconds_left_low, one.seconds_left_high) or ""
    return (
        printable(one.index),
        f"{noun(one)} {one.operation_id}",
        one.status,
        "" if one.phase == "done" else one.phase_shown,
        percent(one.percent_complete),
        rate(now) if now else "",
        remaining.removesuffix(" left") if one.status in LIVE else "",
        duration(one.total_execution_time),
    )


def _limits(one: OperationStatus) -> Iterator[str]:
    """Yields the limits of an operation: throttle, windows, longest duration."""
    if throttle := one.options["throttle"]:
        yield f"limits: {printable(throttle)}"
    if windows := one.options["windows"]:
        yield f"windows: {printable(windows)}"
    if longest := one.options["max_duration_s"]:
        yield f"longest duration: {duration(longest)}"


def operation_notes(seen: Overview, one: OperationStatus) -> Iterator[str]:
    """Yields the notes on an operation, as lines: its driver, the cause that holds it up, what to do."""
    state = state_of(one)
    yield printable(str(state))
    lives = one.status in LIVE
    if one.shares_scan_of:
        yield printable(sharing.told(one.shares_scan_of))
    if one.duplicate_keys and lives:
        yield f"duplicates: {shared(one.duplicate_keys, one.duplicate_rows)}; roir duplicates {argument(one.index)}"
    if one.compaction is not None and (lives or one.status == Status.FAILED):
        yield str(one.compaction)
        if one.compaction.at_hand:
            yield f"at hand: {'; '.join(one.compaction.at_hand)}"
    held = one.held_up.text if one.held_up is not None and one.held_up.by in WORTH_SAYING else None
    if held is not None and state.name not in ("undriven", "abandoned"):
        yield printable(held)
    if one.notice and lives and one.notice != held:
        yield printable(one.notice)
    if one.long_pause:
        yield f"warning: {printable(one.long_pause)}"
    if lives:
        yield from _limits(one)
    if one.throttle_seconds:
        yield printable(lost(one.throttle_seconds))
    for wait in seen.waits_of(one.index):
        yield printable(str(wait))


def operation_line(seen: Overview, one: OperationStatus) -> str:
    """An operation in one line, for output without a terminal."""
    parts = []
    if one.status in LIVE:
        parts = [f"{one.phase_shown}: {percent(one.percent_complete)}", *figures(one)]
    notes = "; ".join(operation_notes(seen, one))
    return f"{printable(one.index)}: {noun(one)} {one.operation_id}, {', '.join([*parts, notes])}"
