"""The room that a plan announces, compared with the room that the build takes: `-s` prints both."""

from __future__ import annotations

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import dry_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import forecast, space, trial, writes
from airflow_roir.engine.forecast.space import Space
from airflow_roir.engine.forecast.trial import Trial
from airflow_roir.engine.forecast.writes import WriteRate
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(2)

LONG = "(SELECT string_agg(md5((i + j)::text), '') FROM generate_series(1, 100) j)"
PARTITIONED = (
    "CREATE TABLE t (id bigint PRIMARY KEY, k text, v text) PARTITION BY HASH (id)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES WITH (MODULUS 60, REMAINDER {n})" for n in range(60)),
)
# The statements that create the table, a row's values, the number of rows, the key and the included columns.
SHAPES: dict[str, tuple[tuple[str, ...], str, int, str, str | None]] = {
    "narrow": (("CREATE TABLE t (id bigint PRIMARY KEY, k int)",), "i, i % 7919", 60_000, "k", None),
    "text": (
        ("CREATE TABLE t (id bigint PRIMARY KEY, k text, v text)",),
        "i, md5(i::text), repeat('x', i % 90)",
        40_000,
        "k",
        "v",
    ),
    "toasted": (
        ("CREATE TABLE t (id bigint PRIMARY KEY, k text, v text)",),
        f"i, md5(i::text), {LONG}",
        3_000,
        "k",
        "v",
    ),
    "nulls": (("CREATE TABLE t (id bigint PRIMARY KEY, k text)",), "i, nullif(i % 3, 0)::text", 40_000, "k", None),
    "partitions": (PARTITIONED, "i, md5(i::text), 'v'", 40_000, "k", "v"),
    "few": (("CREATE TABLE t (id bigint PRIMARY KEY, k text)",), "i, i::text", 300, "k", None),
    "one": (("CREATE TABLE t (id bigint PRIMARY KEY, k text)",), "i, i::text", 1, "k", None),
}
RATE = WriteRate(0.5, 0.25, 0.25, "the test")
SIZES = """
SELECT sum(pg_table_size(oid))::bigint, sum(pg_indexes_size(oid))::bigint
  FROM pg_class WHERE relname ~ '^g1_s[0-9]{3}$'
"""


def foreseen(database: Database, definition: IndexDefinition, options: BuildOptions) -> Space:
    dry = forecast.run(database, definition, options, with_trial=True)
    assert isinstance(dry.trial, Trial), dry.trial
    with database.transaction() as connection:
        return space.foresee(connection, dry.plan, options, dry.trial, RATE, dry.index_id)


@pytest.mark.sample(0)
@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_entries_their_tree_and_wal_are_as_announced(
    database: Database, dsn: str, server: str, shape: str, analyzed: bool
) -> None:
    made, row, rows, keys, include = SHAPES[shape]
    run_sql(dsn, *made, f"INSERT INTO t SELECT {row} FROM generate_series(1, {rows}) i", "CHECKPOINT")
    run_sql(dsn, *(["ANALYZE t"] if analyzed else []))
    options = BuildOptions(segments=4)
    found = foreseen(database, IndexDefinition.parse("ix", "t", keys, include), options)
    steps.make_index(database, "ix", "t", keys, include, segments=4)
    [(base, index)] = sql(session(dsn), SIZES)
    print(f"{shape}: base {found.base / base:.2f}, index {found.index / index:.2f} of what it took")
    # With few rows, whole pages and the number of segments are most of the size.
    least = 0.5 if rows < 1_000 else 0.85
    assert least < found.base / base < 1 / least
    assert least < found.index / index < 1 / least
    if rows >= 1_000:
        again = foreseen(database, IndexDefinition.parse("ix"), options)
        assert 0.9 < again.present / (base + index) < 1.1


def test_captured_writes_take_what_was_announced(database: Database, dsn: str) -> None:
    """Each write that the rate counts. A write that leaves the entry as it was takes no room."""
    run_sql(
        dsn,
        "CREATE TABLE t (id bigint PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, md5(i::text), i FROM generate_series(1, 20000) i",
        "ANALYZE t",
    )
    options = BuildOptions()
    found = foreseen(database, IndexDefinition.parse("ix", "t", "k"), options)
    prepared, _ = steps.begin(database)
    assert prepared.generation_id == 1
    # An hour at that rate: 1,800 inserts, 900 updates, 900 deletes.
    run_sql(
        dsn,
        "INSERT INTO t SELECT i, md5(i::text), i FROM generate_series(20001, 21800) i",
        "UPDATE t SET k = k || 'x' WHERE id <= 900",
        "DELETE FROM t WHERE id BETWEEN 901 AND 1800",
    )
    [(took,)] = sql(session(dsn), "SELECT pg_total_relation_size('roir_data.g1_delta')")
    assert found.delta_hour is not None
    print(f"delta {found.delta_hour / took:.2f} of what it took")
    assert 0.7 < found.delta_hour / took < 1.4


def test_an_empty_table_and_one_without_partitions_have_no_trial(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text) PARTITION BY RANGE (id)")
    definition = IndexDefinition.parse("ix", "t", "k")
    for made in ((), ("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (9)",)):
        run_sql(dsn, *made)
        dry = forecast.run(database, definition, BuildOptions(), with_trial=True)
        assert dry.trial == "the table has no rows"


def test_a_trial_that_fails_says_why_and_stops_no_plan(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.make_table(dsn)
    monkeypatch.setattr(trial, "_copy", lambda connection, *_: connection.exec_driver_sql("SELECT 1 / 0"))
    dry = forecast.run(database, IndexDefinition.parse("ix", "t", "k"), BuildOptions(), with_trial=True)
    assert dry.trial == "division by zero"


def test_a_trial_of_duplicates_and_of_thousands_of_small_partitions_is_bounded(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int) PARTITION BY RANGE (id)",
        "DO $$ BEGIN FOR n IN 0..299 LOOP EXECUTE format("
        "'CREATE TABLE t%s PARTITION OF t FOR VALUES FROM (%s) TO (%s)', n, n * 10, n * 10 + 10); END LOOP; END $$",
        "INSERT INTO t SELECT i, 7 FROM generate_series(0, 2999) i",
    )
    definition = IndexDefinition.parse("ix", "t", "k", unique=True)
    found = forecast.run(database, definition, BuildOptions(), with_trial=True).trial
    assert isinstance(found, Trial)
    # Each partition has ten rows.
    assert 0 < found.rows <= trial.MOST_PLACES * 10


def test_writes_are_counted_by_the_statistics_or_for_a_while(database: Database, dsn: str) -> None:
    steps.make_table(dsn, 100)
    source = dry_run.run(database, IndexDefinition.parse("ix", "t", "k"), BuildOptions()).source
    with database.transaction() as connection:
        assert writes.by_statistics(connection, source, least_s=10**9) is None

    def work(_seconds: float) -> None:
        run_sql(dsn, "INSERT INTO t SELECT i, 'x' FROM generate_series(1001, 1050) i")

    # The server has a session's counts once the session has ended.
    found = writes.counted(database, source, 10, work)
    assert (found.inserts, found.updates, found.deletes) == (5.0, 0, 0)
    with database.transaction() as connection:
        known = writes.by_statistics(connection, source, least_s=0)
    assert known is not None
    assert known.inserts > 0


def test_a_segment_that_the_memory_holds_needs_no_files() -> None:
    assert space.sorting(1_000, 60) == (100_000, 0)
    memory, files = space.sorting(10_000_000, 60)
    assert memory == 256 << 20
    assert files == 680_000_000
    assert space.sorting(10_000_000, 60, 2 << 20) == (1_000_000_000, 0)


def test_what_a_seal_sorts_beyond_its_memory_goes_to_files_as_announced(database: Database, dsn: str) -> None:
    """Counted by the server, with a memory that is small enough."""
    run_sql(
        dsn,
        "CREATE TABLE t (k text, id bigint)",
        "INSERT INTO t SELECT md5(i::text), i FROM generate_series(1, 60000) i",
    )
    run_sql(
        dsn, "SET maintenance_work_mem = '1MB'; SET max_parallel_maintenance_workers = 0; CREATE INDEX i ON t (k, id)"
    )
    [(index,)] = sql(session(dsn), "SELECT pg_relation_size('i')")
    [(took,)] = sql(session(dsn), "SELECT temp_bytes FROM pg_stat_database WHERE datname = current_database()")
    each = index / 60_000
    files = 60_000 * (each + space.TAPE_BYTES)
    print(f"temporary files {files / float(took):.2f} of what it took")
    assert 0.5 < files / float(took) < 2
