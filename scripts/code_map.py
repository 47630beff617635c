"""Writes docs/code-map.md, a line per file, from what each file says of itself: `make code-map`. A test compares."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """\
# Code map

What each file is for, by its own first sentence; made by `make code-map`. Where to begin: `engine/lifecycle.py`,
`engine/work/phase_work.py`, `engine/claims.py`, `engine/build.py`; then `engine/capture/row_function.py` beside
`tests/engine/golden/plain_capture.sql`, what it renders; then `engine/seal.py`, `engine/fold.py`, `engine/publish.py`.
[architecture.md](architecture.md) says why.
"""


def code_map() -> str:
    """The page."""
    package = ROOT / "airflow_roir"
    folders = sorted({path.parent for path in package.rglob("*.py")})
    return "\n".join([HEAD, *map(_room, folders), _sql()])


def files() -> dict[Path, str]:
    """What is made: texts by their files."""
    return {ROOT / "docs" / "code-map.md": code_map()}


def _room(folder: Path) -> str:
    lines = [f"## {folder.relative_to(ROOT)}/", "", _says(folder / "__init__.py"), ""]
    lines += [f"- `{path.name}`: {_says(path)}" for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    return "\n".join(lines).rstrip() + "\n"


def _says(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def _sql() -> str:
    lines = ["## migrations/sql/", "", "What the migrations run: one topic per file.", ""]
    for path in sorted((ROOT / "migrations" / "sql").glob("*.sql")):
        first = path.read_text().split("\n\n")[0].splitlines()
        said = " ".join(line.removeprefix("--").strip() for line in first if line.startswith("--"))
        lines.append(f"- `{path.name}`: {re.split(r'(?<=[.:]) ', said)[0]}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
