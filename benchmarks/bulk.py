"""Statements that write many rows: what the capture's row trigger costs them, in both of its modes.

Run by `make bench-writers ARGS="--bulk 100000"`. With `--unique` the key is unique: beside a native unique index, one
of a deferrable constraint, our plain index, and our unique one in each mode.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, drop, install, lifecycle, prepare, seal, switch
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions

# Rows that are there before; a statement writes some of them, or that many more.
TABLE_FACTOR = 5
KEYS = {False: "i * 7919::bigint % 200003", True: "i * 7919::bigint % 99999989"}
INSERT = "INSERT INTO item SELECT i, {key}, i FROM generate_series({first} + 1, {first} + {rows}) i"
STATEMENTS = {
    "insert": INSERT,
    "update included": "UPDATE item SET v = v + 1 WHERE id <= {rows}",
    "update key": "UPDATE item SET k = k + {moved} WHERE id <= {rows}",
    "update neither": "UPDATE item SET other = 1 WHERE id <= {rows}",
    "delete": "DELETE FROM item WHERE id <= {rows}",
}
# Each row gets the key of its neighbour: a native index that isn't deferred refuses it.
SWAP = {"swap keys": "UPDATE item SET k = o.k FROM item o WHERE o.id = ((item.id - 1) # 1) + 1 AND item.id <= {rows}"}
YARDSTICK = "CREATE {} INDEX yardstick ON item ({}) INCLUDE (v)"
DEFERRABLE = "ALTER TABLE item ADD CONSTRAINT yardstick UNIQUE (k) INCLUDE (v) DEFERRABLE"


def load(database: Database, index: str) -> Run:
    """Builds and seals a prepared index, in a run that can continue."""
    run = start_run(database, index, "bench", take_over=True)
    for phase in (build, seal):
        list(phase.PHASE.work(database, run, 0))
        phase.finish(database, run)
    return run


def publish(database: Database, index: str) -> None:
    """All that comes after prepare."""
    lifecycle.run_phases(database, load(database, index))


def computed(connection: Any) -> float:
    """Seconds of processor time of a session, which others disturb less. Elsewhere than on Linux: seconds."""
    path = Path(f"/proc/{connection.info.backend_pid}/schedstat")
    return int(path.read_text().split()[0]) / 1e9 if path.exists() else time.perf_counter()


class Bulk:
    """A server with a table, and what its statements compute. segments: of ours; the plan chooses by default."""

    def __init__(self, dsn: str, rows: int, unique: bool = False, segments: int | None = None) -> None:
        self.rows, self.unique, self.segments = rows, unique, segments
        self.statements = STATEMENTS | (SWAP if unique else {})
        self.database = Database(dsn, "roir bench")
        install.init(self.database)
        self.connection = psycopg2.connect(dsn)
        self.cursor = self.connection.cursor()
        self.cursor.execute("CREATE TABLE item (id int PRIMARY KEY, k int, v int, other int)")
        self.cursor.execute(self.statement("insert", 0, rows * TABLE_FACTOR))
        self.cursor.execute("ANALYZE item")
        self.connection.commit()
        self.taken: dict[tuple[str, str], list[float]] = {}

    def statement(self, name: str, first: int, rows: int) -> str:
        """Its text."""
        moved = 100_000_000 if self.unique else 1
        text = self.statements[name].replace("{key}", KEYS[self.unique])
        return text.format(first=first, rows=rows, moved=moved)

    def measure(self, mode: str) -> None:
        """Each statement, rolled back."""
        for name in self.statements:
            if (name, mode) == ("swap keys", "native"):
                continue
            statement = self.statement(name, self.rows * TABLE_FACTOR, self.rows)
            begun = computed(self.connection)
            self.cursor.execute(statement)
            taken = computed(self.connection) - begun
            self.connection.rollback()
            self.taken.setdefault((name, mode), []).append(taken * 1e6 / self.rows)

    def round(self) -> None:
        """Without an index, with a native one, with ours in each mode."""
        self.measure("none")
        self.native("native", YARDSTICK.format("UNIQUE", "k") if self.unique else YARDSTICK.format("", "k, id"))
        if self.unique:
            self.native("native, deferrable", DEFERRABLE, "ALTER TABLE item DROP CONSTRAINT yardstick")
        self.ours("")
        if self.unique:
            self.ours("unique, ")

    def native(self, mode: str, create: str, remove: str = "DROP INDEX yardstick") -> None:
        """A yardstick."""
        self.cursor.execute(create)
        self.connection.commit()
        self.measure(mode)
        self.cursor.execute(remove)
        self.connection.commit()

    def ours(self, kind: str) -> None:
        """One of ours on its way. Its delta is empty in direct mode."""
        definition = IndexDefinition.parse("ours", "item", "k", "v", unique=bool(kind))
        options = BuildOptions(verify="none", revert_window_s=0, segments=self.segments)
        prepared = prepare.prepare(self.database, definition, options)
        self.measure(f"{kind}capture")
        run = load(self.database, prepared.index)
        switch.switch(self.database, run)
        if self.unique:
            self.measure(f"{kind}direct")
        lifecycle.run_phases(self.database, run)
        self.measure(f"{kind}active")
        drop.drop_index(self.database, "ours", "bench")
        self.cursor.execute("SELECT 1")
        self.connection.commit()


def measure(
    dsn: str, rows: int, rounds: int, unique: bool = False, segments: int | None = None
) -> list[dict[str, Any]]:
    """Microseconds that the session computes per row, medians of the rounds."""
    bulk = Bulk(dsn, rows, unique, segments)
    for _ in range(rounds):
        bulk.round()
    bulk.connection.close()
    modes = list(dict.fromkeys(mode for _, mode in bulk.taken))
    return [
        {
            "statement": name,
            **{
                mode: round(statistics.median(bulk.taken[name, mode]), 2) if (name, mode) in bulk.taken else None
                for mode in modes
            },
        }
        for name in bulk.statements
    ]
