"""The command `compact`: rebuilds aged segments of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from airflow_roir.cli.app import (
    AsJson,
    Conf,
    Index,
    Master,
    WithoutSpark,
    app,
    database_of,
    print_json,
    say,
    show,
    terminal_width,
)
from airflow_roir.cli.given import Given, Wrong, settle_of_index, takes
from airflow_roir.cli.last_line import begins
from airflow_roir.definition import argument
from airflow_roir.errors import InvalidInput
from airflow_roir.options import CompactOptions
from airflow_roir.quantity import counted, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_roir.engine.compact.budget import Budget
    from airflow_roir.engine.compact.choice import Action, Choice
    from airflow_roir.engine.control.new_operation import BegunOperation
    from airflow_roir.engine.database import Database

COLUMNS = ("action", "segments", "now", "after", "reads a day", "saves", "costs", "written", "WAL", "work")
TEXTS = 2


@app.command()
@takes(CompactOptions)
def compact(
    context: typer.Context,
    index: Index,
    budget: Annotated[
        str | None,
        typer.Option(
            help="The bytes it may write, with WAL, or how long one worker may work: 20GB, 30min; by default no limit."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what is chosen, with its figures.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure the segments with pgstattuple, which reads all entries.")
    ] = False,
    segment_size: Annotated[
        str | None,
        typer.Option("--segment-size", help="The size of a segment, 2GB: larger ones are split, small ones merged."),
    ] = None,
    *,
    given: Given,
    wrong: Wrong,
    without_spark: WithoutSpark = False,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite the aged segments of an index. Takes those whose saving exceeds the cost; users go on."""
    from airflow_roir.engine.compact.budget import Budget

    allowed, wanted = Budget(), None
    with wrong.noted():
        allowed = Budget.parse(budget)
    with wrong.noted():
        wanted = _bytes(segment_size)
    settle_of_index(context, wrong, index, given)
    database = database_of(context)
    if dry_run:
        from airflow_roir.engine.compact.choosing import choose

        print_choice(choose(database, index, allowed, exact, segment_bytes=wanted), as_json, index)
        return
    from airflow_roir.cli.execute import run_and_print
    from airflow_roir.cli.spark import spark_or_threads
    from airflow_roir.engine.control import live_options

    options = CompactOptions.asked(**given)
    live_options.check_throttle(database, options.throttle)
    with spark_or_threads(without_spark, database.dsn, master, conf) as spark:
        spark.check()
        begins()
        if (begun := _begin(database, index, allowed, exact, wanted, options, as_json)) is None:
            return
        spark.start(begun.operation_id)
        run_and_print(database, begun.index, spark, as_json=as_json)


def _begin(
    database: Database,
    index: str,
    budget: Budget,
    exact: bool,
    segment_bytes: int | None,
    options: CompactOptions,
    as_json: bool,
) -> BegunOperation | None:
    """Begins a compaction of the chosen segments, or continues an unfinished one. None, with a message, if no segment
    is worth it."""
    from airflow_roir.engine.compact import compaction
    from airflow_roir.engine.compact.choosing import choose
    from airflow_roir.engine.control import operations

    actor = operations.default_actor()
    if compaction.is_unfinished(database, index):
        begun = compaction.begin(database, index, (), options, actor, say)
        say(f"continuing unfinished compaction {begun.operation_id}, with what was chosen for it")
        return begun
    choice = choose(database, index, budget, exact, segment_bytes=segment_bytes)
    if not choice.actions:
        print_choice(choice, as_json, index)
        return None
    if choice.rebuild_is_cheaper:
        say(f"a rebuild would cost no more, or write hardly more: roir build {argument(index)}")
    begun = compaction.begin(database, index, choice.actions, options, actor, say)
    gain = f"{choice.totals['gain']:,.0f} page reads, for {choice.totals['cost']:,.0f}"
    say(f"compaction {begun.operation_id}: {counted(len(choice.actions), 'unit')}, to save {gain}")
    return begun


def _bytes(text: str | None) -> int | None:
    """The bytes of a size, written as in a budget."""
    from airflow_roir.engine.compact.budget import Budget

    given = Budget.parse(text, "--segment-size")
    if given.seconds is not None:
        raise InvalidInput(f"--segment-size is {text!r}; it must be a size, such as 2GB")
    return given.bytes


def print_choice(choice: Choice, as_json: bool, index: str = "INDEX") -> None:
    """Prints the choice as JSON, or as a table with totals, omitted segments and advice. index: the name as given."""

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
