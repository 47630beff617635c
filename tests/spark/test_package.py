"""The package as a zip file: what executors get, and what they need beside it."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

from airflow_roir.spark.package import write_package

# The packages that docs/spark.md tells users to install, and those that they bring along.
HEAVY = {"alembic", "airflow", "typer", "rich", "pyspark", "pyarrow", "pandas"}


def test_a_worker_runs_from_the_zip_file_with_nothing_but_what_the_docs_name(
    python_without_us: str, tmp_path: Path
) -> None:
    write_package(tmp_path / "roir.zip")
    code = f"""if True:
        import json, sys
        sys.path.insert(0, {str(tmp_path / "roir.zip")!r})
        import airflow_roir.spark.task as worker
        print(json.dumps([worker.__file__, sorted({{name.partition(".")[0] for name in sys.modules}})]))"""
    ran = subprocess.run([python_without_us, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    file, modules = json.loads(ran.stdout)
    assert file.startswith(str(tmp_path / "roir.zip"))
    assert {"psycopg2", "sqlalchemy"} <= set(modules)
    assert HEAVY & set(modules) == set()


def test_the_same_code_is_the_same_file(tmp_path: Path) -> None:
    first, second = write_package(tmp_path / "1.zip"), write_package(tmp_path / "2.zip")
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert "airflow_roir/spark/task.py" in names
    assert not [name for name in names if "operators" in name or "/task/" in name or not name.endswith(".py")]
