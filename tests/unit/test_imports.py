"""No module needs itself, by whatever way round."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_imports_go_in_no_circle() -> None:
    """Those within functions count, too; those for types alone don't."""
    graph = grimp.build_graph("airflow_roir", exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert list(TopologicalSorter(imported).static_order())
