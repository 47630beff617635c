"""Each way by which an operation is paused: what `roir status` and its JSON say of it, and how to resume it."""

from __future__ import annotations

import pytest

from airflow_roir.actor import Way, way_of
from airflow_roir.engine.control import long_pause
from airflow_roir.engine.control.run import end_run
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.test_cli_states import Terminal

pytestmark = pytest.mark.sample(1)

RUN = "airflow rebuild_index manual__2026-11-27"
COMMAND = "roir resume public.ix"
# The name in `paused_by`, and the way on.
WAYS = {
    Way.COMMAND: ("ann@desk", f"resume with: {COMMAND}"),
    Way.SQL: ("ann", f"resume with: SELECT roir.resume('public.ix'), or: {COMMAND}"),
    Way.PAGE: ("airflow user ann", f"resume with the button of its page Index build, or: {COMMAND}"),
    Way.SWITCH: ("airflow switch of DAG nightly", "to resume, turn on the switch of DAG nightly"),
    Way.TASK: (
        "airflow control_index manual__1",
        f"resume with the DAG control_index, action resume, or: {COMMAND}",
    ),
    Way.WINDOW: (
        "window",
        "a run that waits continues by itself; or let it work now: roir change public.ix --windows off",
    ),
    Way.MAX_DURATION: ("max_duration", f"resume with: {COMMAND}"),
    Way.GOVERNOR: ("governor", f"resume with: {COMMAND}"),
    Way.DUPLICATES: (
        "duplicates",
        f"change or delete rows until each key is left once, then: {COMMAND}",
    ),
    Way.RUN: (
        RUN,
        "if no try is left, clear its task in run manual__2026-11-27 of DAG rebuild_index with those that follow it "
        f"(Downstream), or trigger rebuild_index for this index: it continues; or: {COMMAND}",
    ),
}


@pytest.mark.parametrize("way", Way)
def test_it_is_told_who_paused_it_since_when_and_the_way_on(database: Database, dsn: str, way: Way) -> None:
    """Found: each pause advised `roir resume`, also one by a DAG's switch, which pauses it again at once."""
    by, on = WAYS[way]
    assert way_of(by, RUN) is way
    steps.make_table(dsn, 100)
    _, run = steps.begin(database)
    run_sql(dsn, f"SELECT roir.pause('ix', 'a reason', '{by}')")
    end_run(database, run)
    run_sql(dsn, f"UPDATE roir.operation SET owner = '{RUN}', paused_at = clock_timestamp() - interval '3 h'")
    text, one = Terminal(dsn).status()
    cause = "since rows share keys of the unique index" if way is Way.DUPLICATES else f"by {by}: a reason"
    assert f"paused 3 h ago {cause}; {on}\n" in text
    assert (one["paused_by"], one["pause_reason"], one["resume_with"]) == (by, "a reason", on)
    assert one["paused_at"] is not None
    run_sql(dsn, "UPDATE roir.operation SET warn_after_s = 60")
    with database.transaction() as connection:
        [pause] = long_pause.long_pauses(connection)
    assert f"{on[1:]}; or abort it: roir abort public.ix" in pause.text


def test_one_that_runs_again_has_no_way_on(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 100)
    steps.begin(database)
    _, one = Terminal(dsn).status()
    assert (one["status"], one["resume_with"]) == ("running", None)
