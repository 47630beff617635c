"""scripts/ensure-java on machines with the right Java, with an old one, and with none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "ensure-java"
# The programs that the script needs, besides Java and apt-get.
TOOLS = ("bash", "cat", "sed")


class Machine:
    """A PATH of its own, on which Java, apt-get and the user's id are what a test says."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        self.command("id", "echo 1000")

    def command(self, name: str, script: str) -> None:
        """Puts a shell script on the PATH."""
        self.write(self.bin / name, script)

    def java(self, home: Path, version: str) -> Path:
        """Puts a Java of this specification version into this home."""
        (home / "bin").mkdir(parents=True)
        self.write(home / "bin" / "java", java_script(home, version))
        return home

    def java_on_path(self, version: str) -> Path:
        """Puts a Java of this specification version onto the PATH; returns its home."""
        home = self.java(self.root / f"jvm-{version}", version)
        (self.bin / "java").symlink_to(home / "bin" / "java")
        return home

    def apt(self, offers: str, version: str = "17") -> None:
        """Offer one package to root, which puts a Java onto the PATH."""
        home = self.root / "installed"
        java = java_script(home, version).replace("'", "'\\''")
        self.command("id", "echo 0")
        self.command(
            "apt-get",
            f'echo "$*" >> {self.root}/apt.log; echo "chatter"\n'
            'case "$*" in\n'
            "  update*) ;;\n"
            f"  *{offers}) rm -f {self.bin}/java; printf '%s' '#!/bin/bash\n{java}' > {self.bin}/java\n"
            f"    chmod +x {self.bin}/java ;;\n"
            "  *) exit 100 ;;\n"
            "esac",
        )
        for tool in ("rm", "chmod"):
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)

    @staticmethod
    def write(path: Path, script: str) -> None:
        """Writes an executable shell script."""
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def ensure(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the script here."""
        return subprocess.run(
            [SCRIPT], env={"PATH": str(self.bin), **environment}, capture_output=True, text=True, check=False
        )


def java_script(home: Path, version: str) -> str:
    """A Java that tells its properties, as the real one does, on standard error."""
    return f"printf '    %s\\n' 'java.home = {home}' 'java.specification.version = {version}' >&2"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("version", ["17", "21", "25"])
def test_takes_the_java_of_the_path(machine: Machine, version: str) -> None:
    home = machine.java_on_path(version)
    result = machine.ensure()
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{home}\n", "")


def test_prefers_java_home_as_spark_does(machine: Machine) -> None:
    machine.java_on_path("17")
    home = machine.java(machine.root / "chosen", "21")
    assert machine.ensure(JAVA_HOME=str(home)).stdout == f"{home}\n"


@pytest.mark.parametrize("version", ["1.8", "11"])
def test_passes_over_an_old_java_home(machine: Machine, version: str) -> None:
    old = machine.java(machine.root / "old", version)
    home = machine.java_on_path("17")
    assert machine.ensure(JAVA_HOME=str(old)).stdout == f"{home}\n"


def test_installs_one_as_root(machine: Machine) -> None:
    """Even if an old one is there; apt's own words don't get into the answer."""
    machine.java_on_path("11")
    machine.apt(offers="openjdk-17-jre-headless")
    result = machine.ensure(JAVA_HOME="/no/such/home")
    assert (result.returncode, result.stdout) == (0, f"{machine.root}/installed\n"), result.stderr


def test_takes_what_a_newer_release_offers(machine: Machine) -> None:
    machine.apt(offers="default-jre-headless", version="25")
    result = machine.ensure()
    assert (result.returncode, result.stdout) == (0, f"{machine.root}/installed\n"), result.stderr


def test_does_not_take_what_is_too_old(machine: Machine) -> None:
    machine.apt(offers="default-jre-headless", version="11")
    result = machine.ensure()
    assert (result.returncode, result.stdout) == (1, "")
    assert "Spark needs Java 17 or newer" in result.stderr


def test_an_ordinary_user_is_told_what_to_install(machine: Machine) -> None:
    machine.apt(offers="openjdk-17-jre-headless")
    machine.command("id", "echo 1000")
    result = machine.ensure()
    assert (result.returncode, result.stdout) == (1, "")
    assert "sudo apt-get install openjdk-17-jre-headless" in result.stderr
    assert not (machine.root / "apt.log").exists()


def test_without_apt_the_remedy_is_named(machine: Machine) -> None:
    machine.java_on_path("11")
    machine.command("id", "echo 0")
    result = machine.ensure()
    assert (result.returncode, result.stdout) == (1, "")
    assert "dnf install" in result.stderr
