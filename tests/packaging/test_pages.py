"""`make docs` builds the pages from the code, without a database; each link, anchor and name leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commands(target: str) -> list[str]:
    """The commands that `make` would run for a target, by this interpreter."""
    # Not with what the `make` that runs these tests was given.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS"))}
    said = subprocess.run(
        ["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return [
        line.replace(".venv/bin/python", sys.executable) for line in said.splitlines() if re.search(r"-m sphinx", line)
    ]


@pytest.mark.slow
def test_make_docs_builds_every_page_without_a_warning(tmp_path: Path) -> None:
    [command] = commands("docs")
    done = subprocess.run(
        command.replace("docs/_build", str(tmp_path)).split(),
        cwd=ROOT,
        env={**os.environ, "AIRFLOW_HOME": str(tmp_path / "airflow")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = tmp_path / "html"
    assert "roir attach-partition" in (pages / "reference" / "command-line.html").read_text()
    assert "PrepareIndexBuildOperator" in (pages / "reference" / "operators.html").read_text()
    assert "max_rows_per_second" in (pages / "reference" / "dags.html").read_text()
    assert "Pauses an operation" in (pages / "reference" / "sql.html").read_text()
    # Both pictures, of which the page shows one.
    shown = (pages / "how-it-works.html").read_text()
    assert "statuses-light.svg" in shown
    assert "statuses-dark.svg" in shown


@pytest.mark.slow
def test_a_link_that_leads_nowhere_ends_it(tmp_path: Path) -> None:
    """The same command over pages of which one names an anchor that isn't there."""
    [command] = commands("docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "conf.py").write_text(
        'extensions = ["myst_parser"]\nmyst_heading_anchors = 4\nnitpicky = True\n'
    )
    page = tmp_path / "docs" / "index.md"
    for anchor, code in (("#there", 0), ("#not-there", 1)):
        page.write_text(f"# Page\n\n## There\n\n[a link]({anchor})\n")
        done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
