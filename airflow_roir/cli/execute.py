"""Runs an operation of a command to its end: on Spark, whose driver is a process of its own, and in this process.

The file is long because it tells a command's run from its first turn to its exit code.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import typer
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from airflow_roir.cli.app import last_look, print_json, say, show
from airflow_roir.cli.cells import printable
from airflow_roir.cli.overview import print_overview
from airflow_roir.cli.spark import CommandSpark, NoSpark, tell
from airflow_roir.definition import argument
from airflow_roir.engine import abort, lifecycle
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.compact.compaction import CompactionReport
from airflow_roir.engine.compact.progress import told
from airflow_roir.engine.control import admission, operations, requests, sign_of_life
from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.control.wait_log import WaitLog
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.repeat import meanwhile
from airflow_roir.engine.snapshot.operation import ABANDONED, OperationStatus, operation_status
from airflow_roir.engine.snapshot.overview import overview
from airflow_roir.engine.snapshot.querying import lines
from airflow_roir.engine.snapshot.words import done, paused_by, speed, time_left, way_on
from airflow_roir.engine.verify.report import VerifyReport, described, report_of
from airflow_roir.errors import DuplicatesFound, OperationPaused, OperationQueued, RoirError
from airflow_roir.operation import BUILDS, BY_DUPLICATES, BY_WINDOW, FINAL, LONG, Kind, Status
from airflow_roir.spark.driver_process import PERMANENT, SETTLE_S, Driver

# The time between two looks for a pause while Spark starts, and between two moves of the progress bar.
LOOK_EVERY_S = 0.5
# The time between two looks of a command that waits for its window or its place in the queue.
WAIT_S = 5.0
LOST = "the server has lost its last commits, by a failover or a restore; continuing with what it has"
# The most failovers with a loss during one command.
MOST_FAILOVERS = 5


def run_and_print(
    database: Database, index: str, spark: CommandSpark | NoSpark, take_over: bool = False, as_json: bool = False
) -> None:
    """Runs the operation to its end, from its present phase, and prints the result.

    Exits with 3 if it is paused, with 1 if a verification has found something that is still wrong. Raises
    OperationAborted.
    """
    row = operations.find_operation(database, index)
    try:
        ended = _to_end(database, row.id, index, spark, take_over, as_json)
        _print_result(database, row, ended, index, as_json)
    except (DBAPIError, RoirError):
        # The operation's end counts, whether or not it can be shown.
        now, _ = _now(database, row.id)
        if now.status != Status.COMPLETED:
            raise
        with last_look(f"index {index}: {Kind(now.kind).noun} {now.id} is done", f"roir status {argument(index)}"):
            raise
        # Its result isn't known.
        if now.kind == Kind.VERIFY:
            raise typer.Exit(1) from None


def _print_result(database: Database, row: OperationRow, ended: OperationStatus, index: str, as_json: bool) -> None:
    if row.kind in BUILDS:
        if ended.census and ended.status in (Status.ABORTING, Status.ABORTED):
            print_census(database, row.id, as_json)
            return
        _raise_if_aborted(database, ended)
        seen = overview(database, index)
        print_overview(seen, as_json)
        if not as_json and ended.status == Status.COMPLETED:
            for line in (line for one in seen.indexes for line in lines(one.queries)):
                show(line)
        _exit_if_unfinished(database, ended, index)
        return
    _exit_if_unfinished(database, ended, index)
    if row.kind == Kind.VERIFY:
        _print_report(report_of(database, row.id), as_json)
    elif row.kind == Kind.REFERENCE:
        print_overview(overview(database, index), as_json)
    else:
        _print_compaction(compaction.report_of(database, row.id), as_json)


def verify_before(database: Database, index: str, spark: CommandSpark | NoSpark) -> VerifyReport:
    """Runs the verification before a rebuild to its end. Exits with 3 if it is paused."""
    row = operations.find_operation(database, index)
    _exit_if_unfinished(database, _to_end(database, row.id, index, spark, False, False), index)
    return report_of(database, row.id)


def _to_end(
    database: Database, operation_id: int, index: str, spark: CommandSpark | NoSpark, take_over: bool, quiet: bool
) -> OperationStatus:
    """Runs an operation to its end: the long phases on Spark, if there is one, the others in this process."""
    owner = f"{operations.default_actor()} pid {os.getpid()}"
    spark.last_line.drives(database, index, operation_id)
    for now, taking_over in _turns(database, operation_id, index, spark, owner, take_over):
        with _progress(database, operation_id, quiet) as relay:
            if now.status == Status.PAUSED:
                # Now: a pause that comes in between must not be lifted with this one.
                requests.resume(database, index, operations.default_actor(), operation_id)
            if now.without_spark != isinstance(spark, NoSpark):
                database.retry(partial(operations.note_spark, database, operation_id, not now.without_spark))
            if isinstance(spark, NoSpark) or now.phase in FINAL:
                spark.release()
                _in_this_process(database, index, operation_id, owner, spark, taking_over, relay)
            elif not _on_spark(database, index, operation_id, owner, spark, taking_over, relay):
                after = operation_status(database, operation_id)
                if after.status == Status.RUNNING and after.phase in LONG:
                    # It had ended the phase.
                    say(LOST)
    return operation_status(database, operation_id)


def _in_this_process(
    database: Database,
    index: str,
    operation_id: int,
    owner: str,
    spark: CommandSpark | NoSpark,
    take_over: bool,
    relay: Callable[[str], None],
) -> None:
    phases = lifecycle.PHASES if isinstance(spark, NoSpark) else FINAL
    wish: dict[str, Any] = {"take_over": take_over, "lift_pause": False, "operation": operation_id}
    try:
        lifecycle.drive(database, index, owner, None, relay, phases=tuple(phases), **wish)
    except DuplicatesFound as error:
        say(str(error))
    except (OperationPaused, OperationQueued, KeyboardInterrupt):
        # Its window has just closed: the next turn waits for it. Or Ctrl-C has paused it.
        return


def print_census(database: Database, operation_id: int, as_json: bool) -> None:
    """Prints the result of a census. Exits with 1 if rows share a key."""
    from airflow_roir.cli.duplicates import print_groups, print_groups_as_json
    from airflow_roir.engine.unique import duplicate_report

    with database.transaction() as connection:
        found = duplicate_report.read(connection, operation_id)
        if as_json:
            print_groups_as_json(found, duplicate_report.groups(connection, found))
        else:
            print_groups(found, duplicate_report.groups(connection, found, limit=duplicate_report.FIRST))
    if found.groups:
        raise typer.Exit(1)


def _print_report(report: VerifyReport, as_json: bool) -> None:
    """Prints the result of a verification. Exits with 1 if something is still wrong."""
    if as_json:
        print_json(report.as_dict())
    else:
        show(f"{report.index}: {report}")
        for one in report.first:
            show(f"  {described(one)}")
        if report.found > len(report.first):
            show(f"  … and more: see the table roir.discrepancy, verification {report.verification_id}")
        for line in report.warnings:
            show(f"warning: {line}")
        if not report.is_exact:
            show(f"repair them with: roir verify {argument(report.index)} --repair")
    if not report.is_exact:
        raise typer.Exit(1)


def _print_compaction(report: CompactionReport, as_json: bool) -> None:
    """Prints the units that were compacted, and those that were left out."""
    if as_json:
        print_json(report.as_dict())
        return
    for line in told(report):
        show(line)


def _turns(
    database: Database, operation_id: int, index: str, spark: CommandSpark | NoSpark, owner: str, take_over: bool
) -> Iterator[tuple[OperationRow, bool]]:
    """Yields the operation each time that it may work, until it has ended or another user or run has paused it.

    Outside of its window, and while it is queued, this process waits, without Spark. Ctrl-C leaves the operation
    paused. Also yields whether to take over: after the first turn a heartbeat may be our own.
    """
    turns, begun = 0, False
    waits = WaitLog(None, lambda kept: None, say)
    try:
        while turns <= MOST_FAILOVERS:
            row, beats = database.retry(partial(_now, database, operation_id))
            # The first turn lifts any pause; later turns lift only that of a window.
            stays = row.status == Status.PAUSED and row.paused_by != BY_WINDOW
            if begun and (stays or row.status not in (Status.RUNNING, Status.PAUSED)):
                return
            if row.status in operations.ABORT:
                return
            taking_over = take_over or (turns > 0 and row.owner == owner)
            if beats and not taking_over:
                with database.transaction() as connection:
                    raise sign_of_life.running_elsewhere(row, index, connection)
            begun = True
            # Waits for a server that restarts, as a run does: a command that queues for hours meets a restart.
            wait = database.retry(partial(admission.ask, database, operation_id))
            if wait is None:
                waits.over()
                row, _ = database.retry(partial(_now, database, operation_id))
                # Closed windows don't count as failovers.
                turns = turns + 1 if row.status == Status.RUNNING else 1
                yield row, taking_over
                continue
            if not wait.passes:
                return
            spark.rest()
            now = "" if wait.is_queued else f"; roir change {argument(index)} --windows off lets it work now"
            line = f"index {argument(index)}: {wait.why}{now}. Waiting; Ctrl-C leaves it paused"
            # The reason of a queued one names its place, which changes.
            waits.waits("queue" if wait.is_queued else wait.why, line)
            if not wait.is_queued:
                abort.settle_pauses(database, owner, operation_id, tell=lambda pause: say(pause.text))
            time.sleep(WAIT_S if wait.seconds is None else max(min(wait.seconds, WAIT_S), 0.1))
    except KeyboardInterrupt:
        _pause_quietly(database, index, operation_id)


def _now(database: Database, operation_id: int) -> tuple[OperationRow, bool]:
    """The operation, and whether a run drives it."""
    with database.transaction() as connection:
        row = operations.read_operation(connection, operation_id)
        return row, sign_of_life.heart_beats(row, connection)


def _on_spark(
    database: Database,
    index: str,
    operation_id: int,
    owner: str,
    spark: CommandSpark,
    take_over: bool,
    relay: Callable[[str], None],
) -> int:
    spark.relay = relay
    driver = spark.drive(operation_id, index, owner, take_over)
    code = _follow(
        driver,
        lambda: _pause_quietly(database, index, operation_id),
        lambda: _has_paused(database, operation_id, owner),
    )
    # An operation that has to queue again takes another turn.
    if code not in (0, OperationPaused.exit_code, OperationQueued.exit_code):
        raise typer.Exit(1 if code == PERMANENT else code)
    return code


def _raise_if_aborted(database: Database, ended: OperationStatus) -> None:
    if ended.status in operations.ABORT:
        with database.transaction() as connection:
            raise operations.overtaken(connection, ended.operation_id, "this command")


def _exit_if_unfinished(database: Database, ended: OperationStatus, index: str) -> None:
    _raise_if_aborted(database, ended)
    if ended.status == Status.PAUSED:
        # For duplicates the driver has printed the pause and the next step.
        if ended.paused_by != BY_DUPLICATES:
            say(f"{printable(paused_by(ended))}; {printable(way_on(ended))}")
        raise typer.Exit(OperationPaused.exit_code)
    if ended.status in (Status.RUNNING, ABANDONED):
        # The end of the work was reported, but the commit of it is lost.
        say(f"the operation isn't finished; continue with: roir resume {argument(index)}")
        raise typer.Exit(1)


def _follow(driver: Driver, on_interrupt: Callable[[], None], has_paused: Callable[[], bool]) -> int:
    """Waits for the driver; its messages go to stderr. Ctrl-C pauses first, and waits for the open batches.

    has_paused: asked while Spark starts, when a pause needn't wait for anything.
    """
    try:
        try:
            return _wait(driver, has_paused)
        except KeyboardInterrupt:
            say("pausing: waiting for the open batches; interrupt again to stop at once")
            # In a thread of its own, so that neither a second Ctrl-C nor a server that hangs prevents the pause.
            pausing = threading.Thread(target=_quietly, args=(on_interrupt,), name="roir-pause", daemon=True)
            pausing.start()
            code = _wait(driver, has_paused)
            pausing.join(SETTLE_S)
            return code
    except KeyboardInterrupt:
        driver.kill()
        return OperationPaused.exit_code


def _quietly(pause: Callable[[], None]) -> None:
    # The driver has the same trouble, and its own patience.
    with suppress(SQLAlchemyError):
        pause()


def _wait(driver: Driver, has_paused: Callable[[], bool]) -> int:
    paused = threading.Event()

    def look() -> None:
        if driver.is_starting and has_paused():
            paused.set()

    # In a thread of its own: a server that hangs must not keep this one from hearing of the driver's end.
    with meanwhile(look, LOOK_EVERY_S, "roir-pause-look", SETTLE_S):
        while driver.is_starting:
            if (code := driver.wait_for_order(LOOK_EVERY_S)) is not None:
                return code
            if driver.is_starting and paused.is_set():
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


def _pause_quietly(database: Database, index: str, operation_id: int) -> None:
    try:
        requests.pause(database, index, operations.default_actor(), "interrupted", operation_id)
    except RoirError as error:
        say(str(error))


@contextmanager
def _progress(database: Database, operation_id: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows a live line from the committed state, if a person watches. Yields a function for the driver's lines."""
    if quiet or not sys.stderr.isatty():
        yield tell
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    # Lines written to standard error meanwhile appear above the bar.
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
            said = f"{now.phase_shown}: {', '.join(filter(None, (done(now), speed(now))))}"
            # A replica may be called anything, also as rich's markup.
            remaining = escape(printable(now.throttled or time_left(now)))
            bar.update(task, completed=now.percent_complete, description=said, left=remaining)

    with bar, meanwhile(look, LOOK_EVERY_S, "roir-progress", SETTLE_S):
        yield _relay_beside_bar


def _relay_beside_bar(line: str) -> None:
    from airflow_roir.engine.work.phase_log import tells_of_pieces

    if not tells_of_pieces(line.removeprefix("roir: ")):
        tell(line)
