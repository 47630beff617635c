"""The command `roir`, as a user runs it: each in a process of its own at least once, then in this one."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_roir import __version__, cli
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_partitions import make

pytestmark = pytest.mark.sample(5)

ROIR = Path(sys.executable).parent / "roir"


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(
        dsn,
        'CREATE SCHEMA "Weird S"',
        'CREATE TABLE "Weird S"."T ""1""" (id int PRIMARY KEY, "line%no" text, v int)',
        'INSERT INTO "Weird S"."T ""1""" SELECT i, (i % 50)::text, i FROM generate_series(1, 5000) i',
        'ANALYZE "Weird S"."T ""1"""',
    )


BUILD = ("build", "ix", "--table", '"Weird S"."T ""1"""', "--keys", '"line%no"', "--include", "v")


def roir(dsn: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [ROIR, *arguments],
        env={**os.environ, "ROIR_DSN": dsn, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def ended_here(dsn: str, *arguments: str) -> SimpleNamespace:
    """How a command ends in this process, without the second that the start of one takes."""
    out, error = io.StringIO(), io.StringIO()
    thresholds = gc.get_threshold()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        patch.setenv("ROIR_DSN", dsn)
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", ["roir", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    gc.set_threshold(*thresholds)
    return SimpleNamespace(returncode=ended.value.code or 0, stdout=out.getvalue(), stderr=error.getvalue())


def here(dsn: str, *arguments: str, code: int = 0) -> SimpleNamespace:
    """Like `roir`, in this process."""
    done = ended_here(dsn, *arguments)
    assert done.returncode == code, done
    return done


def operation(dsn: str) -> Any:
    [found] = as_json(dsn, "status", "ix")["operations"]
    return found


def as_json(dsn: str, *arguments: str, code: int = 0) -> Any:
    return json.loads(here(dsn, *arguments, "--json", code=code).stdout)


def test_status_names_who_holds_up_a_prepare_that_has_no_operation_yet(dsn: str) -> None:
    """The command looks in the rest between two attempts; `--json` names the index, too."""
    table = '"Weird S"."T ""1"""'
    holder = steps.session(dsn)
    sql(holder, f"UPDATE {table} SET v = 0 WHERE id = 1")
    here(dsn, "status", "ix", code=2)
    shown: list[Any] = []

    def look(line: str) -> None:
        if not shown and not line.startswith("expected"):
            shown.append(roir(dsn, "status"))
            shown.extend(as_json(dsn, "status", *which)["operations"] for which in (("ix",), ()))
            holder.rollback()

    definition = IndexDefinition.parse("ix", table, '"line%no"')
    options = BuildOptions(lock_timeout_ms=20, lock_patience_s=300)
    prepare.prepare(Database(dsn), definition, options, "test", look)
    plain, [one], [only] = shown
    pid = holder.info.backend_pid
    assert 'prepare of index "Weird S".ix waits since' in plain.stdout
    assert f"blocked by pid {pid} (postgres, transaction open for" in plain.stdout
    assert one == only
    assert (one["index"], one["operation_id"], one["status"]) == ('"Weird S".ix', None, "waiting")
    [wait] = one["waits"]
    assert (wait["command"], wait["waiter"]) == ("prepare", "roir")
    assert f"pid {pid} " in wait["blocked_by"]
    assert operation(dsn)["waits"] == []


@pytest.mark.slow
def test_plan_build_verify_and_drop(dsn: str) -> None:
    planned = as_json(dsn, "plan", *BUILD[1:])
    assert (planned["kind"], planned["rows_estimate"]) == ("create", 5000)
    assert planned["uncaptured_ddl"].startswith("detected")
    assert 0 < planned["work_seconds_low"] < planned["work_seconds_high"]
    assert 0 < planned["start_seconds_low"] < planned["start_seconds_high"]
    assert planned["expects"] in " ".join(here(dsn, "plan", *BUILD[1:]).stdout.split())
    run_sql(dsn, "SELECT roir.guard()")
    assert json.loads(roir(dsn, "plan", *BUILD[1:], "--json").stdout)["uncaptured_ddl"] == "refused"
    run_sql(dsn, "SELECT roir.unguard()")
    arguments = ("--parallelism", "3", "--batch-rows", "1000", "--master", "local[3]", "--json")
    built = json.loads(roir(dsn, *BUILD, *arguments).stdout)
    [one], [done] = built["indexes"], built["operations"]
    assert (one["state"], one["rows"], one["verified"]["different"]) == ("published", 5000, 0)
    assert (done["status"], done["phase"], done["rows"], done["parallelism"]) == ("completed", "done", 5000, 3)
    run_sql(dsn, "DELETE FROM roir_data.g1 WHERE c2 = 7", "UPDATE roir_data.g1 SET c3 = -1 WHERE c2 = 8")
    wrong = json.loads(roir(dsn, "verify", "ix", "--without-spark", "--json", code=1).stdout)
    assert (wrong["missing"], wrong["extra"], wrong["different"]) == (1, 0, 1)
    assert {one["primary_key"]["id"] for one in wrong["first"]} == {"7", "8"}
    assert "repaired 2" in here(dsn, "verify", "ix", "--repair", "--without-spark").stdout
    assert as_json(dsn, "verify", "ix", "--without-spark", "--sample", "10%")["complete"] is False
    assert "takes a percentage" in here(dsn, "verify", "ix", "--sample", "some", code=2).stderr
    roir(dsn, "drop", "ix")
    assert as_json(dsn, "status") == {"indexes": [], "operations": []}


@pytest.mark.by_hand("sweeps")
def test_rebuild_status_verify_and_clean_up(dsn: str) -> None:
    steps.make_index(Database(dsn), table='"Weird S"."T ""1"""', keys='"line%no"', include="v")
    assert "completed" in roir(dsn, "build", "ix", "--revert-window", "0").stdout
    shown = operation(dsn)
    for name in ("percent_complete", "rows_per_second", "seconds_left", "total_execution_time", "phase_seconds"):
        assert name in shown
    assert (shown["kind"], shown["percent_complete"]) == ("rebuild", 100)
    assert set(shown["phase_seconds"]) == {"prepare", "build", "seal", "fold", "publish"}
    found = json.loads(roir(dsn, "verify", "ix", "--master", "local[2]", "--json").stdout)
    assert list(found)[:7] == ["missing", "extra", "different", "corrupt", "damaged", "duplicate", "repaired"]
    assert (found["rows"], found["entries"], found["missing"], found["extra"], found["complete"]) == (
        5000,
        5000,
        0,
        0,
        True,
    )
    assert json.loads(roir(dsn, "clean-up", "--json").stdout)["generations_dropped"] == 1
    assert [event["action"] for event in as_json(dsn, "status", "ix", "--history")].count("publish") == 2


@pytest.mark.by_hand("sweeps")
def test_partitions_go_and_come(dsn: str) -> None:
    database = Database(dsn)
    make(dsn)
    steps.make_index(database)
    assert "dropped; 100 entries removed" in roir(dsn, "detach-partition", "t1", "--drop", "--reason", "old").stdout
    run_sql(dsn, "CREATE TABLE n (LIKE t INCLUDING ALL)", "INSERT INTO n VALUES (15, 1, 'a', 1)", "DROP TABLE t2")
    attached = roir(dsn, "attach-partition", "t", "n", "FOR VALUES FROM (10) TO (20)")
    assert "n attached to t; 1 entry added" in attached.stdout
    assert "partition public.t2 was dropped" in here(dsn, "status", "ix").stdout
    assert json.loads(roir(dsn, "sync-partitions", "t", "--json").stdout)["gone"] == ["public.t2"]
    assert as_json(dsn, "verify", "ix", "--without-spark")["rows"] == 101
    assert "is no partition" in here(dsn, "detach-partition", "t", code=2).stderr


@pytest.mark.sample(0)
def test_what_the_server_refuses_is_said_with_its_remedy(dsn: str) -> None:
    """Found: a refused attach or detach didn't say the remedy. It holds: it does."""
    database = Database(dsn)
    make(dsn)
    steps.make_index(database)
    run_sql(dsn, "CREATE TABLE n (LIKE t)", "CREATE TABLE other (d int PRIMARY KEY) PARTITION BY RANGE (d)")
    bounds = "FOR VALUES FROM (30) TO (40)"
    refused = roir(dsn, "attach-partition", "t", "n", bounds, code=2).stderr
    assert "n has no primary key" in refused
    assert "Give it the primary key of the table that it is attached to." in refused
    refused = here(dsn, "attach-partition", "other", "n", bounds, code=2).stderr
    assert "has no roir index. Use ALTER TABLE … ATTACH PARTITION." in refused
    refused = here(dsn, "detach-partition", "n", code=2).stderr
    assert "is no partition" in refused
    assert "Use ALTER TABLE … DETACH PARTITION, or DROP TABLE." in refused
    # One that the server refuses in the middle: the table takes writes again.
    run_sql(dsn, "ALTER TABLE n ADD PRIMARY KEY (d, id)", "ALTER TABLE n DROP COLUMN v")
    refused = here(dsn, "attach-partition", "t", "n", bounds, code=2).stderr
    assert "n" in refused
    run_sql(dsn, "INSERT INTO n VALUES (31, 1, 'a')")


def prepared(dsn: str) -> Database:
    database = Database(dsn)
    definition = IndexDefinition.parse("ix", '"Weird S"."T ""1"""', '"line%no"')
    prepare.prepare(database, definition, BuildOptions(batch_rows=1000))
    return database


@pytest.mark.sample(0)
def test_pause_change_and_abort_from_other_processes(dsn: str) -> None:
    database = prepared(dsn)
    assert "paused at 0 %" in roir(dsn, "pause", "ix", "--reason", "lunch").stdout
    paused = operation(dsn)
    assert (paused["status"], paused["pause_reason"]) == ("paused", "lunch")
    changed = roir(dsn, "change", "ix", "--parallelism", "3", "--max-rows-per-second", "9000").stdout
    assert changed == "index ix: changed: --parallelism 2 -> 3, --max-rows-per-second no limit -> 9000\n"
    # As the flags are called, also where the engine or the server speaks.
    assert "--batch-rows is 5; it must" in here(dsn, "change", "ix", "--batch-rows", "5", code=2).stderr
    assert "--max-duration is '400d'" in here(dsn, "change", "ix", "--max-duration", "400d", code=2).stderr
    nothing = here(dsn, "change", "ix", code=2).stderr
    flags = nothing.removeprefix("roir: nothing to change: give one of ").split(", ")
    # Found: the flags whose names are words of English had no dashes.
    assert {one[:2] for one in flags} == {"--"}, nothing
    assert {"--parallelism", "--batch-rows", "--throttle"} < set(flags)
    misspelt = here(dsn, "change", "ix", "--throttle", "lok_waits=50", code=2).stderr
    assert misspelt.startswith("roir: --throttle: there is no signal lok_waits; there are replica_lag, ")
    assert misspelt.endswith(". Did you mean lock_waits?\n")
    assert "or 0 for no limit" in here(dsn, "change", "ix", "--max-rows-per-second", "5", code=2).stderr
    steps.finish_all(database, start_run(database, "ix", "test"))
    prepare.prepare(database, IndexDefinition.parse("ix"), BuildOptions())
    roir(dsn, "abort", "ix", "--reason", "changed my mind")
    assert operation(dsn)["status"] == "aborted"
    assert "was aborted: there is nothing to resume" in here(dsn, "resume", "ix", code=2).stderr
    assert as_json(dsn, "verify", "ix", "--without-spark")["rows"] == 5000


@pytest.mark.by_hand("sweeps")
def test_a_resume_takes_other_options(dsn: str) -> None:
    prepared(dsn)
    roir(dsn, "pause", "ix")
    roir(dsn, "change", "ix", "--parallelism", "3", "--max-rows-per-second", "9000")
    arguments = ("--parallelism", "1", "--max-rows-per-second", "0", "--json")
    [resumed] = json.loads(roir(dsn, "resume", "ix", *arguments).stdout)["operations"]
    assert (resumed["status"], resumed["parallelism"], resumed["max_rows_per_second"]) == ("completed", 1, None)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "nothing"), "no index nothing"),
        (("build", "ix", "--table", "nothing", "--keys", "a"), "table nothing doesn't exist"),
        (("build", "ix", "--parallelism", "0"), "parallelism is 0"),
        (("build", 'ix"', "--table", "t", "--keys", "a"), "quote"),
        (("resume", "ix"), "no index ix"),
    ],
)
def test_bad_input_says_what_and_exits_with_2(dsn: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in roir(dsn, *arguments, code=2).stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_silence_and_no_failure(closed: str) -> None:
    command = ["bash", "-c", f'"$0" -m airflow_roir.cli dags --to "$1" {closed}', sys.executable, "/proc/no"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
    version = [*command[:2], f'"$0" -m airflow_roir.cli --version {closed}', sys.executable]
    assert subprocess.run(version, capture_output=True, check=False).returncode == 0


def test_the_version_needs_no_database() -> None:
    done = subprocess.run([ROIR, "--version"], env={}, capture_output=True, text=True, check=True)
    assert done.stdout == f"roir {__version__}\n"


def imported_by(dsn: str, *arguments: str) -> set[str]:
    """The packages, and modules of ours, that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "airflow_roir.cli", *arguments],
        env={**os.environ, "ROIR_DSN": dsn},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    return {name if name.startswith("airflow_roir.") else name.partition(".")[0] for name in modules}


# Half a second of processor time is what `roir status` may take, and most of these take more by themselves.
HEAVY = {"airflow", "alembic", "hypothesis", "numpy", "pandas", "pyarrow", "pyspark", "rich"}


@pytest.mark.parametrize("group", [(), ("shard",)])
def test_the_list_of_commands_has_whole_sentences_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], group: tuple[str, ...]
) -> None:
    """Found: 19 of 29 ended in `...`, before what they were about."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["roir", *group, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    listed = capsys.readouterr().out.split("Commands:\n")[1].split("\n\n")[0].splitlines()
    assert [one for one in listed if not one.endswith(".") or one.endswith("...")] == []


def test_the_help_imports_nothing_of_the_engine_and_the_status_nothing_that_builds(dsn: str) -> None:
    found = imported_by(dsn, "--help")
    assert "airflow_roir.cli.app" in found
    assert sorted(found & {*HEAVY, "psycopg2", "sqlalchemy", "airflow_roir.engine"}) == []
    found = imported_by(dsn, "status")
    assert "airflow_roir.engine.snapshot.operation" in found
    unwanted = {
        f"airflow_roir.engine.{name}" for name in ("build", "seal", "fold", "prepare", "clean_up", "verify.worker")
    }
    assert sorted(found & {*HEAVY, *unwanted}) == []


def test_a_database_that_cant_be_reached_is_one_line_without_its_password(dsn: str) -> None:
    done = roir("postgresql://nobody:hush@127.0.0.1:1/none", "status", code=1)
    assert "roir: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "hush" not in done.stderr + done.stdout


def test_without_a_dsn_it_says_how_to_give_one() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ROIR_DSN"}
    done = subprocess.run([ROIR, "status"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ROIR_DSN" in done.stderr


@pytest.mark.slow
def test_a_pause_while_spark_starts_ends_the_command_at_once(database: Database, dsn: str, tmp_path: Path) -> None:
    """Found: a pause while Spark starts was obeyed only once Spark was up. It holds: the starting driver is ended at
    once, no try is used up.
    """
    # A Java that says what it is, and never comes up.
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(
        '#!/bin/sh\ncase "$*" in *-version) echo "    java.home = '
        f'{tmp_path}" >&2; echo "    java.specification.version = 17" >&2; exit;; esac\nexec sleep 600\n'
    )
    java.chmod(0o755)
    environment = {**os.environ, "ROIR_DSN": dsn, "JAVA_HOME": str(tmp_path)}
    building = subprocess.Popen(
        [ROIR, *BUILD], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watch = steps.session(dsn)
    watch.autocommit = True
    while not steps.sql(watch, "SELECT count(*) FROM roir.event WHERE action = 'start'")[0][0]:
        assert building.poll() is None
    roir(dsn, "pause", "ix", "--reason", "tea")
    try:
        _, said = building.communicate(timeout=60)
    finally:
        building.kill()
    assert building.returncode == 3, said
    assert ": tea; resume with" in said
    [(status, heart)] = steps.sql(watch, "SELECT status, heartbeat_at FROM roir.operation")
    assert (status, heart) == ("paused", None)


@pytest.mark.sample(0)
def test_plan_says_what_is_missing_what_it_takes_and_prints_its_ddl(dsn: str) -> None:
    planned = as_json(dsn, "plan", *BUILD[1:])
    assert planned["trial"]["rows"] == 5000
    assert planned["base_bytes"] > planned["index_bytes"] > 0
    assert {lock["mode"] for lock in planned["locks"]} == {"ACCESS SHARE", "SHARE ROW EXCLUSIVE", "ACCESS EXCLUSIVE"}
    shown = here(dsn, "plan", *BUILD[1:], "--measure", "1").stdout
    for line in ("space  ", "delta  ", "wal  ", "seal  ", "locks  "):
        assert f"\n{line}" in shown
    assert re.search(r"nothing was written, by a count of [\d.]+ s", shown)
    script = here(dsn, "plan", *BUILD[1:], "--sql").stdout
    assert "CREATE TRIGGER roir_capture_" in script
    assert "-- publish" in script
    wrong = ("plan", "ix", "--table", '"Weird S"."T ""1"""', "--keys", "a,b")
    refused = as_json(dsn, *wrong, code=2)
    assert (refused["missing_rights"], len(refused["refused"])) == ([], 2)
    said = here(dsn, *wrong, code=2).stderr
    assert said.startswith("roir: not yet: 2 refusals. Do what each line says, then plan again\n")
    assert said.count("roir: refused: ") == 2
    assert "measure is -1" in here(dsn, "plan", *BUILD[1:], "--measure", "-1", code=2).stderr
    assert "\nwriters  " in shown
    assert planned["captured_wal_bytes_per_write"] > 0


def test_plan_says_whether_the_index_will_pay(dsn: str) -> None:
    """The same document as text and JSON; "no" for a table without partitions."""
    assert as_json(dsn, "plan", *BUILD[1:])["worth"]["pays"] == "no"
    # The verdict is the first line.
    assert re.match("will it pay +no: the table has no partitions", here(dsn, "plan", *BUILD[1:]).stdout)
    days = (
        "DO $$ BEGIN FOR n IN 0..69 LOOP EXECUTE format('CREATE TABLE p%s PARTITION OF p FOR VALUES IN (%s)', n, n); "
    )
    run_sql(
        dsn,
        "CREATE TABLE p (id int, day int, k int, v text, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
        f"{days} END LOOP; END $$",
        "INSERT INTO p SELECT i, i % 70, i % 9, 'v' FROM generate_series(1, 700) i",
    )
    asked = ("plan", "by_k", "--table", "p", "--keys", "k", "--query", "SELECT id FROM p WHERE k = 3")
    worth = as_json(dsn, *asked)["worth"]
    assert (worth["pays"], worth["partitions"], worth["partition_key"]) == ("yes", 70, ["day"])
    assert (worth["query"]["serves"], worth["query"]["covers"], worth["query"]["look_ups"]) == (True, True, [])
    shown = here(dsn, *asked, "--run-query").stdout
    assert re.match("will it pay +", shown)
    assert shown.index("\nquery  ") < shown.index("\na look-up  ") < shown.index("\nindex  ")
    assert "now opens 70 of 70 partitions" in shown
    assert "roir.rows: " in shown
    alone = here(dsn, "plan", *BUILD[1:], "--run-query", code=2).stderr
    assert "--run-query runs the query that --query names" in alone
    assert "--sql prints the DDL alone" in here(dsn, *asked, "--sql", code=2).stderr
    assert "it isn't one query" in here(dsn, *asked[:-1], "SELECT 1; SELECT 2", code=2).stderr


def test_a_plan_before_init_says_all_that_can_be_known(dsn: str) -> None:
    """Found: before `roir init` a plan said nothing but that. It holds: what can be checked is, and init comes last."""
    run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE")
    asked = ("plan", *BUILD[1:])
    said = here(dsn, *asked, code=2).stderr.splitlines()
    assert said[0].startswith("roir: not yet: nothing is against it but the missing control schema. Run: roir init")
    assert "create it with: roir init" in said[1]
    assert said[2].startswith("roir: will it pay: no: the table has no partitions")
    asked_wrongly = ("plan", "ix", "--table", '"Weird S"."T ""1"""', "--keys", "nowhere")
    wrong = as_json(dsn, *asked_wrongly, code=2)
    assert [one for one in wrong["refused"] if "no column" in one] == wrong["refused"][:1]
    assert wrong["refused"][1:] == ["this database has no control schema yet; create it with: roir init"]


@pytest.mark.parametrize("command", ["status", "queue", "metrics", "shard list"])
def test_an_output_that_has_no_room_is_told_in_a_line(dsn: str, command: str) -> None:
    """Found: a traceback where the output had no room (`roir status --json > /dev/full`), or at Ctrl-C while the
    command was imported. It holds: a line and exit code 1; it ends as any program does.
    """
    arguments = [*command.split(), *([] if command == "metrics" else ["--json"])]
    environment = {**os.environ, "ROIR_DSN": dsn}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [ROIR, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "roir: the output can't be written: No space left on device\n"


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_word(tmp_path: Path) -> None:
    """Found: a traceback where the output had no room (`roir status --json > /dev/full`), or at Ctrl-C while the
    command was imported. It holds: a line and exit code 1; it ends as any program does.
    """
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run([ROIR, "status"], capture_output=True, text=True, env=environment, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("command", ["verify", "build", "status"])
def test_ctrl_c_before_anything_is_begun_is_told(dsn: str, tmp_path: Path, command: str) -> None:
    """Found: `roir verify` ended with 130 and without a word: a user couldn't know whether it had begun."""
    (tmp_path / "psycopg2.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "ROIR_DSN": dsn}
    ended = subprocess.run([ROIR, command, "ix"], capture_output=True, text=True, env=environment, check=False)
    told = "" if command == "status" else "roir: interrupted; nothing was begun\n"
    assert (ended.returncode, ended.stderr) == (130, told)


def test_a_reader_that_has_gone_ends_a_command_as_by_sigpipe(dsn: str) -> None:
    """Seen to be 1, which says that something has failed."""
    for arguments in (["status", "--json"], ["status", "nothing"]):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "airflow_roir.cli", *arguments]
        environment = {**os.environ, "ROIR_DSN": dsn}
        ended = subprocess.run(command, stdout=write, stderr=write, env=environment, check=False)
        os.close(write)
        assert ended.returncode == 141, arguments


def test_a_first_init_says_what_comes_next(dsn: str) -> None:
    """Found: its only line was the schema's version."""
    assert "next: " not in here(dsn, "init").stderr
    run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE")
    assert "next: roir doctor --table SCHEMA.TABLE checks what a first build needs" in here(dsn, "init").stderr
