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

## Storeys

Imports go down only, also within a row where `;` parts rooms: `make lint` holds the storeys of `pyproject.toml`, which
name every room.

| storey | rooms |
| --- | --- |
| surfaces: each binds the engine, and decides nothing | `operators/`, `task/`, `hooks/`, `links/`, `page/`, \
`cli/`, `spark/` |
| an operation of any kind, and what operations leave | `engine/lifecycle.py`: all phases in one table; \
`finalize.py`: what surrounds the last two; `clean_up.py`, `upkeep.py`, `install.py`; `abort.py` |
| around the core, which doesn't notice when it is taken away | `metrics/`; `snapshot/`; `compact/`, `forecast/`; \
`early/`, `governor/`, `partitions/`, `reference/`, `verify/` |
| the core: the phases of a build, and what ends an index | `prepare.py`, `build.py`, `publish.py`, `drop.py`, \
`revert.py`, `whole_rows.py`; `dry_run.py`, `seal.py`, `fold.py`; `apply_delta.py`, `switch.py` |
| what the phases stand on | `apart.py`: what is asked of indexes over shards; `work/`: a phase at \
work; `claims.py`: the one protocol of workers; `scan/`, `unique/`; `health/`; `control/`; `capture/`, `readers/` |
| foundation | `generation/`; `source/`; `locks/`, `schema/`; `database.py`, `retry/`, `sessions/` |
| what everything speaks of; no I/O | `definition.py`, `options.py`, `operation.py`, `entry_state.py`, \
`generation_state.py`, `scan_range.py`, `signals.py`, `errors.py` |

`lifecycle.py` gives the core what is around it: early detection beside the build's workers, the comparison before the
publish, the forecast that prepare says first. `shards/` is a package of its own. The core imports nothing of it, and
asks it by hooks, whose implementation `generation/feeds.py` loads by its name. This one arrow goes up on purpose: with
a registration, a process that forgets it would treat an index over shards as any other, and lose writes.
"""


def code_map() -> str:
    """The page."""
    package = ROOT / "airflow_roir"
    folders = sorted({path.parent for path in package.rglob("*.py")})
    folders += sorted({path.parent for path in (ROOT / "client" / "roir_client").rglob("*.py")})
    return "\n".join([HEAD, *map(_room, folders), _sql()])


def files() -> dict[Path, str]:
    """The generated files, with their texts."""
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
