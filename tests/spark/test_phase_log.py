"""The lines that a phase logs for its user, from committed state."""

from __future__ import annotations

import pytest

from airflow_roir.engine import build
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.work.phase_log import LINES, REST_S, PhaseLog, tells_of_pieces
from tests.conftest import run_sql
from tests.spark.driving import prepared

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.sample(6)]


class Told:
    """The news of a build that has `ranges` ranges."""

    def __init__(self, database: Database, ranges: int) -> None:
        self.operation = prepared(database, ranges=ranges).operation_id
        self.lines: list[str] = []
        self.dsn = database.dsn
        run = start_run(database, "ix", "test")
        self.now = 0.0
        self.news = PhaseLog(database, run, build.PHASE, self.lines.append, lambda: self.now)

    def finish(self, *ordinals: int) -> None:
        """Marks these ranges as done."""
        chosen = ", ".join(map(str, ordinals))
        run_sql(
            self.dsn,
            "UPDATE roir.scan_range SET done = true, rows = 1 + ordinal * 1000, seconds = ordinal "
            f"WHERE ordinal IN ({chosen})",
        )

    def new(self, last: bool = False) -> list[str]:
        """The new lines, a while after the last ones."""
        self.now += REST_S
        del self.lines[:]
        self.news.pieces(last)
        return list(self.lines)


def test_each_range_is_told_once_when_it_is_done(database: Database) -> None:
    told = Told(database, ranges=8)
    told.finish(2)
    told.news.begin(4)
    assert told.lines == ["build: 4 workers", "build: 1 of 8 ranges done before"]
    assert told.new() == []
    told.finish(0)
    assert told.new() == ["build: range 0 done, 2 of 8: 1 row in 0.0 s"]
    told.finish(5)
    assert told.new() == ["build: range 5 done, 3 of 8: 5,001 rows in 5.0 s"]
    assert told.new() == told.new(last=True) == []


def test_ranges_that_are_done_at_about_the_same_time_share_a_line(database: Database) -> None:
    """Found: eight lines within half a second."""
    told = Told(database, ranges=8)
    told.news.begin(4)
    told.finish(0, 5)
    assert told.new() == ["build: 2 of 8 ranges done, 5,002 rows"]
    told.finish(1)
    told.now -= REST_S / 2
    assert told.new() == []
    told.finish(2)
    assert told.new() == ["build: 4 of 8 ranges done, 8,004 rows"]
    told.finish(3)
    assert told.new() == ["build: range 3 done, 5 of 8: 3,001 rows in 3.0 s"]


def test_many_ranges_are_counted_each_time_that_a_tenth_of_them_is_done(database: Database) -> None:
    told = Told(database, ranges=50)
    told.finish(0, 1, 2)
    told.news.begin(1)
    assert told.lines == ["build: 1 worker", "build: 3 of 50 ranges done before"]
    told.finish(*range(3, 7))
    assert told.new() == []
    told.finish(7)
    assert told.new() == ["build: 8 of 50 ranges done, 28,008 rows"]
    told.finish(8)
    assert told.new() == []
    # Nothing is left untold.
    assert told.new(last=True) == ["build: 9 of 50 ranges done, 36,009 rows"]


@pytest.mark.sample(0)
@pytest.mark.parametrize("ranges", [10, 11, 39, 100])
def test_a_phase_tells_of_its_pieces_in_ten_lines_at_most(database: Database, ranges: int) -> None:
    told = Told(database, ranges)
    told.news.begin(1)
    lines = []
    for ordinal in range(ranges):
        told.finish(ordinal)
        lines += told.new()
    assert len(lines) <= LINES
    lines += told.new(last=True)
    assert f"{ranges} of {ranges}" in lines[-1]
    # A live view shows as much.
    assert all(tells_of_pieces(line) for line in lines)


@pytest.mark.parametrize(
    "line",
    [
        "build: 2 workers",
        "build: 3 of 50 ranges done before",
        "build: done, worked 2 s",
        "build: paused by me; waiting for the open batches of 2 workers",
        "Spark lost worker 1, which starts again after its last batch: range 1 done, x",
    ],
)
def test_other_lines_are_for_everybody(line: str) -> None:
    assert not tells_of_pieces(line)


def test_workers_are_told_when_all_have_begun_and_when_their_number_changes(database: Database) -> None:
    told = Told(database, ranges=8)
    told.news.begin(3)
    for count in (0, 2, 3, 1, 3):
        told.news.at_work(count)
    told.news.workers(3)
    told.news.workers(4)
    assert not told.news.all_began
    told.news.at_work(4)
    told.news.workers(1)
    assert told.lines == [
        "build: 3 workers",
        "build: 3 workers at work",
        "build: 4 workers from now on, 3 before",
        "build: 4 workers at work",
        "build: 1 worker from now on, 4 before",
    ]
