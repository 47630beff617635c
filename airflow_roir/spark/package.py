"""This package as one zip file, for executors that don't have it.

`python -m airflow_roir.spark.package roir.zip` writes it, for `--py-files`; the driver does the same by itself
wherever Spark isn't local, so nobody need do it by hand. What the package imports isn't in it: see docs/spark.md.
"""

from __future__ import annotations

import argparse
import importlib.resources
import zipfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

PACKAGE = "airflow_roir"
# What a worker never imports, and an executor couldn't: it has no Airflow.
LEFT_OUT = frozenset({"operators", "hooks", "links", "triggers", "plugins", "migrations", "__pycache__"})
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


def main(arguments: list[str] | None = None) -> None:
    """Write the zip file that is named on the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PACKAGE}.spark.package", description=__doc__)
    parser.add_argument("path", type=Path, help="where to write it, a name that ends in .zip")
    write_package(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main()
