"""`parallelism` and `batch_rows` in the Task State Store: followed, refused, kept."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import NEVER_EXPIRE

from airflow_roir.errors import InvalidInput
from airflow_roir.task.live_options import LiveOptions, seed


class MemoryStore:
    """Stands in for Airflow's store, which lies outside."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values
        self.retention: dict[str, timedelta | None] = {}

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        self.values[key] = value
        self.retention[key] = retention


def test_the_form_seeds_the_store_for_good() -> None:
    store = MemoryStore()
    seed(store, {"parallelism": 2, "batch_rows": 5000})  # type: ignore[arg-type]
    assert store.values == {"parallelism": 2, "batch_rows": 5000}
    assert store.retention == {"parallelism": NEVER_EXPIRE, "batch_rows": NEVER_EXPIRE}


def test_a_later_try_does_not_undo_what_the_user_made_of_it() -> None:
    store = MemoryStore(parallelism="8")
    seed(store, {"parallelism": 2, "batch_rows": None})  # type: ignore[arg-type]
    assert store.values == {"parallelism": "8"}


def test_a_change_is_applied_once() -> None:
    options = LiveOptions({"parallelism": 2, "batch_rows": 1000})
    applied: list[dict[str, int]] = []

    def apply(**values: int) -> None:
        applied.append(values)

    assert options.follow({"parallelism": 2, "batch_rows": 1000}, apply) == {}
    assert options.follow({"parallelism": "6", "batch_rows": 1000}, apply) == {"parallelism": 6}
    assert options.follow({"parallelism": "6", "batch_rows": 1000}, apply) == {}
    assert options.follow({"parallelism": 2, "batch_rows": 10}, apply) == {"parallelism": 2, "batch_rows": 10}
    assert applied == [{"parallelism": 6}, {"parallelism": 2}, {"batch_rows": 10}]


def test_a_deleted_key_changes_nothing() -> None:
    options = LiveOptions({"parallelism": 3, "batch_rows": 1000})
    assert options.follow({"parallelism": None}) == {}
    assert options.current == {"parallelism": 3, "batch_rows": 1000}


@pytest.mark.parametrize("bad", ["many", 0, -1, 1.5, True, 100_000, [2]])
def test_a_bad_value_is_refused_once_and_the_old_one_stays(bad: object, caplog: Any) -> None:
    options = LiveOptions({"parallelism": 3, "batch_rows": 1000})
    applied: list[dict[str, int]] = []
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert options.follow({"parallelism": bad}, lambda **values: applied.append(values)) == {}
    assert len(caplog.records) == 1
    assert "parallelism stays at 3" in caplog.text
    assert applied == []
    # After a good one it is news again.
    assert options.follow({"parallelism": 3}) == {}
    with caplog.at_level(logging.WARNING):
        options.follow({"parallelism": bad})
    assert len(caplog.records) == 2


def test_true_is_refused_and_one_is_not() -> None:
    options = LiveOptions({"parallelism": 3})
    assert options.follow({"parallelism": True}) == {}
    assert options.follow({"parallelism": 1}) == {"parallelism": 1}


def test_what_the_engine_refuses_stays_out_too(caplog: Any) -> None:
    options = LiveOptions({"parallelism": 3, "batch_rows": 1000})

    def refuse(**_: int) -> None:
        raise InvalidInput("the cluster has four cores")

    with caplog.at_level(logging.WARNING):
        assert options.follow({"parallelism": 5}, refuse) == {}
    assert "the cluster has four cores" in caplog.text
    assert options.current["parallelism"] == 3


def test_a_failed_attempt_to_apply_is_made_again() -> None:
    options = LiveOptions({"parallelism": 3, "batch_rows": 1000})

    def fail(**_: int) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        options.follow({"parallelism": 5}, fail)
    assert options.follow({"parallelism": 5}) == {"parallelism": 5}
