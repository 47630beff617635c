"""The SQL of the migrations can be read: its lines are as wide as those of the code."""

from __future__ import annotations

from pathlib import Path

WIDTH = 120
MIGRATIONS = Path(__file__).parents[2] / "migrations"


def test_no_line_of_sql_is_too_wide() -> None:
    files = sorted(MIGRATIONS.rglob("*.sql"))
    assert {"shard.sql", "tables.sql"} <= {path.name for path in files}
    lines = ((path, n, line) for path in files for n, line in enumerate(path.read_text().splitlines(), 1))
    assert [f"{path.name}:{n}" for path, n, line in lines if len(line) > WIDTH] == []
