"""The stamp differs if a full look at the source differs: there is no statement that the look alone sees."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control.job import Job, SourceCheck
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.source import catalog
from airflow_roir.errors import PartitionsChanged, SourceChanged
from tests.conftest import run_sql
from tests.engine import ddl
from tests.engine.stages import Stage
from tests.engine.test_ddl import fits, make, rendered, stage

# Statements that no other list has: rights by membership, names that expressions and keys use, rows of our own schema,
# and levels of partitions below the first one.
MORE = (
    "REVOKE ddl_owner FROM stamp_member",
    "GRANT ddl_owner TO stamp_member",
    "REVOKE ALL ON {delta} FROM PUBLIC; REVOKE ALL ON {delta} FROM postgres",
    "ALTER TABLE {delta} OWNER TO ddl_owner",
    "ALTER OPERATOR CLASS kinds.grade_ops USING btree RENAME TO other_ops",
    "ALTER OPERATOR CLASS pg_catalog.int4_ops USING btree RENAME TO other_ops",
    "ALTER SCHEMA kinds RENAME TO other_kinds",
    "ALTER FUNCTION pg_catalog.upper(text) RENAME TO other_upper",
    "ALTER TYPE kinds.grade DROP ATTRIBUTE b",
    "ALTER TYPE pair ADD ATTRIBUTE c int",
    "ALTER SCHEMA roir_data RENAME TO other_data",
    "UPDATE roir.generation SET capture_mode = 'direct'",
    "UPDATE roir.generation SET shape = shape - 'columns'",
    "UPDATE roir.index SET source_oid = 1",
    "DELETE FROM roir.segment WHERE ordinal = 0",
    "UPDATE roir.source_partition SET status = 'leaving' WHERE leaf",
    "UPDATE roir.source_partition SET link = '1'",
    "UPDATE roir.home SET schema_oid = 1",
    "UPDATE roir.home SET tables = jsonb_set(tables, '{index}', '1')",
    "CREATE TABLE more PARTITION OF t FOR VALUES FROM (30) TO (40) PARTITION BY RANGE (id); "
    "CREATE TABLE deep PARTITION OF more DEFAULT",
    "ALTER TABLE under DETACH PARTITION under_1",
    "CREATE TABLE under_3 PARTITION OF under FOR VALUES FROM (2000) TO (3000)",
    "ALTER TABLE under_1 SET UNLOGGED",
    "ALTER TABLE under_1 DISABLE TRIGGER ALL",
    "DROP TRIGGER {truncate} ON under_1",
    "ALTER TABLE under DROP COLUMN v CASCADE",
    "DROP TABLE under",
)
DEEP = (
    "CREATE TABLE under PARTITION OF t FOR VALUES FROM (90) TO (99) PARTITION BY RANGE (id)",
    "CREATE TABLE under_1 PARTITION OF under FOR VALUES FROM (0) TO (1000)",
    "CREATE TABLE under_2 PARTITION OF under FOR VALUES FROM (1000) TO (2000)",
)
# These are harmless, and sent all the time.
USUAL = (
    "INSERT INTO t (d, id, k) VALUES (1, 700, 'a')",
    "UPDATE t SET k = 'b', v = 8",
    "DELETE FROM t WHERE id = 700",
    "ANALYZE t",
)


LABELS = "SELECT s.name, s.was, s.is_now FROM roir.shape_changes(%(generation)s) s WHERE s.kind = 'label' ORDER BY 1, 2"
# Only asked in a build.
CHANGES = """
SELECT c.relation, c.gone, c.link FROM roir.generation g CROSS JOIN roir.partition_changes(g.id, %(source)s) c
 WHERE g.id = %(generation)s AND g.status = 'building' ORDER BY 1, 2
"""


def full_look(connection: Connection, job: Job) -> list[Any]:
    """The findings of a full look: the fingerprint, the labels of enums, the partitions that came and went."""
    values = {"generation": job.generation_id, "source": job.source.oid}
    found = [[tuple(row) for row in execute(connection, query, values)] for query in (LABELS, CHANGES)]
    return [catalog.fingerprint(connection, job.source.oid, job.columns), *found]


def unseen(reached: Stage, sql: str) -> bool:
    """True if a full look differs after the statement, and the stamp doesn't. Rolls back."""
    connection, job = reached.connection, reached.job
    with connection.begin() as transaction:
        before = full_look(connection, job), catalog.stamp(connection, job.source.oid)
        try:
            with connection.begin_nested():
                execute(connection, "SET LOCAL search_path = public, other; SET LOCAL row_security = on")
                execute(connection, rendered(sql, job.source.oid, job.generation_id))
                execute(connection, "SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL row_security = off")
            after: list[Any] = full_look(connection, job)
            stamp = catalog.stamp(connection, job.source.oid)
        except DBAPIError:
            # The statement is refused; or the look itself fails, and the stamp with it or before it.
            transaction.rollback()
            return False
        transaction.rollback()
    return after != before[0] and stamp == before[1]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", ["mid-build", "mid-build by block", "mid-fold", "published", "rebuild"])
@pytest.mark.parametrize("shape", ["parts", "plain"])
def test_no_statement_is_seen_by_a_full_look_alone(
    database: Database, dsn: str, pg: int, shape: str, phase: str
) -> None:
    make(dsn, shape)
    run_sql(
        dsn,
        "DO $$ BEGIN CREATE ROLE stamp_member; EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$",
        *(DEEP if shape == "parts" else ()),
    )
    reached = stage(database, phase)
    statements = [one.name for one in ddl.EVERYTHING if fits(one, shape, pg) and not one.alone]
    assert [sql for sql in (*statements, *MORE) if unseen(reached, sql)] == []
    reached.connection.close()


def test_the_stamp_stays_where_nothing_but_rows_is_written(database: Database, dsn: str) -> None:
    make(dsn, "parts")
    reached = stage(database, "mid-build")
    with reached.connection.begin():
        before = catalog.stamp(reached.connection, reached.job.source.oid)
    run_sql(dsn, *USUAL, "VACUUM (ANALYZE) t")
    with reached.connection.begin():
        assert catalog.stamp(reached.connection, reached.job.source.oid) == before
    reached.connection.close()


def test_what_was_found_once_is_found_again(database: Database, dsn: str) -> None:
    """A look that raises isn't a look that found nothing: the next transaction raises too."""
    make(dsn, "parts")
    reached = stage(database, "mid-build")
    check = SourceCheck(reached.connection, reached.job)
    for statement, error in (
        ("ALTER TABLE t1 DISABLE TRIGGER USER", SourceChanged),
        ("ALTER TABLE t1 ENABLE TRIGGER USER; ALTER TABLE t DETACH PARTITION t2", (SourceChanged, PartitionsChanged)),
    ):
        run_sql(dsn, statement)
        for _ in range(2):
            with pytest.raises(error), reached.connection.begin():
                check.look()
    reached.connection.close()
