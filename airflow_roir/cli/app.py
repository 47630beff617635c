"""The parts that all commands share: the application, its options, how they print."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from airflow_roir import __version__
from airflow_roir.cli import complete
from airflow_roir.errors import InvalidInput, RoirError

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database

EXIT_CODES = """
Exit codes: 0 done; 1 failed, or verify found a difference, or rows share a key; 2 bad input, and nothing was changed,
or the change was undone; 3 the operation is paused; 4 another run drives the
operation, or an unfinished one is in the way, or it was aborted; 5 the
operation waits in the queue (spark-submit only); 129 SIGHUP ended the command, and no operation is known to be paused;
130 Ctrl-C ended --watch, and nothing else, or a command that had no operation yet; 141 the reader of the output has
gone; 143 as 129, by SIGTERM.
"""

# In the order of a user's life with an index; those of shards come last.
LISTED = (
    *("init", "doctor", "role-sql", "dags", "plan", "build", "status", "pause", "resume", "change", "abort", "queue"),
    *("duplicates", "verify", "report", "revert", "compact", "rows-view", "clean-up", "drop", "metrics"),
    *("attach-partition", "detach-partition", "sync-partitions", "on-conflict", "reference"),
    *("shard", "ship", "announce"),
)


class Commands(TyperGroup):
    """The commands, listed in their order of `LISTED`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names; one that isn't in `LISTED` comes last."""
        place = {name: n for n, name in enumerate(LISTED)}
        return sorted(super().list_commands(ctx), key=lambda name: place.get(name, len(place)))


app = typer.Typer(
    name="roir",
    cls=Commands,
    help="Resumable online index builds for PostgreSQL, on Spark or on threads.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    # Otherwise [n] in a help text would be read as a colour.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Index = Annotated[
    str, typer.Argument(help="The index: name or schema.name, quoted as in SQL.", autocompletion=complete.indexes)
]
Indexes = Annotated[
    list[str],
    typer.Argument(
        metavar="INDEX...",
        help="The index, or several that exist: name or schema.name.",
        autocompletion=complete.indexes,
    ),
]
Beside = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        help="One more new index of the table, as 'name (keys) INCLUDE (columns)'; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Master = Annotated[str | None, typer.Option(help="Spark master: local[n], spark://…, sc://…")]
WithoutSpark = Annotated[
    bool, typer.Option("--without-spark", help="Work by threads of this command instead of Spark.")
]
Conf = Annotated[list[str] | None, typer.Option(help="A Spark setting, key=value; may be repeated.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Take the operation even from a run that is alive.")]
Reason = Annotated[str, typer.Option(help="Why; kept with the operation.")]
IgnorePublications = Annotated[
    bool,
    typer.Option(
        "--ignore-publications",
        help="Allow a publication that contains the index's own tables: its subscribers must skip unknown tables.",
    ),
]


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
    """Warns if a DSN among the arguments has a password. variables: the safe environment variables, by parameter."""
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
        # The command reports the error when it opens a session.
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
    """Prints JSON in one line, for a program that reads along."""
    show(json.dumps(value))


def show(text: str) -> None:
    """Prints a result to standard output."""
    _write(sys.stdout, _harmless(text))


def show_as_it_is(text: str) -> None:
    """Prints to standard output, for another program, without any change. Raises InvalidInput if that can't be."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{error}; set PYTHONIOENCODING=utf-8") from None
    _write(sys.stdout, text)


@contextmanager
def last_look(done: str, look: str) -> Iterator[None]:
    """Says that a command's last look failed, after its work, instead of an error. done: what is done, as a clause."""
    from sqlalchemy.exc import DBAPIError

    from airflow_roir.engine.database import said

    try:
        yield
    except (DBAPIError, RoirError) as error:
        why = said(error) if isinstance(error, DBAPIError) else str(error)
        say(f"warning: {done}; a last look at it failed: {why}. Look again: {look}")


def say(text: str) -> None:
    """Prints a message to standard error."""
    _write(sys.stderr, f"roir: {_harmless(text)}")


def _harmless(text: str) -> str:
    """The text made harmless: a message may contain a name, a reason or a value of another user."""
    from airflow_roir.cli.cells import printable

    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    # At once, for a program that reads along; and so that a lost reader is noticed here, where typer ends the command.
    stream.flush()


def terminal_width() -> int | None:
    """The width of the terminal; None if standard output is no terminal: then nothing is fitted."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
