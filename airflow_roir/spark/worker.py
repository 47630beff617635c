"""What one Spark task does: it drives the engine as one of an operation's workers, and returns its metrics as rows.

Everything a task needs travels in the function that Spark ships: nothing is in Spark's configuration, its UI or
its event log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import build, seal
from airflow_roir.engine.database import Database, is_transient
from airflow_roir.engine.run import Run, settle
from airflow_roir.errors import Fenced, OperationPaused, RoirError, SourceChanged

METRICS_SCHEMA = (
    "worker int, phase string, ordinal int, rows bigint, batches bigint, seconds double, done boolean, error string"
)
# A server that restarts is back within this; longer outages pause the operation.
OUTAGE_PATIENCE_S = 60.0
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0


def worker_function(
    dsn: str, run: Run, phase: str, numbers: list[int]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for `DataFrame.mapInArrow` over `spark.range`: row i is the worker with number `numbers[i]`."""

    def run_workers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column("id").to_pylist():
                number = numbers[task]
                database = Database(dsn, f"roir {run.index} worker {number}")
                rows = list(work(database, run, phase, number))
                yield pa.RecordBatch.from_pylist(rows, schema=_arrow_schema())

    return run_workers


def work(
    database: Database,
    run: Run,
    phase: str,
    number: int,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """Work on a phase until nothing is left to claim; yields a metrics row for each range or segment.

    Lost connections and restarting servers are waited for. Whatever else goes wrong is written to the operation,
    so that its other workers stop at their next batch, and returned as a row: no error is ever dropped.
    """
    patience = OUTAGE_PATIENCE_S
    pause_s = FIRST_WAIT_S
    while True:
        try:
            for metrics in _steps(database, run, phase, number, wait):
                patience, pause_s = OUTAGE_PATIENCE_S, FIRST_WAIT_S
                yield metrics
            return
        except Fenced as error:
            # A newer run works on; that is no failure of this operation.
            yield _row(number, phase, error=f"fenced: {error}")
            return
        except OperationPaused:
            return
        except SourceChanged as error:
            settle(database, run, error, fatal=True)
            yield _row(number, phase, error=str(error))
            return
        except (RoirError, DBAPIError) as error:
            if not isinstance(error, DBAPIError) or not is_transient(error) or patience <= 0:
                settle(database, run, error, fatal=False)
                yield _row(number, phase, error=str(error).strip())
                return
        wait(pause_s)
        patience -= pause_s
        pause_s = min(pause_s * 2, LONGEST_WAIT_S)


def _steps(
    database: Database, run: Run, phase: str, number: int, wait: Callable[[float], None]
) -> Iterable[dict[str, Any]]:
    if phase == "build":
        for m in build.work(database, run, number, wait):
            yield _row(number, phase, m.ordinal, m.rows, m.batches, m.seconds, m.done)
    else:
        for s in seal.work(database, run, number):
            yield _row(number, phase, s.ordinal, seconds=s.seconds, done=True)


def _row(
    worker: int,
    phase: str,
    ordinal: int | None = None,
    rows: int = 0,
    batches: int = 0,
    seconds: float = 0.0,
    done: bool = False,
    error: str | None = None,
) -> dict[str, Any]:
    return {
        "worker": worker,
        "phase": phase,
        "ordinal": ordinal,
        "rows": rows,
        "batches": batches,
        "seconds": seconds,
        "done": done,
        "error": error,
    }


def _arrow_schema() -> pa.Schema:
    return pa.schema(
        [
            ("worker", pa.int32()),
            ("phase", pa.string()),
            ("ordinal", pa.int32()),
            ("rows", pa.int64()),
            ("batches", pa.int64()),
            ("seconds", pa.float64()),
            ("done", pa.bool_()),
            ("error", pa.string()),
        ]
    )
