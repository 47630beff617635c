"""What all commands share: the application, its options, how they print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from airflow_roir.definition import MAX_PARALLELISM

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database
    from airflow_roir.engine.status import OperationStatus

EXIT_CODES = """
Exit codes: 0 done; 1 failed, or verify found a difference; 2 bad input, nothing was changed, or it was undone; 3 the
operation is paused; 4 another run drives the operation.
"""

app = typer.Typer(
    name="roir",
    help="Resumable online index builds for PostgreSQL, on Spark.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    # Else [n] in a help text is taken for a colour.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Index = Annotated[str, typer.Argument(help="The index: name or schema.name, quoted as in SQL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Parallelism = Annotated[int | None, typer.Option(help=f"Workers at the same time, 1 to {MAX_PARALLELISM}.")]
BatchRows = Annotated[int | None, typer.Option(help="The most source rows per batch; each batch commits.")]
Master = Annotated[str | None, typer.Option(help="Spark master: local[n], spark://…, sc://…")]
Conf = Annotated[list[str] | None, typer.Option(help="A Spark setting, key=value; may be repeated.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Take over even from a run that is alive.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the operation.")]
TableName = Annotated[str | None, typer.Option("--table", help="The source, for a new index.")]
Keys = Annotated[str | None, typer.Option("--keys", help="Key columns, comma-separated, in order.")]
Include = Annotated[str | None, typer.Option("--include", help="Included columns, comma-separated.")]
Ranges = Annotated[int | None, typer.Option(help="Pieces of the scan; by default the plan chooses.")]
Segments = Annotated[
    int | None, typer.Option(help="Pieces of the index, each sealed as one unit; by default the plan chooses.")
]
MaxRows = Annotated[
    int | None, typer.Option("--max-rows-per-second", help="A rate limit for the copy, over all workers.")
]
BatchMs = Annotated[int, typer.Option("--batch-ms", help="Target time per batch, in ms; the size adapts.")]
Scan = Annotated[
    str,
    typer.Option(
        help="What to copy: the table by primary key or by block, or the index that is rebuilt; auto takes the fastest."
    ),
]
Covering = Annotated[
    str, typer.Option(help="Included columns that index-only scans see: auto (those of bounded size), all, none.")
]
IgnoreRowSecurity = Annotated[
    bool,
    typer.Option("--ignore-row-security", help="The view may show rows that the table's policies hide."),
]
IgnorePublications = Annotated[
    bool,
    typer.Option(
        "--ignore-publications",
        help="A publication may contain the index's own tables: its subscribers skip unknown tables.",
    ),
]
Verify = Annotated[
    str, typer.Option(help="Compare index and table: after the build, before a rebuild, both, none.", show_default=True)
]
RevertWindow = Annotated[
    int, typer.Option("--revert-window", help="Seconds for which a replaced generation is kept and maintained.")
]


@app.callback()
def common(
    context: typer.Context,
    dsn: Annotated[
        str | None,
        typer.Option(
            envvar="ROIR_DSN",
            help="The database: postgresql://… or libpq's key=value. Prefer ROIR_DSN: all users can see arguments.",
            show_default=False,
        ),
    ] = None,
) -> None:
    context.obj = dsn


def database_of(context: typer.Context) -> Database:
    if not context.obj:
        raise typer.BadParameter("no database given: set the environment variable ROIR_DSN, or use --dsn")
    from airflow_roir.engine.database import Database

    return Database(context.obj, "roir cli")


def print_json(value: Any) -> None:
    show(json.dumps(value, indent=2))


def show(line: str) -> None:
    """To standard output: what the command was called for."""
    _write(sys.stdout, line)


def say(line: str) -> None:
    """To standard error: what happens on the way."""
    _write(sys.stderr, f"roir: {line}")


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    # At once, for a program that reads along; and a reader that has gone is noticed here, where typer ends the command.
    stream.flush()


# Texts to the left, numbers to the right.
COLUMNS = ("index", "status", "phase", "%", "rows", "rows/s", "left", "time", "workers")
TEXTS = 3


def status_table(found: list[OperationStatus]) -> str:
    """One line per operation below the names of the columns. Not by rich, which is slow to import."""
    rows = [COLUMNS, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < TEXTS else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _cells(one: OperationStatus) -> tuple[str, ...]:
    return (
        one.index,
        one.status,
        one.phase,
        f"{one.percent_complete:g}",
        f"{one.rows:,}",
        f"{one.rows_per_second:,.0f}" if one.rows_per_second is not None else "",
        f"{one.seconds_left:g} s" if one.seconds_left is not None else "",
        f"{one.total_execution_time:.1f} s",
        str(one.parallelism),
    )
