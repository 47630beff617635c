"""The error of the time left in recorded builds: with and without writers and a rate limit, again, and with a pause.

`make bench-estimate` records them, on a machine that does nothing else: other work can't be foreseen.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from airflow_roir.engine.database import Database
from benchmarks.estimate import error, errors, estimates
from tests.conftest import run_sql
from tests.engine import steps

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "estimate"
# The median errors that were reached, over all looks from a fifth of the work on. The goal is a quarter, for each look.
REACHED = {"quiet": 0.06, "writer": 0.15, "limited": 0.06, "limited-writer": 0.09, "rebuild": 0.06, "paused": 0.08}


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", sorted(REACHED))
def test_the_time_left_of_a_recorded_build(database: Database, name: str) -> None:
    build = recorded(name)
    with database.transaction() as connection:
        found = errors(connection, build)
        told = estimates(connection, build)
    print(f"{name}: median {statistics.median(found):.0%}, worst {max(found):.0%}")
    assert len(found) >= 25
    assert statistics.median(found) <= REACHED[name]
    assert max(found) <= 0.25
    for _, _, _, likely, low, high in told:
        assert likely is None or 0 <= low <= likely <= high


def test_there_are_recordings_of_each_kind() -> None:
    builds = [recorded(file.stem) for file in RECORDED.glob("*.json")]
    assert len(builds) >= 5
    assert {bool(one["writes"]) for one in builds} == {bool(one["limit"]) for one in builds} == {True, False}


def test_the_replay_sees_a_bad_estimate(database: Database, dsn: str) -> None:
    """An estimate by fixed shares of the work is worse."""
    [(text,)] = _sql(
        dsn,
        "SELECT pg_get_function_identity_arguments('roir.time_left'::regproc) "
        "|| ', OUT likely float8, OUT low float8, OUT high float8, OUT rows_per_second float8'",
    )
    arguments = text.split(", OUT likely")[0] + text[text.rindex(", OUT likely") :]
    run_sql(
        dsn,
        f"CREATE OR REPLACE FUNCTION roir.time_left({arguments}) LANGUAGE sql AS $$ SELECT "
        "w.worked * (100 - w.percent) / nullif(w.percent, 0)::float8, 0::float8, 0::float8, 0::float8 $$",
    )
    build = recorded("quiet")
    with database.transaction() as connection:
        assert statistics.median(errors(connection, build)) > REACHED["quiet"]


def _sql(dsn: str, query: str) -> list[tuple[Any, ...]]:
    return steps.sql(steps.session(dsn), query)


def test_an_error_is_to_what_was_left_and_a_second_is_forgiven() -> None:
    assert error(100, 75) == 0.25
    assert error(1, 2) == 0.25
    assert error(10, None) == 1
