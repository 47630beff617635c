"""This package as one zip file, for executors that don't have it.

The driver ships it wherever Spark isn't local. It is for workers: a driver needs the
migrations, too, to know the control schema's version. What the package imports isn't in it: see docs/spark.md.
"""

from __future__ import annotations

import importlib.resources
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Where Python 3.10 has it, too.
    from importlib.abc import Traversable

PACKAGE = "airflow_roir"
# What a worker never imports, and an executor couldn't: it has no Airflow.
LEFT_OUT = frozenset(
    {"operators", "task", "hooks", "links", "triggers", "plugins", "dags", "migrations", "__pycache__"}
)
# Fixed, so that the same code is the same file, byte by byte.
DATE = (1980, 1, 1, 0, 0, 0)


def write_package(path: Path) -> Path:
    """Write the zip file to `path`, over whatever is there, and return it. Raises OSError."""
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
