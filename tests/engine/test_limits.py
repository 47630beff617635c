"""Limits that would show late are refused at plan if they can be known then; types that change under a build."""

from __future__ import annotations

from contextlib import suppress

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, dry_run, lifecycle
from airflow_roir.engine.build import Claim
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.verify import record
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import InvalidInput, LabelsRenamed
from airflow_roir.options import BuildOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import MODES, Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)

RANDOM = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, {0}) i)"


def plan(database: Database, keys: str, include: str | None = None, **options: str) -> str:
    definition = IndexDefinition.parse("ix", "t", keys, include)
    return str(dry_run.run(database, definition, BuildOptions(**options)).entry_size)  # type: ignore[arg-type]


def test_an_entry_that_is_too_big_for_a_b_tree_is_refused_at_plan(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v varchar(10), w varchar(900))",
        f"INSERT INTO t SELECT i, {RANDOM.format(60)}, 'v', 'w' FROM generate_series(1, 100) i",
    )
    assert plan(database, "v").startswith("at most ")
    assert "sample; the types allow 3" in plan(database, "w")
    assert "any size" in plan(database, "k")
    run_sql(dsn, f"UPDATE t SET k = {RANDOM.format(100)} WHERE id = 77")
    with pytest.raises(InvalidInput, match=r"public.ix.*public.t.*bytes.*Choose other key columns"):
        plan(database, "k")
    assert plan(database, "v", "k").startswith("at most ")


# Values of some n bytes as the source stores them: plain, long and compressible, compressed by the source, and out of
# line. Only the server knows the size of their entries in a B-tree.
NOISE = "substr((SELECT string_agg(md5(i::text), '') FROM generate_series(1, 1 + {0} / 32) i), 1, {0})"
VALUES = {
    "plain": ("text", NOISE),
    "bytea": ("bytea", f"convert_to({NOISE}, 'UTF8')"),
    "half of it compressible": ("text", f"{NOISE} || repeat('x', {{0}})"),
    "out of line": ("text STORAGE EXTERNAL", f"{NOISE} || repeat('x', 3000)"),
    "inline": ("text STORAGE MAIN", f"{NOISE} || repeat('x', 3000)"),
    "by another method": ("text COMPRESSION pglz", f"{NOISE} || repeat('xy', 2000)"),
    "array": ("text[]", f"ARRAY[{NOISE}, NULL]"),
}


RESTS = {"plain": "k, id", "NULL key": "n, k, id", "included": "k, id, v"}
SOME = [("plain", "plain"), ("half of it compressible", "included"), ("out of line", "NULL key"), ("array", "plain")]
EVERY = [
    pytest.param(name, rest, marks=[pytest.mark.sample(0)] * ((name, rest) not in SOME))
    for name in VALUES
    for rest in RESTS
]


@pytest.mark.parametrize(("name", "rest"), EVERY)
def test_the_biggest_entry_that_the_server_takes_is_taken_and_one_byte_more_is_refused(
    database: Database, dsn: str, name: str, rest: str
) -> None:
    """Found: an entry near the limit was refused, or accepted, by an estimate. It holds: the server is asked."""
    kind, value = VALUES[name]
    user = steps.session(dsn)
    user.autocommit = True
    sql(user, f"CREATE TABLE t (id int PRIMARY KEY, k {kind}, n int, v varchar(100))")
    sql(user, f"CREATE TABLE stored AS SELECT {RESTS[rest]} FROM t")
    identity = RESTS[rest].removesuffix(", v")
    index = f"CREATE UNIQUE INDEX i ON stored ({identity}) {'INCLUDE (v)' * (rest == 'included')} NULLS NOT DISTINCT"
    definition = {"keys": identity.removesuffix(", id"), "include": "v" if rest == "included" else None}

    def write(length: int) -> None:
        sql(user, "TRUNCATE t")
        sql(user, f"INSERT INTO t SELECT 1, {value.format(length)}, NULL, repeat('w', 100)")

    def taken(length: int) -> bool:
        """True if the server takes it into a new index of such rows, and into one that exists."""
        write(length)
        copied = f"INSERT INTO stored SELECT {RESTS[rest]} FROM t"
        try:
            sql(user, f"TRUNCATE stored; {copied}; {index}; TRUNCATE stored; {copied}; DROP INDEX i")
        except psycopg2.errors.ProgramLimitExceeded:
            return False
        return True

    low, high = 500, 4_000
    assert taken(low)
    assert not taken(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) else (low, middle)
    write(high)
    with pytest.raises(InvalidInput, match=r"public.ix.*public.t.*bytes.*Choose other key columns"):
        plan(database, **definition)
    write(low)
    plan(database, **definition)
    assert sql(user, "SELECT relname FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace") == []
    steps.make_index(database, segments=1, **definition)
    steps.assert_exact(database)
    # A write may have longer values than the table then stores: the table compresses them because of other columns.
    sql(user, f"CREATE TABLE native (LIKE t INCLUDING ALL); {index.replace('INDEX i ON stored', 'INDEX ON native')}")
    native = False
    with suppress(psycopg2.errors.ProgramLimitExceeded):
        sql(user, f"INSERT INTO native SELECT 1, {value.format(low)}, NULL, repeat('w', 100)")
        native = True
    if native:
        write(low)
        steps.assert_exact(database)


SPREAD = {
    # The number of partitions, the rows of each, and the partition of the one fat row.
    "one table": (0, 300, 0),
    "many small leaves": (60, 20, 59),
    "an empty one among them": (5, 0, 3),
    "one big leaf and small ones": (4, 3_000, 2),
}


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("spread", SPREAD)
def test_a_single_fat_row_of_a_small_leaf_is_always_seen(
    database: Database, dsn: str, spread: str, analyzed: bool
) -> None:
    """Found: the size check saw no row of small leaves. It holds: it reads them whole, and of big ones other blocks
    each time.
    """
    leaves, rows, where = SPREAD[spread]
    by = " PARTITION BY LIST (p)" if leaves else ""
    user = steps.session(dsn)
    user.autocommit = True
    sql(user, f"CREATE TABLE t (p int, id int, k text, PRIMARY KEY (p, id)){by}")
    for n in range(leaves):
        sql(user, f"CREATE TABLE t_{n} PARTITION OF t FOR VALUES IN ({n})")
        big = 150_000 if n == 1 and spread.startswith("one big") else rows
        sql(user, f"INSERT INTO t SELECT {n}, i, 'k' FROM generate_series(1, {big}) i")
    if not leaves:
        sql(user, f"INSERT INTO t SELECT 0, i, repeat('k', 500) FROM generate_series(1, {rows}) i")
    if analyzed:
        sql(user, "ANALYZE t")
    plan(database, "k")
    sql(user, f"INSERT INTO t SELECT {where}, 0, {RANDOM.format(100)}")
    with pytest.raises(InvalidInput, match="Choose other key columns"):
        plan(database, "k")


def test_a_big_leaf_is_sampled_by_other_blocks_each_time_and_never_by_none(database: Database, dsn: str) -> None:
    """Found: the size check saw no row of small leaves. It holds: it reads them whole, and of big ones other blocks
    each time.
    """
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text)",
        "INSERT INTO t SELECT i, repeat('k', 500) FROM generate_series(1, 9000) i",
        f"UPDATE t SET k = {RANDOM.format(50)} || id WHERE id % 20 = 0",
        # The rows that are left are in the table's last blocks.
        "DELETE FROM t WHERE id < 8990",
        "VACUUM (TRUNCATE false) t",
    )
    told = {plan(database, "k") for _ in range(6)}
    assert all(int(line.split()[0]) > 500 for line in told), told


COVERING = {
    # Key, included columns, covering: the columns that are covered; None: refused.
    ("b", "i", "all"): ["i"],
    ("b", "s, i", "all"): ["s", "i"],
    ("b", "x", "all"): None,
    ("b", "i, x", "all"): None,
    ("b", "x, i", "auto"): ["i"],
    ("b", "x", "none"): [],
    ("x", "i", "all"): ["i"],
    ("x", "l", "all"): None,
    ("x", "l", "auto"): [],
    ("b", "l", "all"): ["l"],
    ("b", "l", "auto"): [],
    ("h", "s", "auto"): ["s"],
    ("h", "m", "auto"): [],
    ("h", "m, i", "auto"): ["i"],
    ("h", "m", "all"): None,
}


@pytest.mark.parametrize("case", COVERING, ids=lambda case: ", ".join(case))
def test_no_write_fails_because_of_an_included_column(database: Database, dsn: str, case: tuple[str, str, str]) -> None:
    """The longest values that the types allow; for a key without bound, values that leave 1,024 bytes."""
    keys, include, covering = case
    columns = {"b": "bigint", "i": "int", "s": "varchar(10)", "x": "text", "l": "varchar(300)", "m": "varchar(200)",
               "h": "varchar(500)"}  # fmt: skip
    listed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
    run_sql(dsn, f"CREATE TABLE t (id int PRIMARY KEY, {listed})", "INSERT INTO t VALUES (1, 1)")
    definition = IndexDefinition.parse("ix", "t", keys, include)
    if COVERING[case] is None:
        with pytest.raises(InvalidInput, match=r"public.ix: covering is all, but included column .*auto.*none"):
            dry_run.run(database, definition, BuildOptions(covering=covering))
        return
    entry = dry_run.run(database, definition, BuildOptions(covering=covering)).entry
    assert [c.source for c in entry.columns if c.covered] == COVERING[case]
    stage = Stage(database, "published", keys=keys, include=include, covering=covering)
    wide = "(SELECT string_agg(chr(65536 + (hashint4(i) & 65535)), '') FROM generate_series(1, {0}) i)"
    longest = {"b": "-1", "i": "-1", "s": wide.format(10), "x": wide.format(350 if keys == "x" else 20_000),
               "l": wide.format(300), "m": wide.format(200), "h": wide.format(500)}  # fmt: skip
    user = steps.session(dsn)
    sql(user, f"INSERT INTO t (id, {', '.join(longest)}) SELECT 2, {', '.join(longest.values())}")
    sql(user, "UPDATE t SET " + ", ".join(f"{name} = {value}" for name, value in longest.items()))
    user.commit()
    stage.assert_exact("after the longest values")


@pytest.mark.parametrize("mode", MODES)
def test_a_later_write_that_is_too_big_fails_by_itself_and_leaves_the_index_exact(
    database: Database, dsn: str, mode: str
) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 60) i",
    )
    stage = Stage(database, mode)
    user = steps.session(dsn)
    for statement in (
        f"INSERT INTO t VALUES (100, {RANDOM.format(200)})",
        f"UPDATE t SET k = {RANDOM.format(200)} WHERE id = 1",
    ):
        with pytest.raises(psycopg2.errors.ProgramLimitExceeded, match="index row size"):
            sql(user, statement)
        user.rollback()
    stage.assert_exact("after writes that failed")
    stage.finish()


def half_built(database: Database, key: str = "k") -> tuple[steps.Run, int]:
    prepared, run = steps.begin(database, keys=key, batch_rows=10, ranges=3)
    worker = steps.worker(database, run)
    with worker.connection:
        claim = worker.claim()
        assert isinstance(claim, Claim)
        assert isinstance(worker.step(claim), Step)
    return run, prepared.operation_id


ENUM = ("CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')", "CREATE TYPE pair AS (a int, b text)")
MOODS = "(enum_range(NULL::mood))[1 + i % 3]"


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
        "ALTER TYPE mood ADD VALUE 'glad' AFTER 'sad'",
        "ALTER TYPE mood RENAME TO humour",
        "ALTER TYPE pair RENAME ATTRIBUTE a TO z",
    ],
)
def test_a_types_change_under_a_build_is_harmless_to_the_key(database: Database, dsn: str, change: str) -> None:
    run_sql(
        dsn,
        *ENUM,
        "CREATE TABLE t (id int PRIMARY KEY, k mood, c pair)",
        f"INSERT INTO t SELECT i, {MOODS}, ROW(i, 'x')::pair FROM generate_series(1, 60) i",
        "ANALYZE t",
    )
    run, _ = half_built(database, "k, c")
    run_sql(dsn, change, "UPDATE t SET k = 'ok', c = ROW(0, NULL) WHERE id % 4 = 0", "DELETE FROM t WHERE id % 5 = 0")
    steps.finish_all(database, run)
    run_sql(dsn, "UPDATE t SET k = 'happy' WHERE id % 3 = 0", "DELETE FROM t WHERE id % 7 = 0")
    steps.assert_exact(database)


def test_a_verification_goes_by_the_labels_of_now(database: Database, dsn: str) -> None:
    """It doesn't need the build's labels in bounds and watermarks. A rename meanwhile is no obstacle."""
    run_sql(
        dsn,
        *ENUM,
        "CREATE TABLE t (a mood, id int, k int, PRIMARY KEY (a, id))",
        f"INSERT INTO t SELECT {MOODS}, i, i % 5 FROM generate_series(1, 60) i",
        "ANALYZE t",
    )
    steps.make_index(database)
    run_sql(dsn, "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'")
    assert lifecycle.verify(database, "ix", VerifyOptions(), "test").is_exact
    begun = record.begin(database, "ix", VerifyOptions(), "test")
    run_sql(dsn, "ALTER TYPE mood RENAME VALUE 'blue' TO 'down'")
    with pytest.raises(LabelsRenamed, match="abort the operation and start again"):
        lifecycle.drive(database, begun.index, "test")
    abort.abort(database, "ix", "test")
    assert lifecycle.verify(database, "ix", VerifyOptions(), "test").is_exact


def test_a_renamed_label_of_the_primary_key_stops_the_build_until_it_is_called_as_before(
    database: Database, dsn: str
) -> None:
    """Bounds and watermarks are texts. No row is missed: the batch fails, and the error names the label."""
    run_sql(
        dsn,
        *ENUM,
        "CREATE TABLE t (a mood, id int, k int, PRIMARY KEY (a, id))",
        f"INSERT INTO t SELECT {MOODS}, i, i % 5 FROM generate_series(1, 60) i",
        "ANALYZE t",
    )
    run, _ = half_built(database)
    run_sql(dsn, "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'")
    with pytest.raises(LabelsRenamed, match=r"label sad of type public\.mood"):
        steps.build_all(database, run)
    run_sql(dsn, "ALTER TYPE mood RENAME VALUE 'blue' TO 'sad'")
    steps.finish_all(database, start_run(database, "ix", "the next", take_over=True))
    steps.assert_exact(database)
