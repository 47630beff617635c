"""Imports between files go one way."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
IN_A_TEXT = re.compile(r"^ *from (airflow_roir[\w.]*) import ([\w, ]+)", re.MULTILINE)


def test_no_file_imports_another_that_imports_it() -> None:
    graph = grimp.build_graph("airflow_roir")
    # Raises CycleError, which names the circle; imports for the type checker and inside functions count.
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()


def test_the_code_map_names_every_room_of_the_engine() -> None:
    """The contract of storeys in pyproject.toml is exhaustive; the table that people read is to be so, too."""
    section = (ROOT / "docs" / "code-map.md").read_text().split("## Storeys")[1].split("\n## ")[0]
    rooms = [
        f"{one.name}/" if one.is_dir() else one.name
        for one in (ROOT / "airflow_roir" / "engine").iterdir()
        if not one.name.startswith("__")
    ]
    assert [room for room in sorted(rooms) if room not in section] == []


def imported_by_texts() -> Iterator[tuple[str, str, str]]:
    """The package's names that programs in tests' strings import, which no type check sees: file, module, name."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for module, names in IN_A_TEXT.findall(node.value):
                    for name in names.split(","):
                        yield path.name, module, name.partition(" as ")[0].strip()


def test_programs_within_texts_import_what_there_is() -> None:
    gone = []
    for file, module, name in imported_by_texts():
        try:
            found = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        except ImportError:
            found = None
        if not found:
            gone.append(f"{file}: from {module} import {name}")
    assert not gone
