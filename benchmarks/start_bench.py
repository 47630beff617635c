"""The commands that `benchmarks.start` times, and the logs that show when they did what."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from airflow_roir.engine import prepare
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.options import BuildOptions
from airflow_roir.spark import log_file
from airflow_roir.spark.start_timings import read_marks
from benchmarks.data import DATASETS
from benchmarks.engine import build_until
from benchmarks.scene import INDEX, Scene
from benchmarks.start_parts import PREFIX, Event, parts, points, statements, sums

DATA = DATASETS["item"]
WORKERS = 2
# The share that is built when a build is paused to be resumed.
PAUSED_AT = 0.1
# The session's name of every command.
COMMAND = "roir cli"
EVENTS = """
SELECT extract(epoch FROM at)::float8, action, coalesce(detail, '') FROM roir.event
 WHERE operation_id = %s ORDER BY at
"""

Result = dict[str, dict[str, float]]


class Bench:
    """The scene, the settings of what runs on it, and what it leaves to be read, in this folder."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        self.logs = folder / "logs"
        self.environment = {**os.environ, "ROIR_DSN": scene.dsn, log_file.FOLDER: str(self.logs)}
        self._read_from: dict[tuple[Path, int], int] = {}
        for setting in ("log_statement = 'all'", f"log_line_prefix = '{PREFIX}'"):
            scene.server.execute(f"ALTER SYSTEM SET {setting}")
        scene.run("SELECT pg_reload_conf()")

    def begin(self) -> float:
        """Notes where the logs end now, from where they are read later; returns the time."""
        logs = [self.scene.server.log_file, *self.logs.glob("*.log")]
        # By its number too: a log of the same name that is new is read whole.
        self._read_from = {(log, log.stat().st_ino): log.stat().st_size for log in logs}
        return time.time()

    def result(self, begin: float, asking: str | None, building: str | None = None, **known: float) -> Result:
        """The parts of the newest operation since `begin`. asking, building: see `points`; known: more points."""
        operation = self.operation()
        with self.scene.session.cursor() as cursor:
            cursor.execute(EVENTS, (operation,))
            events = [Event(*row) for row in cursor.fetchall()]
        marks = read_marks(self._new(log_file.spark_log(operation, self.logs)))
        sent = statements(self._new(self.scene.server.log_file))
        reached = points(begin, sent, events, marks, asking, building)
        reached |= {name: at for name, at in known.items() if at >= begin}
        seconds = parts(begin, reached)
        return {
            "parts": rounded(seconds),
            "sums": rounded(sums(seconds)),
            "at": rounded({name: at - begin for name, at in reached.items()}),
        }

    def operation(self) -> int:
        """The newest build."""
        return int(self.scene.value("SELECT max(id) FROM roir.operation WHERE kind <> 'verify'"))

    def _new(self, log: Path) -> str:
        if not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(self._read_from.get((log, os.fstat(file.fileno()).st_ino), 0))
            return file.read().decode(errors="replace")

    def build(self, *more: str) -> Result:
        """`roir build`, to its end."""
        self.scene.clear()
        definition = ("--table", DATA.table, "--keys", ",".join(DATA.key), "--include", ",".join(DATA.include))
        return self._command("build", INDEX, *definition, "--parallelism", str(WORKERS), *more)

    def resume(self) -> Result:
        """`roir resume` of a build that was paused, to its end."""
        self.scene.clear()
        database = self.scene.database
        prepared = prepare.prepare(database, DATA.definition(INDEX), BuildOptions(parallelism=WORKERS), "bench")
        run = start_run(database, prepared.index, "bench")
        if not build_until(database, run, WORKERS, PAUSED_AT):
            raise SystemExit("the build was over before its pause: take more --rows")
        end_run(database, run)
        self.scene.run("CHECKPOINT")
        return self._command("resume", INDEX)

    def _command(self, *arguments: str) -> Result:
        begin = self.begin()
        done = subprocess.run(
            [sys.executable, "-m", "airflow_roir.cli", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"roir {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
        return self.result(begin, COMMAND, ended=time.time())


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds rounded to milliseconds."""
    return {name: round(value, 3) for name, value in seconds.items()}
