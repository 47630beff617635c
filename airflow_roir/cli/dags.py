"""The command `dags`: copies our DAG files into a DAGs folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from airflow_roir.cli.app import app, show
from airflow_roir.errors import InvalidInput


@app.command()
def dags(
    to: Annotated[Path, typer.Option("--to", help="Airflow's DAGs folder, or a folder in it; made if missing.")],
    examples: Annotated[bool, typer.Option("--examples", help="The example DAGs, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that differ.")] = False,
) -> None:
    """Copy the DAGs into a DAGs folder. If a file there differs, nothing is written."""
    try:
        _copy(to, _shipped(examples), force)
    except OSError as error:
        raise InvalidInput(f"the DAGs can't be written to {to}: {error}") from None


def _shipped(examples: bool) -> dict[str, bytes]:
    folders = [dags_folder(), *([dags_folder() / "examples"] if examples else [])]
    return {file.name: file.read_bytes() for folder in folders for file in sorted(folder.glob("*.py"))}


def _copy(to: Path, shipped: dict[str, bytes], force: bool) -> None:
    there = {name: (to / name).read_bytes() for name in shipped if (to / name).exists()}
    differing = [name for name, content in there.items() if content != shipped[name]]
    if differing and not force:
        raise InvalidInput(
            f"{', '.join(differing)} in {to} differs from this version's file; you or an upgrade changed it. Nothing "
            f"was written. Compare it with {dags_folder()}, or overwrite it with --force"
        )
    to.mkdir(parents=True, exist_ok=True)
    for name, content in shipped.items():
        if there.get(name) == content:
            show(f"{to / name}: up to date")
            continue
        # The file appears whole: Airflow may read the folder at any moment. It ignores other endings.
        part = to / f".{name}.part"
        part.write_bytes(content)
        os.replace(part, to / name)
        show(f"{to / name}: written{' over another version' if name in there else ''}")


def dags_folder() -> Path:
    """The folder of our DAG files: inside the installed package, or beside it in a source checkout."""
    import airflow_roir

    package = Path(airflow_roir.__file__).parent
    inside = package / "dags"
    return inside if inside.is_dir() else package.parent / "dags"
