"""Whatever runs out, and wherever: the operation waits, says why, goes on by itself, and the index is exact."""

from __future__ import annotations

import pytest

from airflow_roir.engine import patience
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.running_out import CAUSES, SCENES, STRIDE, Faults, Life


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits; how long each wait would have been."""
    naps: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", naps.append)
    return naps


@pytest.mark.sample(1, 12)
@pytest.mark.parametrize("offset", range(STRIDE))
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("scene", SCENES)
def test_each_statement_may_fail_once(dsn: str, hasty: list[float], scene: str, cause: str, offset: int) -> None:
    run_sql(dsn, *SCENES[scene])
    database = Database(dsn, "roir tests")
    life = Life(database, dsn, scene)
    faults = Faults(database, cause, offset)
    with faults.happening():
        life.live()
    assert faults.made
    steps.assert_exact(database)
    print(scene, cause, offset, len(faults.seen), faults.commits, len(faults.made), life.failed)
