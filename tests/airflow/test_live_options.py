"""The options that change while an operation lives, in its row and in the Task State Store: the newest wins."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import NEVER_EXPIRE  # type: ignore[attr-defined]  # its stub lacks it

from airflow_roir.errors import InvalidInput
from airflow_roir.task.live_options import IN_EFFECT, LiveOptions, write


class Sides:
    """A store and an operation's row, kept the same by `LiveOptions`: a new one for each stretch of the task."""

    def __init__(self, **row: int | str) -> None:
        self.row = row
        self.values: dict[str, Any] = {}
        self.retention: dict[str, timedelta | None] = {}
        self.refusals: list[str] = []
        self.stretch()

    def stretch(self) -> None:
        self.options = LiveOptions(self.values.get(IN_EFFECT), self.refusals.append)
        self.settle()

    def settle(self) -> None:
        write(self, self.options.settle(self.values, self.row, self.apply))  # type: ignore[arg-type]

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        self.values[key] = value
        self.retention[key] = retention

    def apply(self, **options: int | str) -> dict[str, int | str]:
        self.row |= options
        return self.row


def test_the_store_shows_the_row_for_good() -> None:
    sides = Sides(parallelism=2, max_rows_per_second=0)
    assert sides.values == {
        "parallelism": 2,
        "max_rows_per_second": 0,
        IN_EFFECT: {"parallelism": 2, "max_rows_per_second": 0},
    }
    assert set(sides.retention.values()) == {NEVER_EXPIRE}


@pytest.mark.parametrize("meanwhile", [Sides.settle, Sides.stretch])
def test_the_newest_change_wins_whoever_made_it(meanwhile: Any) -> None:
    sides = Sides(parallelism=2, max_rows_per_second=0)
    for step, wanted in (
        (lambda: sides.values.update(parallelism="6"), 6),
        (lambda: sides.row.update(parallelism=5), 5),
        (lambda: sides.values.update(parallelism=6), 6),
        (lambda: sides.row.update(parallelism=2), 2),
        (lambda: None, 2),
        # Both changed meanwhile: it is unknown which came first.
        (lambda: (sides.row.update(parallelism=3), sides.values.update(parallelism=4)), 4),
        (lambda: (sides.row.update(parallelism=7), sides.values.update(parallelism=7)), 7),
        (lambda: sides.values.pop("parallelism"), 7),
    ):
        step()
        meanwhile(sides)
        assert (sides.row["parallelism"], int(sides.values["parallelism"])) == (wanted, wanted)
        assert sides.row["max_rows_per_second"] == 0


@pytest.mark.parametrize("bad", ["many", 0, -1, 1.5, True, 100_000, [2]])
def test_a_bad_value_is_refused_once_and_the_store_shows_what_stays(bad: object, caplog: Any) -> None:
    sides = Sides(parallelism=1)
    sides.values["parallelism"] = bad
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sides.settle()
    assert "parallelism stays at 1" in caplog.text
    assert len(sides.refusals) == len(caplog.records) == 1
    assert (sides.row, sides.values["parallelism"]) == ({"parallelism": 1}, 1)


def test_what_the_engine_refuses_stays_out_too(caplog: Any) -> None:
    sides = Sides(parallelism=3)
    sides.values["parallelism"] = 5

    def refuse(**_: int) -> None:
        raise InvalidInput("the cluster has four cores")

    with caplog.at_level(logging.WARNING):
        assert sides.options.settle(sides.values, sides.row, refuse) == {"parallelism": 3}
    assert "the cluster has four cores" in caplog.text


def test_a_change_that_cannot_be_made_now_is_made_later() -> None:
    sides = Sides(parallelism=3, batch_rows=1000)
    sides.row["parallelism"] = 4
    sides.values["batch_rows"] = 5000

    def fail(**_: int) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        sides.options.settle(sides.values, sides.row, fail)
    sides.settle()
    assert sides.row == {"parallelism": 4, "batch_rows": 5000}
    assert sides.values["parallelism"] == 4
