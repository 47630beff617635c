"""Finds the Java that Spark runs on, as `scripts/ensure-java` does, before Spark is started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

from airflow_roir.errors import JavaMissing

NEEDED = 17
OF_A_WORKER = "set JAVA_HOME for Airflow's workers, and start again"
OF_A_COMMAND = "set JAVA_HOME, or use threads of the command by --without-spark, and start again"
# A Java answers in a second; this is for a machine that swaps.
ANSWER_S = 60.0


def use_java(environment: MutableMapping[str, str] = os.environ, instead: str = OF_A_WORKER) -> Path:
    """Finds a Java that Spark can run on, and sets JAVA_HOME to it for child processes; returns its home.

    instead: what a user can do other than install a Java, for the message.
    JAVA_HOME comes first, then `java` on PATH. Raises JavaMissing, with the versions found and the one to install; also
    if SPARK_HOME contains no Spark, since PySpark starts that one, not its own.
    """
    if (spark := environment.get("SPARK_HOME")) and not (Path(spark) / "bin" / "spark-submit").is_file():
        raise JavaMissing(
            f"SPARK_HOME is {spark}, which has no bin/spark-submit, so Spark can't be started. Unset it to use the "
            "Spark of the package pyspark, or name a folder that has one"
        )
    found: list[str] = []
    for where, java in _candidates(environment):
        home, version = _read(java) or _asked(java, environment)
        if home is not None and version.isdigit() and int(version) >= NEEDED:
            environment["JAVA_HOME"] = str(home)
            return home
        found.append(f"{where} is {f'Java {version}' if version else 'no Java that runs'}")
    raise JavaMissing(
        f"Spark needs Java {NEEDED} or newer on the machine that runs its driver, and there is none "
        f"({'; '.join(found) or 'JAVA_HOME is not set, and no java is on PATH'}). Install it there (Debian, Ubuntu: "
        f"apt-get install openjdk-{NEEDED}-jre-headless; Fedora, RHEL: dnf install java-21-openjdk-headless), or "
        f"{instead}"
    )


def _candidates(environment: MutableMapping[str, str]) -> list[tuple[str, Path]]:
    candidates = []
    if home := environment.get("JAVA_HOME"):
        candidates.append((f"JAVA_HOME={home}", Path(home) / "bin" / "java"))
    if on_path := shutil.which("java", path=environment.get("PATH", os.defpath)):
        candidates.append((on_path, Path(on_path)))
    return candidates


def _read(java: Path) -> tuple[Path, str] | None:
    """As `_asked`, by the file `release` beside a Java's programs; None if that doesn't show it.

    To start Java takes half a second or more.
    """
    home = java.resolve().parent.parent
    try:
        found = re.search(r'^JAVA_VERSION="(1\.\d+|\d+)\b', (home / "release").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    # A wrapper of another name may start any Java.
    runs = java.resolve() == home / "bin" / "java" and os.access(java, os.X_OK)
    return (home, found.group(1)) if found and runs else None


def _asked(java: Path, environment: MutableMapping[str, str]) -> tuple[Path | None, str]:
    """Its home and its specification's version: `17`, or `1.8` before 9. None and an empty text if it can't run."""
    try:
        answer = subprocess.run(
            [java, "-XshowSettings:properties", "-version"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=True,
        ).stderr
    except (OSError, subprocess.SubprocessError):
        return None, ""
    said = dict(re.findall(r"^ *(java\.home|java\.specification\.version) = (.*)$", answer, re.MULTILINE))
    home = said.get("java.home", "").strip()
    return Path(home) if home else None, said.get("java.specification.version", "").strip()
