"""Writes the metrics as text, and to a file that another program may read at any moment."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from airflow_roir.engine.metrics.reading import metrics
from airflow_roir.errors import InvalidInput

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database

SUFFIX = ".prom"
# node_exporter runs as another user.
MODE = 0o644


class Found(Collector):
    """The metrics of one look, for the library."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yields all of them."""
        yield from self._families


def text_of(database: Database) -> tuple[bytes, str | None]:
    """The text, and the reason why the database wasn't read, if it wasn't: then the text has `roir_up` 0."""
    families, problem = metrics(database)
    return generate_latest(Found(families)), problem


def check_textfile(path: Path) -> None:
    """Raises InvalidInput if node_exporter wouldn't read the file, or if it is no file that may be replaced."""
    if path.suffix != SUFFIX:
        raise InvalidInput(f"{path}: node_exporter reads only files that end in {SUFFIX}")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is no ordinary file")


def write_textfile(path: Path, text: bytes) -> None:
    """Replaces the file at once: a reader finds the former text or this one, whole. Keeps the file's mode.

    A process that is killed leaves a hidden file beside it, which node_exporter doesn't read; the next run removes
    it. Raises InvalidInput if the folder can't be written.
    """
    path = Path(os.path.realpath(path))
    beside = f".{path.name}."
    made = None
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else MODE
        _remove_leftovers(path.parent, beside)
        number, made = tempfile.mkstemp(prefix=f"{beside}{os.getpid()}.", dir=path.parent)
        with os.fdopen(number, "wb") as file:
            file.write(text)
            file.flush()
            os.fchmod(number, mode)
            os.fsync(number)
        os.replace(made, path)
    except OSError as error:
        raise InvalidInput(f"{path} can't be written: {error.strerror}") from error
    finally:
        if made is not None and os.path.exists(made):
            os.unlink(made)


def _remove_leftovers(folder: Path, beside: str) -> None:
    """Removes the files that killed processes have left."""
    for one in folder.glob(f"{beside}*"):
        number = one.name.removeprefix(beside).split(".", 1)[0]
        if number.isdigit() and not _lives(int(number)):
            one.unlink(missing_ok=True)


def _lives(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
