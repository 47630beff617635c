"""`roir dags --to DIR`: the DAG files of the repository, and never over what somebody changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from airflow_roir import cli
from airflow_roir.errors import InvalidInput

DAGS = Path(__file__).parents[2] / "dags"
NAMES = sorted(file.name for file in DAGS.glob("*.py"))


def roir_dags(*arguments: object) -> list[str]:
    """The lines that the command prints; raises what the command raises."""
    result = CliRunner().invoke(cli.app, ["dags", *map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    return result.stdout.splitlines()


def test_it_copies_the_dags_and_says_so(tmp_path: Path) -> None:
    to = tmp_path / "new" / "dags"
    assert roir_dags("--to", to) == [f"{to / name}: written" for name in NAMES]
    assert {file.name: file.read_bytes() for file in to.iterdir()} == {
        name: (DAGS / name).read_bytes() for name in NAMES
    }
    assert roir_dags("--to", to) == [f"{to / name}: up to date" for name in NAMES]


def test_it_copies_the_examples_when_asked_to(tmp_path: Path) -> None:
    examples = {file.name: file.read_bytes() for file in (DAGS / "examples").glob("*.py")}
    assert len(roir_dags("--to", tmp_path, "--examples")) == len(NAMES) + len(examples)
    copied = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert examples.items() <= copied.items()
    assert sorted(copied) == sorted([*NAMES, *examples])


def test_what_somebody_changed_is_kept_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("mine")
    changed = tmp_path / NAMES[-1]
    changed.write_text("changed")
    with pytest.raises(InvalidInput, match=f"{NAMES[-1]}.*Nothing was written"):
        roir_dags("--to", tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["mine.py", NAMES[-1]])
    assert changed.read_text() == "changed"
    assert f"{changed}: written over another version" in roir_dags("--to", tmp_path, "--force")
    assert changed.read_bytes() == (DAGS / NAMES[-1]).read_bytes()
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / NAMES[0]).mkdir()
    for to in (tmp_path / "file", tmp_path / "file" / "below", tmp_path):
        with pytest.raises(InvalidInput, match="can't be written to"):
            roir_dags("--to", to)
