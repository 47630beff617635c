"""The command `roir report`, over the life of an index: a build, a verification, an aborted rebuild."""

from __future__ import annotations

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine.steps import begin, make_table
from tests.test_cli import as_json, ended_here, here


@pytest.mark.sample(0)
def test_each_kind_of_operation_has_a_page(dsn: str, database: Database) -> None:
    make_table(dsn)
    for command in (
        ("build", "ix", "--table", "t", "--keys", "k", "--without-spark"),
        ("verify", "ix", "--without-spark"),
    ):
        here(dsn, *command)
        page = here(dsn, "report", "public.ix").stdout
        assert "Completed" in page.splitlines()[0], command
        assert page.startswith("# First build of public.ix, operation 1: Completed"), command
        assert "missing 0, extra 0, different 0: index and table are equal" in page
    # Found: after a verification the report was that of the verification. It is a part of the build's, with its own.
    assert page.splitlines()[0].endswith("operation 1: Completed; verification 2: Completed")
    assert "| verification 2 | " in page
    assert "roir report public.ix --operation 2" in page
    own = here(dsn, "report", "ix", "--operation", "2").stdout
    assert own.startswith("# Verification of public.ix, operation 2: Completed\n")
    assert "## Since then" not in own
    begin(database, "ix", None, None)
    assert here(dsn, "report", "ix").stdout.startswith("# Rebuild of")
    run_sql(dsn, "SELECT roir.abort('ix', 'a reason')")
    ended_here(dsn, "clean-up")
    page = here(dsn, "report", "ix").stdout
    assert "a reason" in page
    assert here(dsn, "report", "ix", "--operation", "1", "--html").stdout.startswith("<!doctype html>")
    # Found: "there is no operation 99. If it was there, the server has lost it, by a failover", for a mistyped number.
    said = here(dsn, "report", "ix", "--operation", "99", code=2).stderr
    assert said == "roir: index ix has no operation 99; its operations: roir status ix --history\n"
    assert "there is no index nowhere" in here(dsn, "report", "nowhere", "--operation", "99", code=2).stderr


@pytest.mark.sample(0)
def test_a_verification_that_found_differences_is_not_titled_completed(dsn: str, database: Database) -> None:
    """Found: `verify of …: Completed`, and status and page said the same, while index and table differed."""
    make_table(dsn)
    here(dsn, "build", "ix", "--table", "t", "--keys", "k", "--without-spark")
    run_sql(
        dsn, "ALTER TABLE t DISABLE TRIGGER USER", "DELETE FROM t WHERE id = 7", "ALTER TABLE t ENABLE TRIGGER USER"
    )
    said = here(dsn, "verify", "ix", "--without-spark", code=1).stdout
    # Found: it ended without the command that repairs.
    assert said.splitlines()[-1] == "repair them with: roir verify public.ix --repair"
    assert here(dsn, "report", "ix").stdout.splitlines()[0].endswith(": Differs")
    said = here(dsn, "status", "ix").stdout
    assert "ago: 1 difference found; 99 rows compared" in said
    assert "repair them with: roir verify public.ix --repair" in said
    [one] = as_json(dsn, "status", "ix")["operations"]
    assert (one["status"], one["differences"], one["differences_left"]) == ("completed", 1, 1)
    here(dsn, "verify", "ix", "--repair", "--without-spark")
    assert here(dsn, "report", "ix").stdout.splitlines()[0].endswith(": Repaired")
    [one] = as_json(dsn, "status", "ix")["operations"]
    assert (one["differences"], one["differences_left"]) == (1, 0)


@pytest.mark.sample(0)
def test_after_an_abort_of_a_first_build_status_says_that_and_how_to_build_it_again(
    dsn: str, database: Database
) -> None:
    """Found: "there is no index ix … Did you mean iy?", as for a mistyped name."""
    make_table(dsn)
    begin(database, "ix", "t", "k")
    run_sql(dsn, "SELECT roir.abort('ix', 'a reason')")
    ended_here(dsn, "clean-up")
    said = here(dsn, "status", "ix", code=2).stderr
    assert "there is no index ix: its build, operation 1, was aborted at 20" in said
    assert ": a reason; build it again: roir build public.ix --table public.t --keys k" in said
    # Found: no report of it, though its change has a ticket, too; the phase that it was in had the state `now`.
    page = here(dsn, "report", "ix").stdout
    assert page.startswith("# First build of public.ix, operation 1: Aborted\n")
    assert "| build | not finished | " in page
    assert "| seal | not begun | " in page
    assert here(dsn, "report", "ix", "--operation", "1").stdout.startswith("# First build of public.ix")
