"""The command `roir report`, over the life of an index: a build, a verification, an aborted rebuild."""

from __future__ import annotations

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine.steps import begin, make_table
from tests.test_cli import ended_here, here


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
        assert "missing 0, extra 0, different 0: index and table are equal" in page
    begin(database, "ix", None, None)
    assert here(dsn, "report", "ix").stdout.startswith("# rebuild of")
    run_sql(dsn, "SELECT roir.abort('ix', 'a reason')")
    ended_here(dsn, "clean-up")
    page = here(dsn, "report", "ix").stdout
    assert "a reason" in page
    assert here(dsn, "report", "ix", "--operation", "1", "--html").stdout.startswith("<!doctype html>")
