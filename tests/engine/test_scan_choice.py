"""The scan that a plan chooses, and the sample that it takes for that."""

from __future__ import annotations

import re

import pytest

from airflow_roir.definition import IndexDefinition, Scan
from airflow_roir.engine import dry_run, lifecycle
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

REBUILD = {"index": "ix", "table": None, "keys": None}


# With this limit a small table is scanned as a big one is.
SMALL = Limits(small_source_bytes=1 << 20)


def test_many_small_partitions_are_sampled(dsn: str) -> None:
    """With one seed for all partitions a sample took blocks of the same numbers, which no partition has.

    A fifth of the blocks: a twentieth would sample none at all in one of two hundred runs.
    """
    database = Database(dsn, limits=Limits(sample_rows=4000, sample_blocks=20))
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n * 200}) TO ({n * 200 + 200})" for n in range(100)),
        "INSERT INTO t SELECT i, i % 1000 FROM generate_series(0, 19999) i",
        "ANALYZE t",
    )
    found = dry_run.run(database, IndexDefinition.parse("ix", "t", "k"), BuildOptions(ranges=400, segments=8)).plan
    assert found.segments == 8
    assert found.ranges > 100


def filled(dsn: str, rows: int, key: str) -> None:
    run_sql(
        dsn,
        "DROP TABLE IF EXISTS t",
        "CREATE TABLE t (id text PRIMARY KEY, k int, pad text)",
        f"INSERT INTO t SELECT {key}, i % 9, repeat('x', 400) FROM generate_series(1, {rows}) i",
    )


def chosen(database: Database, **options: object) -> tuple[str, str]:
    found = dry_run.run(database, IndexDefinition.parse("ix", "t", "k"), BuildOptions(**options)).choice  # type: ignore[arg-type]
    return found.scan.value, found.why


def test_auto_takes_blocks_where_the_keys_order_is_not_the_rows(dsn: str) -> None:
    database = Database(dsn, limits=SMALL)
    filled(dsn, 10_000, "md5(i::text)")
    assert chosen(database)[0] == "block"
    assert re.search(r"correlation 0\.0", chosen(database)[1])
    assert chosen(database, scan="key") == ("key", "as wanted")
    filled(dsn, 10_000, "lpad(i::text, 9, '0')")
    assert chosen(database)[0] == "key"


def test_auto_takes_the_key_for_a_small_table(dsn: str, database: Database) -> None:
    filled(dsn, 1_000, "md5(i::text)")
    assert chosen(database) == ("key", "the table is small")


def test_auto_takes_an_index_that_is_narrower_and_trusted(dsn: str) -> None:
    database = Database(dsn, limits=SMALL)
    filled(dsn, 10_000, "md5(i::text)")
    steps.finish_all(database, steps.begin(database)[1])
    assert chosen(database)[0] == "index"
    assert chosen(database, verify="none")[0] == "block"
    _, run = steps.begin(database, **REBUILD, scan="auto")
    with database.transaction() as connection:
        assert execute(connection, "SELECT scan FROM roir.generation ORDER BY id DESC LIMIT 1").scalar() == "index"
    steps.finish_all(database, run)
    run_sql(dsn, f"ALTER TABLE t DISABLE TRIGGER {steps.capture_triggers(dsn)[0]}")
    assert chosen(database)[0] == "block", "not every write was captured"


def test_an_index_with_known_differences_is_not_copied(dsn: str) -> None:
    database = Database(dsn, limits=SMALL)
    filled(dsn, 10_000, "md5(i::text)")
    prepared, run = steps.begin(database)
    steps.finish_all(database, run)
    run_sql(dsn, f"DELETE FROM {physical.base(prepared.generation_id)} WHERE c1 = 3")
    lifecycle.verify(database, "ix", VerifyOptions(), "test")
    assert chosen(database)[0] == "block"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scan": "index"}, "there is no index to rebuild yet"),
        ({"scan": "heap"}, "must be one of auto, source, key, block"),
    ],
)
def test_what_cannot_be_is_refused(dsn: str, database: Database, options: dict[str, str], said: str) -> None:
    filled(dsn, 1, "i")
    with pytest.raises(InvalidInput, match=said):
        steps.begin(database, **options)  # type: ignore[arg-type]


def test_a_partitioned_tables_index_is_not_read(dsn: str, database: Database) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int) PARTITION BY RANGE (id)",
        "CREATE TABLE t0 PARTITION OF t DEFAULT",
        "INSERT INTO t SELECT i, i FROM generate_series(0, 199) i",
    )
    steps.finish_all(database, steps.begin(database)[1])
    with pytest.raises(InvalidInput, match="its view hides"):
        steps.begin(database, **REBUILD, scan="index")


def test_every_kind_of_scan_is_known_to_the_control_tables(database: Database) -> None:
    assert {scan.value for scan in Scan} == {"key", "block", "index"}
    check = (
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = 'roir.generation'::regclass AND contype = 'c' AND conname ~ 'scan'"
    )
    with database.transaction() as connection:
        stated = execute(connection, check).scalar_one()
    assert set(re.findall(r"'(\w+)'", stated)) == {scan.value for scan in Scan}


def test_who_holds_the_view_of_an_index_is_not_waited_for(database: Database, dsn: str) -> None:
    """Seen to wait for the holder, and to blame the table."""
    filled(dsn, 100, "i::text")
    steps.make_index(database)
    holder = steps.session(dsn)
    steps.sql(holder, "ALTER VIEW ix SET SCHEMA public")
    with pytest.raises(InvalidInput, match="can't be checked now"):
        dry_run.run(database, IndexDefinition.parse("ix", None, None), BuildOptions(scan="index"))
    holder.close()
