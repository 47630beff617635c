"""The process that drives the engine dies by SIGKILL in the middle of each phase, or comes back as a zombie."""

from __future__ import annotations

import pytest

from tests.crash.runner import Runner
from tests.crash.scene import Scene, some

# Phase: the statement before which it dies, in the middle of a transaction.
PLACES = {
    "prepare": "INSERT INTO roir.scan_range",
    "build": "INSERT INTO roir_data.g1 ",
    "seal": "ATTACH PARTITION",
    "fold": "FOR UPDATE SKIP LOCKED",
    "publish": "CREATE VIEW",
}
# Phase: where it is cut off for so long that another takes over; it holds no lock that the other needs.
ASLEEP = {
    "build": "INSERT INTO roir_data.g1 ",
    "seal": "CREATE UNIQUE INDEX g1_s002",
    "fold": "FOR UPDATE SKIP LOCKED",
    "publish": "AS ranges, .* AS segments",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("phase", some(PLACES, "prepare", "seal"))
def test_a_killed_process_leaves_the_operation_to_the_next(scene: Scene, phase: str) -> None:
    victim = Runner(scene.dsn, PLACES[phase])
    print(victim.stopped())
    scene.killed("engine process", phase)
    victim.kill()
    heir = Runner(scene.dsn, "", "operation" if phase == "prepare" else "resume")
    assert heir.ended() == "ended: completed"
    scene.finished()


@pytest.mark.sample(0)
@pytest.mark.parametrize("phase", some(ASLEEP, "build", "publish"))
def test_a_process_that_was_taken_for_dead_changes_nothing(scene: Scene, phase: str) -> None:
    zombie = Runner(scene.dsn, ASLEEP[phase])
    zombie.stopped()
    scene.killed("zombie", phase)
    heir = Runner(scene.dsn, "", "resume")
    assert heir.ended() == "ended: completed"
    zombie.go()
    said = zombie.ended()
    print(said)
    assert said.startswith("failed: ")
    scene.finished()
    assert scene.read("SELECT count(*) FROM roir.event WHERE action IN ('pause', 'fail')") == [(0,)]
