"""Whose turn it is to drive an operation, from committed state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from airflow_roir.operation import Phase
from airflow_roir.task.next_step import Done, Fail, Go, Turn, Wait, decide

SWITCH = "airflow switch of DAG rebuild_index"
OWNER = "airflow rebuild_index run_1"
BUILD_DONE = frozenset({Phase.FOLD, Phase.PUBLISH, Phase.DONE})


@dataclass(frozen=True)
class Operation:
    id: int = 7
    status: str = "running"
    phase: str = "build"
    owner: str | None = OWNER
    paused_by: str | None = None
    pause_reason: str | None = None
    error: str | None = None


RUNNING = Operation()
PAUSED_BY_SWITCH = Operation(status="paused", paused_by=SWITCH, pause_reason="the DAG is paused")
PAUSED_BY_USER = Operation(status="paused", paused_by="ann@desk", pause_reason="backup")
PAUSED_BY_OTHER_DAG = replace(PAUSED_BY_SWITCH, paused_by="airflow switch of DAG copy")
PAUSED_BY_FAILURE = Operation(status="paused", paused_by=OWNER, pause_reason="disk full")
FOLDING = Operation(phase="fold")
COMPLETED = Operation(status="completed", phase="done")
ABORTED = Operation(status="aborted")
FAILED = Operation(status="failed", error="the source was altered")


@pytest.mark.parametrize(
    ("operation", "dag_paused", "driver", "turn"),
    [
        (RUNNING, False, None, Go()),
        (RUNNING, True, None, Wait(f"paused by {SWITCH}: unpause to resume", by_switch=True)),
        (RUNNING, False, "roir of ann", Wait("driven by roir of ann; this run continues when that run ends")),
        # This DAG's switch doesn't concern another user's run.
        (RUNNING, True, "roir of ann", Wait("driven by roir of ann; this run continues when that run ends")),
        (PAUSED_BY_SWITCH, False, None, Go()),
        (PAUSED_BY_SWITCH, True, None, Wait(f"paused by {SWITCH}: unpause to resume", by_switch=True)),
        (
            PAUSED_BY_USER,
            False,
            None,
            Wait("paused by ann@desk (backup); this run continues once the operation is resumed"),
        ),
        (
            PAUSED_BY_USER,
            True,
            None,
            Wait("paused by ann@desk (backup); this run continues once the operation is resumed"),
        ),
        (
            PAUSED_BY_OTHER_DAG,
            False,
            None,
            Wait(
                "paused by airflow switch of DAG copy (the DAG is paused); this run continues once the operation "
                "is resumed"
            ),
        ),
        (PAUSED_BY_FAILURE, False, None, Go()),
        (FOLDING, False, None, Done()),
        (FOLDING, True, None, Done()),
        (COMPLETED, True, "anybody", Done()),
        (ABORTED, False, None, Fail("operation 7 was aborted; trigger a new run to start again")),
        (
            FAILED,
            False,
            None,
            Fail("operation 7 has failed: the source was altered. Abort it, then trigger a new run"),
        ),
    ],
)
def test_the_decision(operation: Operation, dag_paused: bool, driver: str | None, turn: Turn) -> None:
    assert decide(operation, BUILD_DONE, SWITCH, dag_paused, driver) == turn


def test_a_window_that_may_be_open_is_looked_at_and_any_other_pause_is_kept() -> None:
    closed = Operation(status="paused", paused_by="window", pause_reason="outside of its window; opens at 22:00 UTC")
    assert decide(closed, BUILD_DONE, SWITCH, False, None, window_opens=True) == Go()
    assert decide(closed, BUILD_DONE, SWITCH, True, None, window_opens=True) == Wait(
        f"paused by {SWITCH}: unpause to resume", by_switch=True
    )
    assert decide(closed, BUILD_DONE, SWITCH, False, None) == Wait(
        "outside of its window; opens at 22:00 UTC; this run continues by itself then"
    )
    over = replace(closed, paused_by="max_duration")
    assert isinstance(decide(over, BUILD_DONE, SWITCH, False, None, window_opens=True), Wait)
    assert isinstance(decide(PAUSED_BY_USER, BUILD_DONE, SWITCH, False, None, window_opens=True), Wait)


def test_who_aborted_an_operation_is_told() -> None:
    assert decide(ABORTED, BUILD_DONE, SWITCH, False, None, "ann@desk: too slow") == Fail(
        "operation 7 was aborted by ann@desk: too slow; trigger a new run to start again"
    )
