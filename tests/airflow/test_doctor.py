"""`roir doctor` beside an Airflow of its own: jobs, DAGs, errors of import, the connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli_doctor import doctor

# In processes of their own: this one has imported an Airflow with another home.
FILL = """
from datetime import timedelta
from airflow.jobs.job import Job
from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.models.errors import ParseImportError
from airflow.utils.session import create_session
from airflow.utils import timezone
with create_session() as session:
    session.add(DagBundleModel(name="b"))
    session.flush()
    session.add(DagModel(dag_id="rebuild_index", bundle_name="b", is_paused=True, is_stale=False))
    session.add(DagModel(dag_id="clean_up_indexes", bundle_name="b", is_paused=False, is_stale=False))
    # A busy machine may look long after it.
    job = Job(job_type="SchedulerJob", state="running", latest_heartbeat=timezone.utcnow() + timedelta(hours=1))
    session.add(job)
    text = "Traceback\\n from airflow_roir import nothing\\nImportError: <none>"
    session.add(ParseImportError(timestamp=timezone.utcnow(), filename="mine.py", bundle_name="b", stacktrace=text))
    session.add(ParseImportError(timestamp=timezone.utcnow(), filename="others.py", bundle_name="b", stacktrace="no"))
"""

PAGE = """
from airflow_roir.page import set_up
print([one.as_dict() for one in set_up.look(with_errors=False)])
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    environment: dict[str, str] = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name}
    environment["AIRFLOW_HOME"] = str(tmp_path)
    for command in (["-m", "airflow", "db", "migrate"], ["-c", FILL]):
        subprocess.run([sys.executable, *command], env=environment, check=True, capture_output=True)
    return tmp_path


@pytest.mark.sample(0)
def test_airflows_part_is_listed_with_what_helps(home: Path, shop: Any) -> None:
    code, found = doctor(shop.dsn, home)
    assert code == 1, found
    verdicts = {
        name: found[name]["verdict"] for name in ("Scheduler", "Triggerer", "rebuild_index", "clean_up_indexes")
    }
    assert verdicts == {
        "Scheduler": "ok",
        "Triggerer": "warning",
        "rebuild_index": "warning",
        "clean_up_indexes": "ok",
    }
    assert found["rebuild_index"]["remedy"] == "airflow dags unpause rebuild_index"
    assert found["mine.py"]["says"] == "can't be imported: ImportError: <none>"
    assert "others.py" not in found
    assert found["postgres_default"]["verdict"] == "warning"
    assert found["Airflow"]["where"] == found["mine.py"]["where"] == "Airflow"
    assert found["pyspark"]["where"] == f"machine {socket.gethostname()}"
    environment = {name: value for name, value in os.environ.items() if "AIRFLOW" not in name}
    page = subprocess.run(
        [sys.executable, "-c", PAGE], env=environment | {"AIRFLOW_HOME": str(home)}, capture_output=True, text=True
    )
    assert "one can't be imported" in page.stdout, page.stderr
    assert "mine.py" not in page.stdout, "not every user of the page may see import errors"
    code, found = doctor(shop.dsn, home, AIRFLOW_CONN_POSTGRES_DEFAULT="postgres://u:secret@h/d")
    assert found["postgres_default"]["verdict"] == "ok"
    assert "secret" not in str(found)
