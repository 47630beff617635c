"""The control law, simulated: servers that answer to load in their own ways, and what the governor makes of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from airflow_roir.engine.governor.control import FEWEST, UNREADABLE, Control, Grant
from airflow_roir.signals import SIGNALS, Reading

LIMIT = 0.020


def latency(value: float | None, problem: str = "") -> Reading:
    return Reading(SIGNALS["commit_latency"], LIMIT, value, problem=problem)


def lag(value: float | None, of: str = "r2", limit: float = 100.0) -> Reading:
    return Reading(SIGNALS["replica_lag"], limit, value, of)


@dataclass
class Queue:
    """A server whose commits take longer the more of it is used: users' load, and what a worker adds."""

    users: Callable[[float], float]
    worker: float
    idle_s: float = 0.002
    noise: random.Random = field(default_factory=lambda: random.Random(16))

    def latency(self, now: float, workers: float) -> float:
        used = min(0.98, self.users(now) + self.worker * workers)
        return self.idle_s / (1 - used) * self.noise.lognormvariate(0, 0.15)

    def room(self, now: float, load: float) -> float:
        """The workers with which a commit takes this part of the limit, without noise."""
        return max(0.0, (1 - self.idle_s / (LIMIT * load) - self.users(now)) / self.worker)


class SmallServer(Queue):
    """A server of which one worker uses half. Work beyond its capacity queues up, so commits stay slow after the worker
    has gone."""

    queued_s = 0.0

    def latency(self, now: float, workers: float) -> float:
        self.queued_s = max(0.0, self.queued_s + self.users(now) + self.worker * workers - 0.98)
        return super().latency(now, workers) + self.queued_s


def simulate(server: Queue, parallelism: int, seconds: int) -> list[tuple[float, float, Grant]]:
    """Now, latency and grant at each second. The reading is of the last five seconds, as the probe's."""
    control, grant = Control(), Grant(0.0)
    seen: list[float] = []
    found = []
    for now in range(seconds):
        seen.append(server.latency(now, grant.workers))
        recent = sorted(seen[-5:])
        grant = control.decide([latency(recent[-1])], parallelism, float(now))
        found.append((float(now), seen[-1], grant))
    return found


STEADY = [0.0, 0.3, 0.6, 0.75]


@pytest.mark.parametrize("users", STEADY)
@pytest.mark.parametrize("worker", [0.02, 0.05, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_the_limit_holds_and_the_build_takes_what_is_left(users: float, worker: float, seed: int) -> None:
    server = Queue(lambda _: users, worker, noise=random.Random(seed))
    run = simulate(server, 16, 1800)[60:]
    over = sum(took > LIMIT for _, took, _ in run) / len(run)
    assert over < 0.01, f"{over:.1%} of the time above the limit"
    used = sum(grant.workers for *_, grant in run) / len(run)
    enough = min(16.0, server.room(0, 0.4))
    assert used > 0.7 * enough, f"{used:.2f} workers of {enough:.2f}"


@pytest.mark.parametrize("users", STEADY)
def test_on_a_small_server_what_queued_up_is_not_held_against_fewer_workers(users: float) -> None:
    """Two workers were too much, and one was blamed for their queue: so two were tried again and again."""
    run = simulate(SmallServer(lambda _: users, 0.5), 4, 3600)[60:]
    over = sum(took > LIMIT for _, took, _ in run) / len(run)
    changes = sum(a[2].workers != b[2].workers for a, b in pairwise(run))
    assert over < 0.05, f"{over:.1%} of the time above the limit"
    assert changes <= 100, f"{changes} changes in an hour"


@pytest.mark.parametrize("users", STEADY)
def test_it_does_not_flap(users: float) -> None:
    run = simulate(Queue(lambda _: users, 0.05), 16, 3600)[120:]
    changes = sum(a[2].workers != b[2].workers for a, b in pairwise(run))
    assert changes <= 60, f"{changes} changes in an hour"


def test_it_gives_way_at_once_and_comes_back() -> None:
    """Users come for ten minutes, and go again."""
    server = Queue(lambda now: 0.85 if 600 <= now < 1200 else 0.1, 0.05)
    run = simulate(server, 8, 2400)
    rush = [took for now, took, _ in run if 630 <= now < 1200]
    assert sum(took > LIMIT for took in rush) / len(rush) < 0.25, "users alone are near the limit"
    assert max(grant.workers for now, _, grant in run if 660 <= now < 1200) <= 1
    assert max(grant.workers for now, _, grant in run if now >= 1900) >= 6


def test_users_alone_above_the_limit_leave_the_least() -> None:
    run = simulate(Queue(lambda _: 0.97, 0.05), 8, 300)
    assert {grant.workers for now, _, grant in run if now > 60} == {FEWEST}


def test_nothing_that_steers_is_no_restraint() -> None:
    free = Reading(SIGNALS["free_space"], 100.0, 500.0)
    assert Control().decide([free], 4, 0.0) == Grant(4.0)


def test_a_budget_stops_at_once_and_lets_go_below_its_limit() -> None:
    control = Control()
    granted = [control.decide([lag(value)], 4, float(n)).workers for n, value in enumerate([10, 101, 95, 81, 79])]
    assert granted[1:4] == [0, 0, 0]
    assert granted[4] > 0


def test_the_reason_names_the_replica_its_lag_and_the_limit() -> None:
    megabytes = 1 << 20
    grant = Control().decide([lag(5.0, "r1"), lag(340.0 * megabytes, "r2", 100.0 * megabytes)], 4, 0.0)
    assert grant == Grant(0.0, "replica_lag", "replica r2 is 340 MB behind, limit 100 MB")


def test_a_replica_that_is_no_longer_asked_about_counts_no_more() -> None:
    """gh-ost #361: its lag stayed in force after the list of replicas was changed."""
    control = Control()
    assert control.decide([lag(500.0, "r1"), lag(1.0, "r2")], 4, 0.0).workers == 0
    assert control.decide([lag(1.0, "r2")], 4, 1.0).workers > 0


@pytest.mark.parametrize("signal", sorted(SIGNALS))
def test_what_cannot_be_read_is_a_hold(signal: str) -> None:
    """Spirit #1035: lag that couldn't be seen was taken for none."""
    control = Control()
    control.decide([latency(0.001)], 4, 0.0)
    blind = Reading(SIGNALS[signal], 1.0, None, problem="role app may not see it")
    grant = control.decide([latency(0.001), blind], 4, 1.0)
    assert (grant.workers, grant.cause) == (0.0, UNREADABLE)
    assert "can't be read: role app may not see it" in (grant.why or "")
    assert control.decide([latency(0.001)], 4, 2.0).workers > 0


def test_a_lag_that_stopped_the_work_comes_back_with_half_of_the_workers() -> None:
    control = Control()
    now, workers = 0.0, 0.0
    while workers < 8:
        workers = control.decide([lag(1.0)], 8, now).workers
        now += 1
    assert control.decide([lag(150.0)], 8, now).workers == 0
    assert control.decide([lag(10.0)], 8, now + 1).workers == 4


def test_a_lowered_parallelism_holds_at_once() -> None:
    control = Control()
    for now in range(60):
        control.decide([latency(0.001)], 8, float(now))
    assert control.decide([latency(0.001)], 3, 60.0) == Grant(3.0)


def test_what_was_too_much_is_tried_ever_more_seldom() -> None:
    control, tried, before = Control(), [], 0.0
    for now in range(2000):
        # Three workers are too much, two are a third of the limit.
        grant = control.decide([latency(0.9 * LIMIT if before >= 3 else 0.3 * LIMIT)], 8, float(now))
        if grant.workers >= 3 > before:
            tried.append(now)
        before = grant.workers
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == sorted(gaps)
    assert len(tried) <= 12, tried
