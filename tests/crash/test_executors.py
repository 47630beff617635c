"""An executor of a standalone cluster dies by SIGKILL, or the whole machine that it runs on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.gate import PATIENCE_S
from tests.crash.scene import BUILD, Scene, some
from tests.spark.cluster import EXECUTOR_SETTINGS, Cluster, standalone_cluster

ROOT = Path(__file__).parents[2]
CONF = [part for name, value in EXECUTOR_SETTINGS.items() for part in ("--conf", f"{name}={value}")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and two workers."""
    with standalone_cluster(tmp_path_factory.mktemp("cluster"), environment={"PYTHONPATH": str(ROOT)}) as cluster:
        yield cluster


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", some(["build", "seal"], "build"))
def test_an_executor_is_killed(scene: Scene, cluster: Cluster, phase: str) -> None:
    gate = scene.gate(phase)
    command = scene.roir(*BUILD, *CONF, master=cluster.url)
    gate.reached()
    victims = cluster.executors()
    assert victims
    scene.killed("Spark executor", phase)
    for victim in victims:
        victim.kill()
    gate.open()
    said, _ = command.communicate(timeout=PATIENCE_S)
    print(said)
    assert command.returncode == 0, said
    scene.finished()
