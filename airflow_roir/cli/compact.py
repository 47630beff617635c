"""The command that makes aged segments of an index again: compact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from airflow_roir.cli.app import AsJson, Index, app, database_of, print_json, show
from airflow_roir.definition import argument
from airflow_roir.errors import InvalidInput
from airflow_roir.quantity import counted, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_roir.engine.compact.choice import Action, Choice

COLUMNS = ("action", "segments", "now", "after", "reads a day", "saves", "costs", "written", "WAL", "work")
TEXTS = 2


@app.command()
def compact(
    context: typer.Context,
    index: Index,
    budget: Annotated[
        str | None,
        typer.Option(help="What it may write, with WAL, or how long one worker may work: 20GB, 30min; else no limit."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what is chosen, with its figures.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure the segments with pgstattuple, which reads all entries.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make those segments of an index again that save most for what that costs."""
    from airflow_roir.engine.compact.budget import Budget
    from airflow_roir.engine.compact.choosing import choose

    allowed = Budget.parse(budget)
    if not dry_run:
        _execute(context, index, allowed, exact, as_json)
        return
    print_choice(choose(database_of(context), index, allowed, exact), as_json, index)


def _execute(context: typer.Context, index: str, budget: object, exact: bool, as_json: bool) -> None:
    raise InvalidInput("compactions can't be carried out yet; --dry-run shows what would be chosen")


def print_choice(choice: Choice, as_json: bool, index: str = "INDEX") -> None:
    """As JSON, or as a table with its totals, what was left out, and advice. index: as the user named it."""
    from airflow_roir.cli.status import terminal_width

    if as_json:
        print_json(choice.as_dict())
        return
    for line in choice_lines(choice, index, terminal_width()):
        show(line)


def choice_lines(choice: Choice, index: str, cells: int | None) -> Iterator[str]:
    """The lines that `print_choice` shows. cells: the terminal's width; None: any."""
    from airflow_roir.cli.cells import INDENT, fitted, printable, wrapped

    said = f"{printable(index)}: {counted(choice.segments, 'segment')}"
    if choice.actions:
        rows = [_row(one) for one in choice.actions]
        notes = [[one.why] for one in choice.actions]
        if len(rows) > 1:
            rows.append(_total(choice))
            notes.append([])
        yield from fitted(COLUMNS, TEXTS, rows, notes, cells)
        horizon = counted(choice.horizon_days, "day")
        yield from wrapped(
            f"{said}, {len(choice.ordinals)} chosen, budget: {choice.budget}. saves, costs: in page reads; saves: over "
            f"{horizon}. work: of one worker",
            cells,
        )
    else:
        yield from wrapped(f"{said}, none is worth a compaction" + _within(choice), cells)
    for left in choice.left_out:
        yield from wrapped(f"left out: {_named(left.ordinals)}: {printable(left.why)}", cells)
        if left.action is not None:
            yield from wrapped(f"{left.action.why}; saves {left.action.gain:,.0f} page reads", cells, INDENT)
    if choice.rebuild_is_cheaper:
        yield from wrapped(
            f"a rebuild costs no more, or writes hardly more ({size(choice.rebuild_bytes)} with WAL): rather run "
            f"roir build {argument(index)}",
            cells,
        )


def _within(choice: Choice) -> str:
    return f" within the budget of {choice.budget}" if choice.budget.is_limited else ""


def _row(action: Action) -> tuple[str, ...]:
    name = action.kind.value if action.parts == 1 else f"{action.kind.value} in {action.parts}"
    return (name, ", ".join(map(str, action.ordinals)), *_figures(action))


def _total(choice: Choice) -> tuple[str, ...]:
    of = choice.totals
    sizes = [size(of[name]) for name in ("bytes_now", "bytes_after")]
    counts = [f"{of[name]:,.0f}" for name in ("reads_per_day", "gain", "cost")]
    return ("all", "", *sizes, *counts, size(of["bytes_written"]), size(of["bytes_logged"]), duration(of["seconds"]))


def _figures(action: Action) -> tuple[str, ...]:
    return (
        size(action.bytes_now),
        size(action.bytes_after),
        f"{action.reads_per_day:,.0f}",
        f"{action.gain:,.0f}",
        f"{action.cost:,.0f}",
        size(action.bytes_written),
        size(action.bytes_logged),
        duration(action.seconds),
    )


def _named(ordinals: tuple[int, ...]) -> str:
    return f"{'segment' if len(ordinals) == 1 else 'segments'} {', '.join(map(str, ordinals))}"
