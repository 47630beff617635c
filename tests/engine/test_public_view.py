"""An index's view can be read, and nothing else, whatever is granted on it, with every statement, in each state."""

from __future__ import annotations

import io
import re

import psycopg2
import pytest

from airflow_roir.engine import clean_up, install, lifecycle
from airflow_roir.engine.health import faults
from airflow_roir.options import VerifyOptions
from tests.engine import steps
from tests.engine.public import World
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

LOCKS = ("ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE", "SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE",
         "ACCESS EXCLUSIVE")  # fmt: skip
STATEMENTS = (
    "INSERT INTO ix (k, id) VALUES ('0', 1000)",
    "INSERT INTO ix SELECT k, id + 1000 FROM ix",
    "INSERT INTO ix (k, id) VALUES ('0', 5) ON CONFLICT DO NOTHING",
    "UPDATE ix SET k = 'x'",
    "UPDATE ix SET k = k WHERE id = 5",
    "UPDATE ix SET k = 'x' WHERE false",
    "DELETE FROM ix",
    "DELETE FROM ix USING t WHERE t.id = ix.id",
    "WITH gone AS (DELETE FROM ix RETURNING id) SELECT * FROM gone",
    "MERGE INTO ix USING (SELECT 5 AS id) s ON ix.id = s.id WHEN MATCHED THEN DELETE",
    "MERGE INTO ix USING (SELECT 5 AS id) s ON ix.id = s.id WHEN NOT MATCHED THEN INSERT (k, id) VALUES ('0', 1)",
    "TRUNCATE ix",
    "CREATE TEMP VIEW mine AS SELECT * FROM ix; DELETE FROM mine",
    "CREATE TEMP VIEW mine AS SELECT * FROM ix; LOCK TABLE mine IN ACCESS EXCLUSIVE MODE",
    "CREATE TEMP VIEW mine AS SELECT * FROM ix; SELECT * FROM mine FOR UPDATE",
    *(f"LOCK TABLE ix IN {mode} MODE" for mode in LOCKS),
    "LOCK TABLE ONLY ix IN ACCESS EXCLUSIVE MODE",
    "LOCK TABLE ix IN ACCESS EXCLUSIVE MODE NOWAIT",
    *(f"SELECT * FROM ix FOR {how}" for how in ("UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE")),
    "SELECT * FROM t JOIN ix USING (id) FOR UPDATE OF ix",
    "SELECT * FROM (SELECT * FROM ix) x FOR SHARE SKIP LOCKED",
)
# Errors of the server: not updatable; no right; not possible on a view.
REFUSED = ("55000", "42501", "0A000", "42809")
STATES = ("guarded", "plain", "hiding", "rebuilt")


def bring(world: World, state: str) -> None:
    """Creates the index, with its view in that state."""
    if state == "hiding":
        world.run(
            "DROP TABLE t",
            "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (50)",
            "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (50) TO (500)",
            "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 100) i",
            *(f"ALTER TABLE {name} OWNER TO alice" for name in ("t", "t1", "t2")),
        )
    steps.make_index(world.database, "public.ix", "public.t")
    if state == "rebuilt":
        steps.make_index(world.database, "public.ix", None, None)
    if state in ("plain", "rebuilt"):
        assert clean_up.clean_up(world.database).guards_removed == 1
    if state == "hiding":
        one = steps.session(world.database.dsn)
        sql(one, "SELECT roir.detach_partition('public.t1')")
        one.commit()
        one.close()
    world.run("GRANT ALL ON ix TO app, alice", "GRANT SELECT ON t TO app", "GRANT SELECT ON ix TO reader")


@pytest.mark.sample(0)
@pytest.mark.parametrize("state", STATES)
def test_the_view_lets_nobody_do_more_than_read(world: World, state: str) -> None:
    """The refusal doesn't wait: LOCK is refused before it takes locks that writers need, and beside writers."""
    bring(world, state)
    writer = world.session("alice")
    sql(writer, "UPDATE t SET k = 'w' WHERE id = 60")
    owner = "super" if world.database.dsn == world.dsn else "builder"
    wrong = [
        f"{role}: {statement}: {outcome}"
        for role in ("app", "alice", owner, "super")
        for statement in STATEMENTS
        if (outcome := world.outcome(role, statement)) not in REFUSED
        # A superuser, of whom no right is required.
        and not (
            role == "super" and owner != role and outcome == "done" and not statement.startswith(("INS", "UPD", "DEL"))
        )
    ]
    assert wrong == []
    with pytest.raises(psycopg2.errors.WrongObjectType), world.session("app") as one:
        one.cursor().copy_expert("COPY ix (k, id) FROM STDIN", io.StringIO("0\t1000\n"))
    writer.commit()
    for role in ("app", "reader"):
        one = world.session(role)
        assert sql(one, "SELECT count(*) FROM ix WHERE k = 'w'") == [(1,)]
        assert sql(one, "LOCK TABLE ix IN ACCESS SHARE MODE") == []
        one.close()
    if state != "hiding":
        steps.assert_exact(world.database)
    with world.database.transaction() as connection:
        assert faults.warnings(connection) == []


QUERIES = (
    "SELECT * FROM {} WHERE k = '3'",
    "SELECT * FROM {} WHERE k > '1' AND k <= '3' ORDER BY k, id",
    "SELECT k FROM {} ORDER BY k LIMIT 3",
    "SELECT k FROM {} ORDER BY k DESC LIMIT 3",
    "SELECT min(k), max(k) FROM {}",
    "SELECT count(*) FROM {} WHERE k IN ('1', '4')",
    "SELECT k, count(*) FROM {} GROUP BY k",
    "SELECT DISTINCT k FROM {}",
    "SELECT * FROM t JOIN {} x ON x.k = t.k WHERE t.id < 5",
    "SELECT * FROM t LEFT JOIN {} x ON x.k = t.k WHERE t.id < 5",
    "SELECT * FROM t WHERE k IN (SELECT k FROM {} WHERE id < 9)",
    "SELECT * FROM t WHERE NOT EXISTS (SELECT FROM {} x WHERE x.k = t.k)",
    "SELECT (SELECT max(id) FROM {} x WHERE x.k = t.k) FROM t",
    "SELECT * FROM {0} a FULL JOIN {0} b USING (k) WHERE a.k < '2'",
    "UPDATE t SET v = x.id FROM {} x WHERE x.k = t.k AND t.id = 3",
    "SELECT * FROM {0} WHERE k = '3' UNION ALL SELECT * FROM {0} WHERE k = '1'",
)
SETTINGS = (
    "SET enable_seqscan = off",
    "SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; "
    "SET min_parallel_index_scan_size = 0; SET enable_partitionwise_join = on; SET enable_partitionwise_aggregate = on",
)


@pytest.mark.sample(0)
def test_the_planner_sees_the_entries_alone(world: World) -> None:
    """The part of the view that keeps writes away is gone before a plan is chosen."""
    steps.make_index(world.database, "public.ix", "public.t", segments=3)
    clean_up.clean_up(world.database)
    world.run("VACUUM ANALYZE roir_data.g1", "CREATE VIEW plain AS SELECT c1 AS k, c2 AS id FROM roir_data.g1")
    one = world.session("super")
    one.autocommit = True
    for settings in SETTINGS:
        sql(one, f"RESET ALL; {settings}")
        for query in QUERIES:
            plans = [
                [re.sub(r"\bg1(_\d+)?\b", "g1", line) for (line,) in sql(one, "EXPLAIN " + query.format(name))]
                for name in ("plain", "ix")
            ]
            assert plans[0] == plans[1], query
    one.close()


BROKEN = {
    "replaced by its owner": ("CREATE OR REPLACE VIEW ix AS SELECT c1 AS k, c2 AS id FROM roir_data.g1", "builder"),
    "given its rights": ("GRANT ALL ON roir_data.g1_shown TO builder", "builder"),
    "owner became superuser": ("ALTER ROLE builder SUPERUSER", "super"),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("how", "by"), [(how, by) for how in BROKEN for by in ("init", "verify") if by == "verify" or how[:2] != "re"]
)
@pytest.mark.parametrize("world", ["plain"], indirect=True)
def test_status_tells_where_more_than_reading_became_possible(world: World, how: str, by: str) -> None:
    steps.make_index(world.database, "public.ix", "public.t")
    clean_up.clean_up(world.database)
    statement, role = BROKEN[how]
    one = world.session(role)
    sql(one, world.named(statement))
    one.commit()
    one.close()
    with world.database.transaction() as connection:
        (line,) = faults.warnings(connection)
    assert "more than SELECT" in line
    if by == "init":
        install.init(world.database)
    else:
        assert lifecycle.verify(world.database, "public.ix", VerifyOptions(repair=True), "test").damaged == 1
    with world.database.transaction() as connection:
        assert faults.warnings(connection) == []
    world.run("GRANT ALL ON ix TO app")
    assert world.outcome("app", "DELETE FROM ix") == "55000"
    assert world.outcome("app", "LOCK TABLE ix") == "42501"


def test_status_tells_who_may_not_read_what_the_view_reads(world: World) -> None:
    """No role can read the view then. Seen to say nothing, and to name a table that has nothing to do with it."""
    steps.make_index(world.database, "public.ix", "public.t")
    clean_up.clean_up(world.database)
    reader, read = ("pg_write_server_files", "g1") if world.database.dsn == world.dsn else ("builder", "g1_shown")
    world.run(f"REVOKE SELECT ON roir_data.{read} FROM {reader}", "GRANT SELECT ON ix TO app")
    assert world.outcome("app", "SELECT * FROM ix") == "42501"
    with world.database.transaction() as connection:
        (line,) = faults.warnings(connection)
    assert f"who may not read roir_data.{read}," in line
    assert "roir init" in line
    install.init(world.database)
    assert world.outcome("app", "SELECT * FROM ix") == "done"
    with world.database.transaction() as connection:
        assert faults.warnings(connection) == []
    world.run("ALTER VIEW ix OWNER TO bob", "GRANT SELECT ON roir_data.g1 TO bob")
    with world.database.transaction() as connection:
        (line,) = faults.warnings(connection)
    assert "who may not read roir_data.g1_shown," in line
    assert "ALTER VIEW" in line


@pytest.mark.sample(0)
def test_a_view_of_another_name_is_named_alone(world: World) -> None:
    """Our own view below it isn't named: users can't rename that one."""
    steps.make_index(world.database, "public.ix", "public.t")
    world.run("ALTER VIEW ix RENAME TO other")
    (line,) = [line for line in clean_up.clean_up(world.database).warnings if "shows its entries now" in line]
    assert ": view public.other shows" in line


def test_functions_that_a_script_took_from_all_roles_are_told_and_given_again(world: World) -> None:
    """Seen to fail: readers and writers failed, `roir status` said nothing, and `roir init` changed nothing."""
    steps.make_index(world.database, "public.ix", "public.t")
    world.run("GRANT SELECT ON ix TO app", "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA roir FROM PUBLIC")
    assert world.outcome("app", "SELECT * FROM ix") == "42501"
    with world.database.transaction() as connection:
        (line,) = faults.warnings(connection)
    assert "roir.published(" in line
    assert "roir init" in line
    install.init(world.database)
    assert world.outcome("app", "SELECT * FROM ix") == "done"
    assert world.outcome("app", "SELECT roir.note_taken(1, 0, '(0,1)')") == "42501"
    with world.database.transaction() as connection:
        assert faults.warnings(connection) == []
