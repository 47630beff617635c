"""This package as one zip file, for executors that don't have it.

The driver ships it unless Spark is local. It is for workers: a driver needs the migrations, too, to know the control
schema's version. The packages that this one imports aren't in it: see docs/spark.md.
"""

from __future__ import annotations

import importlib.resources
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Python 3.10 has it only there.
    from importlib.abc import Traversable

PACKAGE = "airflow_roir"
# The parts that a worker never imports; an executor couldn't, without Airflow.
LEFT_OUT = frozenset({"operators", "task", "hooks", "links", "dags", "migrations", "__pycache__"})
# Fixed, so that the same code is the same file, byte by byte.
DATE = (1980, 1, 1, 0, 0, 0)


def write_package(path: Path) -> Path:
    """Writes the zip file to `path`, over a file that is there, and returns it. Raises OSError."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(_sources(importlib.resources.files(PACKAGE), PACKAGE)):
            archive.writestr(zipfile.ZipInfo(name, DATE), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return path


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name not in LEFT_OUT:
            yield from _sources(entry, f"{prefix}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{prefix}/{entry.name}", entry
