"""Imports between files go one way."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]


def test_no_file_imports_another_that_imports_it() -> None:
    graph = grimp.build_graph("airflow_roir")
    # Raises CycleError, which names the circle; imports for the type checker and inside functions count.
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()


def test_the_code_map_names_every_room_of_the_engine() -> None:
    """The contract of storeys in pyproject.toml is exhaustive; the table that people read is to be so, too."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Code map")[1].split("\n## ")[0]
    rooms = [
        f"{one.name}/" if one.is_dir() else one.name
        for one in (ROOT / "airflow_roir" / "engine").iterdir()
        if not one.name.startswith("__")
    ]
    assert [room for room in sorted(rooms) if room not in section] == []
