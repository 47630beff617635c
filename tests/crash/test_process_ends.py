"""Each process of a build ended by each signal, while each of the others is healthy, stopped or deaf: no process is
left, no heartbeat continues, and no dead process is named as the driver.

The JVM is a substitute: it is asked nothing before it is up, and so a build waits for it as for one that hangs.
`test_a_real_build_ends` has a real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from airflow_roir.engine.control import operations, sign_of_life
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import OperationRunning
from servers.killable import Server
from tests.crash.gate import PATIENCE_S
from tests.crash.network import Proxy
from tests.crash.scene import BUILD, MARK, ROIR, Scene, a_scene, wait_until

pytestmark = pytest.mark.sample(1)
SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL"]
# A Java that never comes up, with a child in a group of its own, as Spark's Python daemon is; both end by KILL alone.
JAVA = """#!{python}
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
name = "stand-in-java"
if os.fork() == 0:
    os.setpgid(0, 0)
    # Spark's launcher is asked by a pipe, and has no such child.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    name = "stand-in-worker"
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", name])
"""
WHO = {"driver": "airflow_roir.spark", "java": "stand-in-java", "worker": "stand-in-worker"}


class Family:
    """A build in a session of its own, whose driver has taken the operation up and waits for Java."""

    def __init__(self, scene: Scene, home: Path) -> None:
        self.scene = scene
        (home / "bin").mkdir(parents=True)
        java = home / "bin" / "java"
        java.write_text(JAVA.format(python=sys.executable))
        java.chmod(0o755)
        (home / "release").write_text('JAVA_VERSION="17.0.1"\n')
        self.proxy = Proxy((scene.server.address, scene.server.port))
        self.log = home / "log"
        with self.log.open("w") as log:
            self.command = subprocess.Popen(
                [ROIR, *BUILD],
                env={
                    **os.environ,
                    **scene.marked(scene.server.dsn(scene.name, self.proxy.port)),
                    "JAVA_HOME": str(home),
                    "ROIR_LOG_FOLDER": str(home),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: self.is_driven() and self.found("java") and self.found("worker"), f"a driver: {self.said()}")

    def said(self) -> str:
        return self.log.read_text()

    def is_driven(self) -> bool:
        assert self.command.poll() is None, self.said()
        return self.scene.read("SELECT owner IS NOT NULL AND heartbeat_at IS NOT NULL FROM roir.operation") == [(True,)]

    def found(self, who: str) -> list[psutil.Process]:
        return self.scene.processes(WHO[who])

    def process(self, who: str) -> psutil.Process:
        if who == "command":
            return psutil.Process(self.command.pid)
        (found,) = self.found(who)
        return found

    def ends_without_java(self) -> bool:
        """Kills Java once more; returns whether the command has ended."""
        for process in self.found("java"):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return self.command.poll() is not None


def left(scene: Scene) -> list[psutil.Process]:
    """All that are alive and were started for it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            mine = process.pid != os.getpid() and process.environ().get(MARK) == scene.name
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def signals_are_heard() -> Iterator[None]:
    """A shell, or nohup, starts what runs in its background with these ignored, and its children inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)}
    for number, handler in before.items():
        if handler == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def family(crash_server: Server, tmp_path: Path) -> Iterator[Family]:
    with a_scene(crash_server) as scene:
        family = Family(scene, tmp_path / "java")
        try:
            yield family
        finally:
            family.proxy.heal()
            for process in left(family.scene):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            family.command.wait()
            family.proxy.close()


OTHERS = ["healthy", "driver stopped", "java stopped", "worker stopped", "network stalled", "guard killed"]


@pytest.mark.sample(0)
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("victim", ["command", "driver", "java"])
def test_nobody_is_left_and_nobody_dead_is_named(family: Family, victim: str, number: str, others: str) -> None:
    """Found: a second Ctrl-C while the first one's pause was being written cut it off: beside a driver that hung the
    status said `running` for half a minute. It holds: the pause is written beside what waits.
    """
    match others.split():
        case ["network", _]:
            family.proxy.stall()
        case ["guard", _]:
            (guard,) = [one for one in left(family.scene) if any(part.endswith("guard.py") for part in one.cmdline())]
            if victim == "command" and number in ("SIGQUIT", "SIGKILL"):
                pytest.skip("without it nobody ends what a killed command has started, but for its next line")
            guard.kill()
        case [who, "stopped"]:
            family.process(who).suspend()
    if victim == "java" and number != "SIGKILL":
        pytest.skip("a Java that is deaf to it goes on, and its driver with it")
    if others == "driver stopped" and (victim == "java" or (victim == "driver" and number != "SIGKILL")):
        pytest.skip("a stopped process hears of it when it goes on")
    signalled = family.process(victim)
    signalled.send_signal(getattr(signal, number))
    if others == "network stalled" and victim != "command":
        # No process has ended the command, which waits for its server, as its driver does.
        family.proxy.heal()
    if victim == "command" and number == "SIGINT":
        # The first one lets open batches end.
        wait_until(lambda: "pausing" in family.said() or not signalled.is_running(), "the first Ctrl-C")
        with suppress(psutil.NoSuchProcess):
            signalled.send_signal(signal.SIGINT)
    try:
        if victim == "java":
            # A start that fails is tried once more, without options of ours.
            wait_until(family.ends_without_java, "the command's end")
        code = family.command.wait(PATIENCE_S)
        assert code != 0, family.said()
        wait_until(lambda: not left(family.scene), f"the end of {left(family.scene)}")
    except BaseException:
        print(family.said(), left(family.scene))
        raise
    family.proxy.heal()
    told = others != "network stalled" and not (victim == "command" and number in ("SIGQUIT", "SIGKILL"))
    database = Database(family.scene.dsn)
    with database.transaction() as connection:
        row = operations.find_operation(database, "ix")
        beats = sign_of_life.heart_beats(row, connection)
    if told:
        assert (row.status, beats) == ("paused", False), family.said()
    # If no process could write down the end, the heartbeat that has stopped shows it.
    wait_until(lambda: _can_be_taken_up(database), "the end of its heartbeat")


def _can_be_taken_up(database: Database) -> bool:
    try:
        run = start_run(database, "ix", "heir")
    except OperationRunning:
        return False
    end_run(database, run)
    return True


@pytest.mark.sample(0)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("stopped", ["java", "airflow_roir.spark.worker_daemon", "airflow_roir.spark"])
def test_a_real_build_ends(crash_server: Server, stopped: str, number: str) -> None:
    """While its workers wait for a lock, and one of its processes is stopped."""
    with a_scene(crash_server) as scene:
        gate = scene.gate("build")
        command = scene.roir(*BUILD)
        gate.reached()
        java = [one for one in psutil.Process(command.pid).children(recursive=True) if one.name() == "java"]
        for process in java if stopped == "java" else scene.processes(stopped):
            process.suspend()
        command.send_signal(getattr(signal, number))
        command.wait(PATIENCE_S)
        wait_until(lambda: not left(scene), "the end of all")
        if number == "SIGTERM":
            assert scene.read("SELECT status FROM roir.operation") == [("paused",)]
        wait_until(lambda: _can_be_taken_up(scene.database), "the end of its heartbeat")
        gate.open()
