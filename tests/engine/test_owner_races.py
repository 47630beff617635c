"""The table's owner changes in the gaps of a command: a clean-up leaves nothing to the former one, and writes work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import meeting, operators
from tests.engine.meeting import Meeting
from tests.engine.operators import COMMANDS
from tests.engine.steps import sql
from tests.engine.test_two_operators import scenes

pytestmark = pytest.mark.by_hand("sweeps")

MOST_GAPS = 6
FORMER, PRESENT = "roir_race_former", "roir_race_present"
CHANGE = "change owner"
TABLES = ("t", *(f"t{n}" for n in range(5)), "n", "m")
LEFT = f"""
SELECT 'capture of ' || pg_get_userbyid(p.proowner) FROM pg_proc p, pg_class t
 WHERE t.oid = 't'::regclass AND p.oid = to_regprocedure(format('roir_data.capture_%s()', t.oid))
   AND p.proowner <> t.relowner
UNION ALL
SELECT 'a right on ' || c.oid::regclass FROM pg_class c, aclexplode(c.relacl) a
 WHERE c.relnamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND a.grantee = '{FORMER}'::regrole
UNION ALL
SELECT 'a right on ' || p.oid::regprocedure FROM pg_proc p, aclexplode(p.proacl) a
 WHERE p.pronamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND a.grantee = '{FORMER}'::regrole
"""


def give(owner: str) -> str:
    return "; ".join(f"ALTER TABLE IF EXISTS public.{table} OWNER TO {owner}" for table in TABLES)


def change(database: Database) -> None:
    with database.transaction() as connection:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '8s'; {give(PRESENT)}")


@pytest.fixture(scope="module")
def templates(server: str) -> Iterator[dict[str, str]]:
    run_sql(server, f"CREATE ROLE {FORMER}", f"CREATE ROLE {PRESENT}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "SOURCE", (*operators.SOURCE, "GRANT ALL ON SCHEMA public TO PUBLIC", give(FORMER)))
        names = operators.make_templates(server)
    yield names
    operators.drop_templates(server, names)
    run_sql(server, f"DROP ROLE {FORMER}", f"DROP ROLE {PRESENT}")


CASES = [(scene, first) for first in COMMANDS for scene in scenes(first) if scene != "came" or first == "cancel attach"]


@pytest.mark.parametrize("guarded", [False, True], ids=["reassigned", "altered"])
@pytest.mark.parametrize(("scene", "first"), CASES)
def test_the_owner_changes_in_a_gap(
    server: str, templates: dict[str, str], scene: str, first: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the event triggers, as with REASSIGN OWNED, our code isn't called."""
    monkeypatch.setitem(COMMANDS, CHANGE, change)
    gaps = meeting.Gaps(server, templates).of(scene, first)
    wrong = {}
    for at in gaps[:: -(-len(gaps) // MOST_GAPS)]:
        with operators.cloned(server, templates[scene]) as dsn:
            if guarded:
                run_sql(dsn, "SELECT roir.guard()")
            one = Meeting(dsn, first, CHANGE, verified=False)
            try:
                one.go(at)
                clean_up.clean_up(one.other)
                one.found += [left for (left,) in sql(one.watch, LEFT)]
                run_sql(dsn, "INSERT INTO t VALUES (15, 999999, 'x', 1)", "DELETE FROM t WHERE id = 999999")
            finally:
                one.close()
            if one.found:
                wrong[at] = one.found
    assert wrong == {}
