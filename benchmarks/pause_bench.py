"""The build that `benchmarks.pause` pauses, by the real Spark driver; and what is left once its workers are gone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, install, prepare
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from servers.killable import Server

LONGEST_STRETCH_S = 1.5
# This many drivers are waited for to their end, to see how long Spark itself takes to go.
FULL_ENDS = 10
# A JVM that starts with half the work; it isn't what is measured, and the copying is PostgreSQL's.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PATIENCE_S = 240
WORKERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'roir % worker %'"
COMMITTED = "SELECT coalesce(sum(rows), 0)::bigint FROM roir.scan_range WHERE operation_id = %s"
INSERTED = (
    "SELECT coalesce(sum(pg_stat_get_tuples_inserted(inhrelid)), 0)::bigint FROM pg_inherits "
    "WHERE inhparent = %s::regclass"
)
STATE = "SELECT status, phase FROM roir.operation WHERE id = %s"
# A batch's own duration, as the worker measured it, all but its commit.
RECORD_BATCHES = """
CREATE TABLE batch (seconds numeric);
CREATE FUNCTION record_batch() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO public.batch VALUES (NEW.seconds - OLD.seconds); RETURN NULL; END $$;
CREATE TRIGGER record_batch AFTER UPDATE OF watermark ON roir.scan_range FOR EACH ROW
WHEN (NEW.batches > OLD.batches) EXECUTE FUNCTION record_batch();
"""


class Bench:
    """One table, and operations on it that are paused until enough pauses were measured."""

    def __init__(self, server: Server, rows: int, batch_rows: int, seed: int) -> None:
        self.rows, self.batch_rows = rows, batch_rows
        self.random = random.Random(seed)
        server.execute("CREATE DATABASE bench")
        self.dsn = server.dsn("bench")
        self.server = server
        self.database = Database(self.dsn, "roir bench")
        install.init(self.database)
        self.session = psycopg2.connect(self.dsn)
        self.session.autocommit = True
        self.run(RECORD_BATCHES)
        self.run("CREATE TABLE t (id bigint PRIMARY KEY, k int, a int, b text)")
        columns = "i, (i::bigint * 7919) %% 1000003, i %% 97, md5(i::text)"
        self.run(f"INSERT INTO t SELECT {columns} FROM generate_series(1, %s) i", rows)
        self.run("VACUUM ANALYZE t")
        self.prepared: Any = None
        self.redone_before = 0
        self.measured = 0

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """A statement in the watching session."""
        with self.session.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def begin(self) -> None:
        """A fresh operation; the last one, unless it is the first, is thrown away."""
        if self.prepared is not None:
            abort.abort(self.database, "ix", "bench")
        options = BuildOptions(parallelism=2, batch_rows=self.batch_rows)
        definition = IndexDefinition.parse("ix", "t", "k", "a, b")
        self.prepared = prepare.prepare(self.database, definition, options, "bench")
        self.redone_before = 0

    def building(self) -> bool:
        """True while there is an operation with something left to copy."""
        if self.prepared is None:
            return False
        ((status, phase),) = self.run(STATE, self.prepared.operation_id)
        return status in ("running", "paused") and phase == "build"

    def pause_driver(self) -> dict[str, Any] | None:
        """Starts the driver, pauses it at a random moment; None if the build was over before."""
        if not self.building():
            self.begin()
        command = [sys.executable, "-m", "airflow_roir.spark", "--index", "ix", "--owner", "bench", "--take-over"]
        driver = subprocess.Popen(
            [*command, "--master", "local[4]", "--conf", "spark.ui.enabled=false"],
            env={**os.environ, "ROIR_DSN": self.dsn, "JAVA_TOOL_OPTIONS": QUICK_JVM},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.wait_for(lambda: self.run(WORKERS)[0][0] >= 2 or driver.poll() is not None)
            time.sleep(self.random.uniform(0, LONGEST_STRETCH_S))
            if not self.building() or not self.run(WORKERS)[0][0]:
                # It ended first, all of it or what there was to copy: nothing is left that could be paused.
                return None
            begun = time.monotonic()
            self.run("SELECT roir.pause('ix', 'bench')")
            measured = self.stopped(begun)
            if self.measured < FULL_ENDS:
                driver.wait(PATIENCE_S)
                measured["driver_gone_s"] = round(time.monotonic() - begun, 3)
            self.measured += 1
            return measured
        finally:
            # All that was to be seen of it is over: Spark's own leisurely end would double the time of a hundred.
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()

    def stopped(self, begun: float) -> dict[str, Any]:
        """Waits for the last worker's end, and counts."""
        self.wait_for(lambda: self.run(WORKERS)[0][0] == 0, every=0.002)
        seconds = time.monotonic() - begun
        table = f"roir_data.g{self.prepared.generation_id}"
        committed = self.run(COMMITTED, self.prepared.operation_id)[0][0]
        kept = self.run(f"SELECT count(*) FROM {table}")[0][0]
        redone = self.run(INSERTED, table)[0][0] - committed
        before, self.redone_before = self.redone_before, redone
        return {
            "seconds": round(seconds, 3),
            "rows": committed,
            "rows_lost": committed - kept,
            "batches_redone": round((redone - before) / self.batch_rows, 2),
        }

    @staticmethod
    def wait_for(condition: Any, every: float = 0.02) -> None:
        """Polls until it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("waited in vain")
            time.sleep(every)
