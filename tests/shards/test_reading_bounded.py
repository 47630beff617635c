"""Bounded reads: `roir.fresh` says what the very snapshot of its query lacks, or refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg2
import pytest

from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput, StaleAnswer
from servers.shards import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.shards.conftest import Make
from tests.shards.reading import Ground, T, ground

pytestmark = pytest.mark.sample(2)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
)
READ = "SELECT count(*) FROM public.t_by_k WHERE k = 'k1' AND (SELECT roir.fresh('public.t_by_k', '5 s'))"


@pytest.fixture
def two(shards: Make) -> Iterator[Ground]:
    with ground(shards(2, *TABLE), None) as made:
        yield made


def feeds(ground: Ground, change: str, shard: str = "s1") -> None:
    ground.made.ask(
        f"UPDATE roir.feed SET {change} WHERE shard_id = (SELECT id FROM roir.shard WHERE name = '{shard}')"
    )


STATES = {
    "late": ("fresh_at = clock_timestamp() - interval '5.01 s'", r"shard s1 lags by 5\.[1-9] s, more than the 5\.0 s"),
    "never shipped": ("fresh_at = NULL", "shard s1 has not been shipped to its end yet"),
    "clock set back": ("fresh_at = clock_timestamp() + interval '1 h'", "is in the future: the clock of this server"),
    "doubtful": ("doubtful_at = now(), doubt = 'it lost commits'", "entries of shard s1 may be wrong: it lost commits"),
    "removed": ("removed_at = now()", "shard s1 is captured no more"),
}


@pytest.mark.parametrize("state", STATES)
def test_an_answer_that_may_lack_something_is_refused_and_the_shard_named(two: Ground, state: str) -> None:
    assert two.made.ask(READ) == [(4,)]
    change, message = STATES[state]
    feeds(two, change)
    with pytest.raises(psycopg2.OperationalError, match=message) as e:
        two.made.ask(READ)
    assert e.value.pgcode == "40R01"
    assert e.value.diag.message_hint
    assert "t_by_k" in e.value.diag.message_primary
    # Also if the query finds nothing, and wherever in the query the question is.
    for query in (
        "SELECT * FROM public.t_by_k WHERE k = 'none' AND (SELECT roir.fresh('public.t_by_k', '5 s'))",
        "SELECT * FROM public.t_by_k WHERE roir.fresh('public.t_by_k', '5 s') AND k = 'none'",
        "SELECT k FROM (SELECT * FROM public.t_by_k WHERE (SELECT roir.fresh('public.t_by_k', '5 s'))) x WHERE k = ''",
    ):
        with pytest.raises(psycopg2.OperationalError, match=message):
            two.made.ask(query)
    with pytest.raises(StaleAnswer, match=message):
        two.index.rows(T, T.c.k == "k1", "bounded", max_staleness=5)


def test_the_worst_shard_is_named_first(two: Ground) -> None:
    feeds(two, "fresh_at = clock_timestamp() - interval '100 s'", "s0")
    feeds(two, "fresh_at = clock_timestamp() - interval '200 s'", "s1")
    with pytest.raises(psycopg2.OperationalError, match="shard s1 lags by 200"):
        two.made.ask(READ)
    feeds(two, "doubtful_at = now(), doubt = 'restored'", "s0")
    with pytest.raises(psycopg2.OperationalError, match="shard s0 may be wrong: restored"):
        two.made.ask(READ)


def test_a_shard_that_came_with_a_rebuild_counts_once_the_new_generation_is_shown(two: Ground) -> None:
    made = two.made
    made.ask(
        "INSERT INTO roir.generation (index_id, status, capture_mode, entry) SELECT index_id, 'building', 'capture', "
        "entry FROM roir.generation"
    )
    made.ask(
        "INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid) "
        "SELECT g.id, s.id, s.name, 1 FROM roir.generation g, roir.shard s WHERE g.status = 'building'"
    )
    assert made.ask(READ) == [(4,)]
    run_sql(
        made.index,
        "UPDATE roir.generation SET status = 'retired', retired_at = now(), drop_after = now() WHERE status = 'active'",
        "UPDATE roir.generation SET capture_mode = 'direct' WHERE status = 'building'",
        "UPDATE roir.generation SET status = 'active', capture_mode = 'active' WHERE status = 'building'",
        "CREATE TABLE roir_data.g2 (LIKE roir_data.g1) PARTITION BY RANGE (c1)",
        "CREATE TABLE roir_data.g2_s000 PARTITION OF roir_data.g2 DEFAULT",
        "CREATE OR REPLACE VIEW public.t_by_k AS SELECT c1 AS k, c2 AS shard, c3 AS id, c4 AS v FROM roir_data.g2",
    )
    with pytest.raises(psycopg2.OperationalError, match="shard s0 has not been shipped"):
        made.ask(READ)


def test_arguments_that_make_no_sense_are_refused(two: Ground) -> None:
    for argument in ("NULL", "'-1 s'"):
        with pytest.raises(psycopg2.errors.InvalidParameterValue, match="how old an answer may be"):
            two.made.ask(f"SELECT roir.fresh('public.t_by_k', {argument})")
    for name in ("'pg_class'", "NULL"):
        with pytest.raises(psycopg2.errors.WrongObjectType, match="index"):
            two.made.ask(f"SELECT roir.fresh({name}, '1 s')")
    with pytest.raises(InvalidInput, match="max_staleness is -1"):
        two.index.rows(T, T.c.k == "k1", "bounded", max_staleness=-1)
    with pytest.raises(InvalidInput, match="and only then"):
        two.index.rows(T, T.c.k == "k1", "bounded")
    with pytest.raises(InvalidInput, match="and only then"):
        two.index.rows(T, T.c.k == "k1", max_staleness=1)
    with pytest.raises(InvalidInput, match="eventual, bounded or strict"):
        two.index.rows(T, T.c.k == "k1", "stong")  # type: ignore[arg-type]


def test_an_index_beside_its_table_is_always_fresh(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database)
    assert sql(steps.session(dsn), "SELECT roir.fresh('ix', '0')") == [(True,)]


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_it_speaks_of_the_snapshot_that_the_entries_are_read_in(two: Ground, broken: bool) -> None:
    """A cursor is opened; what was late is shipped; then it is read. broken: a snapshot of the function's own."""
    if broken:
        run_sql(two.made.index, "ALTER FUNCTION roir.fresh(regclass, interval) VOLATILE")
    two.made.run("INSERT INTO t VALUES (7, 'k1', 0)", only="s1")
    feeds(two, "fresh_at = clock_timestamp() - interval '1 h'")
    user = steps.session(two.made.index)
    sql(user, f"DECLARE c CURSOR FOR {READ}")
    two.ship()
    two.refresh()
    if broken:
        # Row 7 was committed, and the feed is fresh; the answer lacks it.
        assert sql(user, "FETCH c") == [(4,)]
    else:
        with pytest.raises(psycopg2.OperationalError, match="lags by 3600"):
            sql(user, "FETCH c")
    assert two.made.ask(READ) == [(5,)]


def test_an_old_snapshot_is_no_fresh_answer(two: Ground) -> None:
    old = steps.old_session(two.made.index)
    feeds(two, "fresh_at = clock_timestamp() - interval '1 h'")
    later = steps.old_session(two.made.index)
    two.refresh()
    assert two.made.ask(READ) == [(4,)]
    assert sql(old, READ) == [(4,)]
    with pytest.raises(psycopg2.OperationalError, match="lags by 3600"):
        sql(later, READ)


@pytest.mark.parametrize("plan", ["prepared", "parallel", "in a function"])
def test_it_is_asked_once_whatever_the_plan(two: Ground, plan: str) -> None:
    run_sql(
        two.made.index,
        "CREATE FUNCTION of_key(key text) RETURNS bigint LANGUAGE sql STABLE AS "
        f"$$ {READ.replace(chr(39) + 'k1' + chr(39), 'key')} $$",
        "SET track_functions = 'all'",
    )
    user = steps.session(two.made.index)
    sql(user, "SET plan_cache_mode = force_generic_plan")
    sql(user, "SET track_functions = 'all'")
    read = {"prepared": "EXECUTE p ('k1')", "parallel": READ, "in a function": "SELECT of_key('k1')"}[plan]
    sql(user, f"PREPARE p (text) AS {READ.replace(chr(39) + 'k1' + chr(39), '$1')}")
    if plan == "parallel":
        for setting in ("parallel_setup_cost = 0", "parallel_tuple_cost = 0", "min_parallel_table_scan_size = 0"):
            sql(user, f"SET {setting}")
        sql(user, "SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off")
        assert "Parallel" in str(sql(user, f"EXPLAIN {READ}"))
    user.commit()
    assert sql(user, read) == [(4,)]
    calls = "SELECT pg_stat_get_xact_function_calls('roir.fresh(regclass, interval)'::regprocedure)"
    assert sql(user, calls) == [(1,)]
    user.commit()
    feeds(two, "fresh_at = clock_timestamp() - interval '1 h'")
    with pytest.raises(psycopg2.OperationalError, match="lags by 3600"):
        sql(user, read)


def test_a_reader_needs_no_right_but_to_the_view(two: Ground) -> None:
    made = two.made
    [(role,)] = made.ask("SELECT 'reader_' || current_database()")
    run_sql(
        made.index,
        f"CREATE ROLE {role} LOGIN",
        f"GRANT SELECT ON public.t_by_k TO {role}",
        f"GRANT USAGE ON SCHEMA roir TO {role}",
    )
    try:
        user = steps.session(re.sub("//postgres:@", f"//{role}:@", made.index))
        assert sql(user, READ) == [(4,)]
        user.commit()
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            sql(user, "SELECT * FROM roir.feed")
        user.close()
    finally:
        run_sql(made.index, f"DROP OWNED BY {role}", f"DROP ROLE {role}")
