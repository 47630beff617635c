"""The Java that the driver takes is the one that scripts/ensure-java names; without any it says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_roir.errors import JavaMissing
from airflow_roir.spark.java import use_java
from tests.packaging.test_ensure_java import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("home", "on_path"), [(None, "17"), ("21", "17"), ("11", "17"), ("1.8", "25"), (None, "11"), ("11", None)]
)
def test_it_is_the_one_that_the_script_finds(machine: Machine, home: str | None, on_path: str | None) -> None:
    environment = {"PATH": str(machine.bin)}
    if on_path:
        machine.java_on_path(on_path)
    if home:
        environment["JAVA_HOME"] = str(machine.java(machine.root / "home", home))
    by_script = machine.ensure(**environment)
    if by_script.returncode == 0:
        found = use_java(environment)
        assert f"{found}\n" == by_script.stdout
        # For Spark, which asks no version.
        assert environment["JAVA_HOME"] == str(found)
        return
    with pytest.raises(JavaMissing, match=f"Java {home or on_path}.*apt-get install openjdk-17-jre-headless"):
        use_java(environment)


def test_a_spark_home_that_leads_nowhere_is_named(machine: Machine) -> None:
    """Found: `SPARK_HOME` that leads nowhere wasn't named: "No such file or directory". It holds: the message
    names it.
    """
    machine.java_on_path("17")
    environment = {"PATH": str(machine.bin), "SPARK_HOME": str(machine.root)}
    with pytest.raises(JavaMissing, match=f"SPARK_HOME is {machine.root}, which has no bin/spark-submit"):
        use_java(environment)
    (machine.root / "bin").mkdir(exist_ok=True)
    (machine.root / "bin" / "spark-submit").touch()
    use_java(environment)


def test_a_java_that_does_not_run_is_none(machine: Machine) -> None:
    machine.command("java", "exit 1")
    with pytest.raises(JavaMissing, match="no Java that runs"):
        use_java({"PATH": str(machine.bin)})


@pytest.mark.parametrize("home", ["17", "11", "1.8"])
@pytest.mark.parametrize("by_path", [False, True])
def test_a_java_that_says_its_version_in_a_file_is_not_started(machine: Machine, home: str, by_path: bool) -> None:
    folder = machine.java_on_path(home) if by_path else machine.java(machine.root / "home", home)
    environment = {"PATH": str(machine.bin)} | ({} if by_path else {"JAVA_HOME": str(folder)})
    machine.write(folder / "bin" / "java", f"touch {machine.root / 'started'}; exit 1")
    (folder / "release").write_text(f'IMPLEMENTOR="Debian"\nJAVA_VERSION="{home}.0.15_3"\nOS_ARCH="x86_64"\n')
    if home == "17":
        assert use_java(environment) == Path(environment["JAVA_HOME"]) == folder
    else:
        with pytest.raises(JavaMissing, match=f"is Java {home};|is Java {home}[)]"):
            use_java(environment)
    assert not (machine.root / "started").exists()


@pytest.mark.parametrize("release", ["", 'JAVA_VERSION="unknown"', "\xff"])
def test_a_file_that_does_not_tell_is_no_answer(machine: Machine, release: str) -> None:
    folder = machine.java(machine.root / "home", "21")
    (folder / "release").write_bytes(release.encode("latin-1"))
    assert use_java({"PATH": str(machine.bin), "JAVA_HOME": str(folder)}) == folder


def test_a_file_without_the_program_is_no_java(machine: Machine) -> None:
    folder = machine.java(machine.root / "home", "21")
    (folder / "release").write_text('JAVA_VERSION="21"')
    (folder / "bin" / "java").unlink()
    with pytest.raises(JavaMissing, match="no Java that runs"):
        use_java({"PATH": str(machine.bin), "JAVA_HOME": str(folder)})
