"""A unique index of another role's table: it is built, enforced, repaired, and a refusal reveals nothing secret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine import install, lifecycle, switch
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.errors import DuplicatesFound, RightMissing
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import Stage
from tests.engine.steps import sql
from tests.engine.test_unique_types import unhealed
from tests.engine.test_unique_verify import unseen

pytestmark = pytest.mark.sample(1)

TABLE = (
    "CREATE TABLE t (id int, day int, k text, v int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(3)),
    "INSERT INTO t SELECT i, i % 3, 'k' || i, i FROM generate_series(1, 30) i",
)
ROLES = ("unique_keeper", "unique_writer")


@pytest.fixture(autouse=True)
def keeper(dsn: str) -> Iterator[None]:
    """`t` belongs to unique_keeper. unique_writer may write to it, and read only the primary key."""
    for role in ROLES:
        run_sql(dsn, f"DROP ROLE IF EXISTS {role}", f"CREATE ROLE {role}")
    run_sql(
        dsn,
        *TABLE,
        *(f"ALTER TABLE {name} OWNER TO unique_keeper" for name in ("t", "t0", "t1", "t2")),
        "GRANT INSERT, UPDATE, DELETE, SELECT (id, day) ON t TO unique_writer",
    )
    yield
    for role in ROLES:
        run_sql(dsn, f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def writer(dsn: str, role: str = "unique_writer") -> psycopg2.extensions.connection:
    user = steps.session(dsn)
    sql(user, f"SET ROLE {role}")
    user.commit()
    return user


@pytest.mark.parametrize("nulls_not_distinct", [False, True], ids=["distinct", "not distinct"])
@pytest.mark.parametrize("mode", ["direct", "active"])
def test_whoever_may_write_meets_the_key(database: Database, dsn: str, mode: str, nulls_not_distinct: bool) -> None:
    stage = Stage(database, mode, keys="k", include="v", segments=3, unique=True, nulls_not_distinct=nulls_not_distinct)
    with closing(writer(dsn)) as user:
        for statement in (
            "INSERT INTO t VALUES (100, 1, NULL, 0)",
            "UPDATE t SET v = 1, k = 'new' WHERE id = 100 AND day = 1",
            "INSERT INTO t VALUES (101, 2, NULL, 0)",
            "UPDATE t SET v = 2 WHERE id = 101",
            "UPDATE t SET k = NULL WHERE id = 100; DELETE FROM t WHERE id = 101"
            if not nulls_not_distinct
            else "DELETE FROM t WHERE id = 101; UPDATE t SET k = NULL WHERE id = 100",
            "UPDATE t SET k = 'k' || (31 - id) WHERE id BETWEEN 1 AND 30",
            "UPDATE t SET day = (day + 1) % 3 WHERE id < 10",
        ):
            sql(user, statement)
            user.commit()
        with pytest.raises(psycopg2.errors.UniqueViolation) as refused:
            sql(user, "INSERT INTO t VALUES (102, 1, 'k7', 0)")
        assert refused.value.diag.message_detail is None
        assert "k7" not in str(refused.value)
        user.rollback()
    stage.assert_exact("written")
    stage.finish()


@pytest.mark.parametrize("row_security", ["none", "enabled", "forced"])
def test_the_values_are_told_to_who_may_read_them_in_any_row(database: Database, dsn: str, row_security: str) -> None:
    run_sql(dsn, "GRANT SELECT ON t TO unique_writer")
    if row_security != "none":
        run_sql(
            dsn,
            "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY own ON t USING (id > 10) WITH CHECK (true)",
        )
    Stage(database, "published", keys="k", unique=True, ignore_row_security=True)
    told = "Key (k)=(k7) already exists."
    roles = {"unique_writer": told if row_security == "none" else None, "unique_keeper": told, "postgres": told}
    if row_security == "forced":
        # A member of the owner, and a role that may see past all policies.
        run_sql(dsn, "GRANT unique_keeper TO unique_writer")
        roles["unique_writer"] = told
    for role, expected in roles.items():
        with closing(writer(dsn, role)) as user:
            with pytest.raises(psycopg2.errors.UniqueViolation) as refused:
                sql(user, "INSERT INTO t VALUES (102, 1, 'k7', 0)")
            assert refused.value.diag.message_detail == expected, role
            assert refused.value.diag.constraint_name == "ix"


def test_duplicates_are_found_healed_and_repaired_as_the_owner(database: Database, dsn: str) -> None:
    """No code of the owner runs as us: the domain's check notes the role that runs it."""
    run_sql(
        dsn,
        "CREATE FUNCTION mine(x text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN IF current_user = 'postgres' THEN "
        "RAISE 'as us'; END IF; RETURN true; END $$",
        "ALTER FUNCTION mine(text) OWNER TO unique_keeper",
        "CREATE DOMAIN checked AS text",
        "ALTER DOMAIN checked OWNER TO unique_keeper",
        "CREATE TYPE held AS (x checked, y int)",
        "ALTER TYPE held OWNER TO unique_keeper",
        "ALTER TABLE t ADD h held",
        "UPDATE t SET h = ROW(k, 1)::held",
        "ALTER DOMAIN checked ADD CHECK (mine(VALUE)) NOT VALID",
    )
    with closing(writer(dsn, "unique_keeper")) as user:
        sql(user, "INSERT INTO t VALUES (100, 1, 'k100', 0, ROW('k7', 1))")
        user.commit()
        run = steps.built(database, keys="h", include="v", unique=True, segments=3)
        sql(user, "INSERT INTO t VALUES (101, 1, 'k101', 0, ROW('k8', 1))")
        user.commit()
        with pytest.raises(DuplicatesFound):
            steps.seal_all(database, run)
        assert len(unhealed(dsn)) == 4
        sql(user, "DELETE FROM t WHERE id = 100")
        user.commit()
        run = start_run(database, "ix", "test", take_over=True)
        steps.seal_all(database, run)
        with pytest.raises(DuplicatesFound):
            switch.switch(database, run)
        sql(user, "UPDATE t SET h = ROW(NULL, NULL)::held WHERE id = 101")
        user.commit()
        run = start_run(database, "ix", "test", take_over=True)
        steps.fold_all(database, run)
        steps.publish_all(database, run)
        with pytest.raises(psycopg2.errors.UniqueViolation):
            sql(user, "INSERT INTO t VALUES (102, 1, 'k102', 0, ROW(NULL, NULL)::held)")
        user.rollback()
        assert lifecycle.verify(database, "ix", VerifyOptions(sample=100)).found == 0


def test_the_note_of_a_taken_entry_reads_no_table_but_ours(database: Database, dsn: str) -> None:
    """The owner may call it. A view can have a column `ctid`, and its functions run as the role that reads the view."""
    run_sql(
        dsn,
        "CREATE TABLE t9 (id int, day int, k text, v int, PRIMARY KEY (id, day))",
        "ALTER TABLE t9 OWNER TO unique_keeper",
        "CREATE SCHEMA keepers AUTHORIZATION unique_keeper",
    )
    Stage(database, "published", keys="k", unique=True)
    run_sql(dsn, "SELECT roir.begin_attach('t', 't9', 'FOR VALUES IN (9)', 'test')")
    with closing(writer(dsn, "unique_keeper")) as user:
        sql(
            user,
            "CREATE TABLE keepers.ran (who text);"
            "CREATE FUNCTION keepers.code() RETURNS text LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO keepers.ran VALUES (current_user); RETURN 'x'; END $$;"
            "CREATE VIEW keepers.place AS SELECT keepers.code() AS c1, 1 AS c2, 9 AS c3, '(0,1)'::tid AS ctid",
        )
        user.commit()
        with pytest.raises(psycopg2.errors.InvalidParameterValue, match="no segment"):
            sql(user, "SELECT roir.note_taken(1, 'keepers.place'::regclass, '(0,1)')")
        user.rollback()
        assert sql(user, "SELECT who FROM keepers.ran") == []
        user.rollback()
    run_sql(dsn, "DROP SCHEMA keepers CASCADE")


@pytest.mark.by_hand("sweeps")
def test_only_a_write_to_the_table_notes_that_an_entry_was_taken_over(database: Database, dsn: str) -> None:
    """The owner of an indexed table may call the function. Seen to make another owner's attach begin again."""
    run_sql(dsn, "CREATE TABLE t9 (id int, day int, k text, v int, PRIMARY KEY (id, day))")
    run_sql(dsn, "ALTER TABLE t9 OWNER TO unique_keeper", "INSERT INTO t9 VALUES (900, 9, 'k900', 1)")
    Stage(database, "published", keys="k", unique=True)
    run_sql(
        dsn,
        "CREATE TABLE other (id int PRIMARY KEY, k int)",
        "ALTER TABLE other OWNER TO unique_writer",
        "INSERT INTO other SELECT i, i FROM generate_series(1, 3) i",
    )
    steps.make_index(database, "io", "other", "k", unique=True)
    run_sql(dsn, "SELECT roir.begin_attach('t', 't9', 'FOR VALUES IN (9)', 'test')")
    with closing(writer(dsn)) as user:
        # A write to the role's own table gives no right to a note about another table.
        sql(user, "UPDATE other SET k = k + 1")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="only a write to its table"):
            sql(user, "SELECT roir.note_taken(1, 'roir_data.g1_s000'::regclass, '(9999,1)')")
        user.rollback()
    with closing(steps.session(dsn)) as user:
        assert sql(user, "SELECT * FROM roir.emptied") == []


@pytest.mark.by_hand("sweeps")
def test_a_repair_of_anothers_table(database: Database, dsn: str) -> None:
    steps.make_index(database, keys="k", include="v", unique=True, segments=3)
    unseen(dsn, "INSERT INTO t VALUES (100, 1, 'k7', 0)", "UPDATE t SET k = 'new' WHERE id = 8")
    run_sql(
        dsn, "UPDATE roir_data.g1 SET c2 = 109, c3 = 1 WHERE c2 = 9", "UPDATE roir_data.g1 SET c4 = 0 WHERE c2 = 10"
    )
    report = lifecycle.verify(database, "ix", VerifyOptions(repair=True))
    assert (report.duplicate, report.found - report.repaired) == (1, 1)
    run_sql(dsn, "DELETE FROM t WHERE id = 7")
    assert lifecycle.verify(database, "ix", VerifyOptions(repair=True)).is_exact
    steps.assert_exact(database)


# Tables with an index: for a unique index, and for a deferrable primary key, the capture locks rows.
LOCKED = {
    "unique": ("CREATE TABLE u (id int PRIMARY KEY, k text)", True),
    "deferrable": ("CREATE TABLE u (id int PRIMARY KEY DEFERRABLE, k text)", False),
}

FILL = "INSERT INTO u SELECT i, i FROM generate_series(1, 9) i"


@pytest.fixture
def keepers(dsn: str) -> str:
    """The DSN of unique_keeper, who has made the control schema."""
    with closing(steps.session(dsn)) as user:
        [(name,)] = sql(user, "SELECT current_database()")
    run_sql(
        dsn,
        "ALTER ROLE unique_keeper LOGIN",
        f"GRANT CREATE ON DATABASE {name} TO unique_keeper",
        "GRANT CREATE ON SCHEMA public TO unique_keeper",
        "DROP SCHEMA roir, roir_data CASCADE",
    )
    keepers = dsn.replace("//postgres:@", "//unique_keeper:@")
    install.init(Database(keepers, "roir tests"))
    return keepers


@pytest.mark.parametrize("kind", LOCKED)
def test_an_owner_who_took_update_from_itself_is_told_before_writes_fail(dsn: str, keepers: str, kind: str) -> None:
    """Owners of append-only tables do this. Prepare refuses, and after the publish the status reports it."""
    made, unique = LOCKED[kind]
    database = Database(keepers, "roir tests")
    taken, given = "REVOKE UPDATE ON u FROM unique_keeper", "GRANT UPDATE ON u TO unique_keeper"
    run_sql(keepers, made, FILL, taken)
    with pytest.raises(RightMissing, match=r"may not lock rows of table public\.u, .*GRANT UPDATE ON"):
        steps.begin(database, "iu", "u", "k", unique=unique)
    with closing(steps.session(keepers)) as user:
        assert sql(user, "SELECT count(*) FROM roir.operation") == [(0,)]
    run_sql(keepers, given)
    steps.make_index(database, "iu", "u", "k", unique=unique)
    assert warnings(database) == []
    for lacks in ("UPDATE", "SELECT, UPDATE"):
        run_sql(keepers, f"REVOKE {lacks} ON u FROM unique_keeper")
        [warning] = warnings(database)
        remedy = f'GRANT {lacks} ON "public"."u" TO "unique_keeper"'
        assert f"has lost {lacks} on it, so writes fail. Run: {remedy}" in warning
        statement = "INSERT INTO u VALUES (10, '9')" if unique else "DELETE FROM u WHERE id = 1"
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            run_sql(dsn, statement)
        run_sql(keepers, remedy)
        assert warnings(database) == []
    if unique:
        with pytest.raises(psycopg2.errors.UniqueViolation):
            run_sql(dsn, statement)
    else:
        run_sql(dsn, statement)
        steps.assert_exact(database, "iu")


@pytest.mark.parametrize("place", ["key", "included", "primary key", "array", "base of a domain"])
def test_a_type_that_roir_may_not_use_is_refused_with_the_remedy(dsn: str, keepers: str, place: str) -> None:
    """Entries are tables with that type. Seen to fail with the server's message, after the build's first changes."""
    database = Database(keepers, "roir tests")
    column = {"array": "mood[]", "base of a domain": "temper"}.get(place, "mood")
    run_sql(dsn, "CREATE TYPE mood AS ENUM ('a', 'b')", "CREATE DOMAIN temper AS mood")
    run_sql(
        keepers, f"CREATE TABLE u (id int, k text, m {column}, PRIMARY KEY ({'m' if place == 'primary key' else 'id'}))"
    )
    # A right to a domain isn't needed: entries have its base type.
    run_sql(dsn, "REVOKE USAGE ON TYPE mood, temper FROM PUBLIC")
    definition = ("u", "k", "m" if place == "included" else None)
    if place in ("key", "array", "base of a domain"):
        definition = ("u", "m", None)
    remedy = 'GRANT USAGE ON TYPE public.mood TO "unique_keeper"'
    with pytest.raises(RightMissing) as refused:
        steps.begin(database, "iu", *definition)
    assert remedy in str(refused.value)
    with closing(steps.session(keepers)) as user:
        assert sql(user, "SELECT count(*) FROM roir.generation") == [(0,)]
    run_sql(dsn, remedy)
    steps.make_index(database, "iu", *definition)


def test_policies_that_hold_the_capture_are_told(dsn: str, keepers: str) -> None:
    """FORCE after the publish, even if the build ignores row-level security."""
    database = Database(keepers, "roir tests")
    run_sql(keepers, "CREATE TABLE u (id int PRIMARY KEY, k text)", FILL)
    run_sql(keepers, "ALTER TABLE u ENABLE ROW LEVEL SECURITY")
    steps.make_index(database, "iu", "u", "k", ignore_row_security=True)
    assert warnings(database) == []
    run_sql(keepers, "ALTER TABLE u FORCE ROW LEVEL SECURITY")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="row-level security"):
        run_sql(dsn, "DELETE FROM u WHERE id = 1")
    [warning] = warnings(database)
    remedy = 'ALTER TABLE "public"."u" NO FORCE ROW LEVEL SECURITY'
    assert f"so writes fail. Run: {remedy}" in warning
    run_sql(keepers, remedy)
    run_sql(dsn, "DELETE FROM u WHERE id = 1")
    assert warnings(database) == []
    steps.assert_exact(database, "iu")


def warnings(database: Database) -> list[str]:
    """The warnings of the status."""
    with database.transaction() as connection:
        return faults.warnings(connection)
