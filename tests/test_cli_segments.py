"""`roir status INDEX --segments`: a table for people, the worst first, and a list for programs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from airflow_roir.cli import app
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.test_cli_states import Terminal

pytestmark = pytest.mark.sample(1)

ROWS = 6_000


def refused(dsn: str, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments], env={"ROIR_DSN": dsn, "COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.replace("│", " ").split())


def test_the_worst_segment_is_the_first_row_and_the_sum_the_last(database: Database, dsn: str) -> None:
    steps.make_table(dsn, ROWS)
    steps.make_index(database, keys="v", segments=3, verify="none")
    run_sql(dsn, f"DELETE FROM t WHERE v > {ROWS // 3} AND v <= {2 * ROWS // 3}", "SELECT pg_stat_force_next_flush()")
    terminal = Terminal(dsn)
    head, columns, *rows = terminal.run("status", "ix", "--segments").splitlines()
    assert head == (
        "4 segments of public.ix, by estimates; first those that would give most back if they were built now"
    )
    assert columns.split("  ")[0] == "segment"
    assert [row.split()[0] for row in rows] == ["2", "0", "1", "3", "all"]
    bounds = [" ".join(row.split()[1:4]) for row in rows]
    assert bounds[0].replace(" to ", "").isdigit()
    assert bounds[1].startswith("NULL")
    assert bounds[2].startswith("below ")
    assert bounds[3].startswith("from ")
    assert "4,000" in rows[-1]
    listed = json.loads(terminal.run("status", "ix", "--segments", "--json"))
    assert [one["ordinal"] for one in listed] == [0, 1, 2, 3]
    assert (listed[2]["rows"], listed[2]["exact"]) == (0, False)
    assert {"lower", "upper", "heap_needed", "leaf_density", "scans", "blocks_read", "since", "sealed_at"} < {
        *listed[0]
    }
    said = terminal.run("status", "ix", "--segments", "--exact")
    if "isn't installed" in said:
        assert said.splitlines()[-1] == "segments: estimated, since the extension pgstattuple isn't installed"


def test_what_is_not_published_yet_has_no_segments_to_tell_of(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 100)
    _, run = steps.begin(database, verify="none")
    terminal = Terminal(dsn)
    said = terminal.run("status", "ix", "--segments")
    assert said == "index public.ix isn't published: its segments are told while readers see it\n"
    assert json.loads(terminal.run("status", "ix", "--segments", "--json")) == []
    steps.finish_all(database, run)
    steps.begin(database, table=None, keys=None)
    assert "segments of public.ix, by" in terminal.run("status", "ix", "--segments")


def test_keys_and_names_do_nothing_to_a_terminal_and_are_cut(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text)",
        "INSERT INTO t SELECT i, lpad(i::text, 4, '0') || E'\\x1b[31m' || repeat('x', 50) "
        "FROM generate_series(1, 500) i",
        "ANALYZE t",
    )
    name = 'public."ix\x1b[31m"'
    steps.make_index(database, name, segments=2, verify="none")
    said = Terminal(dsn).run("status", name, "--segments")
    assert "\\x1b[31mx" in said
    assert "…" in said
    assert "x" * 30 not in said


def test_unique_segments_and_what_goes_together(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 500)
    steps.make_index(database, keys="v", unique=True, segments=2, verify="none")
    assert "3 segments of public.ix" in Terminal(dsn).run("status", "ix", "--segments")
    assert "--segments needs the name of one index" in refused(dsn, "status", "--segments")
    assert "--watch goes with neither" in refused(dsn, "status", "ix", "--segments", "--watch")
    assert "ask for one" in refused(dsn, "status", "ix", "--segments", "--history")
