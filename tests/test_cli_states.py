"""Every state of an operation of every kind, through `roir status` and its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from airflow_roir.cli import app
from airflow_roir.definition import IndexDefinition, argument
from airflow_roir.engine import abort, lifecycle, prepare
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.verify import record
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.options import BuildOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)
HOSTILE = "me\x1b[31m\u202e"


class Terminal:
    """The command, in this process and without a terminal."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def run(self, *arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments], env={"ROIR_DSN": self.dsn, "COLUMNS": "20"})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        assert "\x1b" not in done.stdout
        assert "\u202e" not in done.stdout
        return done.stdout

    def status(self, index: str = "ix") -> tuple[str, dict[str, Any]]:
        """The text of all indexes, and the operation of this one in JSON."""
        one = json.loads(self.run("status", index, "--json"))
        assert list(one) == ["indexes", "operations"]
        assert len(one["indexes"]) == 1
        [found] = one["operations"]
        text = self.run("status")
        assert text.startswith("indexes\n")
        assert "\noperations\n" in text
        return text, found


@pytest.fixture
def terminal(dsn: str) -> Terminal:
    steps.make_table(dsn, 500)
    return Terminal(dsn)


def begin(database: Database, kind: str) -> Run:
    if kind == "verify":
        begun = record.begin(database, "ix", VerifyOptions(), "test")
        return start_run(database, begun.index, f"a run of {HOSTILE}")
    definition = IndexDefinition.parse("ix", *(("t", "k") if kind == "create" else (None, None)))
    prepared = prepare.prepare(database, definition, BuildOptions(), "test")
    return start_run(database, prepared.index, f"a run of {HOSTILE}")


@pytest.mark.sample(0)
@pytest.mark.parametrize("kind", ["create", "rebuild", "verify"])
def test_each_state_says_what_it_is_who_drives_it_and_what_to_do(
    database: Database, dsn: str, terminal: Terminal, kind: str
) -> None:
    if kind != "create":
        steps.make_index(database)
        text, one = terminal.status()
        assert (one["status"], one["kind"], one["driven"], one["seconds_left"]) == ("completed", "create", False, None)
        assert "500 rows copied" in text
    run = begin(database, kind)
    text, one = terminal.status()
    assert (one["status"], one["kind"], one["driven"], one["error"]) == ("running", kind, True, None)
    assert "running, driven by a run of me\\x1b[31m\\u202e\n" in text
    assert one["held_up"]["by"] == "starting"

    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '50 s'")
    text, one = terminal.status()
    assert (one["status"], one["driven"]) == ("running", False)
    assert 50 <= one["silent_seconds"] < 600
    assert "running, but no run has driven it for " in text

    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() WHERE status = 'running'")
    requests.pause(database, "ix", HOSTILE, "lunch")
    text, one = terminal.status()
    assert (one["status"], one["pause_reason"]) == ("pausing", "lunch")
    assert "pausing, on request by me\\x1b[31m\\u202e: lunch" in text

    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
    text, one = terminal.status()
    assert (one["status"], one["held_up"]["by"]) == ("paused", "pause")
    assert "resume with: SELECT roir.resume('public.ix'), or: roir resume public.ix\n" in text
    assert one["resume_with"] == "resume with: SELECT roir.resume('public.ix'), or: roir resume public.ix"

    run = start_run(database, "ix", "test")
    with database.transaction() as connection:
        row = operations.read_operation(connection, run.operation_id)
        operations.fail(connection, row, "test", "the table was altered", run.epoch)
    text, one = terminal.status()
    assert (one["status"], one["error"]) == ("failed", "the table was altered")
    assert "failed: the table was altered; abort it with: roir abort public.ix\n" in text
    with pytest.raises(InvalidInput, match="has failed and can't be resumed: the table was altered"):
        terminal.run("resume", "ix", "--parallelism", "3")

    requests.request_abort(database, "ix", HOSTILE, "a mistake")
    text, one = terminal.status()
    assert (one["status"], one["end_reason"]) == ("aborting", "a mistake")
    assert "aborting, aborted by me\\x1b[31m\\u202e: a mistake" in text
    with pytest.raises(InvalidInput, match="is being aborted"):
        terminal.run("resume", "ix")
    abort.finish_abort(database, run.operation_id, "test")
    if kind == "create":
        with pytest.raises(NotFound, match="no index ix"):
            terminal.run("status", "ix")
        assert json.loads(terminal.run("status", "--json")) == {"indexes": [], "operations": []}
        assert terminal.run("status").startswith("no index yet")
        return
    # The index is unchanged, whatever the operation's end.
    text, one = terminal.status()
    assert (one["status"], one["ended_by"]) == ("aborted", HOSTILE)
    published = text[: text.index("operations")]
    assert "abort" not in published
    assert "exact" in published
    with pytest.raises(InvalidInput, match="was aborted: there is nothing to resume"):
        terminal.run("resume", "ix")


TRICKY = 'public."it\'s; $(exit 9) \x1b[2J\u202e\\n"'


def output_of(dsn: str, command: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """The output of a line in a shell, as a user pastes it."""
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "ROIR_DSN": dsn,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONIOENCODING": encoding,
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_remedy_may_be_pasted_and_no_message_acts_on_the_terminal(database: Database, dsn: str) -> None:
    """Names and reasons are others'; so are the values in what the server says."""
    steps.make_table(dsn)
    steps.begin(database, TRICKY)
    requests.pause(database, TRICKY, HOSTILE, "lunch\x1b]0;x\x07\nroir: all is well")
    name = argument(TRICKY)
    for command, code in ((f"roir pause {name}", 0), (f"roir drop {name}", 4), (f"roir build {name} --table u", 2)):
        done = output_of(dsn, command)
        assert done.returncode == code, done
        assert "\x1b" not in done.stdout + done.stderr
        assert "\nroir: all" not in done.stdout + done.stderr
    # Another user's pause was first, and the message names it.
    assert "by me\\x1b[31m\\u202e: lunch" in output_of(dsn, f"roir pause {name}").stdout
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
    for wanted in ("resume with: ", "abort it first: "):
        said = output_of(dsn, "roir status").stdout + output_of(dsn, f"roir drop {name}").stderr
        [remedy] = [line.split(wanted)[1] for line in said.splitlines() if wanted in line]
        done = output_of(dsn, f"{remedy.replace('roir resume', 'roir pause')}")
        assert done.returncode == 0, done
    assert output_of(dsn, f"roir abort {name}").returncode == 2
    assert "\\u6f22" in output_of(dsn, "roir status 漢", "latin-1").stderr


@pytest.mark.sample(0)
def test_after_a_verification_its_rate_is_called_that_of_a_comparison(database: Database, terminal: Terminal) -> None:
    steps.make_index(database)
    lifecycle.verify(database, "ix", VerifyOptions())
    text, one = terminal.status()
    assert (one["kind"], one["status"], one["rows"]) == ("verify", "completed", 500)
    assert "500 rows compared" in text
    with pytest.raises(InvalidInput, match=r"operation 2 \(verification\) is completed"):
        terminal.run("resume", "ix")


def test_names_that_differ_look_different_and_nothing_is_cut(database: Database, terminal: Terminal) -> None:
    long = "a" * 60
    names = [f"public.{long}_{n}" for n in "12"] + ['public."w\x1b[2J漢"', 'public."w\u202e漢"', "public.select"]
    for name in names:
        steps.begin(database, name)
    text = terminal.run("status")
    for shown in (
        f"public.{long}_1 ",
        f"public.{long}_2 ",
        'public."w\\x1b[2J漢"',
        'public."w\\u202e漢"',
        "public.select",
    ):
        assert text.count(f"\n{shown}") == 2, (shown, text)
    seen = json.loads(terminal.run("status", "--json"))
    assert [one["index"] for one in seen["indexes"]] == [one["index"] for one in seen["operations"]]
    assert {one["index"] for one in seen["indexes"]} == set(names)


@pytest.mark.sample(0)
def test_what_is_wrong_with_an_index_stands_with_the_index(database: Database, dsn: str, terminal: Terminal) -> None:
    steps.make_index(database)
    run_sql(dsn, "DELETE FROM roir_data.g1 WHERE c2 IN (7, 8)", "ALTER TABLE t DISABLE TRIGGER USER")
    lifecycle.verify(database, "ix", VerifyOptions())
    text, _ = terminal.status()
    indexes = text[: text.index("operations")]
    assert "2 differences" in indexes
    assert "found missing 2; repaired 0: roir verify public.ix --repair" in indexes
    assert "warning: index public.ix: not every write to" in indexes
    [facts] = json.loads(terminal.run("status", "--json"))["indexes"]
    assert (facts["verified"]["missing"], len(facts["warnings"])) == (2, 1)


def test_the_columns_of_a_history_fit_the_longest_action(database: Database, dsn: str, terminal: Terminal) -> None:
    """Found: `change max_rows_per_second` moved the columns behind it."""
    steps.begin(database)
    run_sql(dsn, "SELECT roir.change('ix', max_rows_per_second => 5000)", "SELECT roir.pause('ix', 'lunch')")
    lines = terminal.run("status", "ix", "--history").splitlines()
    assert all("  operation 1  " in line for line in lines), "the number that roir report --operation takes"
    whos = {"prepare": "test", "change max_rows_per_second": "postgres", "pause": "postgres"}
    found = [line.index(f" {who}") for line in lines for action, who in whos.items() if f"  {action} " in line]
    assert len(found) == len(whos)
    assert len(set(found)) == 1, "\n".join(lines)
