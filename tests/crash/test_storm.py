"""Two operators work at random beside users: old readers still see what the table shows them; in the long run only."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.engine import operators
from tests.engine.storm import Storm


@pytest.mark.by_hand("soak")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [int(seed) for seed in os.environ.get("ROIR_STORM_SEEDS", "1 2 3").split()])
def test_whatever_two_operators_do_at_random(server: str, seed: int) -> None:
    chance = random.Random(seed)
    names = operators.make_templates(server)
    scene = chance.choice(list(names))
    try:
        with operators.cloned(server, names[scene]) as dsn:
            storm = Storm(dsn, seed)
            storm.rage(float(os.environ.get("ROIR_STORM_SECONDS", "20")))
    finally:
        operators.drop_templates(server, names)
    print(f"seed {seed}, {scene}: {dict(storm.counts)}")
    assert dict(Counter(storm.found)) == {}
