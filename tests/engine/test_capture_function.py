"""The capture functions equal those in golden/ to the character: a reviewer sees each change of them as a whole.

`ROIR_RENEW_GOLDEN=1 pytest tests/engine/test_capture_function.py` writes the files again.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from airflow_roir.definition import parse_name
from airflow_roir.engine import clean_up
from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.row_function import body, function_name, render, row_function_name
from airflow_roir.engine.capture.truncate_function import render_truncate
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.source import catalog
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import through_modes

GOLDEN = Path(__file__).parent / "golden"
MODES = ("capture", "direct", "active")
COLUMNS = "id int PRIMARY KEY, k text, v int"
SHAPES = {
    "plain": (f"CREATE TABLE t ({COLUMNS})",),
    "partitioned": (
        f"CREATE TABLE t ({COLUMNS}) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t2 PARTITION OF t DEFAULT",
    ),
    # Rows that share a key for a while: the careful path for every write.
    "deferrable": ("CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, k text, v int)",),
    # Rows that move to another block are touched, too.
    "blocks": (f"CREATE TABLE t ({COLUMNS})",),
}


def functions(database: Database) -> str:
    """The statements of t's functions, as they are installed. The table's oid differs in each database."""
    with database.transaction() as connection:
        oid = int(execute(connection, "SELECT 'public.t'::regclass::oid::bigint").scalar_one())
        source = catalog.read_source_by_oid(connection, oid)
        targets = installation.targets(connection, oid)
        query = f"SELECT prosrc FROM pg_proc WHERE oid = '{row_function_name(oid)}'::regproc"
        installed = execute(connection, query)
        assert installed.scalar_one().strip() == body(source, targets).strip()
        statements = [*render(source, targets), render_truncate(source, targets)]
        return "\n\n".join(f"{statement};" for statement in statements).replace(str(oid), "{oid}") + "\n"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_functions_of_each_mode_are_the_golden_ones(database: Database, dsn: str, shape: str) -> None:
    run_sql(dsn, *SHAPES[shape], "INSERT INTO t SELECT i, (i % 3)::text, i FROM generate_series(1, 40) i")
    found: dict[str, str] = {}

    def read(mode: str) -> None:
        found[f"{shape}_{mode}.sql"] = functions(database)

    through_modes(database, read, include="v", scan="block" if shape == "blocks" else "key")
    if shape == "plain":
        steps.begin(database, table=None, keys=None)
        read("rebuild")
    if shape == "blocks":
        # The other modes are the same as those of plain.
        found = {name: text for name, text in found.items() if name == "blocks_capture.sql"}
    if os.environ.get("ROIR_RENEW_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        for name, text in found.items():
            (GOLDEN / name).write_text(text)
        pytest.skip(f"wrote {', '.join(found)}")
    for name, text in found.items():
        golden = (GOLDEN / name).read_text()
        lines = (golden.splitlines(), text.splitlines())
        difference = "\n".join(difflib.unified_diff(*lines, f"golden/{name}", "rendered", lineterm=""))
        assert text == golden, difference


def test_each_golden_file_is_compared() -> None:
    wanted = {f"{shape}_{mode}.sql" for shape in SHAPES for mode in MODES if shape != "blocks"}
    assert {path.name for path in GOLDEN.iterdir()} == wanted | {"blocks_capture.sql", "plain_rebuild.sql"}


def test_a_session_keeps_little_for_each_partition_that_it_writes_to(database: Database, dsn: str) -> None:
    """Seen: half a megabyte for each partition in each session: PL/pgSQL compiles the function of each trigger."""
    partitions = 30
    run_sql(
        dsn,
        f"CREATE TABLE t ({COLUMNS}) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}) TO ({n + 1})" for n in range(partitions)),
    )
    steps.make_index(database, "one", "t", "k", unique=True)
    steps.make_index(database, "two", "t", "k,v")
    session = steps.session(dsn)
    kept = "SELECT coalesce(sum(used_bytes), 0)::int FROM pg_backend_memory_contexts WHERE name = 'PL/pgSQL function'"
    [(before,)] = steps.sql(session, kept)
    for n in range(partitions):
        steps.sql(session, "INSERT INTO t VALUES (%s, %s, 0)", n, str(n))
        steps.sql(session, "UPDATE t SET v = 1, k = k || 'x' WHERE id = %s", n)
    steps.sql(session, "DELETE FROM t WHERE id % 3 = 0")
    [(after,)] = steps.sql(session, kept)
    session.rollback()
    # One function of a hundred kilobytes or more, and a small one for each partition.
    assert after - before < 500_000 + 20_000 * partitions


KEPT_BY_SESSION = (
    "SELECT coalesce(sum(used_bytes), 0)::int FROM pg_backend_memory_contexts WHERE name ~ 'PL/pgSQL|Cached'"
)


def test_a_session_keeps_no_more_after_a_rebuild(database: Database, dsn: str) -> None:
    """Seen: half a megabyte more with each refresh: PL/pgSQL never frees a function that was dropped."""
    steps.make_table(dsn)
    steps.make_index(database, keys="k,v")
    session = steps.session(dsn)
    session.autocommit = True

    def kept() -> int:
        steps.sql(session, "UPDATE t SET k = k || 'x', v = v + 1 WHERE id = 1")
        steps.sql(session, "UPDATE t SET v = v + 1 WHERE id = 1")
        return int(steps.sql(session, KEPT_BY_SESSION)[0][0])

    before = kept()
    with database.connect() as connection, connection.begin():
        source = catalog.read_source(connection, parse_name("t", "table"))
        for _ in range(3):
            execute(connection, f"LOCK TABLE {source.sql} IN SHARE ROW EXCLUSIVE MODE")
            installation.refresh(connection, source)
    assert kept() < before + 50_000


def test_the_function_that_an_owner_has_dropped_is_made_again(database: Database, dsn: str) -> None:
    """Seen: its type was in the way: no clean-up, no build and no drop was possible any more, and no write."""
    steps.make_table(dsn)
    steps.make_index(database)
    with database.connect() as connection, connection.begin():
        source = catalog.read_source(connection, parse_name("t", "table"))
    run_sql(dsn, f"DROP FUNCTION {row_function_name(source.oid)}")
    steps.make_index(database, "other", keys="v")
    run_sql(dsn, "UPDATE t SET k = 'x', v = -1 WHERE id = 1")
    for index in ("ix", "other"):
        steps.assert_exact(database, index)


def test_a_table_changes_hands_though_its_owner_has_dropped_the_function(database: Database, dsn: str) -> None:
    """The guard hands the capture over at once: it gave up for want of the function."""
    steps.make_table(dsn)
    steps.make_index(database)
    run_sql(dsn, "SELECT roir.guard()", "CREATE ROLE heir", "GRANT USAGE, CREATE ON SCHEMA public TO heir")
    try:
        with database.connect() as connection, connection.begin():
            source = catalog.read_source(connection, parse_name("t", "table"))
        run_sql(dsn, f"DROP FUNCTION {row_function_name(source.oid)}", "ALTER TABLE t OWNER TO heir")
        owner = f"SELECT proowner::regrole::text FROM pg_proc WHERE oid = '{function_name(source.oid)}'::regproc"
        assert steps.sql(steps.session(dsn), owner) == [("heir",)]
        clean_up.clean_up(database)
        run_sql(dsn, "UPDATE t SET k = 'x', v = -1 WHERE id = 1")
        steps.assert_exact(database)
    finally:
        run_sql(dsn, "ALTER TABLE t OWNER TO CURRENT_USER", "REASSIGN OWNED BY heir TO CURRENT_USER",
                "DROP OWNED BY heir", "DROP ROLE heir")  # fmt: skip
