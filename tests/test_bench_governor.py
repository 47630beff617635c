"""The readings of `make bench-governor` about a load and two servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.governor import CALM, Bench, keep, table
from benchmarks.governor_watch import Sample, lags
from benchmarks.paced_load import PacedLog, over
from benchmarks.pictures import of_governor


def samples(*positions: tuple[float, int, int]) -> list[Sample]:
    found: list[Sample] = [{"at": at, "written": written, "replayed": there} for at, written, there in positions]
    lags(found)
    return found


def test_a_lag_is_the_time_since_the_primary_was_where_the_replica_is() -> None:
    found = samples((10.0, 0, 0), (11.0, 100, 100), (12.0, 300, 100), (13.0, 500, 200), (14.0, 500, 500))
    assert [one["lag_bytes"] for one in found] == [0, 0, 200, 300, 0]
    # In the fourth, 200 was written halfway between the second and the third.
    assert [one["lag_s"] for one in found] == [0.0, 0.0, 1.0, 1.5, 0.0]


def test_a_replica_that_was_behind_before_the_first_sample_is_not_guessed_at() -> None:
    assert [one["lag_s"] for one in samples((1.0, 900, 100), (2.0, 950, 200))] == [0.0, 0.0]


def test_transactions_count_in_the_second_of_their_end(tmp_path: Path) -> None:
    lines = ["0 1 1500 0 100 5 10", "1 1 2500 0 100 900 10", "0 2 skipped 0 101 1 10", "0 3 4000 0 102 7 10", "0 4 99"]
    (tmp_path / "log.1").write_text("\n".join(lines))
    found = PacedLog(tmp_path).by_second()
    assert dict(found) == {100: [1.5, 2.5], 102: [4.0]}
    assert over(found, 100.0, 102.0) == {"tps": 2.0, "p50_ms": 1.5, "p99_ms": 2.5}
    assert over(found, 100.5, 102.9) == {}


@pytest.mark.sample(0)
def test_results_are_drawn_for_light_and_dark_pages(tmp_path: Path) -> None:
    row = {"p99_ms": 3.0, "lag_bytes": 1e6, "rows": 5, "granted": 0.5, "working": 1}
    results = {
        "asked": {"p99_ms": 9.0, "lag_mb": 32},
        "stretches": [{"side": "build, governed", "begin": 1, "end": 2}, {"side": CALM, "begin": 0, "end": 1}],
        "seconds": [{"at": float(second), **row} for second in range(3)] + [{"at": 3.0, "lag_bytes": 0}],
    }
    keep(results, tmp_path / "governor.json")
    of_governor(tmp_path / "governor.json")
    assert {path.name for path in tmp_path.glob("*.svg")} == {"governor-light.svg", "governor-dark.svg"}


def test_the_table_has_every_column() -> None:
    assert table([{"a": 1}, {"a": 2, "b": 3}]).splitlines() == ["| a | b |", "| --- | --- |", "| 1 |  |", "| 2 | 3 |"]


def test_what_is_asked_for_is_relative_to_the_calm() -> None:
    bench = Bench.__new__(Bench)
    bench.calms = [{"p99_ms": 2.0, "commit_ms": 1.0}, {"p99_ms": 4.0, "commit_ms": 1.2}]
    bench.chosen = type("Chosen", (), {"slower": 2.0, "lag": 32, "throttle": None})()
    assert bench.p99 == 6.0
    assert bench.throttle() == "replica_lag=32MB commit_latency=2.2ms"
