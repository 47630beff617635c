"""The pages warn of a pause that lasts too long, and of an abandoned operation, as `roir status` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.page import databases, fates, lookups
from tests.conftest import run_sql
from tests.engine import steps


@pytest.fixture
def shown(database: Database, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads the tab of an operation, and its index's card."""

    @contextmanager
    def reading(_connection_id: str) -> Iterator[Database]:
        yield database

    monkeypatch.setattr(databases, "reading", reading)
    monkeypatch.setattr(fates, "settle_runs", lambda *_: None)
    monkeypatch.setattr(lookups, "runs_of", lambda *_: {})
    monkeypatch.setattr(lookups, "continuation", lambda *_: None)

    def read(operation: int) -> tuple[str | None, str | None]:
        [card] = lookups.indexes_of("c")
        return lookups.progress_of("c", operation)["long_pause"], card["state_of_operation"]["long_pause"]

    return read


@pytest.mark.parametrize("state", ["paused", "abandoned"])
def test_a_long_pause_is_warned_of(database: Database, dsn: str, shown: Any, state: str) -> None:
    """Found: status, log and clean-up warned of it, and the pages didn't."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k int)")
    begun, _ = steps.begin(database)
    if state == "paused":
        requests.pause(database, "ix", "ann", "month-end close")
    assert shown(begun.operation_id) == (None, None)
    earlier = "clock_timestamp() - interval '30 h'"
    names = ["started_at", "heartbeat_at", "awaited_until", "paused_at" if state == "paused" else "run_ended_at"]
    moved = ", ".join(f"{one} = {earlier}" for one in names)
    run_sql(dsn, f"UPDATE roir.operation SET {moved}")
    tab, card = shown(begun.operation_id)
    assert tab == card
    words = (
        "has been paused for 1 d 6 h by ann (month-end close)"
        if state == "paused"
        else "no run has driven it for 1 d 6 h"
    )
    assert words in str(tab)
