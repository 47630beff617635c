"""The script that makes the archive of Spark's classes: when it makes one, and what it prints.

Spark is a stand-in here; `make test` itself starts the real one from the real archive.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "spark-archive"
WRITES = """#!/bin/bash
echo "$@" >>"$(dirname "$0")/calls"
eval "touch ${SPARK_SUBMIT_OPTS##*=}"
"""
FAILS = WRITES + "exit 1\n"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment's folder, with a space in its name."""
    folder = tmp_path / "some env"
    (folder / "bin").mkdir(parents=True)
    (folder / ".installed").touch()
    os.utime(folder / ".installed", (1, 1))
    return folder


def printed(environment: Path, spark_submit: str) -> str:
    program = environment / "bin" / "spark-submit"
    program.write_text(spark_submit)
    program.chmod(0o755)
    return subprocess.run([SCRIPT, environment], capture_output=True, text=True, check=True).stdout


def calls(environment: Path) -> int:
    return len((environment / "bin" / "calls").read_text().splitlines())


def test_it_is_made_once_and_anew_for_a_newer_environment(environment: Path) -> None:
    archive = environment / "spark.jsa"
    assert f'-XX:SharedArchiveFile="{archive}" ' in printed(environment, WRITES)
    assert archive.exists()
    assert f'-XX:SharedArchiveFile="{archive}" ' in printed(environment, WRITES)
    assert calls(environment) == 1
    os.utime(archive, (0, 0))
    printed(environment, WRITES)
    assert calls(environment) == 2


def test_where_it_cannot_be_made_nothing_is_printed_and_nothing_left(environment: Path) -> None:
    assert printed(environment, FAILS) == ""
    assert not list(environment.glob("spark.jsa*"))
