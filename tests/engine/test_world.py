"""Other things in a database: event triggers, prepared transactions, wide rows, big values, policies, limits."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import psycopg2.errors
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import abort, clean_up, drop
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import InvalidInput, LockNotAcquired, RoirError
from servers.postgres import embedded_postgres
from tests.conftest import run_sql, with_template
from tests.engine import steps
from tests.engine.stages import Stage, through_modes
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

ROWS = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i",
)


def change(dsn: str) -> None:
    run_sql(
        dsn,
        "UPDATE t SET k = k || 'x', v = v + 1 WHERE id % 2 = 0",
        "UPDATE t SET id = id + 1000 + (SELECT max(id) FROM t) WHERE id % 7 = 0",
        "DELETE FROM t WHERE id % 5 = 0",
        "INSERT INTO t (id, k, v) SELECT i, 'again', 0 FROM generate_series(1, 30) i "
        "ON CONFLICT (id) DO UPDATE SET k = 'c'",
    )


def test_event_triggers_of_others_see_our_ddl_and_change_nothing(database: Database, dsn: str) -> None:
    """One records every command, as an audit does, and leaves a search_path behind."""
    run_sql(
        dsn,
        *ROWS,
        "CREATE TABLE log (tag text, what text)",
        "CREATE FUNCTION note() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO public.log SELECT command_tag, object_identity FROM pg_event_trigger_ddl_commands(); "
        "PERFORM set_config('search_path', 'public', true); END $$",
        "CREATE FUNCTION note_drop() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO public.log SELECT tg_tag, object_identity FROM pg_event_trigger_dropped_objects(); END $$",
        "CREATE EVENT TRIGGER aa ON ddl_command_end EXECUTE FUNCTION note()",
        "CREATE EVENT TRIGGER zz ON sql_drop EXECUTE FUNCTION note_drop()",
        "SELECT roir.guard()",
    )
    through_modes(database, lambda mode: change(dsn), include="v")
    clean_up.clean_up(database)
    drop.drop_index(database, "ix", "test")
    assert sql(steps.session(dsn), "SELECT count(*) > 10 FROM log") == [(True,)]


def test_an_event_trigger_that_refuses_our_ddl_is_told_as_it_is(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        *ROWS,
        "CREATE FUNCTION no() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'no tables on weekdays'; END $$",
        "CREATE EVENT TRIGGER no ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION no()",
    )
    with pytest.raises((DBAPIError, RoirError), match="no tables on weekdays"):
        steps.begin(database)
    change(dsn)
    assert sql(steps.session(dsn), "SELECT count(*) FROM roir.operation") == [(0,)]
    run_sql(dsn, "DROP EVENT TRIGGER no")
    steps.make_index(database)
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", ["mid-build", "mid-fold"])
def test_a_prepared_transaction_over_an_abort(database: Database, dsn: str, phase: str) -> None:
    """The prepared writes wait for their commit. The abort gets no locks, stays `aborting`, and is finished later."""
    run_sql(dsn, *ROWS)
    stage = Stage(database, phase)
    stage.connection.close()
    end_run(database, stage.run)
    name = f"over_{phase}_{dsn.rsplit('/')[-1].split('?')[0]}"
    user = steps.session(dsn)
    sql(user, "UPDATE t SET k = 'prepared', v = -1 WHERE id < 20; DELETE FROM t WHERE id = 21")
    sql(user, f"PREPARE TRANSACTION '{name}'")
    user.close()
    assert abort.abort(database, "ix", "test", patience_s=0).status == "aborting"
    resumed = psycopg2.connect(dsn)
    resumed.autocommit = True
    sql(resumed, f"COMMIT PREPARED '{name}'")
    resumed.close()
    assert clean_up.clean_up(database).operations_aborted == 1
    change(dsn)
    steps.make_index(database)
    steps.assert_exact(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize("ended", ["COMMIT", "ROLLBACK"])
def test_a_prepared_transaction_over_a_drop(database: Database, dsn: str, ended: str) -> None:
    run_sql(dsn, *ROWS)
    steps.make_index(database)
    name = f"drop_{dsn.rsplit('/')[-1].split('?')[0]}"
    user = steps.session(dsn)
    sql(user, "UPDATE t SET k = 'prepared' WHERE id < 20; DELETE FROM t WHERE id = 21")
    sql(user, f"PREPARE TRANSACTION '{name}'")
    user.close()
    with pytest.raises(LockNotAcquired, match="prepared transaction"):
        drop.drop_index(database, "ix", "test", patience_s=0)
    resumed = psycopg2.connect(dsn)
    resumed.autocommit = True
    sql(resumed, f"{ended} PREPARED '{name}'")
    resumed.close()
    steps.assert_exact(database)
    drop.drop_index(database, "ix", "test")
    change(dsn)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("scan", ["key", pytest.param("block", marks=pytest.mark.sample(0))])
def test_a_table_of_1500_columns(database: Database, dsn: str, scan: str) -> None:
    columns = ", ".join(f"c{i} int" for i in range(1497))
    run_sql(
        dsn,
        f"CREATE TABLE t (id int PRIMARY KEY, k text, v int, {columns})",
        "INSERT INTO t (id, k, v, c0, c1496) SELECT i, i % 5, i, i, -i FROM generate_series(1, 60) i",
    )
    included = ", ".join(f"c{i}" for i in range(700))
    through_modes(database, lambda mode: change(dsn), keys="c1496, k", include=included, scan=scan, covering="none")


@pytest.mark.sample(0)
def test_more_included_columns_than_an_index_can_cover(database: Database, dsn: str) -> None:
    """Found: more than 32 key, primary key and covered columns: prepare ended in PostgreSQL's own error, and left
    nothing. It holds: `auto` covers as many as have a place, `all` is refused.
    """
    columns = ", ".join(f"c{i} int" for i in range(40))
    run_sql(
        dsn,
        f"CREATE TABLE t (id int PRIMARY KEY, k text, v int, {columns})",
        ROWS[1].replace("INTO t", "INTO t (id, k, v)"),
    )
    include = ", ".join(f"c{i}" for i in range(40))
    with pytest.raises(InvalidInput, match='at most 32 columns: there is no room for included column "c30"'):
        steps.begin(database, include=include, covering="all")
    through_modes(database, lambda mode: change(dsn), include=include)


@pytest.mark.sample(0)
def test_ten_megabytes_in_one_value(database: Database, dsn: str) -> None:
    """An included column, out of line and hardly compressible. It is copied, moved with its key, and replaced."""
    big = "(SELECT string_agg(md5({0}::text || j::text), '') FROM generate_series(1, 328000) j)"
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int, big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO t SELECT i, i % 5, i, {big.format('i')} FROM generate_series(1, 3) i",
        "INSERT INTO t SELECT i, i % 5, i, 'small' FROM generate_series(4, 60) i",
    )
    user = steps.session(dsn)
    values = iter("abc")

    def write(mode: str) -> None:
        one = ord(next(values))
        sql(user, "UPDATE t SET k = k || 'x', v = v + 1 WHERE id < 3")
        sql(user, f"UPDATE t SET big = {big.format(one)} WHERE id = 3")
        sql(user, f"INSERT INTO t VALUES ({one + 100}, 'new', 0, {big.format(one + 1)})")
        user.commit()

    through_modes(database, write, include="big")
    assert sql(user, "SELECT max(octet_length(big)) >= 10000000 FROM ix") == [(True,)]
    user.close()


def test_labels_of_an_enum_that_are_renamed_during_a_build(database: Database, dsn: str) -> None:
    """In key and included columns, with new labels in between. Entries have the value, not its name."""
    run_sql(
        dsn,
        "CREATE TYPE color AS ENUM ('red', 'green', 'blue')",
        "CREATE TABLE t (id int PRIMARY KEY, k color, v color)",
        "INSERT INTO t SELECT i, ('{red,green,blue}'::color[])[i % 3 + 1], 'red' FROM generate_series(1, 60) i",
    )
    renames = iter((("red", "rouge"), ("green", "vert"), ("rouge", "rot")))
    user = steps.session(dsn)

    def write(mode: str) -> None:
        old, new = next(renames)
        sql(user, f"UPDATE t SET k = '{old}' WHERE id % 4 = 0")
        user.commit()
        run_sql(dsn, f"ALTER TYPE color RENAME VALUE '{old}' TO '{new}'")
        run_sql(dsn, f"ALTER TYPE color ADD VALUE 'n{new}' BEFORE '{new}'")
        sql(user, f"UPDATE t SET v = '{new}' WHERE id % 5 = 0; UPDATE t SET k = 'n{new}' WHERE id % 7 = 0")
        sql(user, "DELETE FROM t WHERE id % 11 = 0")
        user.commit()

    through_modes(database, write, include="v")
    user.close()


def test_policies_by_role_hide_no_row_from_the_index(database: Database, dsn: str, stranger: str) -> None:
    """Each role sees and writes its own rows. Its writes neither lose nor change the rows that it can't see."""
    name = sql(steps.session(stranger), "SELECT current_user")[0][0]
    run_sql(
        dsn,
        *ROWS,
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY odd ON t TO {name} USING (id % 2 = 1) WITH CHECK (true)",
        f"GRANT ALL ON t TO {name}",
    )

    unseen = iter((-2, -4, -6))

    def write(mode: str) -> None:
        user = steps.session(stranger)
        assert sql(user, "SELECT count(*) FROM t WHERE id % 2 = 0") == [(0,)]
        sql(user, "UPDATE t SET k = k || 'o', v = v + 1")
        sql(user, "UPDATE t SET id = id + 1000 + 2 * (SELECT max(id) / 2 FROM t) WHERE id % 9 = 1")
        # A row that the role itself can't see.
        sql(user, f"INSERT INTO t VALUES ({next(unseen)}, 'unseen', 0)")
        sql(user, "DELETE FROM t WHERE id % 5 = 1")
        user.commit()
        user.close()
        run_sql(dsn, "UPDATE t SET v = v - 1 WHERE id % 3 = 0")

    through_modes(database, write, include="v", ignore_row_security=True)


def test_autovacuum_at_its_fastest_meets_a_build(database: Database, dsn: str) -> None:
    run_sql(dsn, *ROWS, "ALTER TABLE t SET (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0)")
    run_sql(dsn, "ALTER SYSTEM SET autovacuum_naptime = 1", "SELECT pg_reload_conf()")
    try:
        through_modes(database, lambda mode: change(dsn), include="v")
    finally:
        run_sql(dsn, "ALTER SYSTEM RESET autovacuum_naptime", "SELECT pg_reload_conf()")


LOCKS = "max_locks_per_transaction = 10\nmax_connections = 12\nmax_prepared_transactions = 0\n"


@pytest.fixture
def narrow(pg: int) -> Iterator[str]:
    """A server with few locks and few connections."""
    with embedded_postgres(pg, settings=LOCKS) as dsn:
        with_template(dsn)
        run_sql(dsn, "CREATE DATABASE narrow TEMPLATE roir_template")
        yield dsn.replace("/postgres?", "/narrow?")


@pytest.mark.by_hand("sweeps")
def test_no_locks_and_no_connections_left(narrow: str) -> None:
    """Hundreds of partitions, more than there are locks: a message says so, nothing is left over, and writers go on."""
    database = Database(narrow, limits=Limits(outage_s=1))
    run_sql(narrow, "CREATE TABLE t (d int, id int, k text, PRIMARY KEY (d, id)) PARTITION BY LIST (d)")
    for first in range(0, 600, 20):
        run_sql(narrow, *(f"CREATE TABLE t{i} PARTITION OF t FOR VALUES IN ({i})" for i in range(first, first + 20)))
    run_sql(narrow, *(f"INSERT INTO t VALUES ({i}, {i}, 'k')" for i in range(0, 600, 10)))
    with pytest.raises((DBAPIError, RoirError), match=r"out of shared memory|max_locks_per_transaction"):
        steps.begin(database)
    user = steps.session(narrow)
    assert sql(user, "SELECT count(*) FROM roir.operation") == [(0,)]
    sql(user, "INSERT INTO t VALUES (1, 1, 'new')")
    user.commit()
    run_sql(
        narrow, "CREATE TABLE s (id int PRIMARY KEY, k text)", "INSERT INTO s SELECT i, i FROM generate_series(1, 50) i"
    )
    _, run = steps.begin(database, "is", "s")
    end_run(database, run)
    others = []
    with pytest.raises(psycopg2.OperationalError, match=r"too many|reserved"):
        others.extend(psycopg2.connect(narrow) for _ in range(20))
    for one in others:
        one.close()
    run = start_run(database, "is", "test", take_over=True)
    steps.finish_all(database, run)
    steps.assert_exact(database, "is")
    user.close()
