"""Deaths at random: any process, at any statement of any phase, and again, by printed seeds; in the long run only."""

from __future__ import annotations

import os
import random

import pytest

from tests.crash.runner import Runner
from tests.crash.scene import Scene

# A whole operation of a scene is of about this many statements.
STATEMENTS = 330
SESSIONS = (
    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
    "WHERE application_name = 'roir runner' AND datname = current_database()"
)
BEGUN = "SELECT FROM roir.operation WHERE heartbeat_at IS NOT NULL OR status <> 'running'"


@pytest.mark.by_hand("soak")
@pytest.mark.parametrize("seed", [int(seed) for seed in os.environ.get("ROIR_CRASH_SEEDS", "1 2 3").split()])
def test_whatever_dies_at_whatever_moment(scene: Scene, seed: int) -> None:
    print(f"seed of the moments: {seed}")
    chance = random.Random(seed)
    program = "operation"
    kills = 0
    while True:
        runner = Runner(scene.dsn, str(chance.randrange(STATEMENTS)), program)
        said = runner._line()
        if not said.startswith("stopped: "):
            break
        kills += 1
        what = chance.choice(["engine process", "PostgreSQL backend", "PostgreSQL server", "zombie"])
        begun = scene.read("SELECT phase FROM roir.operation")
        print(what, begun, said)
        scene.killed(what, f"{begun[0][0]}, random" if begun else "prepare, random")
        if what == "engine process":
            runner.kill()
        elif what == "PostgreSQL backend":
            scene.read(SESSIONS)
            runner.go()
            said = runner.ended()
            break
        elif what == "PostgreSQL server":
            scene.server.kill()
            runner.go()
            scene.server.start()
            said = runner.ended()
            break
        else:
            # The zombie comes back while the next run starts: the later of the two to take the operation completes it.
            scene.read(SESSIONS)
            heir = Runner(scene.dsn, "", "resume" if begun else "operation")
            runner.go()
            ends = {heir.ended(), runner.ended()}
            print(ends)
            said = "ended: completed" if "ended: completed" in ends else f"{ends}"
            break
        program = "resume" if scene.read("SELECT FROM roir.operation") else "operation"
    if said.startswith("failed: OperationalError") and not scene.read(BEGUN):
        # The operation had not begun. The command fails at once if it can't connect, and its user runs it again.
        said = Runner(scene.dsn, "", "resume" if scene.read("SELECT FROM roir.operation") else "operation").ended()
    assert said == "ended: completed", (said, scene.read("SELECT status, phase, pause_reason FROM roir.operation"))
    if not kills:
        pytest.skip("it was over before the moment came")
    scene.finished()
