"""What a phase tells its user, line by line, from committed state."""

from __future__ import annotations

import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.run import start_run
from airflow_roir.operation import Phase
from airflow_roir.spark.news import News
from tests.conftest import run_sql
from tests.spark.driving import prepared

pytestmark = pytest.mark.usefixtures("source")


class Told:
    """The news of a build that has so many ranges, and a clock."""

    def __init__(self, database: Database, ranges: int) -> None:
        self.operation = prepared(database, ranges=ranges).operation_id
        self.lines: list[str] = []
        self.now = 0.0
        self.dsn = database.dsn
        run = start_run(database, "ix", "test")
        self.news = News(database, run, Phase.BUILD, self.lines.append, lambda: self.now)

    def finish(self, *ordinals: int) -> None:
        """These ranges are done."""
        chosen = ", ".join(map(str, ordinals))
        run_sql(
            self.dsn,
            "UPDATE roir.scan_range SET done = true, rows = 1 + ordinal * 1000, seconds = ordinal "
            f"WHERE ordinal IN ({chosen})",
        )

    def new(self, last: bool = False) -> list[str]:
        """What is told now."""
        del self.lines[:]
        self.news.pieces(last)
        return list(self.lines)


def test_each_range_is_told_once_when_it_is_done(database: Database) -> None:
    told = Told(database, ranges=8)
    told.finish(2)
    told.news.begin(4)
    assert told.lines == ["build: 4 workers", "build: 1 of 8 ranges done before"]
    assert told.new() == []
    told.finish(0, 5)
    assert told.new() == [
        "build: range 0 done, 2 of 8: 1 row in 0.0 s",
        "build: range 5 done, 3 of 8: 5,001 rows in 5.0 s",
    ]
    assert told.new() == told.new(last=True) == []


def test_many_ranges_are_counted_now_and_then(database: Database) -> None:
    told = Told(database, ranges=50)
    told.news.begin(1)
    assert told.lines == ["build: 1 worker"]
    told.finish(3)
    assert told.new() == []
    told.now = 6
    assert told.new() == ["build: 1 of 50 ranges done, 3,001 rows"]
    told.finish(4)
    assert told.new() == []
    # Whatever the time, nothing is left untold.
    assert told.new(last=True) == ["build: 2 of 50 ranges done, 7,002 rows"]
    # After an hour once a minute.
    told.now = 3_600
    told.new()
    told.finish(5)
    told.new()
    told.finish(6)
    told.now += 59
    assert told.new() == []
    told.now += 1
    assert len(told.new()) == 1


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
