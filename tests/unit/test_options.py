"""The files that are made from the declared options are up to date."""

from __future__ import annotations

import runpy

from tests.unit.test_docs import ROOT


def test_what_is_made_from_the_options_is_up_to_date() -> None:
    for path, content in runpy.run_path(str(ROOT / "scripts" / "options.py"))["files"](with_airflow=False).items():
        assert path.read_text() == content, f"{path.relative_to(ROOT)} differs: make options"
