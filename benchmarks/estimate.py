"""The quality of `seconds_left`: builds that are looked at all the time, and the errors of their estimates.

make bench-estimate
make bench-estimate ARGS="--rows 1000000 --builds quiet writer"    # a quick look

benchmarks/results/estimate keeps the inputs of the estimates of each build, look by look, so that a test can try
another way to estimate on the same builds. A build without a limit is over soon, so other work of the machine shows in
it. Figures: the errors from a fifth of the work on, in per cent of the seconds that were left, or of four if fewer
were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import build, clean_up, drop, install, lifecycle, prepare, seal
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run, driving, heartbeat, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.options import BuildOptions
from benchmarks.data import DATASETS
from benchmarks.engine import in_parallel
from benchmarks.steady_writer import Writer
from servers.postgres import embedded_postgres

RESULTS = Path(__file__).parent / "results" / "estimate"
DATA = DATASETS["item"]
INDEX = "item_by_part"
LOOKS = 45
# The columns that the estimate reads.
OPERATION = (
    "kind",
    "status",
    "phase",
    "parallelism",
    "max_rows_per_second",
    "options",
    "rows_estimate",
    "phase_seconds",
)
WORK = (
    "rows",
    "copied",
    "batch_seconds",
    "sealed",
    "sealing",
    "compared",
    "comparing",
    "worked",
    "in_phase",
    "percent",
)
LOOK = """
SELECT to_jsonb(o) AS operation, to_jsonb(w) AS work,
       coalesce(pg_stat_get_live_tuples(to_regclass('roir_data.g' || o.generation_id || '_delta')), 0) AS delta,
       (SELECT jsonb_build_array(x.rows_estimate, x.phase_seconds) FROM roir.operation x
         WHERE x.index_id = o.index_id AND x.id < o.id AND x.kind <> 'verify' AND x.status = 'completed'
         ORDER BY x.id DESC LIMIT 1) AS earlier
  FROM roir.operation o JOIN roir.operation_work w ON w.operation_id = o.id WHERE o.id = %(operation)s
"""
SAMPLES = """
SELECT to_jsonb(s) - 'operation_id' - 'at' FROM roir.progress_sample s WHERE operation_id = %(operation)s ORDER BY at
"""
# The same call as in the view, over what was recorded.
ESTIMATE = """
SELECT t.likely, t.low, t.high
  FROM roir.time_left(
       jsonb_populate_record(NULL::roir.operation, %(operation)s),
       jsonb_populate_record(NULL::roir.operation_work, %(work)s),
       ARRAY(SELECT jsonb_populate_record(NULL::roir.progress_sample, s) FROM jsonb_array_elements(%(samples)s) s
              WHERE (s ->> 'worked')::float8 <= (%(work)s::jsonb ->> 'worked')::float8 + 0.001),
       %(delta)s, %(earlier_rows)s, %(earlier_seconds)s) t
"""


@dataclass(frozen=True)
class Case:
    """A build that is recorded. again: of an index that was built before. then: what happens after a third of it."""

    name: str
    writes: int = 0
    limit: float | None = None
    again: bool = False
    then: str | None = None


# limit: in seconds that the copying then takes.
CASES = (
    Case("quiet"),
    Case("writer", writes=500),
    Case("limited", limit=40),
    Case("limited-writer", writes=500, limit=40),
    Case("rebuild", again=True, writes=200),
    Case("paused", writes=200, limit=30, then="pause"),
)


class Looker(threading.Thread):
    """Looks at an operation every `every_s` seconds, until it is halted."""

    def __init__(self, database: Database, operation_id: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.database, self.values, self.every_s = database, {"operation": operation_id}, every_s
        self.looks: list[dict[str, Any]] = []
        self.halt = threading.Event()

    def run(self) -> None:
        with self.database.autocommit() as connection:
            while not self.halt.wait(self.every_s):
                self.looks.append(look(connection, self.values))


def look(connection: Any, values: dict[str, int]) -> dict[str, Any]:
    """The inputs of an estimate now."""
    row = execute(connection, LOOK, values).one()
    operation = {name: row.operation[name] for name in OPERATION}
    operation["options"] = {"verify": row.operation["options"].get("verify", "after")}
    work = {name: _short(row.work[name]) for name in WORK}
    return {"operation": operation, "work": work, "delta": row.delta, "earlier": row.earlier}


def record(database: Database, dsn: str, case: Case, rows: int) -> dict[str, Any]:
    """Builds the index and looks at it meanwhile; returns what was seen."""
    limit = None if case.limit is None else max(100, int(rows / case.limit))
    options = BuildOptions(revert_window_s=0, parallelism=2, max_rows_per_second=limit)
    if not case.again:
        _drop(database)
    prepared = prepare.prepare(database, DATA.definition(INDEX), options)
    looker = Looker(database, prepared.operation_id, 0.25 if limit is None else 1.0)
    with ExitStack() as stack:
        if case.writes:
            stack.enter_context(Writer(dsn, DATA.write(rows), case.writes))
        run = start_run(database, prepared.index, "bench", take_over=True)
        looker.start()
        if case.then == "pause":
            # Half of the work with two workers, the rest with one, after a rest that counts for nothing.
            threading.Timer(case.limit / 2 if case.limit else 5, lambda: _pause(database)).start()
            _drive(database, run, until_build=True)
            threading.Event().wait(5)
            run = start_run(database, prepared.index, "bench", take_over=True)
        _drive(database, run)
    looker.halt.set()
    looker.join()
    with database.transaction() as connection:
        values = {"operation": prepared.operation_id}
        end = look(connection, values)
        samples = [
            {name: _short(value) for name, value in one.items()}
            for one in execute(connection, SAMPLES, values).scalars()
        ]
    clean_up.clean_up(database)
    seen = [one for one in looker.looks if one["operation"]["status"] == "running"]
    step = max(1, len(seen) // LOOKS)
    return {
        "name": case.name,
        "rows": rows,
        "limit": limit,
        "writes": case.writes,
        "seconds": end["work"]["worked"],
        "samples": samples,
        "looks": seen[::step],
    }


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _pause(database: Database) -> None:
    requests.pause(database, INDEX, "bench", "to measure")


def _drop(database: Database) -> None:
    with database.transaction() as connection:
        built = execute(connection, "SELECT EXISTS (SELECT FROM roir.index WHERE dropped_at IS NULL)").scalar_one()
    if built:
        drop.drop_index(database, INDEX, "bench")


def _drive(database: Database, run: Run, until_build: bool = False) -> None:
    with driving(database, run), heartbeat(database, run):
        in_parallel(build, database, run, 2)
        if until_build:
            return
        build.finish(database, run)
        in_parallel(seal, database, run, 2)
        seal.finish(database, run)
        lifecycle.run_phases(database, run)


def estimates(connection: Any, recorded: dict[str, Any]) -> list[tuple[str, float, float, float | None, float, float]]:
    """Look by look while it ran: the phase, the seconds worked, what was left, what was estimated, between what."""
    found = []
    samples = json.dumps(recorded["samples"])
    for one in recorded["looks"]:
        if one["operation"]["status"] != "running":
            continue
        earlier = one["earlier"] or [None, None]
        values = {
            "operation": json.dumps(one["operation"]),
            "work": json.dumps(one["work"]),
            "samples": samples,
            "delta": one["delta"],
            "earlier_rows": earlier[0],
            "earlier_seconds": None if earlier[1] is None else json.dumps(earlier[1]),
        }
        row = execute(connection, ESTIMATE, values).one()
        worked = one["work"]["worked"]
        found.append((one["operation"]["phase"], worked, recorded["seconds"] - worked, row.likely, row.low, row.high))
    return found


def error(left: float, likely: float | None) -> float:
    """The error of an estimate, relative to what was left; at least four seconds count as left."""
    if likely is None:
        return 1.0
    return abs(likely - left) / max(left, 4.0)


def errors(connection: Any, recorded: dict[str, Any]) -> list[float]:
    """The errors of all looks from a fifth of the work on."""
    return [
        error(left, likely)
        for _, worked, left, likely, _, _ in estimates(connection, recorded)
        if worked >= recorded["seconds"] / 5
    ]


def main() -> None:
    """Record, print, and write the recordings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--builds", nargs="+", default=[case.name for case in CASES])
    parser.add_argument(
        "--replay", action="store_true", help="estimate anew from what was recorded, and record nothing"
    )
    parser.add_argument("--show", action="store_true", help="every look")
    options = parser.parse_args()
    with embedded_postgres(fsync="on") as dsn:
        database = Database(dsn, "roir bench")
        install.init(database)
        if not options.replay:
            _load(dsn, options.rows)
        for case in CASES:
            if case.name not in options.builds:
                continue
            file = RESULTS / f"{case.name}.json"
            if options.replay:
                recorded = json.loads(file.read_text())
            else:
                recorded = record(database, dsn, case, options.rows)
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
            with database.transaction() as connection:
                _tell(connection, recorded, options.show)


def _load(dsn: str, rows: int) -> None:
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    with connection.cursor() as cursor:
        DATA.load(cursor, rows)
        cursor.execute("VACUUM (ANALYZE) item")
    connection.close()


def _tell(connection: Any, recorded: dict[str, Any], show: bool) -> None:
    found = errors(connection, recorded)
    print(
        f"{recorded['name']}: {recorded['seconds']:.1f} s, {len(found)} looks: error median "
        f"{statistics.median(found):.0%}, 90 % below {statistics.quantiles(found, n=10)[-1]:.0%}, "
        f"worst {max(found):.0%}",
        flush=True,
    )
    if show:
        for phase, worked, left, likely, low, high in estimates(connection, recorded):
            told = "?" if likely is None else f"{likely:6.1f} ({low:.1f} to {high:.1f}), {error(left, likely):.0%}"
            print(f"  {phase:8} at {worked:6.1f}: left {left:6.1f}, told {told}")


if __name__ == "__main__":
    main()
