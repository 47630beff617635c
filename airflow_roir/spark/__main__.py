"""`python -m airflow_roir.spark`, also for `spark-submit`: builds and seals, or verifies, an unfinished operation.

The DSN is read from the environment variable ROIR_DSN alone: an argument would show in the process list.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from airflow_roir.definition import argument
from airflow_roir.errors import (
    InvalidInput,
    JavaMissing,
    OperationPaused,
    OperationQueued,
    OperationRunning,
    RoirError,
    SparkFailed,
)
from airflow_roir.operation import LONG, Status
from airflow_roir.spark import guard
from airflow_roir.spark.driver_process import ENDED, INTERRUPTED, PERMANENT
from airflow_roir.spark.log_file import SparkLog, diverted
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.start_timings import mark, turn_on

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database
    from airflow_roir.spark.start import SparkStart

BEREAVED = "the process that started this run has died (an Airflow task, for example)"
# After an order with one of these exit codes Spark can take another one.
GOES_ON = (0, OperationPaused.exit_code, OperationRunning.exit_code, OperationQueued.exit_code)


def main(arguments: list[str] | None = None) -> int:
    """The driver's main function. Exit codes: 0 done, 3 paused, 4 another run drives the operation, 5 it waits in the
    queue, 2 bad input, 6 another error that every other try would meet, 1 any other error."""
    guard.begin()
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    # No process of Spark needs it in its environment.
    dsn = os.environ.pop("ROIR_DSN", None)
    if not dsn:
        return say("no database given: set the environment variable ROIR_DSN", 2)
    if not (options.index or options.later):
        return say("no index given: --index", 2)
    if wrong := [setting for setting in options.conf if "=" not in setting]:
        return say(f"--conf takes KEY=VALUE, not {wrong[0]!r}", 2)
    try:
        spark = SparkOptions(options.master, dict(setting.split("=", 1) for setting in options.conf))
    except InvalidInput as error:
        return say(str(error), error.exit_code)
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        voice, log = (
            (sys.stderr, SparkLog()) if options.spark_log is None else stack.enter_context(diverted(options.spark_log))
        )
        if log.path is not None:
            turn_on()

        def discard() -> None:
            """Removes the log if no operation was driven."""
            if options.later and not log.is_named:
                log.discard()

        def bereave(_signal: int, _frame: Any) -> None:
            """As `_interrupt`, sent by the `guard`, which kills this process soon."""
            discard()
            raise KeyboardInterrupt(BEREAVED)

        signal.signal(signal.SIGHUP, bereave)
        mark("driver")
        try:
            code = _run(given, options, dsn, spark, voice, log)
            if log.path is not None:
                conclude(code)
            return code
        except KeyboardInterrupt:
            # Nothing has begun.
            return OperationPaused.exit_code
        except JavaMissing as error:
            return say(str(error), error.exit_code, voice)
        except OSError as error:
            return say(f"Spark can't be started: {error}", SparkFailed.exit_code, voice)
        finally:
            discard()


def conclude(code: int) -> None:
    """The last line of Spark's own log, whose stack traces else look like the end of the run."""
    ended = {
        0: "the run has ended well. Errors above are of workers that ended and were started again",
        OperationPaused.exit_code: "the run has paused. Errors above are of workers that ended",
    }.get(code, "the run has failed. The task's log, or the command's last line, has the reason")
    with suppress(OSError):
        print(f"roir: {ended}", file=sys.stderr, flush=True)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    """The parser of the arguments, and of an order, which has the same ones."""
    parser = argparse.ArgumentParser(prog="python -m airflow_roir.spark", description=__doc__)
    parser.add_argument("--index", help="the index: name or schema.name, quoted as in SQL")
    parser.add_argument("--operation", type=int, help="the id of the only operation to drive, by default the latest")
    parser.add_argument("--owner", help="the name of this run in roir status")
    parser.add_argument("--master", help="Spark master URL, local[n], or sc://… for Spark Connect")
    parser.add_argument("--take-over", action="store_true", help="take over even from a run that is alive")
    parser.add_argument(
        "--no-lift-pause", dest="lift_pause", action="store_false", help="end at once if the operation is paused"
    )
    parser.add_argument("--spark-log", type=Path, metavar="FILE", help="where Spark's own log goes, by default here")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting")
    parser.add_argument(
        "--later",
        action="store_true",
        help="start Spark, and read the other arguments from a line of standard input, a list in JSON; end with it",
    )
    return parser


def _run(
    given: list[str], options: argparse.Namespace, dsn: str, spark: SparkOptions, voice: TextIO, log: SparkLog
) -> int:
    """Drives the given operation, or each that is ordered, one after another; returns the last exit code."""
    from airflow_roir.spark.start import SparkStart

    with SparkStart(spark, f"roir {options.index}" if options.index else "roir") as start:
        # The slow imports run while Java starts.
        from airflow_roir.engine import lifecycle  # noqa: F401
        from airflow_roir.engine.database import Database

        def drive(of: argparse.Namespace) -> int:
            return _drive(Database(dsn, f"roir {of.index} driver"), of, start, voice, log.path)

        try:
            if not options.later:
                return drive(options)
            code = 0
            while code in GOES_ON and not _is_interrupted() and (order := sys.stdin.readline()):
                of = _parser().parse_args([*given, *json.loads(order)])
                log.name(of.spark_log)
                code = drive(of)
                say(f"{ENDED}{code}", code, voice)
            return code
        finally:
            # Spark is ending already, so a further SIGTERM has nothing to do.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _drive(database: Database, options: argparse.Namespace, spark: SparkStart, voice: TextIO, log: Path | None) -> int:
    """Drives one operation and reports on it line by line; returns its exit code. log: of Spark, for messages."""
    from sqlalchemy.exc import DBAPIError

    from airflow_roir.engine import lifecycle
    from airflow_roir.engine.control.operations import default_actor
    from airflow_roir.engine.retry.trouble import Trouble, is_permanent, reason_of, trouble_of
    from airflow_roir.spark.pool import SparkPools

    try:
        status = lifecycle.drive(
            database,
            options.index,
            options.owner or f"{default_actor()} pid {os.getpid()}",
            SparkPools(spark, log),
            lambda line: report(line, voice),
            take_over=options.take_over,
            lift_pause=options.lift_pause,
            operation=options.operation,
            phases=LONG,
        )
    except RoirError as error:
        return say(str(error), PERMANENT if error.exit_code == 1 and is_permanent(error) else error.exit_code, voice)
    except DBAPIError as error:
        gone = "; nothing can be written there now. What is committed stays: resume once the server is back"
        code = PERMANENT if is_permanent(error) else 1
        return say(f"{reason_of(error)}{gone if trouble_of(error) is Trouble.LOST else ''}", code, voice)
    except KeyboardInterrupt:
        # It isn't known here whether the pause was committed.
        more = f"{INTERRUPTED}; continue with: roir resume {argument(options.index)}"
        return say(more, OperationPaused.exit_code, voice)
    except Exception as error:
        # A defect: its stack goes to Spark's log, but the user must learn of it here, too.
        with suppress(OSError):
            traceback.print_exc()
        return say(f"{type(error).__name__}: {error}{'' if log is None else f'; its stack is in {log}'}", 1, voice)
    if status.status == Status.PAUSED:
        return say(
            f"paused by {status.paused_by} at {status.percent_complete:g} %: {status.pause_reason}",
            OperationPaused.exit_code,
            voice,
        )
    return 0


def _interrupt(_signal: int, _frame: Any) -> None:
    """Leaves as on Ctrl-C: the operation is paused, workers end their batch. A second signal ends the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt


def _is_interrupted() -> bool:
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def report(line: str, voice: TextIO) -> None:
    """Prints a line for the user. Raises SparkFailed if no process reads: without its parent a run learns neither of
    the DAG's switch nor of changed options."""
    try:
        # A text of others, such as a pause's reason, must not look like a line of ours.
        print(f"roir: {line}".replace("\r", "\n").replace("\n", "\n  "), file=voice, flush=True)
    except (BrokenPipeError, ConnectionResetError):
        raise SparkFailed(BEREAVED) from None


def say(message: str, code: int, voice: TextIO | None = None) -> int:
    """Reports a last line, if a process reads it; returns the code."""
    with suppress(SparkFailed):
        report(message, voice or sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
