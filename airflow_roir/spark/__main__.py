"""`python -m airflow_roir.spark`, also for `spark-submit`: builds and seals, or verifies, an unfinished operation.

The DSN is read from the environment variable ROIR_DSN alone: an argument would show in the process list.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database
from airflow_roir.engine.operations import default_actor
from airflow_roir.errors import OperationPaused, RoirError, SparkFailed
from airflow_roir.operation import Status
from airflow_roir.spark.log_file import diverted
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.supervise import drive


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 3 paused, 4 another run drives the operation, 2 bad input, 1 any other error."""
    parser = argparse.ArgumentParser(prog="python -m airflow_roir.spark", description=__doc__)
    parser.add_argument("--index", required=True, help="the index: name or schema.name, quoted as in SQL")
    parser.add_argument("--owner", help="the name of this run in roir status")
    parser.add_argument("--master", help="Spark master URL, local[n], or sc://… for Spark Connect")
    parser.add_argument("--take-over", action="store_true", help="take over even from a run that is alive")
    parser.add_argument("--keep-pause", action="store_true", help="end at once if the operation is paused")
    parser.add_argument("--spark-log", type=Path, metavar="FILE", help="where Spark's own log goes, by default here")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting")
    options = parser.parse_args(arguments)
    dsn = os.environ.get("ROIR_DSN")
    if not dsn:
        return _say("no database given: set the environment variable ROIR_DSN", 2)
    owner = options.owner or f"{default_actor()} pid {os.getpid()}"
    if wrong := [setting for setting in options.conf if "=" not in setting]:
        return _say(f"--conf takes KEY=VALUE, not {wrong[0]!r}", 2)
    conf = dict(setting.split("=", 1) for setting in options.conf)
    signal.signal(signal.SIGTERM, _interrupt)
    job = _Job(Database(dsn, f"roir {options.index} driver"), options, owner, conf)
    if options.spark_log is None:
        return job.run(sys.stderr, None)
    with diverted(options.spark_log) as (voice, log):
        return job.run(voice, log)


class _Job:
    """The work of one call, told line by line."""

    def __init__(self, database: Database, options: argparse.Namespace, owner: str, conf: dict[str, str]) -> None:
        self._database = database
        self._options = options
        self._owner = owner
        self._spark = SparkOptions(options.master, conf)

    def run(self, voice: TextIO, log: Path | None) -> int:
        """Its exit code. voice: where the lines go; log: the file of Spark's own, only told."""
        try:
            status = drive(
                self._database,
                self._options.index,
                self._owner,
                self._spark,
                self._options.take_over,
                lambda line: _report(line, voice),
                lift_pause=not self._options.keep_pause,
                log=log,
            )
        except RoirError as error:
            return _say(str(error), error.exit_code, voice)
        except DBAPIError as error:
            return _say(str(error.orig).strip(), 1, voice)
        except KeyboardInterrupt:
            return _say("interrupted; the operation is paused", OperationPaused.exit_code, voice)
        except Exception as error:
            # A defect: its stack is for the other log, too, but the reader of this one must know.
            traceback.print_exc()
            return _say(f"{type(error).__name__}: {error}{'' if log is None else f'; its stack is in {log}'}", 1, voice)
        if status.status == Status.PAUSED:
            return _say(
                f"paused by {status.paused_by} at {status.percent_complete:g} %: {status.pause_reason}",
                OperationPaused.exit_code,
                voice,
            )
        return 0


def _interrupt(_signal: int, _frame: Any) -> None:
    """Leave as on Ctrl-C: the operation is paused, workers end their batch. A second signal ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _report(line: str, voice: TextIO) -> None:
    """Raises SparkFailed if no process reads: without its parent a run hears of no switch and no changed option."""
    try:
        print(f"roir: {line}", file=voice, flush=True)
    except BrokenPipeError:
        raise SparkFailed("the process that started this run has died (an Airflow task, for example)") from None


def _say(message: str, code: int, voice: TextIO | None = None) -> int:
    with suppress(SparkFailed):
        _report(message, voice or sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
