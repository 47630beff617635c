"""Writes Spark's own log, the output of its JVM and its Python workers, to a file of its own, bounded in size.

The log of a build that succeeds contains stack traces, too: of a worker that had to leave, of a node that came late.
The lines for the user go elsewhere.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from airflow_roir.engine.retry.repeat import meanwhile
from airflow_roir.errors import InvalidInput

# A file that has grown beyond this becomes the older one of two.
LIMIT_BYTES = 10_000_000
LOOK_EVERY_S = 5.0
# The environment variable that names the folder of these files.
FOLDER = "ROIR_LOG_FOLDER"


def spark_log(operation: int | str, folder: Path | None = None) -> Path:
    """The file of an operation: in $ROIR_LOG_FOLDER, else in this folder, else in the user's folder of state.

    operation: its id, or a placeholder until that is known. Raises InvalidInput if the user has no home.
    """
    chosen = os.environ.get(FOLDER)
    if chosen:
        folder = Path(chosen)
    if folder is None:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        if state.startswith("~"):
            raise InvalidInput(f"this user has no home for Spark's own log: name a folder by {FOLDER}")
        folder = Path(state) / "roir"
    return folder / f"spark-{operation}.log"


class SparkLog:
    """A log that is being written. path: its present place; None: standard error, among the lines for the user."""

    def __init__(self, path: Path | None = None, file: int | None = None) -> None:
        self.path = path
        # A file with contents is an operation's already.
        self.is_named = file is not None and os.fstat(file).st_size > 0
        self._file = file

    def name(self, path: Path) -> None:
        """Renames the log once its name is known; only the first call counts. An older file of that name is kept as the
        older one of two.

        If that fails, the log silently keeps its present name.
        """
        if self.is_named or self.path is None:
            return
        self.is_named = True
        if path == self.path:
            return
        with suppress(OSError):
            with suppress(FileNotFoundError):
                path.replace(_older(path))
            self.path = self.path.rename(path)

    def discard(self) -> None:
        """Removes the log, since no operation was driven."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def bound(self) -> None:
        """Cuts the log if it has grown too long."""
        if self._file is None or self.path is None or os.fstat(self._file).st_size <= LIMIT_BYTES:
            return
        with suppress(OSError):
            older = _older(self.path)
            with suppress(FileNotFoundError):
                older.unlink()
            with (
                os.fdopen(os.open(older, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy,
                os.fdopen(os.dup(self._file), "rb") as log,
            ):
                log.seek(0)
                shutil.copyfileobj(log, copy)
        # Even if the older half couldn't be kept: a log must never fill a disk.
        os.ftruncate(self._file, 0)


@contextmanager
def diverted(path: Path) -> Iterator[tuple[TextIO, SparkLog]]:
    """Sends the output of this process and its children to the file; yields the stream for the user's lines, and the
    log.

    Only its owner can read the file, since a stack trace may show anything. The file's text is kept: stretches of an
    operation share it. If it can't be written, a new file among the temporary ones takes its place. Raises OSError if
    that can't be written either.

    Bounded at about twice `LIMIT_BYTES`, the older half in a file with `.1` at its end; a burst between two looks
    comes on top.
    """
    file, path = _opened(path)
    log = SparkLog(path, file)
    # Both duplicates stay with this process: its children must not hold the pipe to the reader of the lines.
    voice = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, errors="backslashreplace")
    before = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in before:
            os.dup2(file, number)
        with meanwhile(log.bound, LOOK_EVERY_S, "roir-spark-log"):
            yield voice, log
    finally:
        # Its reader may have died; the writer of a line has got an error for that.
        with suppress(OSError):
            voice.close()
        for number, kept in before.items():
            os.dup2(kept, number)
            os.close(kept)
        os.close(file)


def _opened(path: Path) -> tuple[int, Path]:
    # Many processes append at once, and it is cut at its beginning. O_NOFOLLOW: never through another user's link.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, flags, 0o600)
        os.fchmod(file, 0o600)
    except OSError:
        file, name = tempfile.mkstemp(prefix=f"roir-{path.stem}-", suffix=".log")
        os.close(file)
        path = Path(name)
        file = os.open(path, flags)
    return file, path


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
