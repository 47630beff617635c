"""What `roir status` prints: two parts, the indexes and their operations. Not by rich, which is slow to import.

Without a terminal nothing is cut, and lines are as long as they are. On a terminal a table that is too wide becomes a
paragraph for each row, so that nothing is cut there either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from airflow_roir.cli.app import print_json, show, terminal_width
from airflow_roir.cli.cells import fitted, printable, wrapped
from airflow_roir.cli.snapshot import PAUSING, Look
from airflow_roir.definition import argument, quote
from airflow_roir.operation import BY_DUPLICATES, QUEUED, Status
from airflow_roir.quantity import counted, duration, left, lost, percent, rate, shared, size

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_roir.engine.snapshot.details import Progress
    from airflow_roir.engine.snapshot.index import IndexFacts
    from airflow_roir.engine.snapshot.operation import OperationStatus

INDEX_COLUMNS = ("index", "generation", "published", "verified", "rows", "size", "of a table of")
INDEX_TEXTS = 4
OPERATION_COLUMNS = ("index", "operation", "state", "phase", "done", "rate", "time left", "worked")
OPERATION_TEXTS = 4
# What holds a run up and isn't seen in its rate.
WORTH_SAYING = ("lock", "rate limit", "starting", "another run", "server", "throttled")


def print_overview(seen: Look, as_json: bool) -> None:
    """Both parts, as JSON or as text."""
    if as_json:
        print_json(seen.as_dict())
        return
    for line in overview_lines(seen, terminal_width()):
        show(line)


def overview_lines(seen: Look, cells: int | None = None) -> Iterator[str]:
    """The two parts. cells: the terminal's width, None without one."""
    indexes, operations = seen.overview.indexes, seen.overview.operations
    if not indexes and not seen.overview.waits:
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
        rows = [_operation_row(seen, one) for one in operations]
        notes = [list(operation_notes(seen, one)) for one in operations]
        if operations:
            yield from fitted(OPERATION_COLUMNS, OPERATION_TEXTS, rows, notes, cells)
        for wait in waiting:
            yield from wrapped(printable(str(wait)), cells)


def _index_row(one: IndexFacts) -> tuple[str, ...]:
    return (
        printable(one.index),
        str(one.generation) if one.generation is not None else one.state,
        f"{duration(one.age_seconds)} ago" if one.age_seconds is not None else "",
        verified(one) if one.generation is not None else "",
        f"{one.rows:,}" if one.rows is not None else "",
        size(one.bytes) if one.bytes else "",
        "dropped" if one.source is None else "in shards" if one.apart else size(one.source_bytes),
    )


def verified(one: IndexFacts) -> str:
    """When the index was verified, and with what outcome."""
    last = one.verified
    if last is None or one.published_at is None or one.age_seconds is None:
        return "never"
    ago = max(0.0, one.age_seconds + (one.published_at - last.at).total_seconds())
    part = {"all": "", "sample": " in a sample", "slice": " in a slice"}.get(last.part, " as far as it came")
    wrong = last.found - last.repaired
    outcome = "exact" if not last.found else f"{wrong:,} wrong" if wrong else f"{last.repaired:,} repaired"
    return f"{duration(ago)} ago, {outcome}{part}"


def index_notes(one: IndexFacts) -> Iterator[str]:
    """What else there is to say of an index: lines."""
    name = argument(one.index)
    if one.unique:
        nulls = ", NULLs not distinct" if one.nulls_not_distinct else ""
        yield f"unique{nulls}: {_enforced(one)}"
    if one.revert_until is not None:
        old = next((g for g in one.generations if g.status == "retired"), None)
        if old is not None:
            yield (
                f"generation {old.id} ({size(old.bytes)}) is kept until {one.revert_until:%Y-%m-%d %H:%M} UTC: "
                f"roir revert {name}"
            )
    last = one.verified
    if last is not None and last.found > last.repaired:
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
            yield f"in doubt: {printable(shard.doubt)}: roir verify {name} --repair"
    for line in one.warnings:
        yield f"warning: {printable(line)}"


def _enforced(one: IndexFacts) -> str:
    if one.generation is None:
        return "not enforced yet"
    if not one.apart:
        return "enforced over all partitions"
    if one.unique_since is None:
        problem = (one.unique_problem or "").replace("roir announce INDEX", f"roir announce {argument(one.index)}")
        return f"not enforced: {printable(problem)}"
    return f"enforced since {one.unique_since:%Y-%m-%d %H:%M} UTC over all shards"


def _strict_note(one: IndexFacts) -> str:
    """Who announces the writes in the shards, and whether the index can be read strictly."""
    if one.announced_by is None:
        return f"no strict reads: its writes aren't announced (roir announce {argument(one.index)} --by server)"
    who = "the shards' servers announce its writes" if one.announced_by == "server" else "clients announce its writes"
    if one.strict_problem is None:
        return f"strict reads are possible: {who}"
    problem = one.strict_problem.replace("roir announce INDEX", f"roir announce {argument(one.index)}")
    return f"no strict reads now, though {who}: {problem}"


def _operation_row(seen: Look, one: OperationStatus) -> tuple[str, ...]:
    found = seen.progress.get(one.operation_id)
    moves = one.status in (Status.RUNNING, Status.PAUSED)
    now = one.rows_per_second_now
    return (
        printable(one.index),
        f"{what_of(one)} {one.operation_id}",
        seen.state(one),
        "" if one.phase == "done" else _phase(one, found),
        percent(one.percent_complete),
        rate(now) if now else "",
        (left(one.seconds_left, one.seconds_left_low, one.seconds_left_high) or "").removesuffix(" left")
        if moves
        else "",
        duration(found.seconds_worked if found else one.total_execution_time),
    )


def _limits(one: OperationStatus) -> Iterator[str]:
    """What it was told to keep to."""
    if throttle := one.options["throttle"]:
        yield f"limits: {printable(throttle)}"
    if windows := one.options["windows"]:
        yield f"windows: {printable(windows)}"
    if longest := one.options["max_duration_s"]:
        yield f"longest duration: {duration(longest)}"


def what_of(one: OperationStatus) -> str:
    """What an operation does."""
    return "census" if one.census else one.kind


def _phase(one: OperationStatus, found: Progress | None) -> str:
    """As `progress` names it, which tells the comparison from the publish."""
    if found is not None:
        return next((phase.name for phase in found.phases if phase.state == "now"), one.phase)
    return one.phase


def operation_notes(seen: Look, one: OperationStatus) -> Iterator[str]:
    """Who drives an operation, what holds it up, what is to be done: lines."""
    yield driven(seen, one)
    if one.shares_scan_of:
        yield printable(f"shares the scan of {', '.join(one.shares_scan_of)}")
    if one.duplicate_keys and one.status in (Status.RUNNING, Status.PAUSED):
        yield f"duplicates: {shared(one.duplicate_keys, one.duplicate_rows)}; roir duplicates {argument(one.index)}"
    if one.compaction is not None and one.status in (Status.RUNNING, Status.PAUSED, Status.FAILED):
        yield str(one.compaction)
        if one.compaction.at_hand:
            yield f"at hand: {'; '.join(one.compaction.at_hand)}"
    found = seen.progress.get(one.operation_id)
    if found is not None and one.status == Status.RUNNING and found.held_up.by in WORTH_SAYING:
        yield printable(found.held_up.text)
    if (
        one.notice
        and one.status in (Status.RUNNING, Status.PAUSED)
        and (found is None or one.notice != found.held_up.text or found.held_up.by not in WORTH_SAYING)
    ):
        yield printable(one.notice)
    if one.long_pause:
        yield f"warning: {printable(one.long_pause)}"
    if one.status in (Status.RUNNING, Status.PAUSED):
        yield from _limits(one)
    if one.throttle_seconds:
        yield printable(lost(one.throttle_seconds))
    for wait in seen.waits_of(one.index):
        yield printable(str(wait))


def driven(seen: Look, one: OperationStatus) -> str:
    """The state of an operation in words, with who drives it, or who ended it."""
    state = seen.state(one)
    found = seen.progress.get(one.operation_id)
    name = argument(one.index)
    if state == Status.RUNNING:
        if one.driven:
            return f"running, driven by {printable(one.owner or 'unknown')}"
        if one.notice is not None and one.notice.startswith(QUEUED):
            return "waits for its turn: roir queue shows all that do"
        if one.silent_seconds is None:
            return f"running, no run drives it yet: a waiting task begins within half a minute, or: roir resume {name}"
        since = duration(one.silent_seconds)
        return f"running, but no run has driven it for {since}: its task's next try will, or: roir resume {name}"
    who = f" by {printable(one.paused_by or 'unknown')}: {printable(one.pause_reason or '')}"
    if state == PAUSING:
        alive = found.workers.alive if found is not None else 0
        rest = f"; {counted(alive, 'worker')} still to commit" if alive else "; its run is still to leave"
        return f"pausing, on request{who}{rest}"
    if state == Status.PAUSED and one.paused_by == BY_DUPLICATES:
        return (
            f"paused{_ago(one.paused_at, seen)}, since rows share keys of the unique index. Change or delete rows "
            f"until each key is left once, then: roir resume {name}"
        )
    if state == Status.PAUSED:
        return f"paused{_ago(one.paused_at, seen)}{who}; resume with: roir resume {name}"
    if state == Status.FAILED:
        return f"failed: {printable(one.error or '')}; abort it with: roir abort {name}"
    by = f", aborted by {printable(one.ended_by)}: {printable(one.end_reason or '')}" if one.ended_by else ""
    if state == Status.ABORTING:
        return f"aborting{by}; roir clean-up finishes it if its run is gone"
    if state == Status.ABORTED:
        rest = "what it had built is removed" if one.compaction is None else f"{one.compaction}, which stays"
        return f"ended{_ago(one.finished_at, seen)}{by}; {rest}"
    if one.compaction is not None:
        return f"completed{_ago(one.finished_at, seen)}: {one.compaction}"
    what = "compared" if one.kind == "verify" else "copied"
    at = f", {rate(one.rows_per_second)} while it {what}" if one.rows_per_second else ""
    return f"completed{_ago(one.finished_at, seen)}: {counted(one.rows, 'row')} {what}{at}"


def _ago(moment: datetime | None, seen: Look) -> str:
    return "" if moment is None else f" {duration(max(0.0, (seen.overview.now - moment).total_seconds()))} ago"


def operation_line(seen: Look, one: OperationStatus) -> str:
    """One operation in one line, for whoever reads along without a terminal."""
    found = seen.progress.get(one.operation_id)
    parts = []
    if seen.state(one) in (Status.RUNNING, PAUSING, Status.PAUSED):
        parts = [f"{_phase(one, found)}: {percent(one.percent_complete)}", counted(one.rows, "row")]
        if one.rows_per_second_now:
            parts.append(rate(one.rows_per_second_now))
        if seen.state(one) == Status.RUNNING and (
            remaining := left(one.seconds_left, one.seconds_left_low, one.seconds_left_high)
        ):
            parts.append(remaining)
    notes = "; ".join(operation_notes(seen, one))
    return f"{printable(one.index)}: {what_of(one)} {one.operation_id}, {', '.join([*parts, notes])}"
