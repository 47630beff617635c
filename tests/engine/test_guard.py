"""Event triggers refuse DDL that no capture sees, name the supported way, and leave all other DDL alone."""

from __future__ import annotations

from contextlib import closing

import psycopg2
import pytest

from airflow_roir.engine import clean_up, drop, install, revert
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.health import faults
from airflow_roir.engine.partitions import detach, sync
from airflow_roir.engine.schema import schema
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_detach import assert_shown, published
from tests.engine.test_locks import in_thread, wait_until, watching
from tests.engine.test_partitions import make, one

pytestmark = pytest.mark.sample(1)

TAKES_ROWS = [
    "DROP TABLE t1",
    "DROP TABLE t0, t1 CASCADE",
    "ALTER TABLE t DETACH PARTITION t1",
    "BEGIN; SAVEPOINT s; ALTER TABLE t DETACH PARTITION t1; COMMIT",
    "ALTER TABLE t DETACH PARTITION t1 /* detach partition t1 concurrently */",
    "DO $$ BEGIN ALTER TABLE t DETACH PARTITION t1; DROP TABLE t1; END $$",
    "SET session_replication_role = replica; ALTER TABLE t DETACH PARTITION t1",
]
IN_TWO = [
    "ALTER TABLE t DETACH PARTITION t1 CONCURRENTLY",
    'alter table public.t detach partition "public" . t1   concurrently',
    "ALTER TABLE t DETACH PARTITION t1 /* x /* y */ */ CONCURRENTLY",
    "/* ' */ ALTER TABLE ONLY t DETACH -- x\n PARTITION t1\nCONCURRENTLY",
    "ALTER TABLE t DETACH PARTITION U&\"!0074!0031\" UESCAPE '!' CONCURRENTLY",
]


# Entries without a row. An older snapshot sees the entries of a partition that left only as long as it sees the rows.
MISSED = "SELECT d, id, k, v FROM ix EXCEPT ALL SELECT d, id, k, v FROM t"


@pytest.fixture
def guarded(dsn: str) -> str:
    run_sql(dsn, "SELECT roir.guard()")
    return dsn


@pytest.mark.sample(0)
@pytest.mark.parametrize("statement", IN_TWO)
@pytest.mark.parametrize("state", ["building", "active"])
def test_what_takes_rows_in_two_transactions_is_refused_with_the_way_to_do_it(
    database: Database, guarded: str, statement: str, state: str
) -> None:
    make(guarded)
    _, run = steps.begin(database)
    if state == "active":
        steps.finish_all(database, run)
    with pytest.raises(psycopg2.errors.ObjectInUse, match=r"entries behind(.|\n)*roir\.detach_partition\('public\.t1'"):
        run_sql(guarded, statement)
    if state == "building":
        steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 300
    detach.detach_partition(database, "t1", "test", drop=True)
    run_sql(guarded, "SELECT roir.detach_partition('t2')", "DROP TABLE t2")
    clean_up.clean_up(database)
    assert steps.assert_exact(database).rows == 100


@pytest.mark.sample(0)
@pytest.mark.parametrize("statement", TAKES_ROWS)
@pytest.mark.parametrize("state", ["building", "active", "rebuilt"])
def test_what_takes_rows_is_taken_over(database: Database, guarded: str, statement: str, state: str) -> None:
    """The entries are hidden at once, for older snapshots too; the clean-up removes them."""
    make(guarded)
    left = 100 if "t0" in statement else 200
    _, run = steps.begin(database, include="v")
    if state != "building":
        steps.finish_all(database, run)
    if state == "rebuilt":
        steps.make_index(database, "ix", None, None)
    clean_up.clean_up(database)
    with closing(steps.old_session(guarded)) as old:
        run_sql(guarded, statement)
        if state == "building":
            steps.finish_all(database, run)
        else:
            assert steps.sql(old, MISSED) == []
        assert_shown(database)
    assert steps.assert_exact(database).rows == left
    clean_up.clean_up(database)
    assert steps.assert_exact(database).rows == left
    if state == "rebuilt":
        revert.revert(database, "ix", "test")
        assert_shown(database)
    run_sql(guarded, "DROP TABLE IF EXISTS t1")
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    drop.drop_index(database, "ix", "test")
    run_sql(guarded, "DROP TABLE t")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "way", ["ALTER TABLE t DETACH PARTITION t0", "DROP TABLE t0", "SELECT roir.detach_partition('t0')"]
)
@pytest.mark.parametrize(
    "default", ["ALTER TABLE t DETACH PARTITION td", "ALTER TABLE td DETACH PARTITION td1", "DROP TABLE td"]
)
@pytest.mark.parametrize("guard", ["guarded", "synchronised"])
def test_a_default_partition_leaves_with_the_rows_that_it_took(
    database: Database, dsn: str, way: str, default: str, guard: str
) -> None:
    """When another partition left, the default partition's bounds became wider than the recorded ones."""
    run_sql(
        dsn,
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE td PARTITION OF t DEFAULT PARTITION BY RANGE (d)",
        "CREATE TABLE td1 PARTITION OF td FOR VALUES FROM (-100) TO (15)",
        "CREATE TABLE td2 PARTITION OF td DEFAULT",
        "INSERT INTO t SELECT i % 30, i, i % 7, i FROM generate_series(1, 90) i",
    )
    steps.make_index(database, "ix", "t", "k", "v")
    if guard == "guarded":
        run_sql(dsn, "SELECT roir.guard()")
    with closing(steps.session(dsn)) as user:
        user.autocommit = True
        # The server keeps these definitions in the session's cache.
        steps.sql(user, "SELECT pg_get_partition_constraintdef(oid) FROM pg_class WHERE relispartition")
        for statement in (way, "INSERT INTO t VALUES (5, 900, 'new', 1), (25, 901, 'new', 1)", default):
            steps.sql(user, statement)
            if guard == "synchronised":
                sync.sync_partitions(database, "t", "test")
            assert_shown(database)
            clean_up.clean_up(database)
            steps.assert_exact(database)


@pytest.mark.parametrize("statement", ["DROP TABLE t0", "ALTER TABLE t DETACH PARTITION t0"])
@pytest.mark.parametrize(
    "renames",
    [
        ["ALTER TYPE mood RENAME VALUE 'a' TO 'x'"],
        [f"ALTER TYPE mood RENAME VALUE '{was}' TO '{now}'" for was, now in ("ax", "ba", "xb")],
        ["ALTER TYPE mood RENAME TO spirits"],
        ['CREATE SCHEMA "S."', 'ALTER TYPE mood SET SCHEMA "S."'],
    ],
)
def test_what_bounds_were_written_by_may_be_renamed(
    database: Database, guarded: str, renames: list[str], statement: str
) -> None:
    """Found: an enum's label, or a type of the partition key, was renamed: the guard refused to let partitions go, and
    with two labels exchanged the bounds that were written down named another partition. It holds: bounds with a user's
    type are written down as "all", which the question for the row makes exact.
    """
    run_sql(
        guarded,
        "CREATE TYPE mood AS ENUM ('a', 'b')",
        "CREATE TABLE t (d mood, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY LIST (d)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ('{label}')" for n, label in enumerate("ab")),
        "INSERT INTO t SELECT ('{a,b}'::mood[])[1 + i % 2], i, i % 7, i FROM generate_series(1, 40) i",
    )
    steps.make_index(database, "ix", "t", "k", "v")
    run_sql(guarded, *renames, statement)
    assert_shown(database)
    assert clean_up.clean_up(database).partition_entries == 20
    assert steps.assert_exact(database).rows == 20


@pytest.mark.parametrize("statement", ["DROP TABLE tx", "DROP TABLE ty", "ALTER TABLE t DETACH PARTITION tx"])
def test_a_level_below_which_a_table_is_being_attached_stays(database: Database, guarded: str, statement: str) -> None:
    """A DROP also drops the levels in between. No message would then name the table, which takes no writes."""
    run_sql(
        guarded,
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        "CREATE TABLE tx PARTITION OF t FOR VALUES FROM (0) TO (30) PARTITION BY RANGE (d)",
        "CREATE TABLE ty PARTITION OF tx FOR VALUES FROM (0) TO (20) PARTITION BY RANGE (d)",
        "CREATE TABLE t1 PARTITION OF ty FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE n (LIKE t INCLUDING ALL)",
    )
    steps.make_index(database, "ix", "t", "k", "v")
    run_sql(guarded, "SELECT roir.begin_attach('ty', 'n', 'FOR VALUES FROM (10) TO (20)')")
    with pytest.raises(psycopg2.errors.ObjectInUse, match="a table is being attached to it"):
        run_sql(guarded, statement)
    run_sql(guarded, "SELECT roir.cancel_attach('n')", statement)
    assert_shown(database)


def test_a_table_that_left_has_nothing_of_ours(database: Database, guarded: str) -> None:
    published(database, guarded)
    clean_up.clean_up(database)
    run_sql(guarded, "ALTER TABLE t DETACH PARTITION t1")
    assert one(database, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'public.t1'::regclass") == 0
    run_sql(guarded, "TRUNCATE t1", "CREATE TABLE n1 PARTITION OF t FOR VALUES FROM (10) TO (20)")
    run_sql(guarded, "INSERT INTO t VALUES (11, 1, 'a')", "ALTER TABLE t DETACH PARTITION n1", "TRUNCATE n1")
    run_sql(guarded, "ALTER TABLE t ATTACH PARTITION n1 FOR VALUES FROM (10) TO (20)")
    run_sql(guarded, "INSERT INTO t VALUES (11, 2, 'b')", "TRUNCATE n1")
    run_sql(guarded, "INSERT INTO t VALUES (11, 3, 'c')")
    assert_shown(database)
    clean_up.clean_up(database)
    assert steps.assert_exact(database).rows == 201
    drop.drop_index(database, "ix", "test")
    assert one(database, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'roir%%'") == 0


def test_a_reader_who_waits_for_the_table_goes_before_a_detach(database: Database, guarded: str) -> None:
    """Without this, the server would end one of the two, maybe the reader."""
    published(database, guarded)
    clean_up.clean_up(database)
    with closing(steps.session(guarded)) as reader, closing(steps.session(guarded)) as owner:
        steps.sql(reader, "SELECT count(*) FROM ix")
        detaching, refused = in_thread(lambda: steps.sql(owner, "ALTER TABLE t DETACH PARTITION t1"))
        with closing(watching(guarded)) as watch:
            wait_until(watch, "SELECT %s = ANY (pg_blocking_pids(%s))", reader.info.backend_pid, owner.info.backend_pid)
        assert steps.sql(reader, "SELECT count(*) FROM t") == [(300,)]
        detaching.join()
        assert "a reader of the index waits for this statement" in str(refused[0])
        owner.rollback()
    run_sql(guarded, "ALTER TABLE t DETACH PARTITION t1")
    assert_shown(database)


@pytest.mark.parametrize("state", ["building", "active"])
def test_an_attach_with_rows_is_refused_an_empty_one_is_followed(database: Database, guarded: str, state: str) -> None:
    make(guarded)
    _, run = steps.begin(database)
    if state == "active":
        steps.finish_all(database, run)
    run_sql(guarded, "CREATE TABLE t3 (LIKE t INCLUDING ALL)", "INSERT INTO t3 VALUES (31, 1, 'a', 1)")
    attach = "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (30) TO (40)"
    with pytest.raises(psycopg2.errors.ObjectInUse, match="would bring rows into"):
        run_sql(guarded, attach)
    run_sql(guarded, "DELETE FROM t3")
    with pytest.raises(psycopg2.errors.ObjectInUse, match="empty it by TRUNCATE"):
        run_sql(guarded, attach)
    run_sql(guarded, "TRUNCATE t3", attach, "INSERT INTO t VALUES (31, 1, 'a', 1)", "TRUNCATE t3")
    run_sql(
        guarded, "CREATE TABLE t4 PARTITION OF t FOR VALUES FROM (40) TO (50)", "INSERT INTO t4 VALUES (41, 1, 'a')"
    )
    run_sql(guarded, "TRUNCATE t4", "INSERT INTO t4 VALUES (42, 1, 'a')")
    assert one(database, "SELECT count(*) FROM roir.source_partition WHERE status = 'present'") == 5
    if state == "building":
        steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 301


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("before", ["", "ALTER TABLE t DETACH PARTITION s; "], ids=["made", "detached"])
@pytest.mark.parametrize("state", ["building", "active"])
def test_a_level_that_is_attached_is_looked_at_to_its_leaves(
    database: Database, guarded: str, state: str, before: str, deep: bool
) -> None:
    """Its leaves became its partitions in earlier transactions."""
    make(guarded)
    run_sql(
        guarded,
        "CREATE TABLE s (LIKE t INCLUDING ALL) PARTITION BY RANGE (d)",
        "CREATE TABLE s1 PARTITION OF s FOR VALUES FROM (30) TO (35)" + " PARTITION BY RANGE (d)" * deep,
        *["CREATE TABLE s11 PARTITION OF s1 FOR VALUES FROM (30) TO (32)"] * deep,
    )
    attach = "ALTER TABLE t ATTACH PARTITION s FOR VALUES FROM (30) TO (40)"
    if before:
        run_sql(guarded, attach)
    _, run = steps.begin(database)
    if state == "active":
        steps.finish_all(database, run)
    row = "INSERT INTO {} VALUES (31, 1, 'a', 1)"
    run_sql(guarded, row.format("t" if before else "s"))
    with pytest.raises(psycopg2.errors.ObjectInUse, match=r"would bring rows into(.|\n)*Attach public.s without it"):
        run_sql(guarded, f"BEGIN; {before}{attach}; COMMIT")
    run_sql(guarded, f"BEGIN; {before}TRUNCATE s; {attach}; COMMIT", row.format("t"), "TRUNCATE s", row.format("t"))
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    if state == "building":
        steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 301


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t RENAME COLUMN k TO q",
        "ALTER TABLE t DROP COLUMN k CASCADE",
        "ALTER TABLE t DISABLE TRIGGER {0}",
    ],
)
def test_an_alter_that_matters_to_a_build_is_refused(database: Database, guarded: str, statement: str) -> None:
    make(guarded)
    _, run = steps.begin(database)
    with pytest.raises(psycopg2.errors.ObjectInUse, match=r"roir\.abort\('public\.ix'\)|roir drop public\.ix"):
        run_sql(guarded, statement.format(*steps.capture_triggers(guarded)))
    run_sql(
        guarded, "ALTER TABLE t ADD COLUMN more int", "CREATE INDEX ON t (v)", "ALTER TABLE t ALTER v SET DEFAULT 1"
    )
    steps.finish_all(database, run)
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_needed_column_stays(database: Database, guarded: str) -> None:
    published(database, guarded)
    # The server's own refusal: the generation's view of its source depends on the column.
    with pytest.raises(psycopg2.errors.DependentObjectsStillExist, match="roir_data"):
        run_sql(guarded, "ALTER TABLE t DROP COLUMN k")
    with pytest.raises(psycopg2.errors.ObjectInUse, match=r"needs column k of public\.t"):
        run_sql(guarded, "ALTER TABLE t DROP COLUMN k CASCADE")


@pytest.mark.sample(0)
def test_a_table_can_always_go_as_a_whole(database: Database, guarded: str) -> None:
    published(database, guarded)
    user = psycopg2.connect(guarded)
    steps.sql(user, "DROP TABLE t CASCADE")
    assert "index public.ix has lost its table" in user.notices[-1]
    assert "roir drop public.ix" in user.notices[-1]
    user.rollback()
    steps.sql(user, "CREATE SCHEMA other; ALTER TABLE t SET SCHEMA other; DROP SCHEMA other CASCADE")
    user.commit()
    user.close()


def test_other_tables_are_left_alone_even_where_the_guard_fails(database: Database, guarded: str) -> None:
    published(database, guarded)
    other = [
        "CREATE TABLE u (a int PRIMARY KEY) PARTITION BY RANGE (a)",
        "CREATE TABLE u1 PARTITION OF u FOR VALUES FROM (0) TO (9)",
        "CREATE TABLE u2 AS SELECT 10 AS a",
        "ALTER TABLE u2 ALTER a SET NOT NULL",
        "ALTER TABLE u ATTACH PARTITION u2 FOR VALUES FROM (10) TO (11)",
        "ALTER TABLE u DETACH PARTITION u1",
        "ALTER TABLE u DETACH PARTITION u2 CONCURRENTLY",
        "DROP TABLE u, u1, u2",
    ]
    run_sql(guarded, *other)
    user = psycopg2.connect(guarded)
    user.autocommit = True
    steps.sql(user, "ALTER TABLE roir.source_partition RENAME TO lost")
    for statement in other:
        steps.sql(user, statement)
    assert "roir could not check this statement" in user.notices[-1]
    steps.sql(user, "ALTER TABLE roir.lost RENAME TO source_partition")
    user.close()
    steps.assert_exact(database)


def test_what_was_wrong_before_stops_no_later_ddl(database: Database, guarded: str) -> None:
    published(database, guarded)
    run_sql(guarded, "SELECT roir.unguard()", "DROP TABLE t0", "ALTER TABLE t DETACH PARTITION t1")
    run_sql(guarded, "SELECT roir.guard()", "ALTER TABLE t ADD COLUMN more int", "ALTER TABLE t1 ADD COLUMN more int")
    run_sql(guarded, "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40)")


def test_init_leaves_away_what_somebody_has_removed(database: Database, dsn: str) -> None:
    """After a restore too: the dump has no guard, but a record that it was removed."""
    install.init(database)
    run_sql(dsn, "SELECT roir.unguard()")
    install.init(database)
    with database.transaction() as connection:
        assert (schema.is_guarded(connection), schema.is_unguarded(connection)) == (False, True)
    run_sql(dsn, "SELECT roir.guard()")
    install.init(database)
    with database.transaction() as connection:
        assert (schema.is_guarded(connection), schema.is_unguarded(connection)) == (True, False)


def test_init_installs_it_where_it_may(database: Database, dsn: str) -> None:
    with database.transaction() as connection:
        assert not schema.is_guarded(connection)
    install.init(database)
    install.init(database)
    with database.transaction() as connection:
        assert schema.is_guarded(connection)
    run_sql(
        dsn,
        "DO $$ BEGIN CREATE ROLE guard_modest; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
        "SELECT roir.unguard(); GRANT USAGE ON SCHEMA roir TO guard_modest",
    )
    assert one(database, "SET ROLE guard_modest; SELECT roir.guard()") is False
    run_sql(dsn, "DROP OWNED BY guard_modest", "DROP ROLE guard_modest")


def test_the_guard_does_not_look_at_what_prepare_itself_does(database: Database, guarded: str) -> None:
    """The guard would look at all partitions for each of their triggers, while writers wait."""
    run_sql(guarded, f"ALTER DATABASE {one(database, 'SELECT current_database()')} SET track_functions = 'all'")
    looked = []
    for index, leaves in enumerate((3, 30)):
        name = f"t_{leaves}"
        run_sql(
            guarded,
            f"CREATE TABLE {name} (d int, id int, k text, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
            *(f"CREATE TABLE {name}_{n} PARTITION OF {name} FOR VALUES FROM ({n}) TO ({n + 1})" for n in range(leaves)),
            # Counts of this session must not arrive later.
            "SELECT pg_stat_force_next_flush()",
            "SELECT pg_stat_reset()",
        )
        steps.begin(database, f"ix_{index}", name, segments=1)
        run_sql(guarded, "SELECT pg_stat_force_next_flush()")
        calls = "SELECT coalesce(sum(calls), 0)::int FROM pg_stat_user_functions WHERE funcname = 'ddl_problem'"
        looked.append(one(database, calls))
    assert looked[0] == looked[1], looked
    run_sql(guarded, "ALTER TABLE t_30 DETACH PARTITION t_30_7")
    left = "SELECT name FROM roir.source_partition WHERE status = 'leaving'"
    assert one(database, left) == "public.t_30_7", "what others do it looks at"


def test_nobody_passes_it_by_a_setting(database: Database, guarded: str) -> None:
    """Found: a comment in `DETACH … CONCURRENTLY`, or the setting `own_ddl`, passed the DDL guard. It holds: neither
    does.
    """
    published(database, guarded)
    run_sql(
        guarded,
        "DO $$ BEGIN CREATE ROLE guard_owner; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$",
        "GRANT ALL ON SCHEMA public TO guard_owner",
        "ALTER TABLE t OWNER TO guard_owner; ALTER TABLE t1 OWNER TO guard_owner",
    )
    run_sql(guarded, "SET ROLE guard_owner; SET roir.own_ddl = 'on'; ALTER TABLE t DETACH PARTITION t1")
    assert_shown(database)
    run_sql(guarded, "REASSIGN OWNED BY guard_owner TO postgres", "DROP OWNED BY guard_owner", "DROP ROLE guard_owner")


@pytest.mark.parametrize(
    ("query", "partition"),
    [
        ("ALTER TABLE t DETACH PARTITION p CONCURRENTLY", "p"),
        ('alter/**/table a."b ""c" detach partition "D".e finalize;', '"D".e'),
        ('ALTER TABLE t DETACH PARTITION U&"\\0070" CONCURRENTLY', '"p"'),
        ("ALTER TABLE t DETACH PARTITION U&\"!!!0070\\\" UESCAPE '!' CONCURRENTLY", '"!p\\"'),
        ("ALTER TABLE detach DETACH PARTITION partition CONCURRENTLY", "partition"),
        ("ALTER TABLE t DETACH PARTITION p -- CONCURRENTLY", None),
        ("ALTER TABLE t DROP COLUMN k /* detach partition p concurrently */", None),
        ("SELECT 'ALTER TABLE t DETACH PARTITION p CONCURRENTLY'", None),
        ("ALTER TABLE t ADD CHECK (a <> 'DETACH PARTITION p CONCURRENTLY')", None),
    ],
)
def test_a_statement_is_read_as_the_server_reads_it(database: Database, query: str, partition: str | None) -> None:
    """Found: a comment in `DETACH … CONCURRENTLY`, or the setting `own_ddl`, passed the DDL guard. It holds: neither
    does.
    """
    with database.transaction() as connection:
        read = "SELECT partition FROM roir.detached_in_two(%(query)s)"
        assert execute(connection, read, {"query": query}).scalar_one() == partition


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("statement", ["DROP TABLE young", "ALTER TABLE t DETACH PARTITION young"])
def test_what_an_older_snapshot_takes_is_named(
    database: Database, guarded: str, statement: str, isolation: str
) -> None:
    """The snapshot doesn't see that the index has the partition."""
    published(database, guarded)
    with closing(steps.old_session(guarded, isolation)) as user:
        run_sql(
            guarded,
            "CREATE TABLE young PARTITION OF t FOR VALUES FROM (9000) TO (9100)",
            "INSERT INTO t (d, id, k, v) VALUES (9000, 1, 'k', 1)",
        )
        steps.sql(user, statement)
        user.commit()
    assert "sync-partitions" in " ".join(clean_up.clean_up(database).waiting)
    sync.sync_partitions(database, "t", "test")
    steps.assert_exact(database)


@pytest.mark.parametrize("held", [False, True], ids=["free", "read"])
def test_an_emptied_table_that_is_attached_makes_no_false_alarm(database: Database, guarded: str, held: bool) -> None:
    """If a session reads the view at that moment there is one, which the clean-up ends."""
    make(guarded)
    steps.make_index(database, include="v")
    clean_up.clean_up(database)
    run_sql(guarded, "ALTER TABLE t DETACH PARTITION t1", "TRUNCATE t1")
    clean_up.clean_up(database)
    reader = steps.session(guarded)
    if held:
        steps.sql(reader, "SELECT count(*) FROM ix")
    run_sql(
        guarded,
        "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (30) TO (40)",
        "INSERT INTO t VALUES (31, 9001, 'q', 1)",
    )
    reader.close()
    with database.transaction() as connection:
        found = faults.warnings(connection)
    assert bool(found) == held
    assert_shown(database)
    clean_up.clean_up(database)
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    assert steps.assert_exact(database).rows == 201


@pytest.mark.parametrize("rename", ["TYPE mood RENAME VALUE 'a' TO 'x'", "TYPE mood RENAME TO temper"])
def test_a_label_that_was_renamed_before_the_clean_up_is_named(database: Database, guarded: str, rename: str) -> None:
    """The remedy helps, and then the name is free."""
    run_sql(
        guarded,
        "CREATE TYPE mood AS ENUM ('a', 'b')",
        "CREATE TABLE t (d mood, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY LIST (d)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES IN ('a')",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN ('b')",
        "INSERT INTO t SELECT (ARRAY['a', 'b'])[1 + i % 2]::mood, i, i % 7, i FROM generate_series(1, 40) i",
    )
    steps.make_index(database, include="v")
    run_sql(guarded, "SELECT roir.detach_partition('t0')", f"ALTER {rename}")
    assert any("Rename it back, run roir clean-up" in line for line in clean_up.clean_up(database).warnings)
    back = {"x": "TYPE mood RENAME VALUE 'x' TO 'a'", "temper": "TYPE temper RENAME TO mood"}
    run_sql(guarded, f"ALTER {next(text for name, text in back.items() if name in rename)}")
    assert clean_up.clean_up(database).warnings == []
    run_sql(guarded, f"ALTER {rename}", "INSERT INTO t (d, id, k, v) VALUES ('b', 9001, 'q', 1)")
    assert clean_up.clean_up(database).warnings == []
    assert steps.assert_exact(database).rows == 21
