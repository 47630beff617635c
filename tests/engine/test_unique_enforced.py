"""Whether a unique index refuses duplicates now: `roir status`, its JSON and the metrics say why it doesn't."""

from __future__ import annotations

import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_metrics import Scrape
from tests.test_cli import here

pytestmark = pytest.mark.sample(1)

ROW, TRUNCATE = "{row}", "{truncate}"
LAMED = "CREATE TRIGGER {row} AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW WHEN (false) EXECUTE FUNCTION {f}()"
EMPTY = "CREATE OR REPLACE FUNCTION {f}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
# Statements that harm the capture, and the reason.
CAUSES = {
    "disabled": (["ALTER TABLE t DISABLE TRIGGER {row}"], "trigger {row} on public.t is disabled"),
    "not always": (["ALTER TABLE t ENABLE TRIGGER {row}"], "trigger {row} on public.t is not ENABLE ALWAYS"),
    "missing": (["DROP TRIGGER {row} ON t"], "trigger {row} on public.t is missing"),
    "lamed": (
        ["DROP TRIGGER {row} ON t", LAMED, "ALTER TABLE t ENABLE ALWAYS TRIGGER {row}"],
        "trigger {row} on public.t was replaced by one that doesn't fire",
    ),
    "function": ([EMPTY], "its capture function was replaced"),
    "for a while": (
        ["ALTER TABLE t DISABLE TRIGGER {row}", "ALTER TABLE t ENABLE ALWAYS TRIGGER {row}"],
        "capture triggers on public.t were altered, disabled or gone for a while",
    ),
}


@pytest.fixture
def unique(database: Database, dsn: str) -> Database:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k int, v int)")
    run_sql(dsn, "INSERT INTO t SELECT i, i, i FROM generate_series(1, 50) i")
    steps.make_index(database, unique=True)
    return database


def problem(database: Database, dsn: str) -> str | None:
    """The reason that all surfaces give."""
    [one] = indexes(database)
    shown = here(dsn, "status").stdout
    why = one.unique_problem
    assert (f"unique: not enforced: {why}" if why else "unique: enforced over all partitions") in shown
    assert Scrape(database).one("roir_index_unique_enforced", index="public.ix") == (why is None)
    return why


@pytest.mark.parametrize("cause", CAUSES)
def test_an_index_whose_capture_misses_writes_is_not_called_enforced(unique: Database, dsn: str, cause: str) -> None:
    """Found: `unique: enforced over all partitions`, while the capture's triggers were disabled and users wrote
    duplicates.
    """
    assert problem(unique, dsn) is None
    row, _ = steps.capture_triggers(dsn)
    done, says = CAUSES[cause]
    [(function,)] = steps.sql(
        steps.session(dsn), f"SELECT tgfoid::regproc::text FROM pg_trigger WHERE tgname = '{row}'"
    )
    run_sql(dsn, *(statement.format(row=row, f=function) for statement in done))
    assert (problem(unique, dsn) or "").startswith(says.format(row=row))


def test_a_missing_trigger_of_truncate_lets_no_duplicate_in(unique: Database, dsn: str) -> None:
    _, truncate = steps.capture_triggers(dsn)
    run_sql(dsn, f"DROP TRIGGER {truncate} ON t")
    assert problem(unique, dsn) is None


@pytest.mark.sample(0)
def test_a_duplicate_of_the_last_verification_is_said_until_a_verification_finds_none(
    unique: Database, dsn: str
) -> None:
    """It holds, too: what a verification reports names the capture's fault, which will make the index wrong again."""
    row, _ = steps.capture_triggers(dsn)
    run_sql(dsn, f"ALTER TABLE t DISABLE TRIGGER {row}", "INSERT INTO t VALUES (51, 1, 1), (52, 52, 1)")
    report = lifecycle.verify(unique, "ix", VerifyOptions(repair=True))
    assert (report.missing, report.duplicate, report.repaired) == (1, 1, 1)
    [warning] = report.warnings
    assert f"{row} on public.t is disabled" in warning
    assert f"ALTER TABLE public.t ENABLE ALWAYS TRIGGER {row}" in warning
    said = here(dsn, "verify", "ix", "--repair", "--without-spark", code=1).stdout
    assert f"warning: {warning}" in said
    assert report.as_dict()["warnings"] == (warning,)

    run_sql(dsn, f"ALTER TABLE t ENABLE ALWAYS TRIGGER {row}")
    assert problem(unique, dsn) == "a verification found 1 row whose key another row has"
    run_sql(dsn, "DELETE FROM t WHERE id = 51")
    assert lifecycle.verify(unique, "ix").warnings == ()
    assert problem(unique, dsn) is None


def test_rows_without_entries_may_have_any_key(unique: Database, dsn: str) -> None:
    run_sql(dsn, "DELETE FROM roir_data.g1 WHERE ctid = '(0,1)'")
    lifecycle.verify(unique, "ix")
    assert (problem(unique, dsn) or "").endswith("without an entry")


PARTS = {"sample": VerifyOptions(sample=1.0), "slice": VerifyOptions(slices=2000)}


@pytest.fixture
def cut(dsn: str) -> Database:
    """Tables in pieces that a partial verification may leave out, the row with k = 7 without its entry."""
    database = Database(dsn, limits=Limits(unit_rows=500, unit_blocks=1))
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k int, v int)")
    run_sql(dsn, "INSERT INTO t SELECT i, i, i FROM generate_series(1, 20000) i")
    steps.make_index(database, unique=True)
    run_sql(dsn, "DELETE FROM roir_data.g1 WHERE c1 = 7")
    return database


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("part", PARTS)
def test_a_partial_verification_that_finds_nothing_changes_nothing(cut: Database, dsn: str, part: str) -> None:
    """Found: after a full verification with a finding, one of a part that found nothing said `enforced` again."""
    found = "a verification found 1 row without an entry"
    assert lifecycle.verify(cut, "ix").missing == 1
    for _ in range(2):
        assert not lifecycle.verify(cut, "ix", PARTS[part]).complete
        assert problem(cut, dsn) == found
    assert lifecycle.verify(cut, "ix", VerifyOptions(repair=True)).repaired == 1
    assert problem(cut, dsn) is None


@pytest.mark.by_hand("sweeps")
def test_a_partial_verification_ends_it_by_its_repair(cut: Database, dsn: str) -> None:
    lifecycle.verify(cut, "ix")
    while problem(cut, dsn) is not None:
        lifecycle.verify(cut, "ix", VerifyOptions(slices=3, repair=True))
    assert lifecycle.verify(cut, "ix").is_exact
    assert problem(cut, dsn) is None


@pytest.mark.by_hand("sweeps")
def test_a_finding_of_a_part_is_said_until_a_complete_verification(cut: Database, dsn: str) -> None:
    while not lifecycle.verify(cut, "ix", VerifyOptions(slices=3)).missing:
        assert problem(cut, dsn) is None
    lifecycle.verify(cut, "ix", VerifyOptions(slices=3))
    assert problem(cut, dsn) == "a verification found 1 row without an entry"
    run_sql(dsn, "DELETE FROM t WHERE k = 7")
    assert lifecycle.verify(cut, "ix").is_exact
    assert problem(cut, dsn) is None


def test_an_index_of_a_dropped_table_is_not_enforced(unique: Database, dsn: str) -> None:
    """Found: the status said that it is enforced, and the metric that it isn't."""
    run_sql(dsn, "SELECT roir.unguard()", "DROP TABLE t CASCADE")
    assert problem(unique, dsn) == "the table is gone"
