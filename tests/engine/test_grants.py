"""Each GRANT that a message names is a whole statement, with its role: pasted, it gives the right that is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import parse_dsn

import airflow_roir
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install, lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import objections, set_up, signals
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.errors import InvalidInput, RightMissing
from airflow_roir.options import BuildOptions
from airflow_roir.shards.announce.handed import hand_over
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_remedies_of_errors import texts
from tests.test_cli import ended_here

GRANT = re.compile(r"GRANT [^;]*? TO \S+?(?= WITH|[;.,]? |[;.]?$)(?: WITH \w+ TRUE(?:, \w+ TRUE)*)?")
# Names of SQL, and lists of its words, which are no remedies.
NO_REMEDY = re.compile(r"^GRANT$|^\s*--")


def messages() -> Iterator[tuple[str, str]]:
    for file in Path(airflow_roir.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                for text in texts(node):
                    if "GRANT " in text and not NO_REMEDY.match(text):
                        yield file.name, text


def test_no_grant_leaves_its_role_to_the_reader() -> None:
    """Found: `GRANT SELECT ON t TO …`, `GRANT pg_monitor to the role`, and `GRANT pg_monitor` alone."""
    found = [(file, text) for file, text in messages() if re.search(r"GRANT [^;]*(?:…|the role)|GRANT \w+$", text)]
    assert found == []


def carry_out(dsn: str, said: str) -> int:
    """Runs the statements of a text as a superuser; returns how many it named."""
    found = GRANT.findall(said)
    run_sql(dsn, *found)
    return len(found)


@pytest.fixture
def role(stranger: str) -> str:
    """The DSN of a role without rights, whose name needs quotes in none of these messages."""
    return stranger


def test_a_plan_names_all_rights_and_its_statements_give_them(dsn: str, role: str) -> None:
    """The table's owner builds, without USAGE on the schema of its table."""
    worker = parse_dsn(role)["user"]
    run_sql(
        dsn,
        "DROP SCHEMA roir, roir_data CASCADE",
        f"GRANT CREATE ON DATABASE {parse_dsn(dsn)['dbname']} TO {worker}",
        "CREATE SCHEMA s",
        "CREATE TABLE s.u (id int PRIMARY KEY, k int)",
        f"ALTER TABLE s.u OWNER TO {worker}",
    )
    database = Database(role)
    wanted = IndexDefinition.parse("s.ix", "s.u", "k")
    install.init(database)
    against = objections.find(database, wanted, BuildOptions())
    assert against.missing
    assert against.refused == ()
    with pytest.raises(InvalidInput, match="GRANT USAGE, CREATE ON SCHEMA"):
        lifecycle.prepare(database, wanted, BuildOptions())
    run_sql(dsn, *(one.statement for one in against.missing))
    steps.make_index(database, "s.ix", "s.u", "k")


def test_signals_that_a_role_may_not_read_are_read_after_their_grants(dsn: str, role: str) -> None:
    def unread() -> list[str]:
        seen = signals.look(Database(role), Surroundings.of_environment())
        return [one.problem or "" for one in seen.readings if one.value is None]

    told = [problem for problem in unread() if "GRANT" in problem]
    assert told
    assert sum(carry_out(dsn, problem) for problem in told) == len(told)
    assert [problem for problem in unread() if "GRANT" in problem] == []


def test_doctor_says_the_same_grants(dsn: str, role: str) -> None:
    found = [one for one in set_up.look(Database(role)) if one.what == "throttle"]
    assert found
    assert all(GRANT.search(one.says) and "GRANT" not in one.remedy for one in found)


def test_a_password_is_handed_over_after_the_grant(dsn: str, role: str) -> None:
    name = parse_dsn(dsn)["dbname"]
    run_sql(dsn, f"REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC")
    database = Database(role)
    with database.transaction() as connection, pytest.raises(RightMissing) as refused:
        hand_over(connection, {"name": "value"})
    assert carry_out(dsn, str(refused.value)) == 1
    with database.transaction() as connection:
        hand_over(connection, {"name": "value"})


QUERIES = {
    "SELECT * FROM nowhere": 'relation "nowhere" does not exist. Name a table that exists, with its schema',
    "SELEC 1": "Give one SELECT",
    "SELECT 1; SELECT 2": "Give one SELECT",
    "SELECT nope FROM t": 'column "nope" does not exist',
}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_that_can_not_be_asked_about_gets_its_own_remedy(database: Database, dsn: str, query: str) -> None:
    """Found: `relation "nowhere" does not exist. Give one SELECT`."""
    steps.make_table(dsn)
    plan = ("plan", "ix", "--table", "t", "--keys", "k", "--query", query)
    assert ended_here(dsn, *plan).stderr.endswith(f"{QUERIES[query]}\n")


def test_the_doctor_looks_at_a_table_before_roir_init(dsn: str, stranger: str) -> None:
    """Found: `t: schema "roir" does not exist`."""
    steps.make_table(dsn)
    run_sql(dsn, "CREATE UNLOGGED TABLE u (id int)", "DROP SCHEMA roir, roir_data CASCADE")
    found = set_up.look(Database(dsn), "t")
    assert [one for one in found if "roir init" in one.remedy + one.says and one.verdict == set_up.PROBLEM] == [
        one for one in found if one.what == "schema"
    ]
    assert found[-1].verdict == set_up.OK
    assert any("no primary key" in one.says for one in set_up.look(Database(dsn), "u"))
    named = [one for one in set_up.look(Database(stranger), "t") if one.what == "t"]
    worker = parse_dsn(stranger)["user"]
    assert [one.remedy for one in named] == [
        f'ALTER TABLE public.t OWNER TO "{worker}"',
        f'GRANT CREATE ON SCHEMA "public" TO "{worker}"',
    ]
    assert "doesn't exist" in set_up.look(Database(dsn), "nowhere")[-1].says
