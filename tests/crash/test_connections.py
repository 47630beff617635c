"""The run itself waits for a lost connection, and for a server that restarts: no user needs to resume anything."""

from __future__ import annotations

import pytest

from tests.crash.runner import Runner
from tests.crash.scene import Scene, some
from tests.crash.test_engine_process import PLACES


@pytest.mark.sample(0)
@pytest.mark.parametrize("phase", some(PLACES, "prepare", "fold"))
def test_terminated_backends_are_replaced(scene: Scene, phase: str) -> None:
    runner = Runner(scene.dsn, PLACES[phase])
    runner.stopped()
    scene.killed("PostgreSQL backend", phase)
    scene.read(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE application_name = 'roir runner' AND datname = current_database()"
    )
    runner.go()
    assert runner.ended() == "ended: completed"
    scene.finished()
    assert scene.read("SELECT count(*) FROM roir.event WHERE action IN ('pause', 'fail', 'abort')") == [(0,)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("phase", some(PLACES, "publish"))
def test_a_server_that_dies_and_recovers_is_waited_for(scene: Scene, phase: str) -> None:
    runner = Runner(scene.dsn, PLACES[phase])
    runner.stopped()
    scene.killed("PostgreSQL server", phase)
    scene.server.kill()
    # The server is down: the run can't connect, and tries again.
    runner.go()
    scene.server.start()
    assert runner.ended() == "ended: completed"
    scene.finished()
    assert scene.read("SELECT count(*) FROM roir.event WHERE action IN ('pause', 'fail', 'abort')") == [(0,)]
