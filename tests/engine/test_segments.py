"""Facts about each segment: sizes, the size if it were built now, reads, age. No look at them waits."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from airflow_roir.engine.compact.bloat import bloat_of
from airflow_roir.engine.compact.segment import Segment, worst_first
from airflow_roir.engine.compact.segments import EMPTY_TREE, NO_STATISTICS, NOT_READABLE, segments
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.index import indexes
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_contrib import create_extension

pytestmark = pytest.mark.sample(2)

ROWS = 12_000


def look(database: Database, generation: int = 1, exact: bool = False) -> tuple[Segment, ...]:
    with database.transaction() as connection:
        return segments(connection, generation, exact)


def make(database: Database, dsn: str, rows: int = ROWS, keys: str = "v", **options: Any) -> None:
    """Builds an index of four segments over keys 1 to `rows`."""
    steps.make_table(dsn, rows)
    steps.make_index(database, keys=keys, segments=4, verify="none", **options)


def changed(dsn: str, *statements: str) -> None:
    """Runs statements; the last one lets the counts arrive."""
    run_sql(dsn, *statements, "SELECT pg_stat_force_next_flush()")


def test_each_segment_is_known_by_its_number_with_its_bounds_and_sizes(database: Database, dsn: str) -> None:
    make(database, dsn)
    found = look(database)
    user = steps.session(dsn)
    assert [one.ordinal for one in found] == [0, 1, 2, 3, 4]
    for one in found:
        assert one.name == f"roir_data.g1_s{one.ordinal:03d}"
        [counted] = sql(
            user,
            f"SELECT (SELECT count(*) FROM {one.name}), pg_relation_size('{one.name}'), "
            f"pg_relation_size('{one.name}_key')",
        )
        assert (one.rows, one.heap_bytes, one.tree_bytes) == counted
        [(lower, upper, sealed_at)] = sql(
            user, "SELECT lower, upper, sealed_at FROM roir.segment WHERE ordinal = %s", one.ordinal
        )
        assert (one.lower, one.upper) == (lower and tuple(lower), upper and tuple(upper))
        assert isinstance(sealed_at, datetime)
        assert one.sealed_at == sealed_at
        assert one.since is not None
        assert one.since >= sealed_at
        assert not one.exact
    assert (found[0].rows, found[0].lower, found[0].upper, found[0].growth) == (0, None, None, None)
    assert (found[0].leaf_density, found[0].note) == (None, EMPTY_TREE)
    assert found[1].lower is None
    assert [one.upper for one in found[1:4]] == [one.lower for one in found[2:]]
    assert sum(one.rows or 0 for one in found) == ROWS
    for one in found[1:]:
        assert (one.needed, one.wasted) == (one.bytes, 0), "a segment that was just built would be built alike"
        # The last of some nine leaves isn't full.
        assert one.leaf_density == pytest.approx(0.85, abs=0.06)
        assert one.growth == pytest.approx(1.0, abs=0.1)
        assert one.note is None
        assert one.as_dict()["sealed_at"] == one.sealed_at.isoformat() if one.sealed_at else True


def test_the_bloat_is_the_sum_over_the_segments(database: Database, dsn: str) -> None:
    make(database, dsn)
    changed(dsn, f"DELETE FROM t WHERE v < {ROWS // 3} AND v % 4 > 0")
    found = look(database)
    with database.transaction() as connection:
        swollen = bloat_of(segments(connection, 1), 0)
    assert swollen.rows == sum(one.rows or 0 for one in found)
    assert swollen.bytes == sum(one.bytes - (one.needed or 0) for one in found)
    assert worst_first(found)[0].ordinal == 1
    [facts] = indexes(database)
    assert facts.segments == found
    assert facts.bloat == swollen
    assert "segments" not in facts.as_dict()


def test_numbers_need_not_be_consecutive_nor_in_the_order_of_keys(database: Database, dsn: str) -> None:
    """A compaction leaves such numbers: a segment that it writes gets a number of its own."""
    make(database, dsn)
    before = {one.lower: one for one in look(database)}
    run_sql(
        dsn,
        "ALTER TABLE roir_data.g1_s002 RENAME TO g1_s1234",
        "UPDATE roir.segment SET ordinal = 1234 WHERE ordinal = 2",
    )
    found = look(database)
    assert [one.ordinal for one in found] == [0, 1, 3, 4, 1234]
    assert found[-1].name == "roir_data.g1_s1234"
    after = {one.lower: one for one in found}
    assert {lower: (one.rows, one.bytes, one.needed) for lower, one in after.items()} == {
        lower: (one.rows, one.bytes, one.needed) for lower, one in before.items()
    }


def test_an_append_only_key_shows_in_the_growth_of_the_last_segment(database: Database, dsn: str) -> None:
    make(database, dsn)
    changed(dsn, f"INSERT INTO t SELECT i, 'x', i FROM generate_series({ROWS + 1}, {3 * ROWS}) i")
    growth = [one.growth or 0 for one in look(database)]
    assert growth[4] == pytest.approx(9, abs=0.5)
    assert max(growth[1:4]) < 1.1


@pytest.mark.sample(0)
def test_emptied_and_churned_segments_are_told_from_the_others(database: Database, dsn: str) -> None:
    make(database, dsn)
    fresh = look(database)
    first, second = f"v <= {ROWS // 4}", f"v > {ROWS // 4} AND v <= {ROWS // 2}"
    changed(dsn, f"DELETE FROM t WHERE {first} AND v % 10 > 0", f"UPDATE t SET k = 'y', v = v WHERE {second}")
    dead = look(database)
    assert dead[1].dead_rows > ROWS // 5
    assert dead[1].leaf_density == fresh[1].leaf_density, "the entries are dead, and still there"
    changed(dsn, "VACUUM (ANALYZE) roir_data.g1_s001")
    found = look(database)
    assert found[1].dead_rows == 0
    assert found[1].rows == pytest.approx(ROWS / 40, abs=5)
    assert found[1].leaf_density is not None
    assert found[1].leaf_density < 0.2
    assert found[1].wasted is not None
    assert found[1].wasted > 0.8 * fresh[1].tree_bytes
    assert [(one.bytes, one.needed) for one in found[3:]] == [(one.bytes, one.needed) for one in fresh[3:]]


@pytest.mark.sample(0)
def test_a_segment_without_any_live_entry_is_empty_before_a_vacuum_has_seen_it(database: Database, dsn: str) -> None:
    """Seen to count as full as the last vacuum had left it."""
    make(database, dsn)
    changed(dsn, f"DELETE FROM t WHERE v <= {ROWS // 2}")
    found = look(database)
    assert (found[1].rows, found[1].heap_needed, found[1].tree_needed) == (0, 0, 8192)
    assert found[1].wasted == found[1].bytes - 8192


def test_reads_are_counted_by_segment(database: Database, dsn: str) -> None:
    make(database, dsn)
    before = look(database)
    bound = before[3].lower
    assert bound is not None
    user = steps.session(dsn)
    sql(user, "SET enable_seqscan = off")
    for _ in range(7):
        sql(user, f"SELECT * FROM ix WHERE v = {bound[0]}")
        user.commit()
    changed(dsn)
    sql(user, "SELECT pg_stat_force_next_flush()")
    user.commit()
    found = look(database)
    assert [now.scans - then.scans for now, then in zip(found, before, strict=True)] == [0, 0, 0, 7, 0]
    assert found[3].rows_read - before[3].rows_read == 7
    assert found[3].blocks_read + found[3].blocks_hit > before[3].blocks_read + before[3].blocks_hit
    # A reset sets the counters and their beginning.
    run_sql(dsn, "SELECT pg_stat_reset()")
    [(at,)] = sql(steps.session(dsn), "SELECT stats_reset FROM pg_stat_database WHERE datname = current_database()")
    assert {(one.scans, one.since) for one in look(database)} == {(0, at)}


def test_a_server_that_has_forgotten_its_counts_makes_no_segment_look_empty(database: Database, dsn: str) -> None:
    make(database, dsn)
    before = look(database)
    run_sql(dsn, "SELECT pg_stat_reset()", "INSERT INTO t VALUES (0, 'x', 0)")
    found = look(database)
    assert [one.rows for one in found] == [one.rows for one in before]
    assert [one.wasted for one in found] == [one.wasted for one in before]


def test_an_index_of_no_rows_has_segments_without_waste(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)")
    steps.make_index(database)
    found = look(database)
    assert [one.ordinal for one in found] == list(range(len(found)))
    assert {(one.rows, one.wasted, one.growth, one.note) for one in found} == {(0, 0, None, EMPTY_TREE)}
    with database.transaction() as connection:
        assert bloat_of(segments(connection, 1), 0).note is None
        assert segments(connection, 99) == ()


def test_without_statistics_of_its_own_a_segment_is_taken_for_one_like_its_siblings(
    database: Database, dsn: str
) -> None:
    make(database, dsn, keys="k, v")
    before = look(database)
    run_sql(dsn, "DELETE FROM pg_statistic WHERE starelid = 'roir_data.g1_s002'::regclass")
    assert [one.needed for one in look(database)] == [one.needed for one in before]
    run_sql(dsn, "DELETE FROM pg_statistic WHERE starelid = ANY (SELECT inhrelid FROM pg_inherits)")
    found = look(database)
    assert {one.note for one in found if one.rows} == {NO_STATISTICS}
    assert {(one.heap_needed, one.tree_needed, one.leaf_density) for one in found if one.rows} == {(None, None, None)}
    assert [one.bytes for one in found] == [one.bytes for one in before]
    run_sql(dsn, "ANALYZE roir_data.g1_s003")
    assert look(database)[3].note is None


def test_of_a_unique_index_the_default_segment_has_two_trees(database: Database, dsn: str) -> None:
    steps.make_table(dsn, ROWS)
    run_sql(dsn, f"UPDATE t SET v = NULL WHERE v <= {ROWS // 2}", "VACUUM ANALYZE t")
    steps.make_index(database, keys="v", include="k", segments=2, unique=True, verify="none")
    found = look(database)
    first = found[0]
    [(key, pair)] = sql(
        steps.session(dsn),
        "SELECT pg_relation_size('roir_data.g1_s000_key'), pg_relation_size('roir_data.g1_s000_pair')",
    )
    assert first.rows == ROWS // 2
    assert first.tree_bytes == key + pair
    assert first.tree_needed == pytest.approx(key + pair, rel=0.1)
    assert first.leaf_density == pytest.approx(0.9, abs=0.06)
    assert len(found) == 3


def test_measured_by_pgstattuple_a_segment_agrees_with_its_estimate(database: Database, dsn: str) -> None:
    make(database, dsn)
    changed(dsn, f"DELETE FROM t WHERE v < {ROWS // 2} AND v % 5 > 0")
    changed(dsn, "VACUUM (ANALYZE) roir_data.g1_s001")
    guessed = look(database, exact=True)
    assert {one.exact for one in guessed} == {False}
    assert {(one.note or "").split("; ")[0] for one in guessed} == {
        "estimated, since the extension pgstattuple isn't installed"
    }
    create_extension(dsn, "pgstattuple", "ext")
    exact = look(database, exact=True)
    assert {one.exact for one in exact} == {True}
    for known, guess in zip(exact[1:], guessed[1:], strict=True):
        assert known.note is None
        assert (known.rows, known.heap_bytes, known.tree_bytes) == (guess.rows, guess.heap_bytes, guess.tree_bytes)
        assert known.heap_needed == pytest.approx(guess.heap_needed, rel=0.05)
        # May differ by one page.
        assert known.tree_needed == pytest.approx(guess.tree_needed, rel=0.05, abs=8192)
        assert known.leaf_density == pytest.approx(guess.leaf_density, abs=0.03)
    assert exact[2].dead_rows > 0
    holder = steps.session(dsn)
    sql(holder, "LOCK TABLE roir_data.g1_s002 IN ACCESS EXCLUSIVE MODE")
    some = look(database, exact=True)
    assert [one.exact for one in some] == [True, True, False, True, True]
    assert some[2].note == "estimated, since the tables are locked now"
    holder.rollback()


@pytest.mark.sample(0)
@pytest.mark.parametrize("what", ["t", "roir_data.g1"])
@pytest.mark.parametrize("mode", ["ACCESS EXCLUSIVE", "SHARE"])
def test_who_holds_a_table_holds_up_no_look_at_the_segments(database: Database, dsn: str, what: str, mode: str) -> None:
    make(database, dsn, rows=1_000)
    free = look(database)
    holder = steps.session(dsn)
    sql(holder, f"LOCK TABLE {what} IN {mode} MODE")
    with database.transaction() as connection:
        connection.exec_driver_sql("SET LOCAL statement_timeout = '5s'")
        found = segments(connection, 1)
        held = connection.exec_driver_sql(
            "SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE l.pid = pg_backend_pid() AND n.nspname = 'roir_data'"
        ).scalar_one()
    assert held == 0, "nothing is kept locked either"
    assert [(one.ordinal, one.rows, one.bytes) for one in found] == [(one.ordinal, one.rows, one.bytes) for one in free]
    holder.rollback()


def test_a_role_without_rights_on_the_entries_is_told_so(database: Database, dsn: str, stranger: str) -> None:
    make(database, dsn, keys="k, v")
    [(name,)] = sql(steps.session(stranger), "SELECT current_user")
    run_sql(
        dsn,
        f"GRANT USAGE ON SCHEMA roir, roir_data TO {name}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA roir TO {name}",
    )
    known = look(database)
    found = look(Database(stranger))
    assert [(one.rows, one.bytes, one.scans) for one in found] == [(one.rows, one.bytes, one.scans) for one in known]
    assert {(one.needed, one.note) for one in found if one.rows} == {(None, NOT_READABLE)}
    create_extension(dsn, "pgstattuple", "ext")
    assert "may not use pgstattuple" in (look(Database(stranger), exact=True)[1].note or "")


def test_while_a_rebuild_runs_the_segments_are_those_that_readers_see(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 1_000)
    _, run = steps.begin(database, keys="v", segments=3, verify="none")
    [facts] = indexes(database)
    assert (facts.state, facts.segments) == ("building", ())
    steps.finish_all(database, run)
    run = steps.built(database, table=None, keys=None, segments=6, verify="none")
    [facts] = indexes(database)
    assert [one.name for one in facts.segments] == [f"roir_data.g1_s{number:03d}" for number in range(4)]
    unsealed = sql(steps.session(dsn), "SELECT DISTINCT sealed_at FROM roir.segment WHERE generation_id = 2")
    assert unsealed == [(None,)]
