"""The network between a worker and the server fails; the worker comes back after another has taken over."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from servers.killable import Server, running_server
from tests.conftest import with_template
from tests.crash.network import Proxy
from tests.crash.runner import Runner
from tests.crash.scene import Scene, a_scene, some
from tests.crash.test_engine_process import ASLEEP, PLACES


@pytest.fixture
def proxy(crash_server: Server) -> Iterator[Proxy]:
    """A network of its own between a worker and the server."""
    proxy = Proxy((crash_server.address, crash_server.port))
    yield proxy
    proxy.close()


@pytest.mark.sample(0)
@pytest.mark.parametrize("phase", some(ASLEEP, "build"))
def test_a_worker_behind_a_stalled_network_comes_back_as_a_zombie(scene: Scene, proxy: Proxy, phase: str) -> None:
    cut_off = Runner(scene.server.dsn(scene.name, proxy.port), ASLEEP[phase])
    cut_off.stopped()
    scene.killed("network", phase)
    proxy.stall()
    # It sends its next statement into nothing, and waits for an answer.
    cut_off.go()
    heir = Runner(scene.dsn, "", "resume")
    assert heir.ended() == "ended: completed"
    proxy.heal()
    said = cut_off.ended()
    print(said)
    assert said.startswith("failed: ")
    scene.finished()
    assert scene.read("SELECT count(*) FROM roir.event WHERE action IN ('pause', 'fail')") == [(0,)]


@pytest.mark.parametrize("phase", some(PLACES, "seal"))
def test_a_worker_whose_connections_are_reset_makes_new_ones(scene: Scene, proxy: Proxy, phase: str) -> None:
    runner = Runner(scene.server.dsn(scene.name, proxy.port), PLACES[phase])
    runner.stopped()
    scene.killed("connections reset", phase)
    proxy.cut()
    runner.go()
    proxy.heal()
    assert runner.ended() == "ended: completed"
    scene.finished()


@contextmanager
def another_machine() -> Iterator[tuple[str, str, str]]:
    """A network namespace behind a virtual cable: its name, our end of the cable, our address there."""
    tag = uuid.uuid4().hex[:6]
    space, ours, theirs = f"roir-{tag}", f"roir{tag}a", f"roir{tag}b"
    net = 200 + int(tag[:2], 16) % 50
    try:
        for command in (
            f"ip netns add {space}",
            f"ip link add {ours} type veth peer name {theirs}",
            f"ip link set {theirs} netns {space}",
            f"ip addr add 10.213.{net}.1/24 dev {ours}",
            f"ip link set {ours} up",
            f"ip -n {space} addr add 10.213.{net}.2/24 dev {theirs}",
            f"ip -n {space} link set {theirs} up",
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        yield space, ours, f"10.213.{net}.1"
    finally:
        subprocess.run(["ip", "link", "del", ours], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def namespaces_are_allowed() -> bool:
    """True for root on a Linux that has them."""
    if os.geteuid() != 0:
        return False
    try:
        with another_machine():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


@pytest.mark.by_hand("soak")
@pytest.mark.parametrize("phase", ["build", "seal", "fold", "publish"])
def test_a_worker_on_a_machine_whose_cable_is_pulled(phase: str) -> None:
    if not namespaces_are_allowed():
        pytest.skip("network namespaces need root on Linux")
    with another_machine() as (space, cable, address), running_server(address=address) as server:
        with_template(server.dsn())
        with a_scene(server) as scene:
            cut_off = Runner(scene.dsn, ASLEEP[phase], prefix=("ip", "netns", "exec", space))
            cut_off.stopped()
            scene.killed("network cable", phase)
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            cut_off.go()
            # We reach our own address whatever becomes of the cable.
            heir = Runner(scene.dsn, "", "resume")
            assert heir.ended() == "ended: completed"
            subprocess.run(["ip", "link", "set", cable, "up"], check=True)
            said = cut_off.ended()
            print(said)
            assert said.startswith("failed: ")
            scene.finished()
