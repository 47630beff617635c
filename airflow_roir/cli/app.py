"""What all commands share: the application, its options, how they print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

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
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Index = Annotated[str, typer.Argument(help="The index, as SQL writes it: name, schema.name, quoted or not.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Parallelism = Annotated[int | None, typer.Option(help="Workers.")]
BatchRows = Annotated[int | None, typer.Option(help="The most source rows per batch, the unit that commits.")]
Master = Annotated[str | None, typer.Option(help="Spark master: local[n], spark://…, sc://…")]
Conf = Annotated[list[str] | None, typer.Option(help="A Spark setting, key=value. May be repeated.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Take over from a run that is alive.")]
Reason = Annotated[str, typer.Option(help="Why; it is kept with the operation.")]
TableName = Annotated[str | None, typer.Option("--table", help="The source, for an index that is new.")]
Keys = Annotated[str | None, typer.Option("--keys", help="Key columns, comma-separated, in order.")]
Include = Annotated[str | None, typer.Option("--include", help="Included columns, comma-separated.")]
Ranges = Annotated[int | None, typer.Option(help="Pieces of the scan; by default as many as fit the table.")]
Segments = Annotated[int | None, typer.Option(help="Pieces of the index, each sealed as one unit.")]
MaxRows = Annotated[int | None, typer.Option("--max-rows-per-second", help="A rate limit over all workers.")]
BatchMs = Annotated[int, typer.Option("--batch-ms", help="How long a batch should take, in ms: they are cut to fit.")]
Scan = Annotated[
    str,
    typer.Option(help="What to copy: the table by primary key, or by block; the index that is rebuilt; auto."),
]
Covering = Annotated[
    str, typer.Option(help="Included columns that index-only scans see: auto (bounded ones), all, none.")
]
IgnoreRowSecurity = Annotated[
    bool,
    typer.Option("--ignore-row-security", help="The view may show rows that the table's policies hide."),
]
IgnorePublications = Annotated[
    bool,
    typer.Option("--ignore-publications", help="Subscribers skip tables that they don't know, the index's own."),
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
            help="The database: postgresql://… or libpq's key=value. Prefer ROIR_DSN: arguments can be seen by all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    context.obj = dsn


def database_of(context: typer.Context) -> Database:
    if not context.obj:
        raise typer.BadParameter("name the database by --dsn or the environment variable ROIR_DSN")
    from airflow_roir.engine.database import Database

    return Database(context.obj, "roir cli")


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def say(line: str) -> None:
    err.print(f"roir: {line}", markup=False)


def status_table(found: list[OperationStatus]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("index", "status", "phase", "%", "rows", "rows/s", "left", "time", "workers"):
        table.add_column(column, justify="left" if column in ("index", "status", "phase") else "right")
    for one in found:
        table.add_row(
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
    return table
