"""Attacks by class: triggers that write beside a TRUNCATE, rights that come and go, dependents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import psycopg2.errors
import pytest

from airflow_roir.engine import abort, clean_up, drop, install
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.partitions import detach
from airflow_roir.errors import InvalidInput
from tests.conftest import database_dsn, run_sql
from tests.engine import steps, verifying
from tests.engine.stages import MODES, Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

ROWS = "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 30) i"
PLAIN = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
PARTITIONED = (
    f"{PLAIN} PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (15)",
    "CREATE TABLE t2 PARTITION OF t DEFAULT",
)
SEED = (
    "CREATE FUNCTION seed() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN INSERT INTO t VALUES (1000, 'seed', 0); RETURN NULL; END $$"
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("on", ["t", "other", "t partitioned", "leaf"])
def test_what_a_trigger_writes_after_a_truncate_is_not_lost(
    database: Database, dsn: str, on: str, name: str, mode: str
) -> None:
    """The trigger's events come before the capture's, or between those of the table and of its leaves."""
    run_sql(dsn, *(PARTITIONED if on in ("t partitioned", "leaf") else (PLAIN,)), ROWS, SEED)
    table = {"t partitioned": "t", "leaf": "t1"}.get(on, on)
    truncated = "other, t" if on == "other" else "t"
    if on == "other":
        run_sql(dsn, "CREATE TABLE other (x int)")
    run_sql(dsn, f"CREATE TRIGGER {name} AFTER TRUNCATE ON {table} EXECUTE FUNCTION seed()")
    stage = Stage(database, mode)
    if (on, name) != ("t", "z"):
        with pytest.raises(psycopg2.errors.FeatureNotSupported, match="a trigger has written"):
            run_sql(dsn, f"TRUNCATE {truncated}")
    else:  # the capture's trigger comes first
        run_sql(dsn, f"TRUNCATE {truncated}")
    stage.assert_exact("truncate")
    stage.finish()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_partitioned_table_is_truncated_in_an_old_snapshot(
    database: Database, dsn: str, isolation: str, mode: str
) -> None:
    """All entries go with their files; only a leaf's TRUNCATE would have to see them."""
    run_sql(dsn, *PARTITIONED, ROWS)
    stage = Stage(database, mode)
    user = steps.old_session(dsn, isolation)
    run_sql(dsn, "INSERT INTO t VALUES (77, 'later', 1)")
    sql(user, "TRUNCATE t")
    user.commit()
    sql(user, "INSERT INTO t VALUES (1, 'new', 1)")
    user.commit()
    stage.assert_exact("truncate")
    with pytest.raises(psycopg2.errors.FeatureNotSupported):
        sql(user, "TRUNCATE t1")
    user.close()
    stage.finish()


WRITES = (
    "INSERT INTO t VALUES (500, 'x', 1)",
    "UPDATE t SET k = 'y', v = 0 WHERE id = 3",
    "UPDATE t SET id = 600 WHERE id = 5",
    "DELETE FROM t WHERE id = 4",
)


@pytest.fixture
def roles(dsn: str) -> Iterator[tuple[str, str, str]]:
    """The names of two owners and of a role without rights. Roles belong to the server: they are dropped afterwards."""
    [(database,)] = sql(steps.session(dsn), "SELECT current_database()")
    names = (f"first_{database}", f"second_{database}", f"nobody_{database}")
    run_sql(dsn, *(f"CREATE ROLE {name} LOGIN" for name in names))
    yield names
    for name in names:
        run_sql(dsn, f"DROP OWNED BY {name} CASCADE")
    for name in names:
        run_sql(dsn, f"DROP ROLE {name}")


OWNERS = {
    "reassigned": "REASSIGN OWNED BY {0} TO {1}",
    "reassigned, all else dropped": "REASSIGN OWNED BY {0} TO {1}; DROP OWNED BY {0}",
    "altered": "ALTER TABLE t OWNER TO {1}",
    "altered with its functions": (
        "ALTER TABLE t OWNER TO {1}; DO $$ BEGIN EXECUTE format("
        "'ALTER FUNCTION roir_data.capture_%s() OWNER TO {1}', 't'::regclass::oid); END $$"
    ),
}


@pytest.mark.parametrize("how", OWNERS)
def test_a_new_owner_is_told_and_gets_what_the_capture_needs(
    database: Database, dsn: str, roles: tuple[str, str, str], how: str
) -> None:
    """Found: `REASSIGN OWNED`, or the table and its capture function altered together: every write failed, `roir
    status` and clean-up said nothing. It holds: a warning; a clean-up gives the new owner what the capture needs.
    """
    first, second, _ = roles
    run_sql(dsn, PLAIN, ROWS, f"ALTER TABLE t OWNER TO {first}")
    stage = Stage(database, "active", include="v")
    run_sql(dsn, OWNERS[how].format(first, second))
    with database.transaction() as connection:
        warned = faults.warnings(connection)
    assert any("Run: roir clean-up" in line for line in warned), warned
    clean_up.clean_up(database)
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    run_sql(dsn, *(f"SET ROLE {second}; {write}" for write in WRITES))
    stage.assert_exact(how)


def verified(database: Database) -> None:
    run = verifying.begin(database, repair=True)
    verifying.go_through(database, run)


COMMANDS: dict[str, Callable[[Database], object]] = {
    "detach": lambda database: detach.detach_partition(database, "t1", "test"),
    "verify": verified,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_before_a_clean_up_works_for_a_new_owner(
    database: Database, dsn: str, roles: tuple[str, str, str], command: str
) -> None:
    """The command reads entries with the source. Only the former owner had rights on them: it failed with 42501."""
    first, second, _ = roles
    run_sql(dsn, *PARTITIONED, ROWS, *(f"ALTER TABLE {name} OWNER TO {first}" for name in ("t", "t1", "t2")))
    stage = Stage(database, "active", include="v")
    run_sql(dsn, OWNERS["reassigned"].format(first, second))
    COMMANDS[command](database)
    run_sql(dsn, *(f"SET ROLE {second}; {write}" for write in WRITES[:1]))
    stage.assert_exact(command)
    clean_up.clean_up(database)
    with database.transaction() as connection:
        assert faults.warnings(connection) == []


GRANTED = """
SELECT p.oid::regprocedure::text FROM pg_proc p CROSS JOIN LATERAL aclexplode(p.proacl) a
 WHERE p.pronamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND a.grantee = %s::regrole
"""


@pytest.mark.by_hand("sweeps")
def test_an_owner_has_no_right_of_ours_once_the_last_index_is_dropped(
    database: Database, dsn: str, roles: tuple[str, str, str]
) -> None:
    """DROP ROLE would name a function of ours that belongs to an index that is gone."""
    run_sql(dsn, PLAIN, ROWS, f"ALTER TABLE t OWNER TO {roles[0]}")
    for index in ("ix", "second"):
        steps.make_index(database, index, unique=True, keys="k, id")
    with closing(steps.session(dsn)) as user:
        drop.drop_index(database, "second", "test")
        assert sql(user, GRANTED, roles[0]) != []
        drop.drop_index(database, "ix", "test")
        assert sql(user, GRANTED, roles[0]) == []


@pytest.mark.parametrize("mode", MODES)
def test_an_owner_who_is_a_superuser_no_more_goes_on_writing(
    database: Database, dsn: str, roles: tuple[str, str, str], mode: str
) -> None:
    """Found: an owner who ceased to be a superuser: every write failed. It holds: rights are granted by name, whatever
    else the owner may.
    """
    owner = roles[0]
    run_sql(dsn, PLAIN, ROWS, f"ALTER ROLE {owner} SUPERUSER", f"ALTER TABLE t OWNER TO {owner}")
    stage = Stage(database, mode, include="v")
    run_sql(dsn, f"ALTER ROLE {owner} NOSUPERUSER", *(f"SET ROLE {owner}; {write}" for write in WRITES))
    stage.assert_exact("no superuser any more")
    stage.finish()


def test_default_privileges_give_nobody_a_right_to_ours(
    database: Database, dsn: str, roles: tuple[str, str, str]
) -> None:
    """EXECUTE on the function that reads the source gives its owner's rights; TRIGGER on the delta, the folder's."""
    owner, _, nobody = roles
    run_sql(
        dsn,
        *(f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO {nobody}" for kind in ("TABLES", "FUNCTIONS", "TYPES")),
        f"{PLAIN}; CREATE TABLE secret (x int); REVOKE ALL ON t, secret FROM {nobody}",
        ROWS,
        f"ALTER TABLE t OWNER TO {owner}; ALTER TABLE secret OWNER TO {owner}",
    )
    stage = Stage(database, "direct")
    user = steps.session(dsn)
    sql(user, f"SET ROLE {nobody}")
    mine = sql(
        user,
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace "
        "AND relkind IN ('r', 'p', 'v') AND has_table_privilege(oid, 'SELECT, INSERT, UPDATE, DELETE, TRIGGER') "
        "UNION ALL SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'roir_data'::regnamespace "
        "AND has_function_privilege(oid, 'EXECUTE')",
    )
    assert mine == []
    [(oid,)] = sql(user, "SELECT 't'::regclass::oid")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        sql(user, f"SELECT * FROM roir_data.read_{oid}('SELECT x FROM public.secret') AS r (x int)")
    user.close()
    stage.finish()
    run_sql(
        dsn,
        *(f"ALTER DEFAULT PRIVILEGES REVOKE ALL ON {kind} FROM {nobody}" for kind in ("TABLES", "FUNCTIONS", "TYPES")),
    )


@pytest.mark.parametrize("what", ["g1", "g1_delta", "g1_source", "g1_s001"])
def test_nobody_can_make_a_column_of_a_row_of_ours(
    database: Database, dsn: str, roles: tuple[str, str, str], what: str
) -> None:
    """Otherwise a role that may create a temporary table could keep each abort, drop and clean-up from ending."""
    run_sql(dsn, PLAIN, ROWS)
    stage = Stage(database, "capture")
    with closing(steps.session(dsn)) as user:
        sql(user, f"SET ROLE {roles[2]}")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            sql(user, f"CREATE TEMP TABLE mine (x roir_data.{what})")
    stage.connection.close()
    assert abort.abort(database, "ix", "test", patience_s=2).status == "aborted"


READS = {
    "leaf of a superuser": "ALTER TABLE t1 OWNER TO postgres",
    "owner without rights on a leaf": "REVOKE ALL ON t1 FROM {0}",
    "owner without the schema": "REVOKE ALL ON SCHEMA public FROM PUBLIC; GRANT USAGE ON SCHEMA public TO {2}",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", READS)
def test_a_write_to_a_leaf_needs_no_right_that_it_does_not_need_without_the_index(
    database: Database, dsn: str, roles: tuple[str, str, str], how: str, mode: str
) -> None:
    """The careful path reads the leaf by its name, as the source's owner; the server checks rights on the source."""
    owner, _, writer = roles
    run_sql(dsn, *PARTITIONED, ROWS, *(f"ALTER TABLE {one} OWNER TO {owner}" for one in ("t", "t1", "t2")))
    run_sql(dsn, f"GRANT ALL ON t TO {writer}")
    stage = Stage(database, mode, include="v")
    run_sql(dsn, READS[how].format(*roles))
    run_sql(dsn, *(f"SET ROLE {writer}; {write}" for write in WRITES))
    stage.assert_exact(how)


def test_rows_that_shared_a_primary_key_while_there_was_none_are_told(database: Database, dsn: str) -> None:
    """Dropped and added again, it looks as before: the entry of the row that stayed is gone."""
    run_sql(dsn, PLAIN, ROWS)
    Stage(database, "active", include="v").connection.close()
    run_sql(
        dsn,
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "INSERT INTO t VALUES (7, '2', -7)",
        "DELETE FROM t WHERE id = 7 AND v = 7",
        "ALTER TABLE t ADD PRIMARY KEY (id)",
    )
    with database.transaction() as connection:
        (warned,) = faults.warnings(connection)
    assert "was dropped and added again" in warned
    steps.make_index(database, table=None, keys=None)
    with database.transaction() as connection:
        assert faults.warnings(connection) == []


def test_partitions_by_the_hash_of_a_domain_are_refused(database: Database, dsn: str) -> None:
    """`satisfies_hash_partition` needs the key's own type, which is the domain; an entry has its base type."""
    run_sql(
        dsn,
        "CREATE DOMAIN number AS int",
        "CREATE TABLE t (id number PRIMARY KEY, k text, v int) PARTITION BY HASH (id)",
        *(f"CREATE TABLE t{i} PARTITION OF t FOR VALUES WITH (MODULUS 2, REMAINDER {i})" for i in range(2)),
        ROWS,
    )
    with pytest.raises(InvalidInput, match=r"public.t is partitioned by the hash of .*id.*domain public.number"):
        Stage(database, "capture")


@pytest.mark.parametrize("guarded", [False, True])
def test_a_level_by_the_hash_of_a_domain_that_comes_later_is_told(database: Database, dsn: str, guarded: bool) -> None:
    """Found: a level by the hash of a domain, added later, was registered without a word, though no entry can be told
    to its partition. It holds: not registered, and warned of.
    """
    run_sql(
        dsn,
        "CREATE DOMAIN number AS int",
        "CREATE TABLE t (d int, id number, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
    )
    steps.finish_all(database, steps.begin(database)[1])
    run_sql(
        dsn,
        *(["SELECT roir.guard()"] if guarded else []),
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10) PARTITION BY HASH (id)",
        "CREATE TABLE t10 PARTITION OF t1 FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
    )
    with database.transaction() as connection:
        assert any("t10" in line and "roir sync-partitions" in line for line in faults.warnings(connection))
    (said,) = clean_up.clean_up(database).warnings[:1]
    assert "t1 is partitioned by the hash of id" in said


@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_an_inheritance_child_does_not_answer_for_the_tables_own(
    database: Database, dsn: str, mode: str
) -> None:
    """While the child is there status warns. Once it is gone, it leaves an entry without a row."""
    run_sql(dsn, PLAIN, ROWS)
    stage = Stage(database, mode, include="v")
    run_sql(
        dsn,
        "CREATE TABLE child () INHERITS (t)",
        "BEGIN; INSERT INTO child VALUES (9, '4', -9); DELETE FROM ONLY t WHERE id = 9; COMMIT",
        "DROP TABLE child",
    )
    stage.assert_exact("child")


def test_default_privileges_give_nobody_a_right_to_the_control_schema(server: str, roles: tuple[str, str, str]) -> None:
    """Statements of ours are made from the texts in `roir.generation`."""
    nobody = roles[2]
    name = f"fresh_{nobody}"
    run_sql(server, f"CREATE DATABASE {name}")
    try:
        fresh = database_dsn(server, name)
        run_sql(fresh, f"ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO {nobody}")
        install.init(Database(fresh, "roir tests"))
        with closing(steps.session(fresh)) as user:
            [(may,)] = sql(user, "SELECT has_table_privilege(%s, 'roir.generation', 'UPDATE')", nobody)
        assert not may
    finally:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")
