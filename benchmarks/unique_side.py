"""One build of `benchmarks.unique_cost`, by the code of the folder that PYTHONPATH names: its seconds, as JSON.

`python -P benchmarks/unique_side.py ORDER`, the DSN in ROIR_DSN. ORDER: JSON, `unique`, `early`, `parallelism`,
`index`, and `options` of the build. The folder may be a checkout that knows no unique index.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, drop, install, lifecycle, prepare, seal
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from benchmarks.engine import in_parallel

SECONDS: dict[str, float] = {}


def timed(module: Any, name: str, part: str) -> None:
    """Makes a function of a module add its time to SECONDS."""
    function = getattr(module, name)

    def wrapped(*values: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*values, **named)
        finally:
            SECONDS[part] = SECONDS.get(part, 0.0) + time.perf_counter() - begun

    setattr(module, name, wrapped)


def main() -> None:
    """See the module."""
    order = json.loads(sys.argv[1])
    database = Database(os.environ["ROIR_DSN"], "roir bench")
    install.init(database)
    unique = {"unique": True} if order["unique"] else {}
    definition = IndexDefinition.parse(order["index"], "public.customer", "number", "name", **unique)
    workers = order["parallelism"]
    if order["unique"]:
        timed(importlib.import_module("airflow_roir.engine.unique.duplicates"), "look", "look")
    begun = last = time.perf_counter()

    def took(part: str) -> None:
        nonlocal last
        SECONDS[part], last = time.perf_counter() - last, time.perf_counter()

    options = BuildOptions(parallelism=workers, revert_window_s=0, verify="none", **order["options"])
    prepared = prepare.prepare(database, definition, options)
    run = start_run(database, prepared.index, "bench", take_over=True)
    took("prepare")
    early: Any = nullcontext()
    if order["early"]:
        early = importlib.import_module("airflow_roir.engine.early.detecting").detecting(database, run)
    with early:
        in_parallel(build, database, run, workers)
    build.finish(database, run)
    took("build")
    in_parallel(seal, database, run, workers)
    seal.finish(database, run)
    took("seal")
    lifecycle.run_phases(database, run)
    took("finalize")
    SECONDS["all"] = time.perf_counter() - begun
    drop.drop_index(database, prepared.index, "bench")
    print(json.dumps(SECONDS))


main()
