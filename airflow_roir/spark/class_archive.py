"""The archive of Java's classes with which Spark's driver starts faster: where it lies, and the options that use it.

`roir spark-archive` makes it, once per environment or image. A Java that it doesn't fit starts as ever. See
docs/spark.md#a-faster-start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from airflow_roir.errors import InvalidInput, SparkFailed
from airflow_roir.spark.java import use_java

# The only folder that archives are looked for in, wherever Spark's driver is started.
FOLDER = "ROIR_CACHE_FOLDER"
# The driver only hands tasks out: what takes longest in it is compiling what it runs once.
QUICK = "-XX:TieredStopAtLevel=1"
# Two collectors are one too many for Java, so none is asked for where somebody may have chosen one.
COLLECTOR = "-XX:+UseSerialGC"
CHOSEN_IN = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "PYSPARK_SUBMIT_ARGS")
MAKING_S = 600.0


def archive_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the archive for this Java (JAVA_HOME) and this PySpark lies, or where it would be made."""
    pyspark = _pyspark()
    java = Path(environment.get("JAVA_HOME", ""))
    parts = [str(java.resolve()), str(pyspark), environment.get("SPARK_HOME", "")]
    for file in (java / "release", pyspark / "version.py"):
        parts.append(file.read_text() if os.path.isfile(file) else "")
    name = f"spark-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.jsa"
    paths = [folder / name for folder in _folders(environment)]
    there = [path for path in paths if os.path.exists(path)]
    writable = [path for path in paths if _can_be_made_in(path.parent)]
    return [*there, *writable, *paths][0]


def _folders(environment: Mapping[str, str]) -> list[Path]:
    """With the environment that it belongs to, or the user's own."""
    if folder := environment.get(FOLDER):
        return [Path(folder)]
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # A user of a container may have no home.
    own = [] if cache.startswith("~") else [Path(cache) / "roir"]
    return [Path(sys.prefix) / "share" / "roir", *own]


def _can_be_made_in(folder: Path) -> bool:
    # Not Path.exists, which raises PermissionError below somebody else's home.
    there = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return os.access(there, os.W_OK)


def java_options(conf: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Options for the JVM of a driver that is started with these Spark settings."""
    options = [QUICK]
    settings = Path(environment.get("SPARK_CONF_DIR") or Path(environment.get("SPARK_HOME") or _pyspark()) / "conf")
    chosen = [environment.get(name, "") for name in CHOSEN_IN] + [
        value for name, value in conf.items() if name.lower().endswith("javaoptions")
    ]
    if not any("GC" in text for text in chosen) and not os.path.exists(settings / "spark-defaults.conf"):
        options.append(COLLECTOR)
    archive = archive_path(environment)
    if _is_ours(archive):
        # A JVM that it doesn't fit takes no notice, and needn't say so.
        options += [f"-XX:SharedArchiveFile={quoted(archive)}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
    return options


def make_archive() -> Path:
    """Make the archive again, which takes as long as two or three starts of Spark; its path.

    Raises JavaMissing, InvalidInput if it can't be written, SparkFailed if Spark doesn't start.
    """
    use_java()
    path = archive_path()
    try:
        _make(path)
    except OSError as error:
        raise InvalidInput(
            f"the archive can't be written to {path.parent}: {error.strerror}; name another folder by {FOLDER}, for "
            "the drivers, too"
        ) from None
    return path


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent) as folder:
        new = Path(folder) / path.name
        own = os.environ.get("SPARK_SUBMIT_OPTS", "")
        making = {
            "SPARK_SUBMIT_OPTS": f"{own} -XX:ArchiveClassesAtExit={quoted(new)}".strip(),
            # Where no older one is used.
            FOLDER: folder,
        }
        ran = subprocess.run(
            [sys.executable, "-m", "airflow_roir.spark.archived_start"],
            env={**os.environ, **making},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=MAKING_S,
            check=False,
        )
        if ran.returncode or not new.is_file():
            raise SparkFailed(f"the archive could not be made: {ran.stdout.strip()[-2000:] or 'Spark said nothing'}")
        new.chmod(0o644)
        new.replace(path)


def _pyspark() -> Path:
    found = importlib.util.find_spec("pyspark")
    return Path(found.origin).parent if found and found.origin else Path()


def _is_ours(archive: Path) -> bool:
    """Whether it is there, and no other user could have put it there: it is code that the driver runs."""
    if ":" in str(archive):
        # Java would take it for two.
        return False
    try:
        found = archive.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def quoted(path: Path) -> str:
    """The path in an option for the JVM: Spark reads these as a shell would."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
