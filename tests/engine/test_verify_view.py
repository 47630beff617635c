"""A verification checks the view: the generation that it shows, the entries that it hides, and whether it is ours."""

from __future__ import annotations

import psycopg2.extensions
import pytest

from airflow_roir.engine import clean_up, revert
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.verify import report
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import meeting, steps
from tests.engine.steps import sql
from tests.engine.test_partitions import make

pytestmark = pytest.mark.sample(1)

COLUMNS = "b.c1 AS k, b.c2 AS d, b.c3 AS id, b.c4 AS v"
# The change of the view, and its message. shown: the query that the view must have.
WRONG = {
    "plain": ("CREATE OR REPLACE VIEW ix AS SELECT {columns} FROM roir_data.g2 b", "shows entries of partitions"),
    "another generation": ("CREATE OR REPLACE VIEW ix AS SELECT {columns} FROM roir_data.g1 b", "another generation"),
    "another condition": (
        "CREATE OR REPLACE VIEW ix AS SELECT {columns} FROM roir_data.g2 b WHERE NOT (SELECT d > 20 FROM "
        "(SELECT b.c2 AS d, b.c3 AS id) e)",
        "was replaced by another query",
    ),
    "other rows": (
        "CREATE OR REPLACE VIEW ix AS {shown} AND b.c3 <> 7",
        "was replaced by another query",
    ),
    "another table": (
        "CREATE TABLE o (id int); CREATE OR REPLACE VIEW ix AS {shown} UNION ALL SELECT NULL, NULL, id, 0 FROM o",
        "reads other relations",
    ),
    "other values": ("CREATE OR REPLACE VIEW ix AS {changed}", "was replaced by another query"),
}


def hiding(database: Database, dsn: str) -> None:
    """`ix`, rebuilt and without a guard, hides the entries of t0."""
    make(dsn)
    steps.make_index(database, include="v")
    steps.make_index(database, "ix", None, None)
    clean_up.clean_up(database)
    run_sql(dsn, "SELECT roir.detach_partition('t0')")


def warned(database: Database) -> list[str]:
    with database.transaction() as connection:
        return faults.warnings(connection)


def _shown(dsn: str) -> str:
    return str(sql(steps.session(dsn), "SELECT rtrim(pg_get_viewdef('ix'::regclass), ';')")[0][0])


def differences(dsn: str) -> list[tuple[object, ...]]:
    return sql(steps.session(dsn), meeting.DIFFERENCE)


@pytest.mark.parametrize(
    ("more", "said"), [("WHERE b.c2 <> 7", "leaves entries out"), ("ORDER BY b.c1", "was replaced by another query")]
)
def test_a_view_that_leaves_entries_out_is_told_from_another_query(
    database: Database, dsn: str, more: str, said: str
) -> None:
    steps.make_table(dsn, 20)
    steps.make_index(database)
    run_sql(dsn, f"CREATE OR REPLACE VIEW ix AS {_shown(dsn).partition(' WHERE')[0]} {more}")
    assert said in " ".join(warned(database))


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_with_the_view_is_found_and_repaired(database: Database, dsn: str, how: str) -> None:
    """Seen to report an exact index without the check of the view."""
    hiding(database, dsn)
    shown = _shown(dsn)
    statement, said = WRONG[how]
    changed = shown.replace("c4 AS v", "c4 + 1 AS v")
    run_sql(dsn, statement.format(columns=COLUMNS, shown=shown, changed=changed))
    found = verify(database, "ix")
    assert (found.is_exact, found.damaged) == (False, 1)
    assert said in report.described(found.first[0])
    assert "--repair" in report.described(found.first[0])
    if "another query" not in said:
        assert said in " ".join(warned(database))
    repaired = verify(database, "ix", VerifyOptions(repair=True))
    assert (repaired.is_exact, repaired.damaged, repaired.repaired) == (True, 1, 1)
    assert differences(dsn) == []
    assert warned(database) == []
    assert verify(database, "ix").damaged == 0


@pytest.mark.by_hand("sweeps")
def test_a_guard_that_is_lost_while_older_snapshots_live_is_found(database: Database, dsn: str) -> None:
    """Found: the view showed another generation, or entries of a partition that had left, or had got another query: the
    verification compared the entries and called the index exact, and `roir status` was silent. It holds: the
    verification compares the view's definition with that of a view made for it, status compares what it can without a
    change; `--repair` makes the view again.
    """
    make(dsn)
    old = steps.old_session(dsn)
    steps.make_index(database, include="v")
    run_sql(dsn, f"CREATE OR REPLACE VIEW ix AS SELECT {COLUMNS} FROM roir_data.g1 b")
    assert "older snapshot of pid" in " ".join(warned(database))
    assert not verify(database, "ix").is_exact
    assert verify(database, "ix", VerifyOptions(repair=True)).is_exact
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(old, "SELECT count(*) FROM ix")
    old.close()
    assert clean_up.clean_up(database).guards_removed == 1
    assert (warned(database), verify(database, "ix").is_exact) == ([], True)


@pytest.mark.sample(0)
def test_a_snapshot_that_is_listed_beside_a_writer_of_before_is_no_older_one(database: Database, dsn: str) -> None:
    """The snapshot's xmin is the writer's number. The guard was removed while no snapshot was open."""
    steps.make_table(dsn)
    run_sql(dsn, "CREATE TABLE other (i int)")
    writer = steps.session(dsn)
    sql(writer, "INSERT INTO other VALUES (1)")
    steps.make_index(database)
    assert clean_up.clean_up(database).guards_removed == 1
    reader = steps.old_session(dsn)
    assert warned(database) == []
    assert verify(database, "ix").is_exact
    assert sql(reader, "SELECT count(*) FROM ix") == [(100,)]
    writer.close()
    reader.close()


@pytest.mark.sample(0)
@pytest.mark.parametrize("state", ["guarded", "plain", "hiding", "joining", "reverted"])
def test_a_view_as_it_must_be_is_right(database: Database, dsn: str, state: str) -> None:
    make(dsn)
    steps.make_index(database, include="v")
    steps.make_index(database, "ix", None, None)
    if state == "reverted":
        revert.revert(database, "ix", "test")
    if state == "plain":
        clean_up.clean_up(database)
    if state in ("hiding", "joining"):
        run_sql(dsn, "SELECT roir.detach_partition('t0')")
    if state == "joining":
        run_sql(dsn, "SELECT roir.begin_attach('t', 't0', 'FOR VALUES FROM (40) TO (50)')")
    assert [one for one in warned(database) if "refuses writes until then" not in one] == []
    assert verify(database, "ix").is_exact


@pytest.mark.by_hand("sweeps")
def test_readers_who_hold_the_view_keep_a_repair_from_it_and_are_not_waited_for(database: Database, dsn: str) -> None:
    hiding(database, dsn)
    run_sql(dsn, f"CREATE OR REPLACE VIEW ix AS SELECT {COLUMNS} FROM roir_data.g2 b")
    reader = steps.session(dsn)
    sql(reader, "SELECT count(*) FROM ix")
    found = verify(database, "ix", VerifyOptions(repair=True))
    assert (found.is_exact, found.damaged, found.repaired) == (False, 1, 0)
    reader.rollback()
    assert verify(database, "ix", VerifyOptions(repair=True)).is_exact


@pytest.mark.by_hand("sweeps")
def test_a_view_that_users_built_on_it_is_theirs(database: Database, dsn: str) -> None:
    hiding(database, dsn)
    run_sql(dsn, "CREATE VIEW mine AS SELECT k FROM ix WHERE k > '1'")
    assert verify(database, "ix", VerifyOptions(repair=True)).damaged == 0
    run_sql(dsn, f"CREATE OR REPLACE VIEW ix AS SELECT {COLUMNS} FROM roir_data.g2 b")
    assert verify(database, "ix", VerifyOptions(repair=True)).repaired == 1
    assert sql(steps.session(dsn), "SELECT count(*) FROM mine") == sql(
        steps.session(dsn), "SELECT count(*) FROM t WHERE k > '1'"
    )
