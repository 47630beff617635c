"""Attacks with a free hand, none of them foreseen. Each is a class of its own, named by its test."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, lifecycle, prepare
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.partitions import attach, remove_entries, sync
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.errors import LockNotAcquired, SourceChanged
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.interposed import before
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

PARTITIONED = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE p2 PARTITION OF t FOR VALUES FROM (100) TO (200)",
    "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 150) i",
)
PLAIN = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 50) i",
)


def said(database: Database) -> list[str]:
    """The messages of status and clean-up."""
    with database.transaction() as connection:
        told = faults.warnings(connection)
    report = clean_up.clean_up(database)
    return told + report.warnings + report.waiting


def published(database: Database, include: str | None = "v") -> None:
    steps.make_index(database, include=include)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("how", ["raw", "roir"])
def test_included_values_change_while_a_partition_is_out(database: Database, dsn: str, how: str) -> None:
    """Found: included values changed while a partition was detached, then a plain `ATTACH`: the old values stayed,
    `roir sync-partitions` and `roir status` said nothing. It holds: such a row counts as brought, and its entry is
    written again.
    """
    run_sql(dsn, *PARTITIONED)
    published(database)
    if how == "raw":
        run_sql(dsn, "ALTER TABLE t DETACH PARTITION p1")
    else:
        run_sql(dsn, "SELECT roir.detach_partition('p1')")
    run_sql(dsn, "UPDATE p1 SET v = -1 WHERE id = 7")
    run_sql(dsn, "ALTER TABLE t ATTACH PARTITION p1 FOR VALUES FROM (0) TO (100)")
    told = said(database)
    print("told", told)
    print(sync.sync_partitions(database, "t", "test"))
    print(said(database))
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_more_than_a_million_subtransactions(database: Database, dsn: str) -> None:
    """Found: a savepoint that begins a million transactions after its own: rows that it wrote twice lost their entries,
    silently. It holds: our own transaction is recognised whatever its number.
    """
    run_sql(dsn, *PLAIN)
    published(database)
    user = steps.session(dsn)
    sql(user, "UPDATE t SET v = 0 WHERE id = 1")
    other = steps.session(dsn)
    sql(
        other,
        "CREATE TEMP TABLE burnt (i int); DO $$ BEGIN FOR i IN 1..1000100 LOOP "
        "BEGIN INSERT INTO burnt VALUES (1); EXCEPTION WHEN OTHERS THEN NULL; END; END LOOP; END $$",
    )
    other.rollback()
    sql(user, "SAVEPOINT a")
    sql(user, "INSERT INTO t VALUES (1000, 'new', 1)")
    sql(user, "UPDATE t SET v = 2 WHERE id = 1000")
    sql(user, "UPDATE t SET id = 2000 WHERE id = 1000")
    user.commit()
    steps.assert_exact(database)


def test_a_partition_made_by_a_superuser(database: Database, dsn: str, stranger: str) -> None:
    """Found: a partition that a superuser made: `DELETE` failed in it. It holds: the partition is read by way of its
    table.
    """
    [(role,)] = sql(steps.session(stranger), "SELECT current_user")
    run_sql(dsn, *PARTITIONED, *(f"ALTER TABLE {t} OWNER TO {role}" for t in ("t", "p1", "p2")))
    published(database)
    run_sql(dsn, "CREATE TABLE p3 PARTITION OF t FOR VALUES FROM (200) TO (300)")
    app = steps.session(stranger)
    sql(app, "INSERT INTO t VALUES (201, 'a', 1), (202, 'b', 2)")
    app.commit()
    print(said(database))
    sql(app, "DELETE FROM t WHERE id = 201")
    app.commit()
    steps.assert_exact(database)


def test_a_vacuum_elsewhere_holds_up_no_new_partition(database: Database, dsn: str) -> None:
    """Found: under the DDL guard a new partition waited for a `VACUUM` of another new one. It holds: it doesn't."""
    run_sql(dsn, *PARTITIONED)
    published(database)
    run_sql(dsn, "CREATE TABLE p3 PARTITION OF t FOR VALUES FROM (200) TO (300)", "SELECT roir.guard()")
    vacuum = steps.session(dsn)
    # A writer of p3 would lock t too, for which the server itself waits.
    sql(vacuum, "LOCK TABLE p3 IN SHARE UPDATE EXCLUSIVE MODE")
    run_sql(dsn, "SET lock_timeout = '300ms'", "CREATE TABLE p4 PARTITION OF t FOR VALUES FROM (300) TO (400)")
    vacuum.commit()
    steps.assert_exact(database)


def test_a_leaf_is_truncated_and_an_old_snapshot_reads(database: Database, dsn: str) -> None:
    """No snapshot sees the rows of a truncated table any more; an older one sees the entries as they were then."""
    run_sql(dsn, *PARTITIONED)
    published(database)
    said(database)
    reader = steps.old_session(dsn)
    run_sql(dsn, "TRUNCATE p1")
    assert sql(reader, "SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM ix)") == [(51, 150)]
    reader.rollback()
    steps.assert_exact(database)


@pytest.mark.parametrize("phase", ["prepared", "published"])
def test_domain_over_an_enum_that_is_renamed(database: Database, dsn: str, phase: str) -> None:
    """Found: a domain's base type renamed, an operator class in another schema (`ALTER EXTENSION … SET SCHEMA`): every
    write failed for good. It holds: a warning; a clean-up follows the names.
    """
    run_sql(
        dsn,
        "CREATE TYPE mood AS ENUM ('a', 'b')",
        "CREATE DOMAIN dm AS mood",
        "CREATE TABLE t (id int PRIMARY KEY, k dm, v int)",
        "INSERT INTO t SELECT i, 'a', i FROM generate_series(1, 20) i",
    )
    _, run = steps.begin(database, include="v")
    if phase == "published":
        steps.finish_all(database, run)
    run_sql(dsn, "ALTER TYPE mood RENAME TO feeling")
    told = said(database)
    assert "has another name now" in told[0]
    assert said(database) == []
    run_sql(dsn, "UPDATE t SET k = 'b' WHERE id = 4", "DELETE FROM t WHERE id = 3")
    if phase == "prepared":
        steps.finish_all(database, start_run(database, "ix", "test", take_over=True))
    steps.assert_exact(database)


# Another table takes the name in the middle of a command, as in a blue-green migration.
SWAP = "BEGIN; ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t; COMMIT"


@pytest.mark.parametrize("options", [{"sample": 100, "repair": True}, {"repair": True}], ids=["sample", "whole"])
def test_names_are_swapped_while_an_index_is_repaired(database: Database, dsn: str, options: dict[str, Any]) -> None:
    """Found: tables' names exchanged in the middle of a command: a batch copied the other table's rows, a rebuild
    didn't drain the source's writers, a removal and a repair removed right entries (`repaired`). It holds: the name is
    checked again under the lock; else the step is repeated, or the command says so and continues when you repeat it.
    """
    run_sql(dsn, *PLAIN, "CREATE TABLE t_new (LIKE t INCLUDING ALL)")
    published(database)
    run = verifying.begin(database, **options)
    if "sample" not in options:
        run_sql(dsn, "UPDATE roir_data.g1 SET c3 = -1 WHERE c2 = 3")
        verifying.to_check(database, run)
    one = verifying.worker(database, run)
    run_sql(dsn, SWAP)
    with suppress(LockNotAcquired):
        _go_on(one)
    one.connection.close()
    _go_on(verifying.worker(database, start_run(database, "ix", "test", take_over=True)))
    steps.assert_exact(database)


def _go_on(one: VerifyWorker) -> None:
    while not isinstance(claim := one.claim(), Stop):
        if one.unit(claim).found:
            one.repair(claim)


def test_names_are_swapped_in_the_middle_of_a_batch(database: Database, dsn: str) -> None:
    """Found: tables' names exchanged in the middle of a command: a batch copied the other table's rows, a rebuild
    didn't drain the source's writers, a removal and a repair removed right entries (`repaired`). It holds: the name is
    checked again under the lock; else the step is repeated, or the command says so and continues when you repeat it.
    """
    run_sql(dsn, *PLAIN, "CREATE TABLE t_new (LIKE t INCLUDING ALL)", "INSERT INTO t_new VALUES (1000, 'other', 1)")
    _, run = steps.begin(database, include="v", ranges=1, batch_rows=20, scan="key")
    worker = steps.worker(database, run)
    claim: Any = worker.claim()
    claim = worker.step(claim).rest  # type: ignore[union-attr]
    with before(database, "LOCK TABLE ONLY", lambda: run_sql(dsn, SWAP)), suppress(LockNotAcquired):
        worker.step(claim)
    worker.connection.close()
    run = start_run(database, "ix", "test", take_over=True)
    steps.build_all(database, run)
    steps.seal_all(database, run)
    steps.fold_all(database, run)
    steps.publish_all(database, run)
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_names_are_swapped_while_entries_of_a_partition_are_removed(database: Database, dsn: str) -> None:
    """Found: tables' names exchanged in the middle of a command: a batch copied the other table's rows, a rebuild
    didn't drain the source's writers, a removal and a repair removed right entries (`repaired`). It holds: the name is
    checked again under the lock; else the step is repeated, or the command says so and continues when you repeat it.
    """
    run_sql(dsn, *PARTITIONED, "CREATE TABLE t_new (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)")
    published(database)
    run_sql(
        dsn,
        "SELECT roir.detach_partition('p1')",
        "CREATE TABLE p1b PARTITION OF t FOR VALUES FROM (0) TO (100)",
        "INSERT INTO t SELECT * FROM p1 WHERE id < 50",
    )
    with database.transaction() as connection:
        rows = remove_entries.leaving(connection)
    run_sql(dsn, SWAP)
    for row in rows:
        with suppress(LockNotAcquired):
            remove_entries.remove(database, row, lambda _line: None, 0)
    steps.assert_exact(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize("verify", ["none"])
def test_names_are_swapped_while_a_rebuild_waits_for_its_lock(database: Database, dsn: str, verify: str) -> None:
    """The lock is taken by name: another table's writers are drained, and the source's aren't."""
    run_sql(dsn, *PLAIN, "CREATE TABLE t_new (LIKE t INCLUDING ALL)")
    published(database)
    blocker, writer = steps.session(dsn), steps.session(dsn)
    sql(blocker, "LOCK TABLE t IN ROW EXCLUSIVE MODE")

    def swap(line: str) -> None:
        if not blocker.closed and not line.startswith("expected"):
            blocker.close()
            run_sql(dsn, SWAP)
            sql(writer, "INSERT INTO t_old VALUES (5000, 'w', 1)")

    options = BuildOptions(lock_timeout_ms=50, lock_patience_s=2, verify=verify)
    with suppress(LockNotAcquired):
        prepare.prepare(database, IndexDefinition.parse("ix", None, None, None), options, "test", swap)
    if not sql(steps.session(dsn), "SELECT id FROM roir.operation WHERE status = 'running'"):
        writer.commit()
        prepare.prepare(database, IndexDefinition.parse("ix", None, None, None), options, "test")
    run = start_run(database, "ix", "test", take_over=True)
    steps.build_all(database, run)
    steps.seal_all(database, run)
    writer.commit()
    lifecycle.run_phases(database, run)
    steps.assert_exact(database)


@pytest.mark.parametrize("scan", ["key", "block", "auto"])
def test_a_partitioned_table_without_partitions(database: Database, dsn: str, scan: str) -> None:
    """Found: a partitioned table without partitions: prepare ended in the server's own error. It holds: it is indexed,
    its partitions are picked up.
    """
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)")
    _, run = steps.begin(database, include="v", scan=scan)
    run_sql(
        dsn,
        "CREATE TABLE p1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
        "INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 2)",
    )
    steps.finish_all(database, run)
    run_sql(dsn, "DELETE FROM t WHERE id = 2")
    steps.assert_exact(database)
    steps.make_index(database, table=None, keys=None)
    steps.assert_exact(database)


def type_with_operators(schema: str) -> list[str]:
    """SQL for a type `pair` whose operators are in this schema, as those of an extension's type are."""
    operators = list(enumerate(["<", "<=", "=", ">=", ">"]))
    pair = f"{schema}.pair"
    return [
        f"CREATE SCHEMA {schema}",
        f"CREATE TYPE {pair} AS (a int, b int)",
        f"CREATE FUNCTION {schema}.cmp({pair}, {pair}) RETURNS int IMMUTABLE STRICT LANGUAGE sql "
        "AS 'SELECT pg_catalog.btrecordcmp($1, $2)'",
        *(
            f"CREATE FUNCTION {schema}.f{n}({pair}, {pair}) RETURNS boolean IMMUTABLE STRICT LANGUAGE sql "
            f"AS 'SELECT pg_catalog.btrecordcmp($1, $2) {sign} 0'"
            for n, sign in operators
        ),
        *(
            f"CREATE OPERATOR {schema}.{sign} (LEFTARG = {pair}, RIGHTARG = {pair}, FUNCTION = {schema}.f{n})"
            for n, sign in operators
        ),
        f"CREATE OPERATOR CLASS {schema}.ops DEFAULT FOR TYPE {pair} USING btree AS "
        + ", ".join(f"OPERATOR {n + 1} {schema}.{sign}" for n, sign in operators)
        + f", FUNCTION 1 {schema}.cmp({pair}, {pair})",
    ]


@pytest.mark.by_hand("sweeps")
def test_an_operator_classs_schema_is_renamed(database: Database, dsn: str) -> None:
    """ALTER EXTENSION citext SET SCHEMA does this."""
    run_sql(
        dsn,
        *type_with_operators("ext"),
        "CREATE TABLE t (id int PRIMARY KEY, k ext.pair, v int)",
        "INSERT INTO t SELECT i, ROW(i, i)::ext.pair, i FROM generate_series(1, 20) i",
    )
    published(database)
    run_sql(dsn, "ALTER SCHEMA ext RENAME TO other")
    assert "has another name now" in said(database)[0]
    assert said(database) == []
    run_sql(dsn, "DELETE FROM t WHERE id = 3", "UPDATE t SET v = 8 WHERE id = 4")
    steps.assert_exact(database)
    steps.finish_all(database, steps.begin(database, table=None, keys=None)[1])
    steps.assert_exact(database)


@pytest.mark.parametrize("kind", ["create", "rebuild"])
def test_a_clean_up_hides_from_no_build_that_writes_were_missed(database: Database, dsn: str, kind: str) -> None:
    """Found: a rebuild during which a capture function was a stub for a while: a clean-up rendered it again, and the
    build never knew. It holds: the build fails.
    """
    run_sql(dsn, *PLAIN)
    if kind == "rebuild":
        published(database)
    _, run = steps.begin(database, **({"include": "v"} if kind == "create" else {"table": None, "keys": None}))
    [(oid,)] = sql(steps.session(dsn), "SELECT 't'::regclass::oid")
    replace = (
        f"CREATE OR REPLACE FUNCTION roir_data.capture_{oid}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS"
    )
    run_sql(dsn, f"{replace} 'BEGIN RETURN NULL; END'", "UPDATE t SET k = 'missed' WHERE id = 3")
    clean_up.clean_up(database)
    with pytest.raises(SourceChanged):
        steps.build_all(database, run)


@pytest.mark.parametrize(
    "how",
    [
        "ALTER TABLE n ALTER COLUMN v TYPE int USING v + 1",
        "ALTER TABLE n RENAME v TO x; ALTER TABLE n RENAME w TO v; ALTER TABLE n RENAME x TO w",
    ],
)
def test_values_are_rewritten_while_a_table_is_being_attached(database: Database, dsn: str, how: str) -> None:
    """Found: values of a table rewritten, or its column names exchanged, during its attach: the copied entries stayed.
    It holds: the entries are copied again.
    """
    run_sql(
        dsn,
        *PARTITIONED,
        "ALTER TABLE t ADD COLUMN w int DEFAULT 7",
        "CREATE TABLE n (LIKE t INCLUDING ALL)",
        "INSERT INTO n SELECT i, (i % 5)::text, i, -i FROM generate_series(200, 250) i",
    )
    published(database)
    # At this statement the rows are copied, and older snapshots are waited for.
    with before(database, "SELECT pg_current_xact_id()::text", lambda: run_sql(dsn, how)):
        attach.attach_partition(database, "t", "n", "FOR VALUES FROM (200) TO (300)", "test")
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_two_indexed_tables_above_a_partition(database: Database, dsn: str) -> None:
    """Found: a partition with two indexed tables above it was detached from one of them alone. It holds: from each."""
    run_sql(
        dsn,
        *PARTITIONED,
        "CREATE TABLE r (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    )
    published(database)
    steps.make_index(database, "rx", "r", include="v")
    run_sql(dsn, "ALTER TABLE r ATTACH PARTITION t FOR VALUES FROM (0) TO (1000)")
    sync.sync_partitions(database, "r", "test")
    run_sql(dsn, "SELECT roir.detach_partition('p1')")
    one = steps.session(dsn)
    for index, table in (("rx", "r"), ("ix", "t")):
        [(ours, theirs)] = sql(one, f"SELECT (SELECT count(*) FROM {index}), (SELECT count(*) FROM {table})")
        assert ours == theirs, index
