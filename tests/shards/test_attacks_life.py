"""Random lives of an index over shards (`life.py`): a seed's life is the same each time but for the server's timing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from airflow_roir.shards.capture import leaves
from airflow_roir.shards.ship import apply
from tests.shards.conftest import Make
from tests.shards.life import Life
from tests.shards.life_tables import KINDS

SEED = int(os.environ.get("ROIR_SEED") or 1)
STEPS = 60


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_life(shards: Make, pg: int, kind: str, number: int) -> None:
    seed = SEED * 1_000 + number
    Life(shards(2 + seed % 2, "SELECT 1"), seed, kind, ("text", "public.mood")[seed % 2], pg).live(STEPS)


# Broken variants: a function, and what it does instead.
BROKEN: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "entries of a partition that is gone stay": (leaves, "_delete", lambda *_: 0),
    "entries that no row has stay": (apply, "_delete", lambda *_: None),
    "entries that a row has are not written": (apply, "_put", lambda *_: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", BROKEN)
def test_a_life_finds_what_is_broken(shards: Make, pg: int, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    module, name, instead = BROKEN[variant]
    lives = [Life(shards(2, "SELECT 1"), seed, "ranges", "text", pg) for seed in (1, 2, 3)]
    monkeypatch.setattr(module, name, instead)

    def live() -> None:
        for life in lives:
            life.live(STEPS)

    with pytest.raises(AssertionError, match=r"extra|missing"):
        live()
