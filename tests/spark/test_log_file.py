"""Spark's own log: apart from the lines for the user, for its owner's eyes, bounded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_roir.spark import log_file
from airflow_roir.spark.log_file import spark_log

DIVERTED = """
import os, subprocess, sys
from pathlib import Path
from airflow_roir.spark.log_file import diverted
with diverted(Path(sys.argv[1])) as (voice, log):
    print("for the user:", log.path, file=voice)
    print("ours", file=sys.stderr, flush=True)
    # A child knows the file alone: whoever reads the lines sees their end with this process's.
    subprocess.run(["/bin/sh", "-c", "echo of a child; echo and its errors >&2; ls -l /proc/self/fd | grep -c pipe:"])
print("as before", file=sys.stderr)
"""


def divert(path: Path) -> Path:
    """The file, as the reader of the lines hears of it, and of nothing else."""
    done = subprocess.run([sys.executable, "-c", DIVERTED, path], stderr=subprocess.PIPE, text=True, check=True)
    first, last = done.stderr.splitlines()
    assert last == "as before"
    prefix, file = first.split(": ", 1)
    assert prefix == "for the user"
    return Path(file)


def test_what_spark_prints_goes_to_a_file_of_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "spark-5.log"
    for times in (1, 2):
        assert divert(path) == path
        # Earlier contents stay: stretches of an operation share the file.
        assert path.read_text().splitlines() == ["ours", "of a child", "and its errors", "1"] * times
    assert path.stat().st_mode & 0o777 == 0o600


def test_where_it_cannot_be_written_another_file_takes_its_place(tmp_path: Path) -> None:
    """A link of somebody's, for one, is not followed."""
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "spark-5.log").symlink_to(theirs)
    file = divert(tmp_path / "spark-5.log")
    try:
        assert file.read_text().startswith("ours")
        assert theirs.read_text() == "precious"
        assert file.stat().st_mode & 0o777 == 0o600
    finally:
        file.unlink()


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "LIMIT_BYTES", 10)
    file, path = log_file._opened(tmp_path / "spark-5.log")
    log = log_file.SparkLog(path, file)
    older = tmp_path / "spark-5.log.1"
    for text in (b"a little", b" and more", b"1", b"1234567890"):
        os.write(file, text)
        log.bound()
    os.write(file, b"end")
    os.close(file)
    assert (older.read_bytes(), path.read_bytes()) == (b"11234567890", b"end")
    assert older.stat().st_mode & 0o777 == 0o600


def test_it_gets_its_name_when_that_is_known(tmp_path: Path) -> None:
    first, second = (log_file._opened(tmp_path / f"spark-of-{number}.log") for number in (1, 2))
    for text, (file, path) in (("one", first), ("two", second)):
        log = log_file.SparkLog(path, file)
        log.name(tmp_path / "spark-5.log")
        os.write(file, text.encode())
        os.close(file)
        assert log.path == tmp_path / "spark-5.log"
        # The first order's name is that of all.
        log.name(tmp_path / "spark-6.log")
        assert log.path == tmp_path / "spark-5.log"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "spark-5.log": "two",
        "spark-5.log.1": "one",
    }


def test_a_log_that_an_earlier_stretch_has_begun_keeps_its_name_and_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "spark-5.log"
    path.write_text("one")
    file, _ = log_file._opened(path)
    log = log_file.SparkLog(path, file)
    assert log.is_named
    log.name(path)
    os.write(file, b" and two")
    os.close(file)
    assert {found.name: found.read_text() for found in tmp_path.iterdir()} == {"spark-5.log": "one and two"}


def test_a_name_that_can_not_be_given_is_no_failure(tmp_path: Path) -> None:
    file, path = log_file._opened(tmp_path / "spark-of-1.log")
    log = log_file.SparkLog(path, file)
    log.name(tmp_path / "no such folder" / "spark-5.log")
    assert log.path == path
    log.discard()
    os.close(file)
    assert not list(tmp_path.iterdir())


def test_its_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROIR_LOG_FOLDER", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert spark_log(5) == tmp_path / "state" / "roir" / "spark-5.log"
    assert spark_log(5, tmp_path / "task") == tmp_path / "task" / "spark-5.log"
    monkeypatch.setenv("ROIR_LOG_FOLDER", str(tmp_path / "chosen"))
    assert spark_log(5, tmp_path / "task") == tmp_path / "chosen" / "spark-5.log"
