"""The environment that `make env` resolves: one coherent PySpark, and the versions that constraints.txt names."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
from importlib.metadata import Distribution, distribution, distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from servers import postgres

REPOSITORY = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def pins() -> list[Requirement]:
    """The lines of constraints.txt that aren't comments."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def pinned_version(requirement: Requirement) -> str:
    """The version of `name==version`."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "=="
    return specifier.version


def owners_of(folder: str) -> dict[str, Distribution]:
    """The installed distributions with a file in this top-level folder, by name."""
    return {
        canonicalize_name(installed.metadata["Name"]): installed
        for installed in distributions()
        if any(path.parts[0] == folder for path in installed.files or ())
    }


def test_an_installed_airflow_is_left_as_it_is() -> None:
    """By the package's own bounds, with which users install it; constraints.txt would move it to another version."""
    bounds = {r.name: r.specifier for r in map(Requirement, requires("airflow-provider-roir") or ())}
    for version in ("3.3.0", "3.3.2", "3.4.1"):
        assert version in bounds["apache-airflow"]
    told = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    lines = [line for file in told for line in file.read_text().splitlines() if "pip install" in line]
    assert [line for line in lines if "constraints.txt" in line] == []
    assert [line for line in lines if 'dist/airflow_roir*.whl "apache-airflow==$(airflow version)"' in line]


def test_the_pyspark_folder_belongs_to_one_distribution() -> None:
    """pyspark-client, which Airflow's Spark provider asks for, would overwrite half of it with another version."""
    assert list(owners_of("pyspark")) == ["pyspark"]


def test_pyspark_is_as_it_was_installed() -> None:
    """Every file is the one that RECORD lists, and pyspark has no module that RECORD doesn't list."""
    pyspark = distribution("pyspark")
    recorded = {path for path in pyspark.files or () if path.parts[0] == "pyspark" and path.hash is not None}
    changed = []
    for path in recorded:
        assert path.hash is not None
        digest = hashlib.new(path.hash.mode, Path(str(path.locate())).read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != path.hash.value:
            changed.append(str(path))
    assert changed == []

    root = Path(str(pyspark.locate_file(".")))
    present = {path.relative_to(root).as_posix() for path in (root / "pyspark").rglob("*.py")}
    assert present - {path.as_posix() for path in recorded} == set()


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_answer_each_dependency_once(python: str) -> None:
    """On every supported Python, exactly one version of each dependency is named, and the dependency accepts it."""
    on = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    applicable: dict[str, list[str]] = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate(on):
            applicable.setdefault(canonicalize_name(pin.name), []).append(pinned_version(pin))
    assert [name for name, versions in applicable.items() if len(versions) > 1] == []

    for dependency in map(Requirement, requires("airflow-provider-roir") or ()):
        (version,) = applicable[canonicalize_name(dependency.name)]
        assert dependency.specifier.contains(version), dependency


def test_the_environment_follows_the_constraints() -> None:
    expected = {
        canonicalize_name(pin.name): pinned_version(pin)
        for pin in pins()
        if pin.marker is None or pin.marker.evaluate()
    }
    installed = {canonicalize_name(found.metadata["Name"]): found.version for found in distributions()}
    differing = {name: found for name, found in installed.items() if expected.get(name, found) != found}
    assert differing == {}


def test_make_env_says_what_it_does() -> None:
    """Found: minutes of silence."""
    wanted = subprocess.run(
        ["make", "--dry-run", "--always-make", "env"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    assert 'echo "make env: a virtual environment in .venv"' in wanted
    assert 'echo "make env: installs about ' in wanted
    assert "uv pip install --python" in wanted, "without --quiet it shows each package"


def test_each_user_of_a_machine_locks_the_start_of_servers_alone() -> None:
    """Found: `make demo` of a second user ended with a traceback: the first one's lock can't be opened."""
    path = os.fsdecode(postgres._SERVER._lock.path)
    assert Path(path).name == f"roir-postgres-{os.getuid()}.lock"
