"""A unique index: enforced from the switch on, over all partitions. Every duplicate is named before that."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.engine import apply_delta, seal, switch
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.unique.duplicates import look
from airflow_roir.errors import DuplicatesFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.isolation import Session, Watcher
from tests.engine.stages import Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(3)

PARTITIONED = (
    "CREATE TABLE t (id int, day int, k int, v int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(4)),
)
PLAIN = ("CREATE TABLE t (id int, day int, k int, v int, PRIMARY KEY (id, day))",)
TWIN = (
    "CREATE TABLE twin (id int, day int, k int, v int, PRIMARY KEY (id, day), "
    "CONSTRAINT u UNIQUE (k) DEFERRABLE INITIALLY IMMEDIATE)",
)
ROWS = "INSERT INTO {} SELECT i, i % 4, i, i FROM generate_series(1, 60) i"


def duplicates(database: Database) -> list[tuple[list[str], list[str], str | None]]:
    """The recorded duplicates that aren't healed."""
    with database.transaction() as connection:
        query = (
            "SELECT key, primary_key, partition FROM roir.duplicate WHERE healed_at IS NULL ORDER BY key, primary_key"
        )
        return [tuple(row) for row in execute(connection, query)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("source", [PARTITIONED, PLAIN], ids=["partitioned", "plain"])
@pytest.mark.parametrize("phase", ["mid-fold", "published"])
def test_the_same_statements_succeed_and_fail_as_on_a_native_twin(
    database: Database, dsn: str, source: tuple[str, ...], phase: str
) -> None:
    run_sql(dsn, *source, *TWIN, ROWS.format("t"), ROWS.format("twin"), "UPDATE t SET v = 0 WHERE id % 7 = 0")
    run_sql(dsn, "UPDATE twin SET v = 0 WHERE id % 7 = 0")
    stage = Stage(database, phase, keys="k", include="v", segments=5, unique=True)
    chance = random.Random(7)
    with closing(steps.session(dsn)) as user:
        for statement in statements(chance, 400):
            outcomes = []
            for table in ("t", "twin"):
                sql(user, "SAVEPOINT s")
                try:
                    sql(user, statement.replace("$", table))
                    outcomes.append(None)
                    sql(user, "RELEASE s")
                except psycopg2.Error as error:
                    outcomes.append(error.pgcode)
                    sql(user, "ROLLBACK TO s")
            assert outcomes[0] == outcomes[1], statement
            if chance.random() < 0.3:
                user.commit()
        user.commit()
        assert sql(user, "TABLE t EXCEPT TABLE twin") == sql(user, "TABLE twin EXCEPT TABLE t") == []
    stage.finish()


def statements(chance: random.Random, count: int) -> Iterator[str]:
    """Random writes whose keys collide half of the time; `$` is the table."""
    for _ in range(count):
        a, b, k, day = chance.randrange(70), chance.randrange(70), chance.randrange(70), chance.randrange(4)
        yield chance.choice(
            (
                f"INSERT INTO $ VALUES ({a}, {day}, {k}, {b})",
                f"INSERT INTO $ VALUES ({a}, {a % 4}, {k}, {b}) ON CONFLICT (id, day) DO UPDATE SET k = excluded.k",
                f"INSERT INTO $ VALUES ({a}, {a % 4}, NULL, {b}) ON CONFLICT (id, day) DO UPDATE SET k = NULL, v = 9",
                f"DELETE FROM $ WHERE id = {a}",
                f"DELETE FROM $ WHERE k = {k}",
                f"UPDATE $ SET k = k + 1 WHERE id BETWEEN {a} AND {b}",
                f"UPDATE $ SET k = k - 1 WHERE k > {k}",
                f"UPDATE $ SET k = {a + b} - k WHERE k IN ({a}, {b})",
                f"UPDATE $ SET k = {k} WHERE id = {a}",
                f"UPDATE $ SET id = {a} WHERE id = {b} AND day = {day}",
                f"UPDATE $ SET day = (day + 1) % 4 WHERE id = {a} AND day = {day}",
                f"UPDATE $ SET v = v + 1 WHERE id BETWEEN {a} AND {a + 9}",
            )
        )


def test_a_refusal_looks_as_postgresqls_own(database: Database, dsn: str) -> None:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    Stage(database, "published", keys="k", unique=True)
    with closing(steps.session(dsn)) as user, pytest.raises(psycopg2.errors.UniqueViolation) as refused:
        sql(user, "INSERT INTO t VALUES (100, 1, 7, 0)")
    said = refused.value.diag
    assert (said.schema_name, said.table_name, said.constraint_name) == ("public", "t", "ix")
    assert said.message_primary == 'duplicate key value violates unique constraint "ix"'
    assert said.message_detail == "Key (k)=(7) already exists."


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("beside", [False, True], ids=["sealed then", "refused again"])
def test_a_pair_that_was_touched_before_the_look_is_no_healed_one(database: Database, dsn: str, beside: bool) -> None:
    """Its segment no longer has it, and the look's mark is younger than the touch. Seen to be switched over."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"), "UPDATE t SET k = 7 WHERE id = 8")
    if beside:
        run_sql(dsn, "UPDATE t SET k = 9 WHERE id = 10")
    run = steps.built(database, keys="k", include="v", unique=True, segments=1)
    for _ in seal.PHASE.work(database, run, 0):
        pass
    run_sql(dsn, "UPDATE t SET v = 0 WHERE id = 8")
    with pytest.raises(DuplicatesFound):
        seal.finish(database, run)
    pair = [(["7"], ["7", "3"], "public.t3"), (["7"], ["8", "0"], "public.t0")]
    assert duplicates(database)[:2] == pair
    if beside:
        run = start_run(database, "ix", "test", take_over=True)
        with pytest.raises(DuplicatesFound):
            steps.seal_all(database, run)
        run_sql(dsn, "DELETE FROM t WHERE id = 10")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    with pytest.raises(DuplicatesFound, match="2 rows share 1 key"):
        switch.switch(database, run)
    assert duplicates(database) == pair
    run_sql(dsn, "DELETE FROM t WHERE id = 8")
    steps.finish_all(database, start_run(database, "ix", "test", take_over=True))
    assert duplicates(database) == []


@pytest.mark.sample(0)
def test_duplicates_are_listed_and_once_they_are_healed_the_build_goes_on(database: Database, dsn: str) -> None:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (5, 10)", "UPDATE t SET k = NULL WHERE id > 50")
    run = steps.built(database, unique=True, ranges=3, segments=4)
    # Writes during the build: a pair in the delta, one with the base, one that is healed, one that only seems to be
    # one.
    run_sql(dsn, "INSERT INTO t VALUES (101, 1, 100, 0), (102, 2, 100, 0), (103, 3, 20, 0)")
    run_sql(dsn, "INSERT INTO t VALUES (104, 0, 30, 0)", "DELETE FROM t WHERE id = 104")
    run_sql(dsn, "DELETE FROM t WHERE id = 31", "INSERT INTO t VALUES (131, 3, 31, 0)")
    with pytest.raises(DuplicatesFound, match="7 rows share 3 keys"):
        steps.seal_all(database, run)
    assert duplicates(database) == [
        (["1"], ["1", "1"], "public.t1"),
        (["1"], ["10", "2"], "public.t2"),
        (["1"], ["5", "1"], "public.t1"),
        (["100"], ["101", "1"], "public.t1"),
        (["100"], ["102", "2"], "public.t2"),
        (["20"], ["103", "3"], "public.t3"),
        (["20"], ["20", "0"], "public.t0"),
    ]
    run_sql(dsn, "UPDATE t SET k = 1000 + id WHERE id IN (5, 10)", "DELETE FROM t WHERE id = 101")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    with pytest.raises(DuplicatesFound, match="2 rows share 1 key"):
        switch.switch(database, run)
    assert [row[0] for row in duplicates(database)] == [["20"], ["20"]]
    run_sql(dsn, "DELETE FROM t WHERE id = 20")
    run = start_run(database, "ix", "test", take_over=True)
    steps.fold_all(database, run)
    assert duplicates(database) == []
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_a_look_scans_a_segment_without_an_index_once_not_for_each_key(database: Database, dsn: str) -> None:
    """The planner expects one key from writers. Seen to loop over tens of thousands, for minutes."""
    run_sql(dsn, *PLAIN, ROWS.format("t"), "UPDATE t SET k = 1 WHERE id = 2")
    run = steps.built(database, unique=True, segments=1)

    def loops() -> str:
        with database.transaction() as connection:
            look(connection, load_job(connection, run))
            return str(execute(connection, "SHOW enable_nestloop").scalar_one())

    list(seal.PHASE.work(database, run, 0))
    assert loops() == "off"
    run_sql(dsn, "DELETE FROM t WHERE id = 2")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    assert loops() == "on"


def test_a_segment_with_duplicates_is_left_by_its_run_alone(database: Database, dsn: str) -> None:
    run_sql(dsn, *PLAIN, ROWS.format("t"), "UPDATE t SET k = 1 WHERE id = 2")
    run = steps.built(database, unique=True, segments=1)
    done = [one.done for one in seal.PHASE.work(database, run, 0)]
    assert done == [True, False], "only the default one"
    with database.transaction() as connection:
        assert seal.PHASE.left(connection, run, ()).undone == 0


def test_a_holder_that_goes_and_comes_again_while_it_is_asked_about_keeps_its_key(database: Database, dsn: str) -> None:
    """The question waits for the holder's row. That version is deleted then, and the entry belongs to the next one."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    Stage(database, "published", keys="k", unique=True)
    with closing(Session(dsn)) as holder, closing(Session(dsn)) as other:
        watcher = Watcher(dsn)

        def do(statement: str) -> None:
            holder.send(statement)
            while not holder.ended(1.0):
                pass
            assert not holder.error

        do("BEGIN; SELECT FROM t WHERE id = 7 FOR UPDATE")
        other.send("INSERT INTO t VALUES (100, 1, 7, 0)")
        while not watcher.is_blocked(other, [holder]):
            assert not other.ended()
        do("DELETE FROM t WHERE id = 7")
        do("INSERT INTO t VALUES (7, 3, 7, 0)")
        do("COMMIT")
        while not other.ended(1.0):
            pass
        watcher.connection.close()
    assert other.error == "23505"
    steps.assert_exact(database)


def test_keys_that_are_equal_and_differ_are_one_group(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k numeric)", "INSERT INTO t VALUES (1, 1.0), (2, 1.00), (3, 2)")
    run = steps.built(database, unique=True)
    run_sql(dsn, "INSERT INTO t VALUES (4, 1), (5, 2.0)")
    with pytest.raises(DuplicatesFound, match="5 rows share 2 keys"):
        steps.seal_all(database, run)
    run_sql(dsn, "DELETE FROM t WHERE id IN (2, 5)", "UPDATE t SET k = 1.000 WHERE id = 1")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    with pytest.raises(DuplicatesFound, match="2 rows share 1 key"):
        switch.switch(database, run)
    assert [row[:2] for row in duplicates(database)] == [(["1"], ["4"]), (["1.000"], ["1"])]


def test_two_fold_steps_whose_keys_cross_wait_for_none(database: Database, dsn: str) -> None:
    """Each step has taken the delta's rows of one row, whose former key is now the other row's."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    run = steps.sealed(database, unique=True, segments=2)
    run_sql(dsn, "UPDATE t SET k = 3 - k WHERE id IN (1, 2)")
    switch.switch(database, run)
    with database.connect() as one, database.connect() as other, one.begin(), other.begin():
        job = load_job(other, run)
        workers = [apply_delta.Folding(connection, job.generation_id, job.entry) for connection in (one, other)]
        execute(other, "SET LOCAL lock_timeout = '1ms'")
        assert workers[0].fold("d.c2 = 1").rows == 2
        assert workers[1].fold("d.c2 = 2").rows == 0
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)
