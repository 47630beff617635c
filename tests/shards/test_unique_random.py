"""Unique over shards, whatever comes between what: no two shards have a key at one moment, and no refusal is false."""

from __future__ import annotations

from functools import partial

import pytest

from airflow_roir.shards.announce import intents
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.contenders import Contest
from tests.shards.test_unique import enforced, problem

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE DEFERRABLE, v int)",)


@pytest.mark.by_hand("sweeps")
@pytest.mark.usefixtures("deadlocks_meant")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.sample(0)] if seed else []) for seed in range(6)]
)
def test_writers_of_shards_contend_for_keys(contrib_shards: Make, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(intents, "look", partial(intents.look, old_s=0.05))
    made = contrib_shards(2 + seed % 2, *TABLE)
    first = enforced(made)
    contest = Contest(made, seed)

    def rebuild() -> None:
        _, run = apart.begin(made, table=None, keys=None, include=None)
        apart.finish_all(made, run)

    contest.run(6.0 if seed else 4.0, meanwhile=rebuild if seed % 2 else None)
    print(f"seed {seed}: {dict(contest.happened)}")
    assert not contest.violations()
    assert not contest.false_refusals()
    assert contest.happened["done"] > 10 < contest.happened["23505"]
    [(shown,)] = made.ask("SELECT id FROM roir.generation WHERE status = 'active'")
    assert (shown == first) == (seed % 2 == 0)
    for _ in range(3):
        apart.ship_all(made, shown)
    apart.assert_exact(made, shown)
    assert problem(made, shown) is None
    # Nothing is left of those who rolled back, or were waited for.
    assert made.ask(f"SELECT count(*) FROM roir_data.g{shown}_intent") == [(0,)]
    assert sorted(made.ask(f"SELECT c1, c2 FROM roir_data.g{shown}_holder")) == sorted(
        made.ask(f"SELECT c1, c2 FROM roir_data.g{shown} WHERE c1 IS NOT NULL")
    )
