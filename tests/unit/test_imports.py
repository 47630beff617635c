"""Imports between files go one way."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_file_imports_another_that_imports_it() -> None:
    graph = grimp.build_graph("airflow_roir")
    # Raises CycleError, which names the circle; imports for the type checker and inside functions count.
    TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()
