"""The guide's SQL, to the letter, run by roles that have what the guide says they need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

DOCS = Path(__file__).parents[2] / "docs"
RIGHTS = "Roles that watch, measure or pause"


def section(page: str, heading: str) -> str:
    """A section of a page."""
    guide = (DOCS / page).read_text()
    begin = guide.index(f"\n## {heading}\n")
    return guide[begin : guide.index("\n## ", begin + 1)]


def blocks(text: str) -> list[str]:
    """The blocks of SQL in a text."""
    return re.findall(r"^```sql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def grants(role: str, given: str) -> list[str]:
    """The statements by which the guide grants rights to a role, for another role."""
    [block] = [one for one in blocks(section("rights.md", RIGHTS)) if f" TO {role};" in one]
    return [statement.replace(f" TO {role}", f" TO {given}") for statement in block.split(";") if statement.strip()]


@pytest.fixture
def role(database: Database, dsn: str, stranger: str) -> str:
    """The name of a stranger's role, beside an operation that runs."""
    steps.make_table(dsn)
    steps.begin(database)
    return str(sql(steps.session(stranger), "SELECT current_user")[0][0])


def test_a_role_that_watches_may_ask_all_that_monitoring_asks(dsn: str, stranger: str, role: str) -> None:
    run_sql(dsn, *grants("watcher", role))
    user = steps.session(stranger)
    [queries, *_] = blocks(section("monitor.md", "SQL"))
    statements = [one for one in re.sub(r"--.*", "", queries).split(";") if one.strip()]
    assert len(statements) == 5
    found = [sql(user, statement) for statement in statements]
    assert found[0][0][0] == "public.ix"
    assert found[4]


def test_a_role_that_pauses_may_do_it_by_sql(database: Database, dsn: str, stranger: str, role: str) -> None:
    run_sql(dsn, *grants("pauser", role))
    user = steps.session(stranger)
    [row] = re.findall(r"^\| SQL \|(.*)\|$", section("operate.md", "Where you can do it"), re.MULTILINE)
    for call in re.findall(r"`(SELECT [^`]+)`", row):
        sql(user, call.replace("'index'", "'ix'"))
        user.commit()
    said = [one.action for one in operations.events(database, "ix")]
    assert said[said.index("pause") :] == ["pause", "change parallelism", "resume", "abort"]
