"""A seal gives way to sessions that wait for its segment. A test type's index build waits at a gate of the test."""

from __future__ import annotations

import threading

import psycopg2.extensions
import pytest

from airflow_roir.engine import abort, lifecycle, seal
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import DEFAULT, Limits
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_locks import in_thread, pid_of, wait_until, watching

pytestmark = pytest.mark.sample(1)

GATE = 20_251
# An int4 whose comparison waits at the gate while it is shut, in the sessions of a seal.
GATED_TYPE = (
    "CREATE TYPE gated",
    "CREATE FUNCTION gated_in(cstring) RETURNS gated LANGUAGE internal IMMUTABLE STRICT AS 'int4in'",
    "CREATE FUNCTION gated_out(gated) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'int4out'",
    "CREATE TYPE gated (INPUT = gated_in, OUTPUT = gated_out, LIKE = int4)",
    *(
        f"CREATE FUNCTION gated_{name}(gated, gated) RETURNS bool LANGUAGE internal IMMUTABLE STRICT AS 'int4{name}'"
        for name in ("lt", "le", "eq", "ge", "gt")
    ),
    "CREATE CAST (gated AS int) WITHOUT FUNCTION",
    "CREATE CAST (int AS gated) WITHOUT FUNCTION",
    "CREATE FUNCTION gated_cmp(a gated, b gated) RETURNS int LANGUAGE plpgsql SET search_path = pg_catalog AS $$ BEGIN "
    # It doesn't wait for a lock: a seal limits such waits.
    f"WHILE current_setting('application_name') = 'sealer' AND NOT pg_try_advisory_xact_lock_shared({GATE}) LOOP "
    "PERFORM pg_sleep(0.01); END LOOP; "
    "RETURN btint4cmp(a::int, b::int); END $$",
    *(
        f"CREATE OPERATOR {sign} (LEFTARG = gated, RIGHTARG = gated, FUNCTION = gated_{name})"
        for sign, name in (("<", "lt"), ("<=", "le"), ("=", "eq"), (">=", "ge"), (">", "gt"))
    ),
    "CREATE OPERATOR CLASS gated_ops DEFAULT FOR TYPE gated USING btree AS OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, "
    "OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 gated_cmp(gated, gated)",
)
PARTITIONS = (
    "CREATE TABLE t (id int PRIMARY KEY, k gated, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (MINVALUE) TO (50)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (50) TO (MAXVALUE)",
)
ROWS = "INSERT INTO t SELECT i, (i % 7)::gated, i FROM generate_series({}, {}) i"


class Gate:
    """A gate at which each seal waits. It is shut from the beginning."""

    def __init__(self, dsn: str) -> None:
        self.session = watching(dsn)
        sql(self.session, "SELECT pg_advisory_lock(%s)", GATE)

    def open(self) -> None:
        sql(self.session, "SELECT pg_advisory_unlock(%s)", GATE)

    def wait_for(self, sealing: threading.Thread, failed: object = "it passed by") -> None:
        """Waits until the seal is at the gate."""
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sealer' AND wait_event = 'PgSleep' "
            "AND datname = current_database()"
        )
        while not sql(self.session, query)[0][0]:
            assert sealing.is_alive(), failed


@pytest.fixture
def built(database: Database, dsn: str) -> Run:
    """An operation on a partitioned table, before its seal."""
    run_sql(dsn, *GATED_TYPE, *PARTITIONS, ROWS.format(1, 100), "ANALYZE t")
    return steps.built(database, include="v", ranges=2, segments=1)


def user(dsn: str) -> psycopg2.extensions.connection:
    """A user's session that fails instead of waiting for ever."""
    session = watching(dsn)
    sql(session, "SET lock_timeout = '20s'")
    return session


def start(dsn: str, run: Run, limits: Limits = DEFAULT) -> tuple[threading.Thread, list[BaseException]]:
    return in_thread(lambda: steps.seal_all(Database(dsn, "sealer", limits), run))


@pytest.mark.parametrize("statement", ["TRUNCATE t", "TRUNCATE t1", "TRUNCATE t1, t2"])
def test_a_truncate_gets_by_an_index_build_that_then_comes_to_its_end(
    database: Database, dsn: str, built: Run, statement: str
) -> None:
    """Found: a `TRUNCATE` waited for the index build of a segment. It holds: the seal gives way."""
    gate = Gate(dsn)
    thread, failed = start(dsn, built)
    gate.wait_for(thread, failed)
    somebody = user(dsn)
    sql(somebody, statement)
    sql(somebody, ROWS.format(201, 240))
    assert thread.is_alive() or not failed, failed
    gate.open()
    thread.join()
    assert not failed
    lifecycle.run_phases(database, built)
    assert steps.assert_exact(database).rows > 0


@pytest.mark.sample(0)
def test_a_truncate_gets_by_a_vacuum(database: Database, dsn: str, built: Run) -> None:
    # The vacuum's ANALYZE compares.
    with database.connect() as connection:
        with connection.begin():
            job = load_job(connection, built)
        sealer = seal.SealWorker(database, connection, job, 0)
        claim = sealer.claim()
        assert isinstance(claim, seal.SegmentClaim)
        sealer.vacuum(sealer.index(claim))
        claim = sealer.claim()
        assert isinstance(claim, seal.SegmentClaim)
        assert sealer.index(claim).status == "indexed"
    gate = Gate(dsn)
    thread, failed = start(dsn, built)
    gate.wait_for(thread, failed)
    # The whole table: a leaf's TRUNCATE only deletes, beside which a vacuum goes on anyway.
    sql(user(dsn), "TRUNCATE t")
    gate.open()
    thread.join()
    assert not failed
    lifecycle.run_phases(database, built)
    steps.assert_exact(database)


def test_an_abort_gets_by(database: Database, dsn: str, built: Run) -> None:
    gate = Gate(dsn)
    thread, failed = start(dsn, built)
    gate.wait_for(thread, failed)
    assert abort.abort(database, "ix", "test").status == "aborted"
    gate.open()
    thread.join()
    assert failed, "the worker was fenced"


def test_who_comes_again_and_again_waits_in_the_end(database: Database, dsn: str, built: Run) -> None:
    """After `seal_retreats` the seal no longer gives way: the next TRUNCATE waits until the index is built."""
    gate = Gate(dsn)
    thread, failed = start(dsn, built, Limits(seal_retreats=2))
    somebody = user(dsn)
    for _ in range(2):
        gate.wait_for(thread, failed)
        sql(somebody, "TRUNCATE t1")
        sql(somebody, ROWS.format(1, 20))
    gate.wait_for(thread, failed)
    last, refused = in_thread(lambda: sql(somebody, "TRUNCATE t1"))
    assert wait_until(gate.session, "SELECT cardinality(pg_blocking_pids(%s)) > 0", pid_of(somebody))
    gate.open()
    for one in (thread, last):
        one.join()
    assert not failed
    assert not refused
    lifecycle.run_phases(database, built)
    steps.assert_exact(database)
