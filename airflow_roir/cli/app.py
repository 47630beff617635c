"""What all commands share: the application, its options, how they print."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from airflow_roir import __version__
from airflow_roir.errors import InvalidInput
from airflow_roir.options import MAX_PARALLELISM, MIN_BATCH_ROWS
from airflow_roir.span import seconds

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database

EXIT_CODES = """
Exit codes: 0 done; 1 failed, verify found a difference, or duplicates or a census found some; 2 bad input, nothing was
changed, or it was undone; 3 the operation is paused; 4 another run drives the operation; 5 it
waits in the queue, of spark-submit alone; 130 Ctrl-C ended --watch, and nothing else;
141 the reader of its output has gone.
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
Indexes = Annotated[
    list[str], typer.Argument(metavar="INDEX...", help="The index, or several that exist: name or schema.name.")
]
Beside = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        help="One more new index of the table, as 'name (keys) INCLUDE (columns)'; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Parallelism = Annotated[int | None, typer.Option(help=f"Workers at the same time, 1 to {MAX_PARALLELISM}.")]
BatchRows = Annotated[
    int | None, typer.Option(help=f"The most source rows per batch; each batch commits. At least {MIN_BATCH_ROWS:,}.")
]
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
    int | None, typer.Option("--max-rows-per-second", help="A rate limit for the copy, over all workers; 0: no limit.")
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
Unique = Annotated[
    bool,
    typer.Option(
        "--unique", help="No two rows may have the same key, over all partitions, or shards. A rebuild keeps it."
    ),
]
NullsNotDistinct = Annotated[
    bool, typer.Option("--nulls-not-distinct", help="Nor the same NULLs in the key; with --unique.")
]
OnDuplicate = Annotated[
    str,
    typer.Option(
        "--on-duplicate",
        help="Where rows share a key of a unique index: pause once all are listed, or stop at the first.",
    ),
]
Census = Annotated[
    bool,
    typer.Option("--census", help="Only list the duplicates of a unique index, and keep nothing of it."),
]
Verify = Annotated[
    str, typer.Option(help="Compare index and table: after the build, before a rebuild, both, none.", show_default=True)
]
Shards = Annotated[
    str | None,
    typer.Option(help="The shards that have the table, comma-separated: an index apart from its source."),
]
ShardColumn = Annotated[
    str | None, typer.Option("--shard-column", help="The view's column that tells the shard; by default shard.")
]
ShardParallelism = Annotated[
    int | None, typer.Option("--shard-parallelism", help="The most workers that read one shard at the same time.")
]
MaxLag = Annotated[
    str | None,
    typer.Option("--max-lag", help="Publish once each shard was shipped up to so long ago; by default 60s."),
]
RevertWindow = Annotated[
    int, typer.Option("--revert-window", help="Seconds for which a replaced generation is kept and maintained.")
]
Throttle = Annotated[
    str | None,
    typer.Option(help="Limits of signals of the server: replica_lag=100MB commit_latency=20ms; off: none."),
]
Windows = Annotated[
    str | None,
    typer.Option(help="When it may work: 0 22 * * 1-5 for 8h in Europe/Berlin; several by semicolons; off: always."),
]
MaxDuration = Annotated[
    str | None,
    typer.Option("--max-duration", help="Pause after so long since it began or was resumed: 2h, 90min; 0: no limit."),
]
Priority = Annotated[
    int | None, typer.Option(help="Of those in the queue the greatest goes first, -100 to 100; by default 0.")
]
WarnAfter = Annotated[
    str | None, typer.Option("--warn-after", help="Warn of a pause that lasts for so long; by default 1d, 0: never.")
]
AbortAfter = Annotated[
    str | None, typer.Option("--abort-after", help="Abort once a pause lasts for so long: 3d; by default 0: never.")
]


def work_options(
    throttle: str | None,
    windows: str | None,
    max_duration: str | None,
    priority: int | None,
    warn_after: str | None,
    abort_after: str | None,
) -> dict[str, Any]:
    """The options that say when and how hard an operation works, as the engine has them. Raises InvalidInput."""
    return {
        "throttle": throttle,
        "windows": windows,
        "max_duration_s": seconds("--max-duration", max_duration),
        "priority": priority,
        "warn_after_s": seconds("--warn-after", warn_after),
        "abort_after_s": seconds("--abort-after", abort_after),
    }


def _show_version(wanted: bool) -> None:
    if wanted:
        show(f"roir {__version__}")
        raise typer.Exit()


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
    version: Annotated[
        bool, typer.Option("--version", help="Show the version, and end.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    context.obj = dsn
    warn_of_passwords(context, dsn="ROIR_DSN")


def warn_of_passwords(context: typer.Context, **variables: str) -> None:
    """Say it if a DSN among the arguments has a password. variables: what else takes it, by the parameters' names."""
    for name, variable in variables.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and _has_password(context.params[name]):
            say(
                "all users of this machine can see the password that is among the arguments. Give the DSN by the "
                f"environment variable {variable}, and change the password"
            )


def _has_password(dsn: str) -> bool:
    from psycopg2 import ProgrammingError
    from psycopg2.extensions import parse_dsn

    from airflow_roir.engine.database import SECRETS

    try:
        return not parse_dsn(dsn).keys().isdisjoint(SECRETS)
    except (ProgrammingError, ValueError):
        # The command says what is wrong with it when it opens a session.
        return False


def dsn_of(context: typer.Context) -> str:
    if not context.obj:
        raise typer.BadParameter("no database given: set the environment variable ROIR_DSN, or use --dsn")
    return str(context.obj)


def database_of(context: typer.Context) -> Database:
    dsn = dsn_of(context)
    from airflow_roir.engine.database import Database

    return Database(dsn, "roir cli")


def print_json(value: Any) -> None:
    show(json.dumps(value, indent=2))


def print_json_line(value: Any) -> None:
    """JSON in one line, for whoever reads along."""
    show(json.dumps(value))


def show(text: str) -> None:
    """To standard output: what the command was called for."""
    _write(sys.stdout, _harmless(text))


def show_as_it_is(text: str) -> None:
    """To standard output, for another program to read: not a sign is changed. Raises InvalidInput if one can't be."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{error}; set PYTHONIOENCODING=utf-8") from None
    _write(sys.stdout, text)


def say(text: str) -> None:
    """To standard error: what happens on the way."""
    _write(sys.stderr, f"roir: {_harmless(text)}")


def _harmless(text: str) -> str:
    """In a message there may be a name, a reason or a value that somebody else has chosen."""
    from airflow_roir.cli.cells import printable

    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    # At once, for a program that reads along; and a reader that has gone is noticed here, where typer ends the command.
    stream.flush()


def terminal_width() -> int | None:
    """The width of the terminal that standard output is; None if it is none: then nothing is fitted."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
