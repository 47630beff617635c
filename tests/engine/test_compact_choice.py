"""The choices of `roir compact --dry-run` in a real index: nothing of a fresh one, the aged segments of another."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from psycopg2.extensions import connection

from airflow_roir.engine.compact import choosing, cost_model
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.choice import Action, Choice, Kind
from airflow_roir.engine.compact.cost_model import Known, Terms
from airflow_roir.engine.compact.segments import segments
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.errors import NotFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.test_cli import as_json, here

ROWS = 90_000
SEGMENTS = 6

pytestmark = pytest.mark.sample(1)


@pytest.fixture
def index(database: Database, dsn: str) -> int:
    """The generation of an index with even keys: each segment has as many entries as the others."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int, v text)",
        f"INSERT INTO t SELECT i, CASE WHEN i % 1000 = 0 THEN NULL ELSE i END, 'v' FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    run = steps.make_index(database, include="v", segments=SEGMENTS)
    with database.transaction() as connection:
        return int(operations.read_operation(connection, run.operation_id).generation_id)


def aged(dsn: str, generation: int, statement: str) -> None:
    """Ages the index by a statement, and vacuums the dead entries."""
    run_sql(dsn, statement)
    for ordinal in range(SEGMENTS + 1):
        run_sql(dsn, f"VACUUM (ANALYZE, TRUNCATE false) roir_data.g{generation}_s{ordinal:03}")


def chosen(found: Choice) -> list[tuple[Kind, tuple[int, ...]]]:
    return [(one.kind, one.ordinals) for one in found.actions]


def test_a_fresh_index_needs_nothing(database: Database, dsn: str, index: int) -> None:
    found = choosing.choose(database, "ix")
    assert (found.actions, found.left_out, found.segments) == ((), (), SEGMENTS + 1)
    assert "none is worth a compaction" in here(dsn, "compact", "ix", "--dry-run").stdout


@pytest.mark.by_hand("sweeps")
def test_what_deletions_have_emptied_is_chosen_with_its_figures(database: Database, dsn: str, index: int) -> None:
    with database.transaction() as connection:
        before = {one.ordinal: one for one in segments(connection, index)}
    middle = before[3]
    assert middle.lower is not None
    assert middle.upper is not None
    low, high = middle.lower[0], middle.upper[0]
    aged(dsn, index, f"DELETE FROM t WHERE k >= {low} AND k < {high} AND id % 10 > 1")
    found = choosing.choose(database, "ix")
    assert chosen(found) == [(Kind.REWRITE, (3,))]
    [action] = found.actions
    assert action.room_saved == pytest.approx(0.8 * middle.bytes, rel=0.1)
    assert action.bytes_written == pytest.approx(0.2 * middle.bytes, rel=0.2)
    shown = here(dsn, "compact", "ix", "--dry-run").stdout
    assert action.why in shown
    told = as_json(dsn, "compact", "ix", "--dry-run", "--budget", "1GB")
    assert [(one["kind"], one["ordinals"]) for one in told["actions"]] == [("rewrite", [3])]
    little = choosing.choose(database, "ix", Budget(bytes=100))
    assert [one.ordinals for one in little.left_out] == [(3,)]
    assert not little.actions


@pytest.mark.by_hand("sweeps")
def test_neighbours_that_are_nearly_empty_are_merged(database: Database, dsn: str, index: int) -> None:
    with database.transaction() as connection:
        second = {one.ordinal: one for one in segments(connection, index)}[2]
    assert second.upper is not None
    aged(dsn, index, f"DELETE FROM t WHERE k < {second.upper[0]} AND id % 50 > 0")
    assert chosen(choosing.choose(database, "ix")) == [(Kind.MERGE, (1, 2))]


@pytest.mark.by_hand("sweeps")
def test_the_segment_of_a_key_that_only_grows_is_split(database: Database, dsn: str, index: int) -> None:
    more = f"INSERT INTO t SELECT i, i, 'v' FROM generate_series({ROWS + 1}, {3 * ROWS}) i"
    aged(dsn, index, more)
    found = choosing.choose(database, "ix", segment_bytes=2 << 20)
    [action] = [one for one in found.actions if one.kind is Kind.SPLIT]
    assert isinstance(action, Action)
    assert action.ordinals == (SEGMENTS,)
    assert action.parts > 4


def test_an_index_that_isnt_there_or_isnt_published(database: Database, dsn: str) -> None:
    here(dsn, "compact", "ix", "--dry-run", code=2)
    steps.make_table(dsn)
    steps.begin(database)
    with pytest.raises(NotFound, match="isn't published yet"):
        choosing.choose(database, "ix")
    here(dsn, "compact", "ix", "--dry-run", "--budget", "20", code=2)


@pytest.mark.sample(0)
def test_the_rate_is_that_of_earlier_builds(database: Database, dsn: str, index: int) -> None:
    """The rate is computed from the time of earlier builds and today's bytes per row."""
    aged(dsn, index, "DELETE FROM t WHERE k % 10 > 1")
    default = choosing.choose(database, "ix").totals["seconds"]
    run_sql(dsn, """UPDATE roir.operation SET phase_seconds = '{"build": 3600, "seal": 3600}'""")
    slower = choosing.choose(database, "ix").totals["seconds"]
    assert slower > 100 * default > 0


def test_the_figures_are_what_a_rewrite_takes(database: Database, dsn: str, index: int) -> None:
    """A rewrite by hand measures them. With so few rows the catalogs log as much as the entries: each segment has an
    allowance for that.
    """
    aged(dsn, index, "DELETE FROM t WHERE id % 10 > 1")
    with database.transaction() as connection:
        seen = segments(connection, index)
    one = Known.of(seen[3], datetime.now(timezone.utc))
    assert one is not None
    terms = Terms(datetime.now(timezone.utc))
    rewritten = cost_model.rewrite(one, terms)
    assert rewritten is not None
    with steps.session(dsn) as user:
        [(definition,)] = steps.sql(user, "SELECT pg_get_indexdef(%s::regclass)", f"{seen[3].name}_key")
        logged = _logged(
            user,
            f"CREATE TABLE again (LIKE {seen[3].name})",
            f"INSERT INTO again SELECT * FROM {seen[3].name}",
            definition.replace(f"ON {seen[3].name}", "ON again").replace("INDEX ", "INDEX again_"),
        )
        [(wrote,)] = steps.sql(user, "SELECT pg_relation_size('again') + pg_indexes_size('again')")
        assert rewritten.bytes_written == pytest.approx(wrote, rel=0.1)
        assert rewritten.bytes_logged == pytest.approx(logged, rel=0.2, abs=2 * cost_model.SEGMENT_WAL)


def _logged(user: connection, *statements: str) -> int:
    [(before,)] = steps.sql(user, "SELECT pg_current_wal_insert_lsn()")
    for statement in statements:
        steps.sql(user, statement)
    [(bytes_of,)] = steps.sql(user, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", before)
    return int(bytes_of)
