"""The claims of `make bench-unique` hold: the oracle sees errors, moments come by a seed, and all of it runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import bulk, unique_cost
from benchmarks.server import BenchServer, bench_server
from benchmarks.unique import compared
from benchmarks.unique_operation import draw
from benchmarks.unique_table import Table

ONE, TWO, THREE = [[0, 1], [1, 2]], [[0, 3], [2, 4]], [[0, 5], [2, 6]]


def test_the_oracle_sees_what_is_missing_and_what_is_invented() -> None:
    right = {1: ONE, 2: TWO}
    assert not any(compared(right, right, set()).values())
    assert compared(right, {1: ONE}, set())["not found"] == [2]
    assert compared({1: ONE}, right, set())["invented"] == [2]
    assert compared(right, {1: ONE, 2: THREE}, set())["of other rows"] == [2]
    # Keys that were written to since the last look aren't judged; in the middle of a build not all are found.
    assert not any(compared({1: ONE, 3: THREE}, right, {2, 3}).values())
    assert not any(compared(right, {1: ONE[:1]}, set(), all_of_them=False).values())
    assert compared({1: ONE}, {2: TWO}, set(), all_of_them=False)["invented"] == [2]


def test_moments_come_by_their_seed_in_the_order_of_the_phases() -> None:
    found = draw(random.Random(1), 50)
    assert found == draw(random.Random(1), 50) != draw(random.Random(2), 50)
    assert [one.phase for one in found] == sorted((one.phase for one in found), key=("build", "seal", "fold").index)
    assert {one.what for one in found} == {"worker", "driver", "pause"}


def test_rows_of_a_group_share_the_key_of_the_first_and_no_writer_gets_them() -> None:
    class Cursor:
        def execute(self, statement: str, values: list[list[int]]) -> None:
            self.values = values

    table, cursor = Table(5000, 10), Cursor()
    rows = table.some_rows(random.Random(1), 600)
    groups = table.make_groups(cursor, random.Random(1), rows, 100)
    members = [row for group in groups for row in group]
    assert len(members) == len(set(members)) == 210
    assert not set(members) & set(rows)
    assert {table.day(group[0]) == table.day(group[1]) for group in groups} == {True, False}
    _, ids, keys = cursor.values
    assert dict(zip(ids, keys, strict=True)) == {row: table.key(group[0]) for group in groups for row in group[1:]}


def test_a_cost_is_the_ratio_of_a_round() -> None:
    def took(seconds: float) -> dict[str, float]:
        return {"all": seconds, "build": seconds / 2, "seal": seconds / 4}

    rounds = [{"plain": took(plain), "unique": took(plain * ratio)} for plain, ratio in ((2, 1.5), (4, 1.1), (3, 1.2))]
    found = unique_cost.summary("unique", rounds)
    assert found["ratio all"] == [1.1, 1.2, 1.5]
    assert found["all"] == 3.6
    assert "| unique | 3.6 | 1.20 (1.10 – 1.50) |" in unique_cost.table([found])


@pytest.fixture(scope="module")
def server() -> Iterator[BenchServer]:
    with bench_server(18, "128MB") as running:
        yield running


@pytest.mark.slow
def test_bulk_statements_of_a_unique_key_are_measured_in_each_mode(server: BenchServer) -> None:
    rows = bulk.measure(server.dsn("bench"), 100, 1, unique=True, segments=3)
    assert [row["statement"] for row in rows] == [*bulk.STATEMENTS, *bulk.SWAP]
    for row in rows:
        lacking = {mode for mode, value in row.items() if value is None}
        assert lacking == ({"native"} if row["statement"] in bulk.SWAP else set())
    assert {"native, deferrable", "active", "unique, capture", "unique, direct", "unique, active"} <= rows[0].keys()


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("what", "said"),
    [(("--kills", "4", "--seed", "5"), "wrong"), (("--cost", "1", "--writes", "50"), "sides")],
    ids=["show", "cost"],
)
def test_it_runs(tmp_path: Path, what: tuple[str, ...], said: str) -> None:
    results = tmp_path / "unique.json"
    size = ("--rows", "6000", "--partitions", "5", "--groups", "30", "--batch-rows", "200", "--segments", "4")
    command = [sys.executable, "-m", "benchmarks.unique", *size, *what, "--ranges", "10", "--shared-buffers", "128MB"]
    done = subprocess.run([*command, "--results", str(results)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    if said == "wrong":
        assert found["wrong"] == []
        assert found["the second pause, writers at rest"]["groups by GROUP BY"] >= 15
        assert found["published"]["exact"]
        assert found["happened"]
    else:
        assert {"plain", "unique"} <= {one["side"] for one in found["sides"]}
