"""Snapshots that are handed on: a session that begins after a publish may still see the database as before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import psycopg2.extras
import pytest

from airflow_roir.engine import clean_up, switch
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

OLD = ["REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn)


def exported(dsn: str, isolation: str = "REPEATABLE READ") -> tuple[psycopg2.extensions.connection, str]:
    """A session that has exported a snapshot of now, and the snapshot's name."""
    exporter = steps.session(dsn, isolation)
    ((name,),) = sql(exporter, "SELECT pg_export_snapshot()")
    return exporter, name


def importing(dsn: str, name: str, isolation: str = "REPEATABLE READ") -> psycopg2.extensions.connection:
    """A transaction that begins now, and sees what the exporter saw."""
    user = steps.session(dsn, isolation)
    sql(user, f"SET TRANSACTION SNAPSHOT '{name}'")
    return user


# Statements of the first transaction, which begins with the old snapshot, and of the second one, which commits before
# the first one writes.
FIRST = {
    "delete": "DELETE FROM t WHERE id = 42",
    "key": "UPDATE t SET k = 'new' WHERE id = 42",
    "included": "UPDATE t SET v = -1 WHERE id = 42",
    "primary key": "UPDATE t SET id = 4200 WHERE id = 42",
    "upsert of what is gone": "INSERT INTO t VALUES (43, '3', 4) ON CONFLICT (id) DO UPDATE SET k = 'new'",
    "insert": "INSERT INTO t VALUES (142, '2', 1)",
    "insert and delete": "INSERT INTO t VALUES (43, '3', 4); DELETE FROM t WHERE id = 43",
    "merge": (
        "MERGE INTO t USING (VALUES (42), (142)) n (id) ON t.id = n.id WHEN MATCHED THEN UPDATE SET k = 'merged' "
        "WHEN NOT MATCHED THEN INSERT VALUES (n.id, 'new', 0)"
    ),
}
SECOND = {
    "nothing": "SELECT",
    "the row": "UPDATE t SET k = 'other', v = 0 WHERE id IN (42, 44)",
    "delete and again": "DELETE FROM t WHERE id = 42; INSERT INTO t VALUES (42, '2', 42)",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize(("first", "second"), list(itertools.product(FIRST, SECOND)))
def test_a_writer_that_begins_later_with_an_older_snapshot_is_exact_or_refused(
    database: Database, dsn: str, first: str, second: str, isolation: str
) -> None:
    """Three transactions: the exporter, one that commits meanwhile, the importer; in each mode, from each mode."""
    names: dict[str, tuple[psycopg2.extensions.connection, str]] = {"before": exported(dsn, isolation)}
    reset = "DELETE FROM t WHERE id IN (42, 43, 44, 142, 4200)"
    refill = "INSERT INTO t VALUES (42, '2', 42), (43, '3', 43), (44, '4', 44)"

    def write(mode: str) -> None:
        names[mode] = exported(dsn, isolation)
        run_sql(dsn, "DELETE FROM t WHERE id = 43", SECOND[second])
        for _, name in names.values():
            user = importing(dsn, name, isolation)
            try:
                sql(user, FIRST[first])
                user.commit()
            except (psycopg2.errors.SerializationFailure, psycopg2.errors.UniqueViolation):
                user.rollback()
            user.close()

    _, run = steps.begin(database, include="v", ranges=3, segments=2)
    write("capture")
    run_sql(dsn, reset, refill)
    steps.build_all(database, run)
    write("built")
    steps.seal_all(database, run)
    switch.switch(database, run)
    write("direct")
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)
    run_sql(dsn, reset, refill)
    write("active")
    steps.assert_exact(database)
    for exporter, _ in names.values():
        exporter.close()


@pytest.mark.by_hand("sweeps")
def test_a_reader_that_begins_after_the_publish_is_refused_and_keeps_the_guard(database: Database, dsn: str) -> None:
    """The snapshot is handed on twice, as in a parallel pg_dump, and the last session alone holds it."""
    exporter, name = exported(dsn)
    steps.make_index(database)
    second = importing(dsn, name)
    exporter.close()
    ((again,),) = sql(second, "SELECT pg_export_snapshot()")
    third = importing(dsn, again)
    second.close()
    assert clean_up.clean_up(database).guards_removed == 0
    with pytest.raises(psycopg2.errors.SerializationFailure, match="published after"):
        sql(third, "SELECT count(*) FROM ix")
    third.rollback()
    assert clean_up.clean_up(database).guards_removed == 1
    assert sql(third, "SELECT count(*) FROM ix") == [(100,)]
    third.close()


@pytest.fixture
def decoder(dsn: str) -> Iterator[psycopg2.extensions.connection]:
    """A session of logical replication, like that of a consumer: Debezium, or a subscriber's first copy."""
    session = psycopg2.connect(dsn, connection_factory=psycopg2.extras.LogicalReplicationConnection)
    yield session
    session.close()


@pytest.mark.by_hand("sweeps")
def test_a_snapshot_that_a_replication_slot_exports_keeps_the_guard(
    database: Database, dsn: str, decoder: psycopg2.extensions.connection
) -> None:
    """A consumer's first copy reads with this snapshot; until then only the walsender holds it."""
    slot = dsn.split("?")[0].rsplit("/", 1)[1]
    with decoder.cursor() as cursor:
        cursor.execute(f'CREATE_REPLICATION_SLOT "{slot}" TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT')
        name = cursor.fetchone()[2]
    steps.make_index(database)
    report = clean_up.clean_up(database)
    assert report.guards_removed == 0
    assert not any("standby" in line for line in report.waiting), report.waiting
    assert any(f"pid {decoder.info.backend_pid}" in line for line in report.waiting)
    reader = importing(dsn, name)
    with pytest.raises(psycopg2.errors.SerializationFailure, match="published after"):
        sql(reader, "SELECT count(*) FROM ix")
    reader.close()


@pytest.mark.sample(0)
def test_a_consumer_of_changes_is_no_standby(
    database: Database, dsn: str, decoder: psycopg2.extensions.connection
) -> None:
    """It reads no table, so it neither keeps a guard nor is named as a standby without feedback."""
    steps.make_index(database)
    assert sql(steps.session(dsn), "SELECT count(*) FROM pg_stat_replication WHERE pid = %s", decoder.info.backend_pid)
    report = clean_up.clean_up(database)
    assert (report.guards_removed, report.waiting, report.warnings) == (1, [], [])
