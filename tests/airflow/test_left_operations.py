"""Operations that no run will continue: *Indexes* offers *Continue* and *Abort*; tabs of old runs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.clean_up import clean_up
from airflow_roir.engine.control import expected, requests
from airflow_roir.engine.control.expected import COMES, ENDED, Fate
from airflow_roir.engine.control.run import start_run
from airflow_roir.options import BuildOptions
from airflow_roir.page import fates, lookups
from airflow_roir.page.settings import CONTROL_DAG
from airflow_roir.page.targets import Run, operations_of

OWNER = "airflow rebuild_index r1"
COMMAND = "ann@desk pid 4711"
SILENT = "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '2 h'"
INDEX = "public.i"


def begin(shop: Any, owner: str) -> int:
    definition = IndexDefinition.parse(INDEX, "public.item", ["price"])
    return prepare.prepare(shop.database, definition, BuildOptions(), owner).operation_id


def shown(shop: Any, operation: int, monkeypatch: pytest.MonkeyPatch, **runs: Fate) -> tuple[str, bool, bool]:
    """The state on *Indexes*, whether there is *Abort*, and *Continue*. runs: the fates of those that Airflow has."""
    monkeypatch.setattr(fates, "_read", lambda _dag_id, run_id: runs.get(run_id, ENDED))
    monkeypatch.setattr(lookups, "continuation", lambda *_: {"dag_id": "rebuild_index"})
    one = lookups.states_of(shop.database, "c", [operation])[operation]
    state = one["state_of_operation"]
    return state["name"], state["left"], one["continues"] is not None


LEFT, KEPT = ("paused", True, True), ("paused", False, False)


@pytest.mark.parametrize("begun", [False, True], ids=["prepared", "begun"])
def test_a_paused_operation_whose_run_is_gone_can_be_continued_and_aborted(
    shop: Any, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Found: only the end that the task itself had noted counted; after the run's deletion there was no button."""
    operation = begin(shop, OWNER)
    if begun:
        start_run(shop.database, INDEX, OWNER)
    requests.pause(shop.database, INDEX, "ann")
    shop.run(SILENT)
    assert shop.run("SELECT run_ended_at FROM roir.operation") == [(None,)]
    assert shown(shop, operation, monkeypatch) == LEFT, "it was deleted, or its DAG, or it has ended"
    assert shown(shop, operation, monkeypatch, r1=COMES) == KEPT
    assert shown(shop, operation, monkeypatch, r1=Fate(waits=True)) == KEPT
    assert shown(shop, operation, monkeypatch, r1=Fate(switch="airflow switch of DAG d")) == KEPT
    # The task knows that it won't come back, although its run goes on, with other indexes for example.
    expected.expect(shop.database, operation, OWNER, None)
    expected.has_ended(shop.database, operation, OWNER)
    assert shown(shop, operation, monkeypatch, r1=COMES) == LEFT
    # Another run is awaited, and counts alone.
    expected.expect(shop.database, operation, "airflow rebuild_index r2 [3]", None)
    assert shown(shop, operation, monkeypatch, r2=COMES) == KEPT
    assert shown(shop, operation, monkeypatch, r1=COMES) == LEFT


def test_after_its_run_was_deleted_the_page_says_so_and_links_to_no_run(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: *Indexes* told to clear the task of a deleted run, and linked to it."""
    begin(shop, OWNER)
    start_run(shop.database, INDEX, OWNER)
    monkeypatch.setattr(lookups.databases, "reading", lambda _: nullcontext(shop.database))
    monkeypatch.setattr(lookups, "continuation", lambda *_: {"dag_id": "rebuild_index"})
    monkeypatch.setattr(fates, "settle_runs", lambda *_: None)
    monkeypatch.setattr(fates, "_read", lambda *_: ENDED)
    airflow = create_engine("sqlite://", poolclass=StaticPool)
    monkeypatch.setattr(fates, "create_session", lambda: Session(airflow))
    with airflow.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE dag_run (dag_id text, run_id text)")

    def look() -> tuple[Any, str, bool]:
        [one] = lookups.indexes_of("c")
        return one["run"], one["state_of_operation"]["why"], one["continues"] is not None

    requests.pause(shop.database, INDEX, OWNER)
    shop.run(SILENT)
    on = "its run was deleted; Continue triggers a new one for this index; or: roir resume public.i"
    none, why, continues = look()
    assert (none, why.endswith(f"; {on}"), continues) == (None, True, True), why
    with airflow.begin() as connection:
        connection.exec_driver_sql("INSERT INTO dag_run VALUES ('rebuild_index', 'r1'), ('other', 'r2')")
    there, why, _ = look()
    assert there == {"dag_id": "rebuild_index", "run_id": "r1"}
    assert "clear its task in run r1 of DAG rebuild_index" in why
    with airflow.begin() as connection:
        connection.exec_driver_sql("DELETE FROM dag_run WHERE run_id = 'r1'")
    requests.resume(shop.database, INDEX, "ann")
    shop.run("UPDATE roir.operation SET run_ended_at = clock_timestamp()")
    assert look() == (None, f"abandoned; {on}", True)


def test_an_operation_is_paused_or_aborted_while_a_process_of_a_run_that_airflow_has_lost_drives_it(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: Airflow's database was replaced, and *Indexes* had no button until the old task's process ended."""
    operation = begin(shop, OWNER)
    start_run(shop.database, INDEX, OWNER)
    monkeypatch.setattr(fates, "_read", lambda *_: ENDED)
    monkeypatch.setattr(lookups, "continuation", lambda *_: {"dag_id": "rebuild_index"})

    def look(*deleted: int) -> Any:
        return lookups.states_of(shop.database, "c", [operation], deleted)[operation]

    there, gone = look()["state_of_operation"], look(operation)
    assert (there["stray"], there["left"], there["why"]) == (False, False, "")
    state = gone["state_of_operation"]
    assert (state["stray"], state["left"], gone["continues"]) == (True, False, None)
    assert state["why"] == "running: its run isn't in this Airflow, but the run's process still works"
    shop.run(SILENT)
    assert not look(operation)["state_of_operation"]["stray"]


def test_a_paused_operation_of_a_command_can_be_continued_and_aborted(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = begin(shop, COMMAND)
    requests.pause(shop.database, INDEX, "ann")
    shop.run(SILENT)
    assert shown(shop, operation, monkeypatch) == LEFT


def test_an_abandoned_operation_whose_run_is_gone_can_be_continued_and_aborted(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = begin(shop, OWNER)
    assert shown(shop, operation, monkeypatch) == ("undriven", False, False)
    shop.run("UPDATE roir.operation SET run_ended_at = clock_timestamp()")
    assert shown(shop, operation, monkeypatch) == ("abandoned", True, True)
    # A worker is still there.
    start_run(shop.database, INDEX, OWNER)
    assert shown(shop, operation, monkeypatch) == ("running", False, False)


def test_the_tab_of_an_old_run_names_the_run_that_continued_its_operation(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: only the open tab said so; after a reload, or in another browser, the run had ended, and that was all."""
    old = Run("rebuild_index", "r1", "failed", False, {"index": INDEX}, {})
    new = replace(old, run_id="r2", state="running")
    operation = begin(shop, OWNER)

    def continued(run: Run = old) -> Any:
        [found] = operations_of(shop.database, "c", run)
        return run.continued_by(found)

    by = {"dag_id": "rebuild_index", "run_id": "r2"}
    start_run(shop.database, INDEX, f"{OWNER} [3]")
    assert continued() is None
    shop.run(SILENT)
    # Prepared, and not begun.
    expected.expect(shop.database, operation, "airflow rebuild_index r2", None)
    assert (continued(), continued(new)) == (by, None)
    [found] = operations_of(shop.database, "c", old)
    assert not old.left_behind(found), "it is continued"
    start_run(shop.database, INDEX, "airflow rebuild_index r2 [0]")
    assert (continued(), continued(new)) == (by, None)
    assert continued(replace(old, state="running")) is None, "it may go on itself"
    assert continued(replace(old, dag_id=CONTROL_DAG, run_id="r9")) is None, "it has changed the operation of another"
    shop.run(SILENT)
    # That one has ended, too.
    requests.pause(shop.database, INDEX, "ann")
    monkeypatch.setattr(fates, "_read", lambda *_: ENDED)
    assert fates.left(shop.database, [operation]) == {operation}
    [found] = operations_of(shop.database, "c", old)
    found = replace(found, left=True)
    assert (old.continued_by(found), old.left_behind(found)) == (None, True)
    requests.resume(shop.database, INDEX, "ann")
    start_run(shop.database, INDEX, COMMAND)
    assert continued() == {"name": COMMAND}


def test_an_abort_continues_nothing(shop: Any) -> None:
    """Found: after *Abort* the tab said `Continued by airflow user ann.`: an abort names its actor as the owner."""
    old = Run("rebuild_index", "r1", "failed", False, {"index": INDEX}, {})
    operation = begin(shop, OWNER)
    start_run(shop.database, INDEX, OWNER)
    for status in ("aborting", "aborted"):
        if status == "aborting":
            requests.request_abort(shop.database, INDEX, "airflow user ann", "too slow", operation)
        else:
            clean_up(shop.database)
        [found] = operations_of(shop.database, "c", old)
        assert (found.status, old.continued_by(found)) == (status, None)
