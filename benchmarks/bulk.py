"""Statements that write many rows: what the capture's row trigger costs them, in both of its modes.

Run by `make bench-writers ARGS="--bulk 100000"`.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.definition import BuildOptions, IndexDefinition
from airflow_roir.engine import build, drop, finalize, prepare, schema, seal
from airflow_roir.engine.database import Database
from airflow_roir.engine.run import start_run

# Rows that are there before; a statement writes some of them, or that many more.
TABLE_FACTOR = 5
STATEMENTS = {
    "insert": (
        "INSERT INTO item SELECT i, i * 7919::bigint % 200003, i FROM generate_series({first} + 1, {first} + {rows}) i"
    ),
    "update included": "UPDATE item SET v = v + 1 WHERE id <= {rows}",
    "update key": "UPDATE item SET k = k + 1 WHERE id <= {rows}",
    "update neither": "UPDATE item SET other = 1 WHERE id <= {rows}",
    "delete": "DELETE FROM item WHERE id <= {rows}",
}


def publish(database: Database, index: str) -> None:
    """All that comes after prepare."""
    run = start_run(database, index, "bench", take_over=True)
    for phase in (build, seal):
        list(phase.work(database, run, 0))
        phase.finish(database, run)
    finalize.finalize_run(database, run)


def computed(connection: Any) -> float:
    """Seconds of processor time of a session, which others disturb less. Elsewhere than on Linux: seconds."""
    path = Path(f"/proc/{connection.info.backend_pid}/schedstat")
    return int(path.read_text().split()[0]) / 1e9 if path.exists() else time.perf_counter()


class Bulk:
    """A server with a table, and what its statements compute."""

    def __init__(self, dsn: str, rows: int) -> None:
        self.rows = rows
        self.database = Database(dsn, "roir bench")
        schema.init(self.database)
        self.connection = psycopg2.connect(dsn)
        self.cursor = self.connection.cursor()
        self.cursor.execute("CREATE TABLE item (id int PRIMARY KEY, k int, v int, other int)")
        statement = STATEMENTS["insert"].format(first=0, rows=rows * TABLE_FACTOR)
        self.cursor.execute(statement)
        self.cursor.execute("ANALYZE item")
        self.connection.commit()
        self.taken: dict[tuple[str, str], list[float]] = {}

    def measure(self, mode: str) -> None:
        """Each statement, rolled back."""
        for name, statement in STATEMENTS.items():
            statement = statement.format(first=self.rows * TABLE_FACTOR, rows=self.rows)
            begun = computed(self.connection)
            self.cursor.execute(statement)
            taken = computed(self.connection) - begun
            self.connection.rollback()
            self.taken.setdefault((name, mode), []).append(taken * 1e6 / self.rows)

    def round(self) -> None:
        """Without an index, with a native one, with ours in both modes."""
        self.measure("none")
        self.cursor.execute("CREATE INDEX yardstick ON item (k, id) INCLUDE (v)")
        self.connection.commit()
        self.measure("native")
        self.cursor.execute("DROP INDEX yardstick")
        self.connection.commit()
        definition = IndexDefinition.parse("ours", "item", "k", "v")
        prepared = prepare.prepare(self.database, definition, BuildOptions(verify="none", revert_window_s=0))
        self.measure("capture")
        publish(self.database, prepared.index)
        self.measure("active")
        drop.drop_index(self.database, "ours", "bench")
        self.cursor.execute("SELECT 1")
        self.connection.commit()


def measure(dsn: str, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds that the session computes per row, medians of the rounds."""
    bulk = Bulk(dsn, rows)
    for _ in range(rounds):
        bulk.round()
    bulk.connection.close()
    return [
        {
            "statement": name,
            **{
                mode: round(statistics.median(taken), 2)
                for (statement, mode), taken in bulk.taken.items()
                if statement == name
            },
        }
        for name in STATEMENTS
    ]
