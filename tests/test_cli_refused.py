"""A wrong value of an option of a command is refused by one sentence, with exit code 2, and has changed nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from airflow_roir import cli
from airflow_roir.cli.spark import CommandSpark
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.database import Database
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_bad_input import CATALOG
from tests.test_cli import here

pytestmark = pytest.mark.sample(2)

NUMBER = ("0", "-1", "many", "1.5", "9" * 30, "", "1e3", "2;")
# 0 is none.
LIMIT = ("-1", "many", "1.5", "9" * 30, "", "1", "2;")
SPAN = ("2 fortnights", "-1h", "h", "9" * 30, "1h;")
WORD = ("nonsense", "", " ", "after,none", "None")
MASTER = ("sparky", "local[0]", "local[x", "spark://host", "sc://", "mesos://h:1", "", " ", "local; x")
THROTTLE = ("nonsense", "replica_lag", "replica_lag=1XB", "x=1", "commit_latency=-1ms")
WINDOWS = ("nonsense", "* * * * *", "0 22 * * 1-5 for 99d in Nowhere/City", "61 22 * * * for 1h")
NAME = ("", " ", "a.b.c", '"', "x" * 64, "a b", "nowhere")
WORK = {
    "--windows": WINDOWS,
    "--priority": ("high", "101", "-101", "1.5", ""),
    "--warn-after": SPAN,
    "--abort-after": SPAN,
}
LIVE = {
    **WORK,
    "--throttle": THROTTLE,
    "--max-duration": SPAN,
    "--parallelism": NUMBER,
    "--batch-rows": (*NUMBER, "1"),
    "--max-rows-per-second": LIMIT,
    "--shard-parallelism": ("2", "-1", "many"),
}
SPARK = {"--master": MASTER, "--conf": ("x", "spark.a", "")}
# Before the options the command, and what is right.
CASES: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("build", "new", "--table", "t", "--keys", "k"): {
        **WORK,
        **SPARK,
        "--throttle": THROTTLE,
        "--max-duration": SPAN,
        "--parallelism": NUMBER,
        "--batch-rows": (*NUMBER, "1"),
        "--batch-ms": NUMBER,
        "--ranges": NUMBER,
        "--segments": NUMBER,
        "--max-rows-per-second": LIMIT,
        "--scan": WORD,
        "--covering": WORD,
        "--verify": WORD,
        "--on-duplicate": WORD,
        "--revert-window": ("-1", "many", "1x"),
        "--shard-parallelism": ("-1", "many", "257"),
        "--max-lag": SPAN,
        "--shard-column": ("s",),
        "--with": ("nonsense", "a (", "(k)", "a (k) INCLUDE", "a (k); x"),
        "--keys": ('"', "k,,k", "k,k", "k k"),
        "--include": ('"', ",", "k", "v,v"),
        "--where": ('"', "id; id", "id, v"),
        "--table": ("", "a.b.c", '"'),
    },
    ("resume", "building"): {**LIVE, **SPARK},
    ("change", "building"): LIVE,
    ("verify", "ix"): {
        **WORK,
        **SPARK,
        "--throttle": THROTTLE,
        "--parallelism": NUMBER,
        "--sample": ("0", "101", "some", "-1%", "nan"),
        "--max-duration": ("-1h", "soon"),
        "--slices": NUMBER,
    },
    ("compact", "ix"): {
        **WORK,
        **SPARK,
        "--throttle": THROTTLE,
        "--max-duration": SPAN,
        "--parallelism": NUMBER,
        "--budget": ("much", "-1GB", "1 fortnight", "1GB|2GB"),
        "--segment-size": ("much", "-1GB", "1h"),
    },
    ("reference", "t(v)", "ix"): {
        **WORK,
        **SPARK,
        "--throttle": THROTTLE,
        "--max-duration": SPAN,
        "--parallelism": NUMBER,
        "--on-delete": WORD,
        "--on-update": WORD,
        "--columns": ('"', "a,,b", "x" * 64),
        "--constraint": ("", "a.b.c", '"', "x" * 64),
    },
    ("announce", "ix"): {"--by": WORD},
    ("duplicates", "building"): {"--limit": ("-1", "many", "1.5", "")},
    ("queue",): {"--max": ("-1", "many", "1.5", "")},
    ("ship", "--once"): {
        "--every": (*SPAN, ""),
        "--warn-age": SPAN,
        "--warn-rows": ("-1", "many", "1.5", ""),
        "--shards": ("nowhere", "a,,b"),
        "--indexes": ("nowhere", '"'),
    },
    ("doctor",): {"--master": MASTER, "--table": ("", "a.b.c", '"')},
    ("report", "ix"): {"--operation": ("many", "1.5", "")},
    ("plan", "new", "--table", "t", "--keys", "k"): {
        **dict.fromkeys(("--parallelism", "--ranges", "--segments"), NUMBER),
        **dict.fromkeys(("--scan", "--covering", "--on-duplicate"), WORD),
        "--max-rows-per-second": LIMIT,
        "--measure": SPAN,
        "--query": ("", "nothing", "SELECT 1; SELECT 2", "DELETE FROM t", "SELECT nothing FROM t", "SELECT 'a"),
        "--shard-column": ("s",),
        "--table": ("", "a.b.c", '"', "nowhere"),
        "--keys": ('"', "k,,k", "k,k", "k k", "nowhere"),
        "--include": ('"', ",", "k", "v,v", "nowhere"),
        "--where": ('"', "id; id", "id, v", "nowhere = 1"),
    },
}
# What takes any text, or is no option of an operation: `test_shards.py` and others have these.
FREE = {"--reason", "--textfile", "--listen", "--to", "--schema", "--tables", "--shards", "--dsn", "--conn-id"}
FREE |= {"--index-dsn"}
# Which argument is wrong of what needs a name.
NAMED = ("pause", "resume", "abort", "revert", "drop", "change", "verify", "compact", "duplicates", "status")
NAMED += ("rows-view",)


@pytest.mark.sample(1)
def test_each_option_that_has_a_value_is_here() -> None:
    here = {command[0]: set(options) for command, options in CASES.items()}
    known = get_command(cli.app).commands  # type: ignore[attr-defined]
    for name in known.keys() - {"shard"}:
        options = {one.opts[0] for one in known[name].params if not getattr(one, "is_flag", False)}
        valued = {option for option in options if option.startswith("--")}
        assert valued - FREE <= here.get(name, set()), name


@pytest.fixture(scope="module")
def shared(server: str) -> Iterator[str]:
    """A published index, and one whose build is paused."""
    run_sql(server, "CREATE DATABASE cli_refused TEMPLATE roir_template")
    dsn = database_dsn(server, "cli_refused")
    database = Database(dsn, "roir tests")
    steps.make_table(dsn)
    steps.make_index(database)
    steps.begin(database, "building")
    requests.pause(database, "building", "somebody")
    yield dsn
    run_sql(server, "DROP DATABASE cli_refused WITH (FORCE)")


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is started is a process beside what refuses, and takes seconds to end."""

    def started(*_: Any) -> None:
        raise AssertionError("Spark has started")

    monkeypatch.setattr(CommandSpark, "start", started)


def changed(dsn: str, *arguments: str) -> bool:
    session = steps.session(dsn)
    try:
        before = sql(session, CATALOG)
        session.rollback()
        said = here(dsn, *arguments, code=2).stderr
        assert "Traceback" not in said, arguments
        assert said.strip(), arguments
        return sql(session, CATALOG) != before
    finally:
        session.close()


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, option) for command, options in CASES.items() for option in options],
    ids=lambda part: part if isinstance(part, str) else part[0],
)
def test_a_wrong_option_is_refused_before_the_first_change(
    shared: str, command: tuple[str, ...], option: str, no_spark: None
) -> None:
    """Found: `roir resume` with a wrong `--master` changed the other options first; `roir compact` without a Java had
    begun a compaction. It holds: looked at before anything is changed. Found: `roir build` and `roir verify` with a
    `--throttle` that the server can't read had started Spark before they said so. It holds: looked at before Spark
    starts. Found: a `--throttle` that the server can't read: `roir compact` measured the index first, and succeeded
    where nothing was worth a compaction. It holds: looked at before it measures.
    """
    for value in CASES[command][option]:
        assert not changed(shared, *command, option, value), (command, option, value)


@pytest.mark.parametrize("command", NAMED)
def test_a_wrong_name_is_refused(shared: str, command: str) -> None:
    for name in NAME:
        assert not changed(shared, command, "--", name), (command, name)


@pytest.mark.sample(1)
def test_a_resume_that_may_not_drive_changes_no_option(shared: str, no_spark: None) -> None:
    """Found: `roir resume --parallelism 7` of an operation that another run drives changed its options, and then
    refused to drive it. It holds: refused first; `roir change` changes the options of what runs.
    """
    database = Database(shared, "roir tests")
    steps.begin(database, "driven")
    before = operations.find_operation(database, "driven")
    said = here(shared, "resume", "driven", "--parallelism", "7", "--throttle", "lock_waits=9", code=4).stderr
    assert "is being driven by test, whose last sign of life is " in said
    assert re.search(r"If that run is dead, no --take-over is needed in \d", said)
    now = operations.find_operation(database, "driven")
    assert (now.parallelism, now.throttle) == (before.parallelism, before.throttle)


def test_the_help_lists_all_commands_in_the_order_of_a_user_s_life() -> None:
    """Found: it began with `announce`, a command of shards, and `plan` came after `build`."""
    from airflow_roir.cli.app import LISTED, app

    group: Any = get_command(app)
    listed = group.list_commands(None)
    assert tuple(listed) == LISTED
    assert listed[0] == "init"
    assert listed[-3:] == ["shard", "ship", "announce"]
