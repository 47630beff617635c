"""Fixtures of the Spark tests: a source, and an interpreter as executors have it."""

from __future__ import annotations

import subprocess
import sysconfig
import venv

import pytest

from tests.spark.driving import make_table


@pytest.fixture
def source(dsn: str) -> None:
    """The table that they build an index on."""
    make_table(dsn)


@pytest.fixture(scope="session")
def python_without_us(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter as executors have it: the dependencies are there, this package isn't."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A path in a .pth file only is a path: the .pth files there, the editable install's among them, aren't read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    check = "import sqlalchemy, psycopg2, pyarrow; import airflow_roir.spark"
    found = subprocess.run([python, "-c", check], cwd=folder, capture_output=True, text=True, check=False)
    assert found.stderr.endswith("No module named 'airflow_roir.spark'\n"), found.stderr
    return str(python)
