"""No import at run time leads back to the module that it starts from."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_imports_go_in_no_circle() -> None:
    """Imports within functions count; those under TYPE_CHECKING don't."""
    graph = grimp.build_graph("airflow_roir", exclude_type_checking_imports=True, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert list(TopologicalSorter(imported).static_order())
