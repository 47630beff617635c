"""How a command runs an operation to its end: Spark's driver as a process, the rest in this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import typer
from sqlalchemy.exc import SQLAlchemyError

from airflow_roir.cli.app import print_json, say, show
from airflow_roir.cli.cells import printable
from airflow_roir.cli.look import look
from airflow_roir.cli.spark import CommandSpark, tell
from airflow_roir.cli.status import print_overview
from airflow_roir.definition import argument
from airflow_roir.engine import finalize, operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.meanwhile import meanwhile
from airflow_roir.engine.operations import OperationRow
from airflow_roir.engine.status import OperationStatus, operation_status
from airflow_roir.engine.verify.report import VerifyReport, described, report_of
from airflow_roir.errors import DuplicatesFound, OperationPaused, RoirError
from airflow_roir.operation import BY_DUPLICATES, Phase, Status
from airflow_roir.quantity import counted, left, rate
from airflow_roir.spark.driver_process import Driver
from airflow_roir.spark.kept_driver import KeptDriver

# How soon a pause is seen while Spark starts, and how often the progress bar moves.
LOOK_EVERY_S = 0.5
# Failovers that lose something, during one command.
MOST = 5


def carry_on(database: Database, index: str, spark: CommandSpark, take_over: bool, as_json: bool) -> None:
    """Run the operation to its end, from its present phase; exits with 3 if somebody paused it."""
    row = operations.find_operation(database, index)
    if row.kind == "verify":
        print_report(carry_on_verification(database, index, spark, take_over, as_json), as_json)
        return
    owner = _owner()
    with _progress(database, row.id, quiet=as_json) as relay:
        for _ in range(MOST):
            if row.phase not in (Phase.BUILD, Phase.SEAL):
                break
            _on_spark(database, index, row, owner, spark, take_over, relay)
            now = operation_status(database, row.id)
            if now.status != Status.RUNNING or now.phase not in (Phase.BUILD, Phase.SEAL):
                break
            # It was sealed. A heartbeat that is there still is our own.
            say("the server has lost its last commits, by a failover or a restore; continuing with what it has")
            row, take_over = operations.find_operation(database, index), True
        spark.release()
        now = operation_status(database, row.id)
        paused = now.status == Status.PAUSED and row.phase in (Phase.BUILD, Phase.SEAL)
        if now.phase in (Phase.FOLD, Phase.PUBLISH) and not paused:
            try:
                finalize.finalize(database, index, owner, say, take_over=take_over)
            except DuplicatesFound as error:
                say(str(error))
    ended = operation_status(database, row.id)
    if ended.census and ended.status in (Status.ABORTING, Status.ABORTED):
        print_census(database, row.id, as_json)
        return
    print_overview(look(database, index), as_json)
    _exit_if_paused(ended, index)
    _exit_if_unfinished(ended, index)


def print_census(database: Database, operation_id: int, as_json: bool) -> None:
    """What a census has found. Exits with 1 if rows share a key."""
    from airflow_roir.cli.duplicates import print_groups, print_groups_as_json
    from airflow_roir.engine import duplicate_report

    with database.transaction() as connection:
        found = duplicate_report.read(connection, operation_id)
        if as_json:
            print_groups_as_json(found, duplicate_report.groups(connection, found))
        else:
            print_groups(found, duplicate_report.groups(connection, found, limit=duplicate_report.FIRST))
    if found.groups:
        raise typer.Exit(1)


def carry_on_verification(
    database: Database, index: str, spark: CommandSpark, take_over: bool = False, quiet: bool = False
) -> VerifyReport:
    """Run a verification to its end, on Spark; exits with 3 if somebody paused it."""
    row = operations.find_operation(database, index)
    with _progress(database, row.id, quiet) as relay:
        _on_spark(database, index, row, _owner(), spark, take_over, relay)
    ended = operation_status(database, row.id)
    _exit_if_paused(ended, index)
    _exit_if_unfinished(ended, index)
    return report_of(database, row.id)


def print_report(report: VerifyReport, as_json: bool) -> None:
    """Exits with 1 if something is still wrong."""
    if as_json:
        print_json(report.as_dict())
    else:
        show(f"{report.index}: {report}")
        for one in report.first:
            show(f"  {described(one)}")
        if report.found > len(report.first):
            show(f"  … and more: see the table roir.discrepancy, verification {report.verification_id}")
    if not report.is_exact:
        raise typer.Exit(1)


def _owner() -> str:
    return f"{operations.default_actor()} pid {os.getpid()}"


def _on_spark(
    database: Database,
    index: str,
    row: OperationRow,
    owner: str,
    spark: CommandSpark,
    take_over: bool,
    relay: Callable[[str], None],
) -> None:
    if row.status == Status.PAUSED:
        # Now, and not when the driver is up: a pause that comes in between must not be lifted with this one.
        operations.resume(database, index, operations.default_actor())
    spark.relay = relay
    driver = spark.drive(row.id, index, owner, take_over)
    code = _follow(
        driver,
        lambda: _pause_quietly(database, index),
        lambda: _has_paused(database, row.id, owner),
    )
    if code not in (0, OperationPaused.exit_code):
        raise typer.Exit(code)


def _exit_if_paused(ended: OperationStatus, index: str) -> None:
    if ended.status == Status.PAUSED:
        # That was said, with what to do next.
        if ended.paused_by != BY_DUPLICATES:
            who = f"{printable(ended.paused_by or '')}: {printable(ended.pause_reason or '')}"
            say(f"paused by {who}; resume with: roir resume {argument(index)}")
        raise typer.Exit(OperationPaused.exit_code)


def _exit_if_unfinished(ended: OperationStatus, index: str) -> None:
    """Its end was told, and is lost."""
    if ended.status == Status.RUNNING:
        say(f"the operation isn't finished; continue with: roir resume {argument(index)}")
        raise typer.Exit(1)


def _follow(driver: Driver | KeptDriver, on_interrupt: Callable[[], None], has_paused: Callable[[], bool]) -> int:
    """Wait for the driver; what it says goes to stderr. Ctrl-C pauses first, and waits for the open batches.

    has_paused: asked while Spark starts, when a pause need not wait for anything.
    """
    try:
        try:
            return _wait(driver, has_paused)
        except KeyboardInterrupt:
            say("pausing: waiting for the open batches; interrupt again to stop at once")
            on_interrupt()
            return _wait(driver, has_paused)
    except KeyboardInterrupt:
        driver.kill()
        return OperationPaused.exit_code


def _wait(driver: Driver | KeptDriver, has_paused: Callable[[], bool]) -> int:
    while driver.is_starting:
        if (code := driver.wait_for_order(LOOK_EVERY_S)) is not None:
            return code
        if driver.is_starting and has_paused():
            driver.kill()
            has_paused()
            return OperationPaused.exit_code
    code = driver.wait_for_order()
    assert code is not None
    return code


def _has_paused(database: Database, operation_id: int, owner: str) -> bool:
    try:
        return operations.has_paused(database, operation_id, owner)
    except SQLAlchemyError:
        # The driver has the same trouble, and its own patience.
        return False


def _pause_quietly(database: Database, index: str) -> None:
    try:
        operations.pause(database, index, operations.default_actor(), "interrupted")
    except RoirError as error:
        say(str(error))


@contextmanager
def _progress(database: Database, operation_id: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A live line from the committed state, if a person watches. Yields what takes the driver's lines meanwhile."""
    if quiet or not sys.stderr.isatty():
        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    # What is written to standard error meanwhile appears above it.
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True, highlight=False),
        expand=True,
    )
    task = bar.add_task("starting", total=100, left="")

    def look() -> None:
        with suppress(SQLAlchemyError, RoirError):
            now = operation_status(database, operation_id)
            speed = f", {rate(now.rows_per_second)}" if now.rows_per_second else ""
            said = f"{now.phase}: {counted(now.rows, 'row')}{speed}"
            remaining = left(now.seconds_left, now.seconds_left_low, now.seconds_left_high) or ""
            bar.update(task, completed=now.percent_complete, description=said, left=remaining)

    with bar, meanwhile(look, LOOK_EVERY_S, "roir-progress"):
        yield _relay_beside_bar


def _relay_beside_bar(line: str) -> None:
    from airflow_roir.spark.news import tells_of_pieces

    if not tells_of_pieces(line.removeprefix("roir: ")):
        tell(line)
