"""The command, Spark's driver and Spark's Python workers die by SIGKILL; a user carries on with `roir resume`."""

from __future__ import annotations

import pytest

from tests.crash.gate import PATIENCE_S
from tests.crash.scene import BUILD, Scene, some, wait_until


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", some(["prepare", "build", "seal", "fold", "publish"], "publish"))
def test_the_command_is_killed(scene: Scene, phase: str) -> None:
    gate = scene.gate(phase)
    command = scene.roir(*BUILD)
    gate.reached()
    scene.killed("CLI", phase)
    command.kill()
    command.wait()
    gate.open()
    if phase == "prepare":
        # Its transaction is undone as soon as the server notices; until then the next one would wait for it.
        command = scene.roir(*BUILD)
        said, _ = command.communicate(timeout=PATIENCE_S)
        assert command.returncode == 0, said
    else:
        scene.resume("--take-over")
    scene.finished()


@pytest.mark.slow
@pytest.mark.parametrize("phase", some(["build", "seal"], "build"))
def test_the_driver_is_killed(scene: Scene, phase: str) -> None:
    gate = scene.gate(phase)
    command = scene.roir(*BUILD)
    gate.reached()
    (driver,) = scene.processes("airflow_roir.spark")
    scene.killed("Spark driver", phase)
    driver.kill()
    said, _ = command.communicate(timeout=PATIENCE_S)
    assert command.returncode not in (0, 3), said
    gate.open()
    scene.resume("--take-over")
    scene.finished()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", some(["build", "seal"], "seal"))
def test_the_python_workers_are_killed(scene: Scene, phase: str) -> None:
    gate = scene.gate(phase)
    command = scene.roir(*BUILD)
    gate.reached()
    # The daemon's children are the workers; it starts new ones.
    daemons = {process.pid for process in scene.processes("airflow_roir.spark.worker_daemon")}
    victims = [process for process in scene.processes("airflow_roir.spark.worker_daemon") if process.ppid() in daemons]
    assert victims
    scene.killed("Spark Python worker", phase)
    for victim in victims:
        victim.kill()
    wait_until(lambda: not any(victim.is_running() and victim.status() != "zombie" for victim in victims), "the kill")
    gate.open()
    said, _ = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0, said
    scene.finished()
