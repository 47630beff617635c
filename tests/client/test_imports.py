"""The client imports what an application has: neither Airflow, Spark nor the provider."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "client" / "roir_client"
# The package that files may import: those of an ORM it, and others none.
NEEDS = {
    **{name: {"sqlalchemy"} for name in ("sqlalchemy.py", "shape.py", "rows.py", "upsert.py")},
    "django": {"django"},
}


def test_the_client_needs_nothing_but_an_orm() -> None:
    for path in FOLDER.rglob("*.py"):
        needed = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                needed.add(node.module or "")
        others = {name.split(".")[0] for name in needed} - {*sys.stdlib_module_names, "roir_client"}
        assert others <= NEEDS.get(path.relative_to(FOLDER).parts[0], set()), path
