"""An Airflow home for the tests of this folder: nothing of the machine's own Airflow is read or changed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# Before the first import of Airflow, which reads its configuration then and only then.
_HOME = tempfile.TemporaryDirectory(prefix="roir-airflow-tests-")
for _name in [name for name in os.environ if name.startswith(("AIRFLOW", "_AIRFLOW"))]:
    del os.environ[_name]
os.environ |= {
    "AIRFLOW_HOME": _HOME.name,
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_HOME.name}/airflow.db",
}


@pytest.fixture(scope="session")
def dags_folder() -> Path:
    """The DAG files as they are shipped."""
    return Path(__file__).parents[2] / "dags"
