"""scripts/check-machine names what `make env` would fail for, before anything is downloaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check-machine"
RIGHT = "echo 3.12"
DISK = "printf '%s\\n' Filesystem '/dev/sda 9 9 {} 1% /'"


def checked(tmp_path: Path, python: str | None, free_mb: int = 50_000) -> subprocess.CompletedProcess[str]:
    """The script's answer on a machine with this python3, a shell script or None, and this room."""
    for name, script in (("python3", python), ("df", DISK.format(free_mb))):
        if script is not None:
            (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
            (tmp_path / name).chmod(0o755)
    for tool in ("bash", "awk"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    return subprocess.run([SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("python", "free_mb", "said"),
    [
        (None, 50_000, "there is no python3; install Python 3.10 to 3.13, or name one: make env PYTHON=python3.12"),
        ("echo 3.9", 50_000, "python3 is Python 3.9, and 3.10 to 3.13 is needed; name one: make env PYTHON=python3.12"),
        ("echo 3.14", 50_000, "python3 is Python 3.14, and 3.10"),
        (
            "[[ $2 == *ensurepip* ]] && exit 1; echo 3.12",
            50_000,
            "on Debian and Ubuntu: apt-get install python3.12-venv",
        ),
        (RIGHT, 900, "this disk has 900 MB free, and .venv needs 2500"),
    ],
)
def test_one_sentence_names_what_is_missing(tmp_path: Path, python: str | None, free_mb: int, said: str) -> None:
    """Found: pip reported a full disk, minutes later."""
    found = checked(tmp_path, python, free_mb)
    assert (found.returncode, found.stdout) == (1, "")
    [line] = found.stderr.splitlines()
    assert line.startswith("make env: ")
    assert said in line


def test_says_nothing_where_all_is_there(tmp_path: Path) -> None:
    found = checked(tmp_path, RIGHT)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize("target", ["demo", "demo-shards", "test"])
def test_java_is_looked_for_before_the_downloads(target: str) -> None:
    """Found: after seven minutes of downloads `make demo` said that there is no Java."""
    wanted = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert wanted.index("scripts/ensure-java") < wanted.index("scripts/check-machine") < wanted.index("uv pip install")
