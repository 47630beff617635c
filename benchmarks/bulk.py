"""Statements that write many rows: the capture's row trigger beside a statement trigger that works set-based.

Run by `make bench-writers ARGS="--bulk 100000"`. The statement triggers are prototypes: they read transition tables,
and do what the quick path of the row trigger does, without its careful path. docs/performance.md says why they stay
here.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import psycopg2

from airflow_roir.definition import BuildOptions, IndexDefinition
from airflow_roir.engine import abort, build, finalize, prepare, schema, seal
from airflow_roir.engine import generation as physical
from airflow_roir.engine.capture import installation
from airflow_roir.engine.database import Database, execute
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
UPSERT = "ON CONFLICT (c1, c2) DO UPDATE SET c1 = EXCLUDED.c1, c2 = EXCLUDED.c2, c3 = EXCLUDED.c3"
# By mode: what the quick path does, for all rows of a statement.
PROTOTYPES = {
    "capture": {
        "INSERT": "INSERT INTO {delta} SELECT k, id, v, 'regular' FROM fresh {upsert}, state = EXCLUDED.state",
        "DELETE": "INSERT INTO {delta} SELECT k, id, NULL, 'antimatter' FROM gone {upsert}, state = EXCLUDED.state",
        "UPDATE": (
            "INSERT INTO {delta} SELECT g.k, g.id, NULL, 'antimatter' FROM gone g JOIN fresh f USING (id) "
            "WHERE g.k IS DISTINCT FROM f.k {upsert}, state = EXCLUDED.state; "
            "INSERT INTO {delta} SELECT f.k, f.id, f.v, 'regular' FROM gone g JOIN fresh f USING (id) "
            "WHERE (g.k, g.v) IS DISTINCT FROM (f.k, f.v) {upsert}, state = EXCLUDED.state"
        ),
    },
    "active": {
        "INSERT": "INSERT INTO {base} SELECT k, id, v FROM fresh {upsert}",
        "DELETE": "DELETE FROM {base} b USING gone g WHERE b.c1 = g.k AND b.c2 = g.id",
        "UPDATE": (
            "DELETE FROM {base} b USING gone g JOIN fresh f USING (id) "
            "WHERE b.c1 = g.k AND b.c2 = g.id AND g.k IS DISTINCT FROM f.k; "
            "INSERT INTO {base} SELECT f.k, f.id, f.v FROM gone g JOIN fresh f USING (id) "
            "WHERE (g.k, g.v) IS DISTINCT FROM (f.k, f.v) {upsert}"
        ),
    },
}
REFERENCING = {
    "INSERT": "NEW TABLE AS fresh",
    "DELETE": "OLD TABLE AS gone",
    "UPDATE": "OLD TABLE AS gone NEW TABLE AS fresh",
}


class Bulk:
    """A server with a table, and how long its statements take."""

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
        self.taken: dict[tuple[str, str, str], list[float]] = {}

    def measure(self, mode: str, trigger: str) -> None:
        """Each statement, rolled back."""
        for name, statement in STATEMENTS.items():
            statement = statement.format(first=self.rows * TABLE_FACTOR, rows=self.rows)
            begun = time.perf_counter()
            self.cursor.execute(statement)
            taken = time.perf_counter() - begun
            self.connection.rollback()
            self.taken.setdefault((name, mode, trigger), []).append(taken * 1e6 / self.rows)

    def measure_prototype(self, mode: str, generation: int) -> None:
        """The same without the row trigger, with statement triggers instead."""
        names = {
            "base": physical.base(generation),
            "delta": physical.delta(generation),
            "upsert": UPSERT,
        }
        # The guard lets only roir itself do that while an index is built.
        self.cursor.execute("SET roir.own_ddl = 'on'")
        self.cursor.execute("SELECT 'item'::regclass::oid")
        trigger = installation.trigger_name(self.cursor.fetchone()[0])
        self.cursor.execute(f"ALTER TABLE item DISABLE TRIGGER {trigger}")
        for event, body in PROTOTYPES[mode].items():
            name = f"prototype_{event.lower()}"
            self.cursor.execute(
                f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS "
                f"$$ BEGIN {body.format(**names)}; RETURN NULL; END $$"
            )
            self.cursor.execute(
                f"CREATE TRIGGER {name} AFTER {event} ON item REFERENCING {REFERENCING[event]} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {name}()"
            )
        self.connection.commit()
        self.measure(mode, "statement")
        for event in PROTOTYPES[mode]:
            self.cursor.execute(f"DROP FUNCTION prototype_{event.lower()} CASCADE")
        self.cursor.execute(f"ALTER TABLE item ENABLE ALWAYS TRIGGER {trigger}")
        self.connection.commit()

    def round(self) -> None:
        """Without an index, with a native one, with ours in both modes."""
        self.measure("none", "")
        self.cursor.execute("CREATE INDEX yardstick ON item (k, id) INCLUDE (v)")
        self.connection.commit()
        self.measure("native", "")
        self.cursor.execute("DROP INDEX yardstick")
        self.connection.commit()
        definition = IndexDefinition.parse("ours", "item", "k", "v")
        prepared = prepare.prepare(self.database, definition, BuildOptions(verify="none", revert_window_s=0))
        with self.database.transaction() as connection:
            generation = int(execute(connection, "SELECT max(id) FROM roir.generation").scalar_one())
        self.measure("capture", "row")
        self.measure_prototype("capture", generation)
        run = start_run(self.database, prepared.index, "bench", take_over=True)
        for phase in (build, seal):
            list(phase.work(self.database, run, 0))
            phase.finish(self.database, run)
        finalize.finalize_run(self.database, run)
        self.measure("active", "row")
        self.measure_prototype("active", generation)
        abort.drop_index(self.database, "ours", "bench")
        self.cursor.execute("SELECT 1")
        self.connection.commit()


def measure(dsn: str, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Microseconds per row, medians of the rounds."""
    bulk = Bulk(dsn, rows)
    for _ in range(rounds):
        bulk.round()
    bulk.connection.close()
    return [
        {
            "statement": name,
            **{
                " ".join(filter(None, (mode, trigger))): round(statistics.median(taken), 2)
                for (statement, mode, trigger), taken in bulk.taken.items()
                if statement == name
            },
        }
        for name in STATEMENTS
    ]
