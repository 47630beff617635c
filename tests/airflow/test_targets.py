"""Which operations a DAG run is about, and which of them its page shows."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.control import expected
from airflow_roir.engine.control.run import start_run
from airflow_roir.errors import OperationRunning
from airflow_roir.links.buttons import IndexBuildLink, LiveOptionsLink
from airflow_roir.options import BuildOptions
from airflow_roir.page.run_operation import Change
from airflow_roir.page.targets import Found, Run, operations_of, runs_of
from airflow_roir.task.roir_operator import owner_of

OWNER = "airflow nightly r1"


def run_of(dag_id: str = "nightly", **prepared: int) -> Run:
    """A run whose tasks `prepare` have returned these, by map index of the group `rebuild`."""
    return Run(dag_id, "r1", "running", False, {}, {("rebuild", int(n[1:])): found for n, found in prepared.items()})


def begin(shop: Any, index: str) -> int:
    definition = IndexDefinition.parse(f"public.{index}", "public.item", ["price"])
    return prepare.prepare(shop.database, definition, BuildOptions(), OWNER).operation_id


def test_of_many_operations_the_one_at_work_comes_first(shop: Any) -> None:
    """A mapped group prepares all its indexes, then builds one after the other: the rest waits."""
    waits = [begin(shop, f"waits_{n}") for n in range(2)]
    works = begin(shop, "works")
    later = begin(shop, "later")
    start_run(shop.database, "public.works", OWNER)
    found = operations_of(shop.database, "shop", run_of())
    assert [one.operation for one in found] == [works, later, *reversed(waits)]
    assert [one.at_work for one in found] == [True, False, False, False]
    assert all(one.drives for one in found)


def test_mapped_tasks_of_a_run_are_drivers_of_their_own(shop: Any) -> None:
    """An index that is named twice is driven by one of the two; both are the run's."""
    tasks: list[Any] = [SimpleNamespace(dag_id="nightly", run_id="r1", map_index=n) for n in (-1, 0, 12)]
    owners = [owner_of(task) for task in tasks]
    assert owners == [OWNER, f"{OWNER} [0]", f"{OWNER} [12]"]
    ids = [begin(shop, f"i{n}") for n in range(3)]
    for n, owner in enumerate(owners):
        start_run(shop.database, f"public.i{n}", owner)
    assert {one.operation: one.drives for one in operations_of(shop.database, "shop", run_of())} == dict.fromkeys(
        ids, True
    )
    assert runs_of(shop.database, ids) == {one: {"dag_id": "nightly", "run_id": "r1"} for one in ids}
    other = Run("nightly", "r", "running", False, {}, {})
    assert operations_of(shop.database, "shop", other) == []


def test_a_task_of_a_mapped_group_has_an_operation_of_its_own() -> None:
    run = run_of(_0=7, _1=8)
    assert run.prepared_by("rebuild.build", 1) == 8
    assert run.prepared_by("rebuild.finalize", 0) == 7
    assert [run.prepared_by("build", -1), run.prepared_by("", -1), run.prepared_by("other.build", 0)] == [None] * 3
    assert run.adopted == (), "in a group of somebody's own nothing is adopted"
    build = Found("shop", 8, "public.i", "rebuild", "running", True, True)
    assert run.task_of(build) == {"task_id": "rebuild.build", "map_index": 1}
    assert run.task_of(Found("shop", 9, "public.i", "rebuild", "running", True, True)) is None


@pytest.mark.parametrize(
    ("dag_id", "task"), [("rebuild_index", "verify_before"), ("verify_index", "verify"), ("nightly", None)]
)
def test_the_log_of_a_verification_is_that_of_a_task_which_exists(dag_id: str, task: str | None) -> None:
    found = run_of(dag_id).task_of(Found("shop", 9, "public.i", "verify", "running", True, True))
    assert found == (None if task is None else {"task_id": task, "map_index": -1})


def test_the_log_of_a_compaction_is_that_of_the_task_which_drives_it(shop: Any) -> None:
    found = Found("shop", 9, "public.i", "compact", "running", True, True, 3)
    assert run_of("keep_indexes_young").task_of(found) == {"task_id": "compact", "map_index": 3}
    assert run_of("nightly").task_of(found) is None
    begin(shop, "i")
    start_run(shop.database, "public.i", f"{OWNER} [12]")
    assert [one.map_index for one in operations_of(shop.database, "shop", run_of())] == [12]


@pytest.mark.parametrize(("map_index", "task"), [(-1, "tasks/rebuild.build"), (0, "tasks/rebuild.build/mapped/0")])
def test_the_links_of_a_mapped_task_lead_to_its_own_page(map_index: int, task: str) -> None:
    key: Any = SimpleNamespace(dag_id="nightly", run_id="r 1", task_id="rebuild.build", map_index=map_index)
    of_run, nothing = "/dags/nightly/runs/r%201", None
    assert LiveOptionsLink().get_link(nothing, ti_key=key) == f"{of_run}/{task}/task-state-store"  # type: ignore[arg-type]
    page = f"{of_run}/{task}/plugin/index-build-of-task" if map_index >= 0 else f"{of_run}/plugin/index-build"
    assert IndexBuildLink().get_link(nothing, ti_key=key) == page  # type: ignore[arg-type]


def test_a_run_that_has_ended_before_its_operation_says_what_to_do(shop: Any) -> None:
    """Found: the page of a run that had ended before its operation said "a waiting task begins within half a minute",
    or only "interrupted"; after *Resume* there "The task continues". It holds: it says that no run drives the
    operation, which task to clear, and that a new run continues it.
    """
    begun = begin(shop, "i")
    ended = replace(run_of(_0=begun), state="failed")
    [found] = operations_of(shop.database, "shop", ended)
    left = (
        "This run has ended, and no run drives the operation. Continue it: that triggers a run for it, or clear its "
        "task rebuild.build with those that follow it (Downstream)"
    )
    assert ended.how_to_go_on(found) == left
    assert (ended.left_behind(found), run_of(_0=begun).left_behind(found)) == (True, False)
    # Its DAG is in no file any more: Airflow starts nothing of it, and nothing of it can be cleared.
    stale = replace(run_of(_0=begun), stale=True)
    assert stale.left_behind(found)
    assert "clear" not in stale.how_to_go_on(found)
    change = Change(shop.database, "shop", ended, begun, "ann")
    change.pause("month-end")
    assert change.resume() == f"Resumed. {left}."
    start_run(shop.database, "public.i", OWNER)
    [found] = operations_of(shop.database, "shop", ended)
    assert not ended.left_behind(found), "somebody drives it"
    assert ended.left_behind(replace(found, at_work=False))
    assert not ended.left_behind(replace(found, at_work=False, elsewhere=True)), "another run may continue it"


def test_a_resume_says_when_the_task_continues(shop: Any) -> None:
    """Found: it said half a minute, whenever the task looked."""
    begun = begin(shop, "i")
    run = run_of(_0=begun)
    change = Change(shop.database, "shop", run, begun, "ann")
    change.pause("month-end")
    expected.expect(shop.database, begun, run.owner, 280)
    assert re.fullmatch(r"Resumed\. Its task continues, at the latest about \d\d:\d\d UTC\.", change.resume())
    change.pause("again")
    expected.has_ended(shop.database, begun, run.owner)
    # Found: a task that was marked while its run went on was said to continue.
    assert change.resume() == (
        "Resumed. No task of this run will continue it: clear its task rebuild.build with those that follow it "
        "(Downstream), or: roir resume public.i."
    )
    change.pause("a third time")
    shop.run("UPDATE roir.operation SET awaited_until = 'infinity', run_ended_at = NULL")
    assert change.resume() == "Resumed. Its run's task begins when its turn comes."


@pytest.mark.parametrize(
    ("dag_id", "state", "missed"),
    [
        ("rebuild_index", "failed", "public.i"),
        ("verify_index", "success", "public.i"),
        ("rebuild_index", "running", None),
        ("control_index", "failed", None),
        ("nightly", "failed", None),
    ],
)
def test_a_run_that_has_ended_before_it_began_names_its_index(dag_id: str, state: str, missed: str | None) -> None:
    """Found: the page of a run that had ended before its operation: "Running", "about 1 s left", a range "being worked
    on"; of one that had ended before *prepare* was done: "This run builds and verifies no index". It holds: *Not
    driven*, no time left, no range at work; which index the run should have worked on, and what to do.
    """
    assert replace(run_of(dag_id), state=state, form={"index": "public.i"}).missed == missed


def test_what_another_tab_did_before_is_told(shop: Any) -> None:
    one, another = (Change(shop.database, "shop", run_of(), begin(shop, "i"), user) for user in ("ann", "bob"))
    assert one.pause("month-end") == ""
    said = another.pause("backup")
    assert "already paused" in said
    assert "airflow user ann: month-end" in said
    assert one.abort("") == (
        "Aborted: the workers can't commit any more. A run of clean_up_indexes for connection shop removes the "
        "unfinished work."
    )
    # The engine's own function refuses it, as for other callers.
    with pytest.raises(OperationRunning, match="run r1 of DAG nightly doesn't drive operation"):
        another.abort("")
