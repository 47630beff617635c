"""The command `roir`, for users without Airflow and for scripts.

A command imports the engine's modules that it calls when it runs: `roir --help` needs none of them, `roir status` few.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from typing import TYPE_CHECKING

# Each module adds its commands to the application.
from airflow_roir.cli import (  # noqa: F401
    announce,
    build,
    compact,
    complete,
    dags,
    doctor,
    duplicates,
    metrics,
    on_conflict,
    operations,
    partitions,
    plan,
    reference,
    report,
    role,
    shard,
    ship,
    status,
    verify,
)
from airflow_roir.cli.app import EXIT_CODES, app, say
from airflow_roir.cli.given import in_flags
from airflow_roir.cli.last_line import INTERRUPTED, of_interrupt
from airflow_roir.errors import IllegalTransition, InvalidInput, RoirError

if TYPE_CHECKING:
    from sqlalchemy.exc import DBAPIError

__all__ = ["EXIT_CODES", "app", "main"]

# The exit code that shells have for a program that SIGPIPE has ended.
UNREAD = 141
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """The entry point: turns the errors of this package and of the database into a line and an exit code."""
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # Typer exits with 1 for a reader that has gone.
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _write_no_more(1, 2)
        sys.exit(UNREAD)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _write_no_more(1)
        say(f"the output can't be written: {error.strerror}")
        sys.exit(1)


def _write_no_more(*numbers: int) -> None:
    """Redirects these streams to the null device: output that is left is dropped without an error."""
    for number in numbers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _run() -> None:
    # The objects that imports create stay: the garbage collector would scan all of them again and again.
    gc.set_threshold(50_000)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A letter that the terminal's encoding doesn't have is written as its number.
            stream.reconfigure(errors="backslashreplace")
    if wanted := os.environ.pop(complete.VARIABLE, ""):
        sys.stdout.write(complete.answer(wanted, app))
        return
    try:
        app()
    except SystemExit as error:
        if error.code == INTERRUPTED and (line := of_interrupt(sys.argv[1:])):
            say(line)
        raise
    except RoirError as error:
        say(in_flags(str(error)))
        # A request that the operation's state doesn't allow has changed nothing, like a bad input.
        sys.exit(InvalidInput.exit_code if isinstance(error, IllegalTransition) else error.exit_code)
    except UnicodeEncodeError as error:
        if not any("\ud800" <= sign <= "\udfff" for sign in error.object):
            raise
        say(f"an argument is no text in this system's encoding: {error.object!r}")
        sys.exit(InvalidInput.exit_code)
    except Exception as error:
        from sqlalchemy.exc import DBAPIError

        if not isinstance(error, DBAPIError):
            raise
        say(_said(error))
        sys.exit(1)


def _open_closed_streams() -> None:
    """Opens the null device for closed streams: `>&-` asks for silence, not for a failure, and no file that is opened
    later may get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _said(error: DBAPIError) -> str:
    """The server's message, with its hint. The statement and its values stay out of it."""
    diagnostics = getattr(error.orig, "diag", None)
    # The name of the shard.
    where = "".join(f"{one}: " for one in error.detail)
    if diagnostics is None or diagnostics.message_primary is None:
        return where + str(error.orig).strip().expandtabs(4)
    detail, hint = diagnostics.message_detail, diagnostics.message_hint
    return "\n".join(
        [
            where + diagnostics.message_primary,
            *([f"DETAIL:  {detail}"] if detail else []),
            *([f"HINT:  {hint}"] if hint else []),
        ]
    )
