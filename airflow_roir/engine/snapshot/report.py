"""An operation as one page for a change ticket, in Markdown or HTML, from what `details.progress` reads.

By default it is the index's latest build: later verifications and compactions are a part of its page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any

from airflow_roir import option as declared
from airflow_roir.definition import argument, parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot import details
from airflow_roir.engine.snapshot.operation import OperationStatus, read
from airflow_roir.engine.snapshot.parts import Error, PhaseOf
from airflow_roir.engine.snapshot.words import done, noun, state_of
from airflow_roir.engine.verify.report import VerifyReport, report
from airflow_roir.errors import NotFound
from airflow_roir.one_line import one_line
from airflow_roir.operation import BUILDS, Kind, Status
from airflow_roir.options import LIVE
from airflow_roir.quantity import counted, duration, lost, rate, size

# All that Markdown or the HTML in it gives a meaning to within a line. An underscore has none inside a name.
_MARKS = re.compile(r"([\\`*\[\]|<~&$]|(?<![^\W_])_|_(?![^\W_]))")
STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em 1em .2em 0}"

# A title, the heads of its columns ('' for none), rows of plain texts.
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]

LATEST_BUILD = """
SELECT max(b.id) FROM roir.operation o JOIN roir.operation b ON b.index_id = o.index_id
 WHERE o.id = %(operation)s AND b.kind IN ('create', 'rebuild')
"""
LATER = """
SELECT l.id FROM roir.operation o JOIN roir.operation l ON l.index_id = o.index_id AND l.id > o.id
 WHERE o.id = %(operation)s ORDER BY l.id DESC LIMIT %(most)s
"""
# The most later operations that a page lists.
MOST_LATER = 20


def write(database: Database, index: str, operation_id: int | None = None, in_html: bool = False) -> str:
    """The page about an index's latest build, or about the operation with that id. Raises NotFound, InvalidInput."""
    listed = f"its operations: roir status {argument(index)} --history"
    try:
        one = details.progress(database, index, operation_id)
    except NotFound:
        if operation_id is None:
            with database.transaction() as connection:
                aborted = operations.aborted_build(connection, parse_name(index, "index"))
            if aborted is None:
                raise
            return write(database, index, aborted.id, in_html)
        # Raises if there is no such index.
        operations.find_operation(database, index)
        raise NotFound(f"index {index} has no operation {operation_id}; {listed}") from None
    if operation_id is None and one.kind not in BUILDS:
        one = _latest_build(database, index, one)
    named, its = parse_name(index, "index"), parse_name(one.index, "index")
    if named.name != its.name or named.schema not in (None, its.schema):
        raise NotFound(f"operation {one.operation_id} is one of index {one.index}, not of {index}; {listed}")
    compared = report(database, one.verification_id) if one.is_compared and one.verification_id else None
    return (as_html if in_html else markdown)(one, compared, _later(database, one) if one.kind in BUILDS else ())


def _latest_build(database: Database, index: str, one: OperationStatus) -> OperationStatus:
    """The latest build of an operation's index; the operation itself if no build is known."""
    with database.transaction() as connection:
        found = execute(connection, LATEST_BUILD, {"operation": one.operation_id}).scalar()
    return one if found is None else details.progress(database, index, found)


def _later(database: Database, one: OperationStatus) -> Sequence[OperationStatus]:
    """The operations of its index that came after a build, until the next one."""
    with database.transaction() as connection:
        values = {"operation": one.operation_id, "most": MOST_LATER}
        ids = list(execute(connection, LATER, values).scalars())
        found = sorted(read(connection, ids), key=lambda later: later.operation_id) if ids else []
    return list(takewhile(lambda later: later.kind not in BUILDS, found))


def markdown(one: OperationStatus, compared: VerifyReport | None, later: Sequence[OperationStatus] = ()) -> str:
    """The page in Markdown: texts of users can't be more than text."""
    parts = [f"# {_md(_title(one, later))}"]
    for title, heads, rows in _tables(one, compared, later):
        lines = [heads, ("---",) * len(heads)]
        shown = [" | ".join(line) for line in lines] + [" | ".join(map(_md, row)) for row in rows]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {line} |" for line in shown))
    return "\n\n".join(parts)


def as_html(one: OperationStatus, compared: VerifyReport | None, later: Sequence[OperationStatus] = ()) -> str:
    """The page in HTML, without a script and without anything to load."""
    title = html.escape(_title(one, later))
    parts = [f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>']
    parts.append(f"<h1>{title}</h1>")
    for name, heads, rows in _tables(one, compared, later):
        lines = [_tr("th", heads), *(_tr("td", row) for row in rows)]
        parts.append(f"<h2>{name}</h2>\n<table>\n" + "\n".join(lines) + "\n</table>")
    return "\n".join([*parts, "</html>"])


def _tr(cell: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(_line(text))}</{cell}>" for text in texts) + "</tr>"


def _md(text: str) -> str:
    return _MARKS.sub(r"\\\1", _line(text))


def _line(text: str) -> str:
    return one_line(text, len(text))


def _title(one: OperationStatus, later: Sequence[OperationStatus]) -> str:
    title = f"{noun(one).capitalize()} of {one.index}, operation {one.operation_id}: {state_of(one).word}"
    # A verification that found differences counts more than the build's own.
    return title + "".join(f"; {noun(last)} {last.operation_id}: {state_of(last).word}" for last in later[-1:])


def _tables(one: OperationStatus, compared: VerifyReport | None, later: Sequence[OperationStatus]) -> list[Table]:
    tables: list[Table] = [
        ("Facts", ("What", "Value"), _facts(one, compared)),
        (
            "Since then",
            ("Operation", "Begun", "State", "Its report"),
            [
                (
                    f"{noun(o)} {o.operation_id}",
                    _moment(o.started_at),
                    str(state_of(o)),
                    f"roir report {argument(o.index)} --operation {o.operation_id}",
                )
                for o in later
            ],
        ),
        ("Options", ("Option", "Value"), _options(one)),
        (
            "Phases",
            ("Phase", "State", "Time of work"),
            [(p.name, _state(one, p), "" if p.seconds is None else duration(p.seconds)) for p in one.phases],
        ),
        (
            "Pauses",
            ("From", "Until", "By", "Why"),
            [(_moment(p.at), _moment(p.until) or "now", p.by, p.why) for p in one.pauses],
        ),
        ("Errors", ("At", "Error", "Remedy"), [(_moment(e.at), e.text, _then(e)) for e in one.errors]),
        (
            "Events, the last ones",
            ("At", "By", "Event", "Detail"),
            [(_moment(e.at), e.actor, e.action, e.detail or "") for e in reversed(one.events)],
        ),
    ]
    return [table for table in tables if table[2]]


def _facts(one: OperationStatus, compared: VerifyReport | None) -> list[tuple[str, ...]]:
    facts = {
        "Index": one.index,
        "Table": one.source,
        "Definition": one.definition,
        "State": str(state_of(one)),
        "Begun": _moment(one.started_at),
        "Ended": _moment(one.finished_at),
        "Driven by": one.owner or "",
        "Rows": done(one),
        "Rate": rate(one.rows_per_second) if one.rows_per_second else "",
        "Time of work": duration(one.total_execution_time),
        "Throttle": lost(one.throttle_seconds),
        "Verification": _verification(one, compared),
        "Duplicates": _duplicates(one),
        "Compaction": "" if one.compaction is None else str(one.compaction),
        "Delta": "" if one.delta is None else f"{counted(one.delta.rows, 'row')}, {size(one.delta.bytes)}",
        "Error": one.error or "",
        "Ended by": f"{one.ended_by}: {one.end_reason or ''}" if one.ended_by else "",
        "Report of": _moment(one.now),
    }
    return [(name, value) for name, value in facts.items() if value]


def _verification(one: OperationStatus, compared: VerifyReport | None) -> str:
    if compared is not None:
        return f"{compared}: {'index and table are equal' if compared.is_exact else 'they differ'}"
    if one.kind == Kind.COMPACT:
        return ""
    return "not compared yet" if one.compares or one.kind == Kind.VERIFY else "not compared before the publish"


def _duplicates(one: OperationStatus) -> str:
    if not one.unique:
        return ""
    if not one.duplicate_keys:
        return "all were healed" if one.has_duplicates else "none found"
    return f"{counted(one.duplicate_keys, 'key')} of {counted(one.duplicate_rows, 'row')}"


def _state(one: OperationStatus, phase: PhaseOf) -> str:
    """The state of a phase; an operation that is over without an end has left it where it was."""
    if one.status not in (Status.ABORTING, Status.ABORTED, Status.FAILED):
        return phase.state
    return {"now": "not finished", "ahead": "not begun"}.get(phase.state, phase.state)


def _options(one: OperationStatus) -> list[tuple[str, ...]]:
    """The options that have a value, by their titles in the form."""
    found = ((LIVE[name], value) for name, value in one.options.items() if value not in (None, ""))
    return [(option.title or option.name, _value(option, value)) for option, value in found]


def _value(option: declared.Option, value: Any) -> str:
    if option.kind is declared.Kind.SPAN:
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _then(error: Error) -> str:
    """The remedy of an error; of one that is over, how it went on."""
    if error.continued_at is None:
        return error.remedy
    return f"continued at {_moment(error.continued_at)} by {error.continued_by or 'unknown'}"


def _moment(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S %Z}"
