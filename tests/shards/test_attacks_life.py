"""Random lives of an index over shards (`life.py`): a seed's life is the same each time but for the server's timing."""

from __future__ import annotations

import os

import pytest

from tests.shards.conftest import Make
from tests.shards.life import KINDS, Life

SEED = int(os.environ.get("ROIR_SEED") or 1)
STEPS = 60


@pytest.mark.sample(1, 5)
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_life(shards: Make, pg: int, kind: str, number: int) -> None:
    seed = SEED * 1_000 + number
    Life(shards(2 + seed % 2, "SELECT 1"), seed, kind, ("text", "public.mood")[seed % 2], pg).live(STEPS)
