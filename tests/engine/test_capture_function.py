"""The capture functions equal those in golden/ to the character: a reviewer sees each change of them as a whole.

`ROIR_RENEW_GOLDEN=1 pytest tests/engine/test_capture_function.py` writes the files again.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.row_function import body, render
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
        installed = execute(connection, f"SELECT prosrc FROM pg_proc WHERE oid = 'roir_data.capture_{oid}'::regproc")
        assert installed.scalar_one().strip() == body(source, targets).strip()
        both = f"{render(source, targets)};\n\n{render_truncate(source, targets)};\n"
        return both.replace(str(oid), "{oid}")


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
