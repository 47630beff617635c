"""Each way by which an operation is paused: what `roir status` and its JSON say of it, and how to resume it."""

from __future__ import annotations

import re
from datetime import timedelta, timezone

import pytest

from airflow_roir.actor import Way, way_of
from airflow_roir.cli.app import EXIT_CODES
from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import expected, long_pause, operations, requests
from airflow_roir.engine.control.run import Run, end_run, settle, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot import details
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.snapshot.words import state_of
from airflow_roir.engine.work.phase_log import PhaseLog
from airflow_roir.engine.work.pool import Ended, ThreadPool
from airflow_roir.errors import Fenced, RoirError
from airflow_roir.operation import Phase
from tests.conftest import run_sql
from tests.engine import steps
from tests.test_cli import as_json, here
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
        f"a run that waits continues when a window opens, else: {COMMAND}; or let it work now: roir change public.ix "
        "--windows off",
    ),
    Way.MAX_DURATION: ("max_duration", f"resume with: {COMMAND}"),
    Way.GOVERNOR: ("governor", f"resume with: {COMMAND}"),
    Way.DUPLICATES: (
        "duplicates",
        f"change or delete rows until no two share a key, then: {COMMAND}",
    ),
    Way.RUN: (
        RUN,
        "clear its task in run manual__2026-11-27 of DAG rebuild_index with those that follow it "
        f"(Downstream), if that run still exists, or trigger rebuild_index for this index: it continues; or: {COMMAND}",
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
    gone = "run_ended_at = clock_timestamp(), paused_at = clock_timestamp() - interval '3 h'"
    run_sql(dsn, f"UPDATE roir.operation SET owner = '{RUN}', {gone}")
    text, one = Terminal(dsn).status()
    cause = "since rows share keys of the unique index" if way is Way.DUPLICATES else f"by {by}: a reason"
    assert f"paused 3 h ago {cause}; {on}\n" in text
    assert (one["paused_by"], one["pause_reason"], one["resume_with"]) == (by, "a reason", on)
    assert one["paused_at"] is not None
    run_sql(dsn, "UPDATE roir.operation SET warn_after_s = 60")
    with database.transaction() as connection:
        [pause] = long_pause.long_pauses(connection)
    assert f"{on[1:]}; or abort it: roir abort public.ix" in pause.text


def begun(database: Database, dsn: str, last_try: bool = False) -> Run:
    """A run of a DAG that is awaited, and may be silent for 700 s."""
    steps.make_table(dsn, 100)
    _, run = steps.begin(database)
    expected.expect(database, run.operation_id, RUN, 30, 700, last_try)
    return start_run(database, "ix", RUN, take_over=True)


def in_minutes(database: Database, seconds: float) -> str:
    with database.transaction() as connection:
        at = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one() + timedelta(seconds=seconds)
    return f"{at.astimezone(timezone.utc):%H:%M} UTC"


def test_after_a_killed_worker_the_first_words_are_that_it_goes_on_by_itself(database: Database, dsn: str) -> None:
    """Found: the first words were that no run drives it, and the time of the next try was nowhere."""
    begun(database, dsn)
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '100 s'")
    run_sql(dsn, "UPDATE roir.operation SET awaited_until = heartbeat_at")
    text, one = Terminal(dsn).status()
    # Found: `by about 02:18`, while the page had Airflow's own moment, 02:12: the database knows a bound alone.
    said = re.search(
        r"    goes on by itself at the next try, within (\d+) minutes at the latest, unless its run was marked; ",
        text,
    )
    assert said is not None, text
    assert said[1] in ("9", "10", "11")
    assert one["status"] == "running"
    assert one["expected_at"] is not None
    assert one["held_up"]["text"].startswith("Goes on by itself at the next try, within ")
    # The grace is over: it is abandoned, and nothing is expected.
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '800 s'")
    run_sql(dsn, "UPDATE roir.operation SET awaited_until = heartbeat_at")
    _, one = Terminal(dsn).status()
    assert (one["status"], one["expected_at"]) == ("abandoned", None)


def test_a_pause_by_the_run_itself_names_the_next_try_or_the_task_to_clear(database: Database, dsn: str) -> None:
    run = begun(database, dsn)
    settle(database, run, RoirError("the disk is full"), fatal=False)
    end_run(database, run)
    _, one = Terminal(dsn).status()
    assert re.fullmatch(
        r"goes on by itself at the next try, within \d+ minutes at the latest, unless its run was marked; or: "
        r"roir resume public\.ix",
        one["resume_with"],
    )
    expected.has_ended(database, run.operation_id, RUN)
    _, one = Terminal(dsn).status()
    assert one["resume_with"] == WAYS[Way.RUN][1]
    assert one["expected_at"] is None


def test_after_the_last_try_was_killed_nothing_is_promised(database: Database, dsn: str) -> None:
    """Found: the next try was awaited for minutes, while the run's tab said that the run has ended."""
    run = begun(database, dsn, last_try=True)
    _, one = Terminal(dsn).status()
    assert (one["last_try"], one["expected_at"], one["driven"]) == (True, None, True)
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '100 s'")
    text, one = Terminal(dsn).status()
    assert re.search(r"no run has driven it for .*, and its task has no try left; clear its task in run manual__", text)
    assert (one["status"], one["expected_at"]) == ("running", None)
    held = f"No run drives it, and its task has no try left; nothing is lost; {WAYS[Way.RUN][1]}"
    assert (one["held_up"]["by"], one["held_up"]["text"]) == ("no run", held)
    assert "next try" not in text
    # The rule of the silence is the same.
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '800 s'")
    assert Terminal(dsn).status()[1]["status"] == "abandoned"
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp()")
    settle(database, run, RoirError("the disk is full"), fatal=False)
    end_run(database, run)
    _, one = Terminal(dsn).status()
    assert (one["resume_with"], one["expected_at"]) == (WAYS[Way.RUN][1], None)
    # A user's resume brings no try.
    run_sql(dsn, "SELECT roir.resume('ix', actor := 'ann')")
    text, one = Terminal(dsn).status()
    assert "and its task has no try left" in text
    assert (one["held_up"]["by"], one["expected_at"]) == ("no run", None)


@pytest.mark.parametrize("way", ["its part is done", "another run", "a command", "it waits", "cleared", "ended"])
def test_a_last_try_ends_with_its_task(database: Database, dsn: str, way: str) -> None:
    """The next task of its DAG run, another run and a task that was cleared have tries of their own."""
    run = begun(database, dsn, last_try=True)
    if way == "its part is done":
        end_run(database, run)
    elif way == "another run":
        expected.expect(database, run.operation_id, f"{RUN}_2", 30, 700)
        start_run(database, "ix", f"{RUN}_2", take_over=True)
    elif way == "a command":
        start_run(database, "ix", "ann@desk pid 4711", take_over=True)
    elif way == "it waits":
        expected.expect(database, run.operation_id, RUN, 30, 700)
    else:
        run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
        if way == "ended":
            expected.settle_runs(database, lambda _: expected.ENDED)
            assert operation_status(database, run.operation_id).last_try
        fate = expected.COMES if way == "ended" else expected.Fate(waits=True)
        expected.settle_runs(database, lambda _: fate)
    assert not operation_status(database, run.operation_id).last_try
    assert "no try left" not in Terminal(dsn).status()[0]


def test_the_cause_of_a_kill_replaces_that_it_was_interrupted(database: Database, dsn: str) -> None:
    """Found: after a mark or a timeout the pause was `interrupted`, and named neither."""
    run = begun(database, dsn)
    settle(database, run, KeyboardInterrupt(), fatal=False)
    cause = "its task build was marked as failed"
    expected.note_cause(database, run.operation_id, RUN, cause)
    end_run(database, run)
    text, one = Terminal(dsn).status()
    assert one["pause_reason"] == cause
    assert f"by {RUN}: {cause}; " in text
    found = details.progress(database, "ix")
    assert (len(found.pauses), found.errors) == (1, ()), "a mark is no error"
    assert [event.detail for event in operations.events(database, "ix") if event.action == "pause"] == [cause]
    # A pause by a user stays.
    run = start_run(database, "ix", RUN)
    requests.pause(database, "ix", "ann@desk", "lunch")
    expected.note_cause(database, run.operation_id, RUN, cause)
    assert Terminal(dsn).status()[1]["pause_reason"] == "lunch"


def test_a_resume_is_seen_at_the_time_that_is_told(database: Database, dsn: str) -> None:
    run = begun(database, dsn)
    requests.pause(database, "ix", "ann@desk", "lunch")
    end_run(database, run)
    expected.expect(database, run.operation_id, RUN, 280)
    whens = [in_minutes(database, seconds) for seconds in (270, 280)]
    state = state_of(operation_status(database, run.operation_id))
    assert state.note in [f"Paused; nothing is lost; its run looks again about {when}" for when in whens]
    requests.resume(database, "ix", "ann@desk")
    state = state_of(operation_status(database, run.operation_id))
    assert any(state.text.startswith(f"its run continues it by about {when}; ") for when in whens)


def test_one_that_runs_again_has_no_way_on(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 100)
    steps.begin(database)
    _, one = Terminal(dsn).status()
    assert (one["status"], one["resume_with"]) == ("running", None)


def test_a_second_pause_says_that_it_is_one(database: Database, dsn: str) -> None:
    """Found: the second `roir pause` read like the first."""
    steps.make_table(dsn, 100)
    steps.begin(database)
    assert here(dsn, "pause", "ix", "--reason", "noon").stdout.startswith("paused at 0 % by ")
    run_sql(dsn, "UPDATE roir.operation SET paused_at = clock_timestamp() - interval '3 h'")
    again = here(dsn, "pause", "ix", "--reason", "later").stdout
    assert re.match(r"index ix is already paused at 0 %, for 3 h, by \S+: noon; resume with: roir resume", again)
    [(said,)] = steps.sql(steps.session(dsn), "SELECT roir.pause('ix')")
    assert re.match(r"already paused at 0.0 %, since \d{4}-\d\d-\d\d .*, by \S+: noon", said)


def test_a_drop_beside_a_paused_operation_ends_as_documented(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 100)
    steps.begin(database)
    here(dsn, "pause", "ix")
    said = here(dsn, "drop", "ix", code=4).stderr
    assert "can't be dropped: operation 1 (first build) is paused; abort it first: roir abort ix" in said
    assert "an unfinished one is in the way" in " ".join(EXIT_CODES.split())


def test_the_status_of_some_indexes(database: Database, dsn: str) -> None:
    """Found: `roir status a b` was refused as an unexpected argument."""
    steps.make_table(dsn, 100)
    for name in ("a", "b", "c"):
        steps.make_index(database, name)
    found = as_json(dsn, "status", "c", "a", "public.c")
    assert [one["index"] for one in found["indexes"]] == ["public.c", "public.a"]
    assert [one["index"] for one in found["operations"]] == ["public.c", "public.a"]
    assert "there is no index nowhere" in here(dsn, "status", "a", "nowhere", code=2).stderr
    assert "the name of one index" in here(dsn, "status", "a", "b", "--history", code=2).stderr
    assert here(dsn, "status", "a", "b", "--watch").stdout.count("completed") == 4


def test_an_aborted_run_says_so_and_not_that_it_lost_its_piece(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 100)
    _, run = steps.begin(database)
    lines: list[str] = []
    log = PhaseLog(database, run, lifecycle.PHASES[Phase.BUILD], lines.append)
    pool = ThreadPool(database, run, lifecycle.PHASES[Phase.BUILD])
    lost = Ended(0, [], Fenced("fenced"))
    assert pool.failure(lost, log, leaving=False) is None
    here(dsn, "abort", "ix")
    assert pool.failure(lost, log, leaving=False) is None
    assert lines == [
        "build: worker 0 stopped: it has lost its piece of the work",
        "build: worker 0 stopped: the operation was aborted",
    ]


def test_the_comparison_before_the_publish_has_one_name_and_the_rows_of_the_table(database: Database, dsn: str) -> None:
    """Found: `publish: 127 units done, 800,000 rows` of a table with 400,000, while status called it verify."""
    steps.make_table(dsn, 100)
    run = steps.folded(database)
    lines: list[str] = []
    lifecycle.run_phases(database, run, lines.append)
    assert any(re.fullmatch(r"verify: (\d+) of \1 units done, 100 rows", line) for line in lines), lines
    assert [line for line in lines if line.startswith("publish: ")] == [lines[-1]]
    # Found: nearly all of this time was the comparison's.
    assert re.fullmatch(r"publish: done, worked [^:]+: verify [^,]+, publish .+", lines[-1]), lines[-1]
