"""Settings that databases and sessions bring along: values mean the same on both sides, and nothing ends early."""

from __future__ import annotations

from contextlib import closing

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from airflow_roir.engine import lifecycle
from airflow_roir.options import VerifyOptions
from airflow_roir.shards.ship.shipping import Shipper, ship_once
from servers.shards import Shards
from tests.engine.steps import sql
from tests.shards import apart
from tests.shards.captured import capture
from tests.shards.conftest import Make

HOSTILE = {
    "DateStyle": "'SQL, DMY'",
    "IntervalStyle": "sql_standard",
    "TimeZone": "'Asia/Kolkata'",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "xmlbinary": "hex",
    "array_nulls": "off",
    "search_path": "pg_temp, nowhere",
    "quote_all_identifiers": "on",
    "transform_null_equals": "on",
    "statement_timeout": "100",  # what a new session says first is under it, on a busy machine, too
    "lock_timeout": "1",
    "idle_in_transaction_session_timeout": "1",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "default_transaction_read_only": "on",
    "row_security": "on",
    "synchronous_commit": "off",
    "enable_indexscan": "off",
    "enable_bitmapscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "constraint_exclusion": "on",
    "client_min_messages": "debug1",
    "default_tablespace": "''",
    "check_function_bodies": "off",
    "gin_pending_list_limit": "64",
    "from_collapse_limit": "1",
    "join_collapse_limit": "1",
    "cursor_tuple_fraction": "0.001",
    "default_statistics_target": "1",
    "backslash_quote": "off",
    "escape_string_warning": "off",
    "lo_compat_privileges": "on",
    "parallel_setup_cost": "0",
    "parallel_tuple_cost": "0",
    "min_parallel_table_scan_size": "0",
    "debug_parallel_query": "on",
    "work_mem": "64",
}
TABLE = (
    "CREATE TABLE t (d date, f float8, PRIMARY KEY (d, f), k timestamptz, i interval, b bytea, a text[], n int)",
    "INSERT INTO t SELECT date '2024-01-02' + x, 1.0 / (x + 3), timestamptz '2024-02-03 04:05:06.789+00' + x * "
    "interval '1 day', make_interval(days => x, secs => -x), decode(lpad(to_hex(x), 4, '0'), 'hex'), "
    "ARRAY['a', NULL, 'null'], x FROM generate_series(0, 50) x",
)
WRITES = (
    "UPDATE public.t SET k = k + interval '1 hour' WHERE n % 3 = 0",
    "UPDATE public.t SET d = d + 1000, f = f * 7 WHERE n % 5 = 0",
    "DELETE FROM public.t WHERE n % 7 = 1",
    "INSERT INTO public.t VALUES ('2030-12-11', 0.1::float8 + 0.2::float8, now(), '-1 day 1 s', '\\x00ff', '{NULL}', "
    "100)",
)
# Settings that make all sessions show values alike.
SEEN = " ".join(
    f"-c {name}={value}"
    for name, value in {
        "DateStyle": "ISO",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "extra_float_digits": "3",
        "bytea_output": "hex",
        "search_path": "public",
        "statement_timeout": "0",
        "lock_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "default_transaction_read_only": "off",
        "default_transaction_deferrable": "off",
        "default_transaction_isolation": "read\\ committed",
        "client_min_messages": "warning",
    }.items()
)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("side", ["shards", "index server"])
def test_what_databases_set_changes_no_value_and_ends_nothing(shards: Make, side: str) -> None:
    made = shards(2, *TABLE)
    pinned = Shards(
        make_dsn(made.index, options=SEEN), {name: make_dsn(dsn, options=SEEN) for name, dsn in made.dsns.items()}
    )
    for dsn in made.dsns.values() if side == "shards" else [made.index]:
        with closing(psycopg2.connect(dsn)) as session, session.cursor() as cursor:
            cursor.execute("SELECT current_database()")
            [(database,)] = cursor.fetchall()
            for name, value in HOSTILE.items():
                cursor.execute(f"ALTER DATABASE {database} SET {name} = {value}")
            session.commit()
    apart.add_all(made)
    prepared, run = apart.begin(made, "k,f", "i,b,a", "public.t", ranges=4, batch_rows=10)
    apart.build_all(made, run)
    apart.seal_all(made, run)
    pinned.run(*WRITES)
    lifecycle.run_phases(made.database, run)
    pinned.run(*WRITES[:2])
    ship_once(Shipper(made.database))
    assert apart.assert_exact(pinned, prepared.generation_id) > 80
    base = f"roir_data.g{prepared.generation_id}"
    pinned.ask(f"DELETE FROM {base} WHERE c2 < 0.1")
    with Shipper(made.database, every_s=0.05).running():
        lifecycle.verify(made.database, "public.ix", VerifyOptions(repair=True), "test")
    apart.assert_exact(pinned, prepared.generation_id)
    found = pinned.ask("SELECT count(*), count(*) FILTER (WHERE outcome = 'repaired') FROM roir.discrepancy")
    assert found[0][0] == found[0][1] > 0
    assert pinned.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL") == []


# Settings of a writer's session, one for each case.
SESSIONS = {
    **{
        name: f"SET {name} = {value}"
        for name, value in HOSTILE.items()
        if name
        not in (
            "statement_timeout",
            "lock_timeout",
            "default_transaction_read_only",
            "idle_in_transaction_session_timeout",
        )
    },
    "replica": "SET session_replication_role = replica",
    "local": "SET session_replication_role = local",
    "names of ours": "SET search_path = pg_temp, public; CREATE TEMP TABLE outbox (name text, tick int); "
    "CREATE TEMP TABLE home (); CREATE TEMP SEQUENCE version; CREATE TEMP TABLE pg_class (); "
    "CREATE FUNCTION pg_temp.nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'; "
    "CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'; "
    "CREATE FUNCTION pg_temp.same(record, record) RETURNS bool LANGUAGE sql AS 'SELECT false'; "
    "CREATE OPERATOR pg_temp.*<> (LEFTARG = record, RIGHTARG = record, FUNCTION = pg_temp.same)",
    "deferred": "SET CONSTRAINTS ALL DEFERRED",
    "generic plans after many": "SET plan_cache_mode = auto",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SESSIONS)
def test_what_a_writers_session_sets_keeps_no_write_from_being_captured(shards: Make, kind: str) -> None:
    made = capture(shards(1, *TABLE), ("k", "f"), ("i", "b", "a"))
    user = made.session()
    sql(user, SESSIONS[kind])
    user.commit()
    for statement in (*WRITES, "UPDATE public.t SET a = NULL", "TRUNCATE public.t", WRITES[3]):
        before = made.look()
        sql(user, statement)
        user.commit()
        assert made.missed(before) == [], statement
    user.close()
    assert made.problem() is None
