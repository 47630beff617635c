"""The loop that a task spends its time in, one turn at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse

from airflow_roir.task.dag_switch import LEAVE_S, is_dag_paused, leave
from airflow_roir.task.ui_requests import Watcher
from airflow_roir.task.wait_for_job import Background, Interrupted, follow


class Task:
    """Stands in for Airflow's task instance: its DAG's switch, or what looking at it raises."""

    dag_id = "rebuild_index"

    def __init__(self) -> None:
        self.switch: bool | Exception = False
        self.looks = 0

    def get_dag(self, dag_id: str) -> Any:
        assert dag_id == self.dag_id
        self.looks += 1
        if isinstance(self.switch, Exception):
            raise self.switch
        return SimpleNamespace(is_paused=self.switch)


class MemoryStore:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        self.values[key] = value


API_DOWN = AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={}))


class Run:
    """One call of `follow`, in which each turn of the loop is a step that the test wrote."""

    def __init__(self, watcher: Watcher, *steps: Any) -> None:
        self.watcher = watcher
        self.steps = list(steps)
        self.killed = False
        self.pauses = 0
        self.seen: list[Mapping[str, Any]] = []

    def wait(self, _seconds: float) -> bool:
        step = self.steps.pop(0)
        if callable(step):
            step()
            self.watcher.look()
            return False
        return bool(step == "ended")

    def request_pause(self) -> None:
        self.pauses += 1

    def go(self) -> None:
        follow(self.wait, self.watcher, lambda: self.killed, self.request_pause, self.turn)

    def turn(self) -> None:
        if (found := self.watcher.found()) is not None:
            self.seen.append(found)


def test_unknown_is_neither_paused_nor_not() -> None:
    task = Task()
    assert is_dag_paused(task) is False  # type: ignore[arg-type]
    task.switch = True
    assert is_dag_paused(task) is True  # type: ignore[arg-type]
    task.switch = API_DOWN
    assert is_dag_paused(task) is None  # type: ignore[arg-type]


def test_a_watcher_keeps_what_it_knew_while_the_api_server_is_away() -> None:
    task, store = Task(), MemoryStore(parallelism=2)
    watcher = Watcher(task, store, ("parallelism", "batch_rows"))  # type: ignore[arg-type]
    watcher.look()
    assert (watcher.paused, watcher.found()) == (False, {"parallelism": 2, "batch_rows": None})
    task.switch, store.values = API_DOWN, {"parallelism": 3}
    watcher.look()
    assert (watcher.paused, watcher.orphaned) == (False, False)
    task.switch = True
    watcher.look()
    assert (watcher.paused, watcher.found()) == (True, {"parallelism": 3, "batch_rows": None})
    task.switch = API_DOWN
    watcher.look()
    assert watcher.paused


def test_a_write_reaches_the_store_at_the_next_look_unless_the_user_was_there_first() -> None:
    task, store = Task(), MemoryStore(parallelism=2, batch_rows=1000)
    watcher = Watcher(task, store, ("parallelism", "batch_rows"))  # type: ignore[arg-type]
    assert watcher.found() is None
    watcher.look()
    watcher.write({"parallelism": 5, "batch_rows": 5000})
    store.values["batch_rows"] = 2000
    task.switch = API_DOWN
    watcher.look()
    task.switch = False
    # The values that it finds are never older than those that were written.
    assert watcher.found() is None or watcher.found() == {"parallelism": 5, "batch_rows": 2000}
    watcher.look()
    assert watcher.found() == store.values == {"parallelism": 5, "batch_rows": 2000}


@pytest.mark.parametrize("gone", [EOFError("closed"), BrokenPipeError()])
def test_a_watcher_knows_when_the_supervisor_is_gone(gone: Exception) -> None:
    task = Task()
    watcher = Watcher(task)  # type: ignore[arg-type]
    task.switch = gone
    watcher.look()
    assert watcher.orphaned


def test_the_thread_looks_and_ends_with_the_block() -> None:
    task = Task()
    with Watcher(task) as watcher:  # type: ignore[arg-type]
        thread = watcher._thread
    thread.join(30)
    assert not thread.is_alive()
    assert task.looks >= 0


def test_a_pause_is_asked_for_at_every_turn_while_the_switch_is_off() -> None:
    task = Task()

    def off() -> None:
        task.switch = True

    def on() -> None:
        task.switch = False

    run = Run(Watcher(task), lambda: None, off, lambda: None, lambda: None, on, "ended")  # type: ignore[arg-type]
    run.go()
    assert run.pauses == 3


def test_what_the_store_holds_is_shown_at_every_turn() -> None:
    task, store = Task(), MemoryStore(parallelism=2)
    run = Run(
        Watcher(task, store, ("parallelism",)),  # type: ignore[arg-type]
        lambda: None,
        lambda: store.values.update(parallelism=5),
        "ended",
    )
    run.go()
    assert run.seen == [{"parallelism": 2}, {"parallelism": 5}]


def test_a_kill_ends_the_wait() -> None:
    run = Run(Watcher(Task()))  # type: ignore[arg-type]
    run.steps = [lambda: setattr(run, "killed", True)]
    with pytest.raises(Interrupted, match="killed"):
        run.go()


def test_a_job_that_ended_by_the_same_kill_was_killed() -> None:
    run = Run(Watcher(Task()), "ended")  # type: ignore[arg-type]
    run.killed = True
    with pytest.raises(Interrupted, match="killed"):
        run.go()


def test_without_a_supervisor_the_task_gives_up() -> None:
    task = Task()
    run = Run(Watcher(task), lambda: setattr(task, "switch", EOFError()))  # type: ignore[arg-type]
    with pytest.raises(Interrupted, match="supervisor is gone"):
        run.go()
    assert run.pauses == 0


def test_a_stretch_never_ends_less_than_fifteen_seconds_before_the_next() -> None:
    from datetime import datetime, timezone

    before = datetime.now(timezone.utc)
    assert LEAVE_S > 15
    assert (leave(0).reschedule_date - before).total_seconds() >= LEAVE_S
    assert (leave(60).reschedule_date - before).total_seconds() >= 60


def test_background_work_hands_on_its_result_or_its_error() -> None:
    work = Background(lambda: 3)
    assert work.wait(30)
    assert work.result() == 3

    def fail() -> int:
        raise KeyError("no")

    failing = Background(fail)
    assert failing.wait(30)
    with pytest.raises(KeyError, match="no"):
        failing.result()
