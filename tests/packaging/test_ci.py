""".ci/run: a failure, and only a failure, exits non-zero, and pytest has the last word."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SUMMARY = "12 passed in 3.45s"
PARTS = ("lint", "test", "test-all")


@pytest.mark.parametrize("failing", [(), *((part,) for part in PARTS), ("lint", "test")], ids=str)
def test_its_exit_code_is_that_of_its_parts(tmp_path: Path, failing: tuple[str, ...]) -> None:
    """A fake make fails for these targets, with make's own message."""
    make = tmp_path / "make"
    make.write_text(
        f"""#!/bin/bash
echo "ran $1"
[[ $1 != test* ]] || echo "{SUMMARY}"
[[ " {" ".join(failing)} " != *" $1 "* ]] || {{ echo "make: *** [Makefile:1: $1] Error 1" >&2; exit 2; }}
"""
    )
    make.chmod(0o755)
    result = subprocess.run(
        [REPOSITORY / ".ci" / "run"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode != 0) == bool(failing)
    assert [line for line in result.stdout.splitlines() if line.startswith("ran ")] == [f"ran {part}" for part in PARTS]
    assert result.stdout.splitlines()[-1] == SUMMARY
