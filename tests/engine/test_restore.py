"""A dump of a database with indexes, restored: entries and capture are right at once, the rest after `roir init`."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg2.errors
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from airflow_roir.engine import abort, clean_up, drop, install
from airflow_roir.engine.capture import trigger_gaps
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.health.faults import warnings
from airflow_roir.engine.partitions.sync import sync_partitions
from airflow_roir.engine.reference import removal
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.unique.on_conflict import set_on_conflict
from airflow_roir.errors import NotFound, OperationFailed, SchemaVersionMismatch
from airflow_roir.operation import Status
from servers.postgres import embedded_postgres, programs
from tests.conftest import database_dsn, run_sql
from tests.engine import referring, steps
from tests.engine.public import World
from tests.engine.steps import sql
from tests.engine.test_detach import assert_shown
from tests.engine.test_partitions import SHAPES, make

pytestmark = pytest.mark.sample(1)

_numbers = itertools.count(1)
Restore = Callable[[], Database]


@pytest.fixture
def restore(dsn: str, server: str, pg: int, tmp_path: Path) -> Iterator[Restore]:
    """Dumps the test's database, and restores it into a new one by pg_restore, which has an order of its own."""
    made = []

    def dump_and_restore() -> Database:
        name = f"restored_{next(_numbers)}"
        run_sql(server, f"CREATE DATABASE {name}")
        made.append(name)
        restored, dump = database_dsn(server, name), tmp_path / name
        subprocess.run([programs(pg) / "pg_dump", "-Fc", "-f", dump, dsn], check=True)
        # This gives each table another oid than it had.
        run_sql(restored, "CREATE TABLE padding (); DROP TABLE padding")
        subprocess.run([programs(pg) / "pg_restore", "--exit-on-error", "-d", restored, dump], check=True)
        return Database(restored, "roir tests")

    yield dump_and_restore
    for name in made:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


def publish(database: Database, index: str = "ix", keys: str = "k", **options: object) -> None:
    _, run = steps.begin(database, index, keys=keys, **options)  # type: ignore[arg-type]
    steps.finish_all(database, run)


def gaps(database: Database, table: str = "t") -> list[trigger_gaps.Gap]:
    with database.transaction() as connection:
        oid = execute(connection, f"SELECT 'public.{table}'::regclass::oid").scalar_one()
        return trigger_gaps.gaps(connection, oid)


WRITES = (
    "UPDATE t SET k = 'new' WHERE id % 4 = 0",
    "UPDATE t SET d = (d + 10) % 30 WHERE id % 9 = 1",
    "DELETE FROM t WHERE id % 5 = 0",
    "INSERT INTO t VALUES (3, 7000, 'in', 1), (25, 7001, NULL, 2)",
)


@pytest.mark.parametrize("guarded", [False, True], ids=["detected", "guarded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_restored_index_is_exact_and_captures_after_init(
    database: Database, dsn: str, restore: Restore, shape: str, guarded: bool
) -> None:
    make(dsn, shape)
    publish(database, include="v")
    publish(database, "other", "v")
    if guarded:
        run_sql(dsn, "SELECT roir.guard()")
    there = restore()
    user = steps.session(there.dsn)
    run_sql(there.dsn, *WRITES)
    looked_up = "SELECT k, d, id, v FROM {} ORDER BY 2, 3"
    assert sql(user, looked_up.format("ix")) == sql(user, looked_up.format("t")), "captured from the first write on"
    user.rollback()
    for command in (lambda: status(there), lambda: clean_up.clean_up(there), lambda: steps.begin(there, keys="d")):
        with pytest.raises(SchemaVersionMismatch, match=r"restored from a dump: .* (public\.)?t .*roir init"):
            command()
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="restored from a dump"):
        run_sql(there.dsn, "TRUNCATE t")
    install.init(there)
    install.init(there)
    assert gaps(there) == []
    report = clean_up.clean_up(there)
    assert (report.warnings, [line for line in report.waiting if "partition" in line]) == ([], [])
    for index in ("ix", "other"):
        steps.assert_exact(there, index)
    run_sql(there.dsn, *(w.replace("7", "8") for w in WRITES), "TRUNCATE t1")
    for index in ("ix", "other"):
        steps.assert_exact(there, index)
    if guarded:
        with pytest.raises(psycopg2.errors.ObjectInUse):
            run_sql(there.dsn, "ALTER TABLE t DETACH PARTITION t0 CONCURRENTLY")
        run_sql(there.dsn, "ALTER TABLE t DETACH PARTITION t0")
    else:
        run_sql(there.dsn, "SELECT roir.unguard()", "ALTER TABLE t DETACH PARTITION t0")
        sync_partitions(there, "t", "test")
    clean_up.clean_up(there)
    assert_shown(there)
    steps.make_index(there, table=None, keys=None)
    run_sql(there.dsn, "UPDATE t SET k = 'last' WHERE id % 2 = 0", "TRUNCATE t")
    assert steps.assert_exact(there).rows == 0
    user.close()


def test_an_ordinary_table_needs_nothing_for_its_writes(database: Database, dsn: str, restore: Restore) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text)",
        "INSERT INTO t SELECT i, i % 7 FROM generate_series(1, 50) i",
    )
    publish(database)
    there = restore()
    run_sql(there.dsn, "UPDATE t SET id = id + 1000, k = 'x' WHERE id < 9", "DELETE FROM t WHERE id = 20")
    install.init(there)
    assert steps.assert_exact(there).rows == 49
    run_sql(there.dsn, "TRUNCATE t", "INSERT INTO t VALUES (1, 'a')")
    assert steps.assert_exact(there).rows == 1
    assert "restored" in [row[0] for row in sql(steps.session(there.dsn), "SELECT action FROM roir.event")]
    drop.drop_index(there, "ix", "test")
    assert sql(steps.session(there.dsn), "SELECT proname FROM pg_proc WHERE proname ~ '^capture_[0-9]'") == []


def test_an_unfinished_operation_ends_with_a_restore(database: Database, dsn: str, restore: Restore) -> None:
    make(dsn)
    publish(database)
    steps.built(database, table=None, keys=None, ranges=6)
    there = restore()
    install.init(there)
    (operation,) = status(there)
    assert operation.status == Status.FAILED
    assert "restored from a dump" in str(operation.error)
    with pytest.raises(OperationFailed, match="roir abort"):
        steps.begin(there, table=None, keys=None)
    run_sql(there.dsn, *WRITES)
    abort.abort(there, "ix", "test")
    steps.assert_exact(there)
    publish(there, keys=None, table=None)  # type: ignore[arg-type]
    steps.assert_exact(there)


def test_an_oid_that_another_source_had(database: Database, dsn: str, restore: Restore) -> None:
    """Now `a` has the oid that `b` had: neither is taken for the other."""
    for table in ("a", "b"):
        run_sql(
            dsn,
            f"CREATE TABLE {table} (id int PRIMARY KEY, k text)",
            f"INSERT INTO {table} SELECT i, '{table}' || i FROM generate_series(1, 20) i",
        )
        steps.make_index(database, f"ix_{table}", table)
    there = restore()
    [(recorded, other)] = sql(
        steps.session(there.dsn),
        "SELECT source_oid, 'a'::regclass::oid::bigint FROM roir.index WHERE name = 'ix_b'",
    )
    run_sql(
        there.dsn,
        f"UPDATE roir.index SET source_oid = {other} WHERE name = 'ix_b'",
        f"ALTER FUNCTION roir_data.capture_{recorded}() RENAME TO capture_{other}",
        f"ALTER FUNCTION roir_data.truncate_{recorded}() RENAME TO truncate_{other}",
    )
    install.init(there)
    run_sql(there.dsn, "UPDATE a SET k = 'new' WHERE id < 5", "TRUNCATE b", "INSERT INTO b VALUES (1, 'only')")
    assert steps.assert_exact(there, "ix_a").rows == 20
    assert steps.assert_exact(there, "ix_b").rows == 1
    with there.transaction() as connection:
        assert warnings(connection) == []


@pytest.mark.parametrize("shape", ["range", "hash"])
def test_entries_that_were_leaving_stay_hidden(database: Database, dsn: str, restore: Restore, shape: str) -> None:
    make(dsn, shape)
    publish(database, include="v")
    run_sql(dsn, "SELECT roir.detach_partition('t1', and_drop => true)")
    there = restore()
    install.init(there)
    assert_shown(there)
    assert clean_up.clean_up(there).partition_entries > 0
    assert_shown(there)
    steps.assert_exact(there)


@pytest.mark.sample(0)
def test_a_dump_without_the_triggers_is_not_taken_for_the_source(
    database: Database, dsn: str, restore: Restore
) -> None:
    make(dsn)
    publish(database)
    run_sql(dsn, f"DROP TRIGGER {steps.capture_triggers(dsn)[0]} ON t")
    there = restore()
    install.init(there)
    with pytest.raises(NotFound, match="was dropped"):
        steps.begin(there, table=None, keys=None)


# The changes of a pg_upgrade, which test_upgrade.py makes for real: it keeps oids, and gives schemas and links new
# ones.
UPGRADE = ("UPDATE roir.home SET schema_oid = 0", "UPDATE roir.source_partition SET link = '1'")


@pytest.mark.sample(0)
@pytest.mark.parametrize("shape", ["range", "two levels"])
def test_partitions_are_known_again_after_a_pg_upgrade(database: Database, dsn: str, shape: str) -> None:
    """Found: after `pg_upgrade` all partitions were gone and new, and the DDL guard could refuse the advised `roir
    sync-partitions`. It holds: `roir init` knows them again, in every phase; what was detached since is still told
    apart.
    """
    make(dsn, shape)
    publish(database, include="v")
    _, run = steps.begin(database, table=None, keys=None)
    run_sql(dsn, "SELECT roir.guard()", *UPGRADE, *WRITES, "TRUNCATE t1")
    for command in (lambda: status(database), lambda: clean_up.clean_up(database)):
        with pytest.raises(SchemaVersionMismatch, match=r"by pg_upgrade: .*roir init"):
            command()
    install.init(database)
    assert clean_up.clean_up(database).waiting == []
    steps.finish_all(database, run)
    run_sql(dsn, "UPDATE t SET k = 'later' WHERE id % 3 = 0", "TRUNCATE t2")
    steps.assert_exact(database)
    assert_shown(database)


@pytest.mark.parametrize(("shape", "out", "to"), [("range", "t1", 20), ("two levels", "tx", 30)])
def test_what_was_taken_out_between_upgrade_and_init_is_not_taken_for_known(
    database: Database, dsn: str, shape: str, out: str, to: int
) -> None:
    make(dsn, shape)
    publish(database, include="v")
    run_sql(dsn, *UPGRADE, f"ALTER TABLE t DETACH PARTITION {out}", "DELETE FROM t1 WHERE id % 2 = 0")
    run_sql(dsn, f"ALTER TABLE t ATTACH PARTITION {out} FOR VALUES FROM (10) TO ({to})")
    install.init(database)
    assert any("roir sync-partitions" in line for line in clean_up.clean_up(database).waiting)
    assert sync_partitions(database, "t", "test").gone == [f"public.{out}"]
    assert_shown(database)
    steps.assert_exact(database)


@pytest.fixture
def replace_table(dsn: str, pg: int, tmp_path: Path) -> Callable[..., None]:
    """Dumps `t` with its partitions, writes, and restores the dump over it. The control schema stays."""

    def replace(*between: str) -> None:
        dump = tmp_path / "t"
        subprocess.run([programs(pg) / "pg_dump", "-Fc", "-t", "t", "-t", "t[0-9]", "-f", dump, dsn], check=True)
        run_sql(dsn, *between, "DROP TABLE t CASCADE")
        restored = [programs(pg) / "pg_restore", "--exit-on-error", "-d", dsn, dump]
        subprocess.run(restored, check=True)

    return replace


@pytest.mark.parametrize("shape", ["range", "ordinary"])
def test_a_single_table_that_was_restored_over_itself_is_not_adopted(
    database: Database, dsn: str, replace_table: Callable[..., None], shape: str
) -> None:
    """No capture has seen its rows: init changes nothing, and the index has a warning until it is dropped."""
    if shape == "ordinary":
        run_sql(dsn, "CREATE TABLE t (d int, id int PRIMARY KEY, k text, v int)")
        run_sql(dsn, "INSERT INTO t SELECT i, i, i % 7, i FROM generate_series(1, 50) i")
    else:
        make(dsn)
    run_sql(dsn, "CREATE TABLE other (id int PRIMARY KEY, k text)", "INSERT INTO other VALUES (1, 'a')")
    publish(database, "ix_other", table="other")
    publish(database, include="v")
    replace_table("DELETE FROM t WHERE id % 2 = 0")
    install.init(database)
    with database.transaction() as connection:
        assert any("index public.ix:" in line and "roir drop" in line for line in warnings(connection))
        assert [line for line in warnings(connection) if "t has taken its place" in line]
        assert not any("ix_other" in line for line in warnings(connection))
    # The other index's commands go on, and users' writes too.
    status(database)
    steps.assert_exact(database, "ix_other")
    run_sql(
        dsn,
        "UPDATE t SET k = 'x' WHERE id = 1",
        "DELETE FROM t WHERE id = 3",
        "TRUNCATE t1, t2" if shape == "range" else "SELECT 1",
    )


def test_the_index_of_a_table_that_was_replaced_is_dropped_and_built_anew(
    database: Database, dsn: str, replace_table: Callable[..., None]
) -> None:
    make(dsn)
    publish(database, include="v")
    replace_table("DELETE FROM t WHERE id % 2 = 0")
    drop.drop_index(database, "ix", "test")
    publish(database, include="v")
    run_sql(dsn, "UPDATE t SET k = 'y' WHERE id = 5", "TRUNCATE t1")
    steps.assert_exact(database)
    with database.transaction() as connection:
        assert warnings(connection) == []


# An ACL that isn't written down is the server's default. A function or view that is created again has an ACL of its
# own.
RIGHTS = """
SELECT regexp_replace(o.name, '_[0-9]+', '_N', 'g'), a.grantee::regrole, a.privilege_type
  FROM (SELECT 'schema ' || n.nspname AS name, n.nspowner AS owner,
               coalesce(n.nspacl, acldefault('n', n.nspowner)) AS acl
          FROM pg_namespace n WHERE n.nspname IN ('roir', 'roir_data')
        UNION ALL
        SELECT c.oid::regclass::text, c.relowner, coalesce(c.relacl, acldefault('r', c.relowner))
          FROM pg_class c WHERE c.relnamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND c.relkind <> 'S'
        UNION ALL
        SELECT 'type ' || t.oid::regtype, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
          FROM pg_type t WHERE t.typnamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND t.typelem = 0
        UNION ALL
        SELECT p.oid::regprocedure::text, p.proowner,
               coalesce(p.proacl, acldefault('f', p.proowner))
          FROM pg_proc p WHERE p.pronamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace)) o
 CROSS JOIN LATERAL aclexplode(o.acl) a ORDER BY 1, 2, 3
"""


def test_rights_are_as_they_were_though_the_dump_was_restored_without_them(
    world: World, server: str, pg: int, tmp_path: Path
) -> None:
    """`pg_restore --no-privileges`, as hosters advise: seen to refuse every read of the view, or every write."""
    steps.make_index(world.database, "public.ix", "public.t")
    steps.make_index(world.database, "public.one", "public.t", "id", unique=True)
    clean_up.clean_up(world.database)
    name = f"restored_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name}")
    try:
        there = World(database_dsn(server, name), world.database, world.roles)
        there.run(f"GRANT CREATE ON DATABASE {name} TO builder")
        by = "super" if world.database.dsn == world.dsn else "builder"
        there.database = Database(there.dsn_of(by), "roir tests")
        dump = tmp_path / name
        subprocess.run([programs(pg) / "pg_dump", "-Fc", "-f", dump, world.dsn], check=True)
        run_sql(there.dsn, "CREATE TABLE padding (); DROP TABLE padding")
        subprocess.run([programs(pg) / "pg_restore", "-x", "--exit-on-error", "-d", there.dsn, dump], check=True)
        install.init(there.database)
        there.run("GRANT SELECT ON ix, one TO reader")
        with there.session("alice") as owner:
            sql(owner, "INSERT INTO t VALUES (1000, 'new', 1)")
        with there.session("reader") as reader:
            for index in ("ix", "one"):
                assert sql(reader, f"SELECT count(*) FROM {index} WHERE id = 1000") == [(1,)]
        assert there.outcome("alice", "INSERT INTO t SELECT 1001, k, v FROM t LIMIT 1") == "done"
        both = [sql(w.session("super"), RIGHTS) for w in (world, there)]
        assert both[0] == both[1]
        with there.database.transaction() as connection:
            assert warnings(connection) == []
    finally:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def elsewhere(pg: int) -> Iterator[str]:
    """The DSN of the superuser of another server, of the newest version, which has none of the roles."""
    with embedded_postgres(max(pg, 18)) as dsn:
        run_sql(dsn, "CREATE ROLE hosted LOGIN CREATEDB")
        yield dsn


@pytest.mark.parametrize("by", ["hosted", "postgres"])
@pytest.mark.parametrize("guarded", [False, True], ids=["detected", "guarded"])
def test_a_dump_by_sections_and_without_owners_goes_into_the_newest_server(
    world: World, elsewhere: str, pg: int, tmp_path: Path, by: str, guarded: bool
) -> None:
    """A move to a hoster: other roles, no superuser, the newer pg_restore; writes between two sections."""
    there = Database(make_dsn(elsewhere, user=by, dbname=f"moved_{next(_numbers)}"), "roir tests")
    name = parse_dsn(there.dsn)["dbname"]
    world.run("CREATE TABLE p (d int, id int, k text, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)")
    world.run(*(f"CREATE TABLE p{i} PARTITION OF p FOR VALUES FROM ({i}0) TO ({i + 1}0)" for i in range(3)))
    world.run("INSERT INTO p SELECT i % 30, i, i % 7 FROM generate_series(1, 100) i")
    world.run(*(f"ALTER TABLE {table} OWNER TO bob" for table in ("p", "p0", "p1", "p2")))
    for index, table, unique in (("ix", "t", False), ("one", "t", True), ("parts", "p", False)):
        steps.make_index(world.database, f"public.{index}", f"public.{table}", "id" if unique else "k", unique=unique)
    if guarded:
        world.run("SELECT roir.guard()")
    # The dump is by the old version's own tool: 15.20 writes attribute options that 18.4's tools don't know.
    tools, dump = programs(max(pg, 18)), tmp_path / "dump"
    subprocess.run([programs(pg) / "pg_dump", "-Fc", "-f", dump, world.dsn], check=True)
    run_sql(make_dsn(elsewhere, user=by, dbname="postgres"), f"CREATE DATABASE {name}")
    try:
        for section in ("pre-data", "data", "post-data"):
            command = [tools / "pg_restore", "-O", "-x", f"--section={section}", "-d", there.dsn, dump]
            said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            failed = [line for line in said.splitlines() if "error:" in line]
            # Only a superuser can have event triggers; roir works without them.
            assert all("event trigger" in line for line in failed), said
            assert bool(failed) == (guarded and by == "hosted" and section == "post-data")
        run_sql(there.dsn, "INSERT INTO t VALUES (1000, 'new', 1)", "DELETE FROM p WHERE id % 5 = 0")
        install.init(there)
        run_sql(there.dsn, "UPDATE t SET k = 'later' WHERE id % 3 = 0", "UPDATE p SET d = (d + 10) % 30")
        with pytest.raises(psycopg2.errors.UniqueViolation):
            run_sql(there.dsn, "INSERT INTO t VALUES (1000, 'again', 1)")
        run_sql(there.dsn, "TRUNCATE p1", "ALTER TABLE p DETACH PARTITION p2")
        sync_partitions(there, "p", "test")
        clean_up.clean_up(there)
        for index in ("ix", "one", "parts"):
            steps.assert_exact(there, f"public.{index}")
        steps.make_index(there, "public.parts", None, None)
        steps.assert_exact(there, "public.parts")
        with there.transaction() as connection:
            assert warnings(connection) == []
    finally:
        run_sql(elsewhere, f"DROP DATABASE {name} WITH (FORCE)")


def test_on_conflict_works_in_the_restored_database(restore: Restore, database: Database, dsn: str) -> None:
    """The function's name and text, and the names of its triggers, have old oids."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int, part int, k text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(2)),
        "INSERT INTO t VALUES (1, 0, 'a'), (2, 1, 'b')",
    )
    steps.make_index(database, "ix", "t", "k", unique=True)
    set_on_conflict(database, "t", "test")
    restored = restore()
    install.init(restored)
    clean_up.clean_up(restored)
    set_on_conflict(restored, "t", "test")
    user = steps.session(restored.dsn)
    assert sql(user, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '~roir%' AND tgparentid = 0") == [(3,)]
    sql(user, "SET roir.on_conflict = 'nothing'")
    inserted = sql(user, "INSERT INTO t VALUES (3, 0, 'a'), (4, 1, 'c'), (5, 1, 'c') RETURNING id")
    assert inserted == [(4,)]
    with pytest.raises(psycopg2.errors.UniqueViolation):
        sql(user, "UPDATE t SET part = 1, k = 'b' WHERE id = 1")
    user.close()
    steps.assert_exact(restored, "ix")


def test_a_foreign_key_holds_in_the_restored_database(restore: Restore, database: Database, dsn: str) -> None:
    """Found: the condition of a trigger couldn't be restored, since the dump left out a type."""
    referring.make_parent(dsn)
    referring.make_child(dsn)
    steps.make_index(database, referring.INDEX, "orders", "id", unique=True)
    referring.refer(database)
    restored = restore()
    install.init(restored)
    assert clean_up.clean_up(restored).warnings == []
    user = steps.session(restored.dsn)
    sql(user, "INSERT INTO payments (id, order_id) VALUES (100, 6)")
    with pytest.raises(psycopg2.errors.ForeignKeyViolation, match=r"Key \(order_id\)=\(77\) is not present"):
        sql(user, "INSERT INTO payments (id, order_id) VALUES (101, 77)")
    user.rollback()
    with pytest.raises(psycopg2.errors.ForeignKeyViolation, match="is still referenced"):
        sql(user, "UPDATE orders SET id = 50 WHERE id = 1")
    user.close()
    removal.remove_named(restored, referring.INDEX, "payments", "test")
