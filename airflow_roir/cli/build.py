"""Commands that build: init, plan, build, resume; and how one process carries an operation on to its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from sqlalchemy.exc import SQLAlchemyError

from airflow_roir.cli.app import (
    AsJson,
    BatchRows,
    Conf,
    Covering,
    IgnoreRowSecurity,
    Include,
    Index,
    Keys,
    Master,
    MaxRows,
    Parallelism,
    Ranges,
    RevertWindow,
    Segments,
    TableName,
    TakeOver,
    app,
    database_of,
    err,
    out,
    print_json,
    say,
    status_table,
)
from airflow_roir.definition import BuildOptions, IndexDefinition
from airflow_roir.engine import control, finalize, prepare, schema, view
from airflow_roir.engine.database import Database
from airflow_roir.engine.status import operation_status
from airflow_roir.errors import OperationPaused, RoirError
from airflow_roir.operation import Phase, Status


@app.command()
def init(context: typer.Context) -> None:
    """Create or upgrade the control schema `roir` in the database."""
    database = database_of(context)
    out.print(f"control schema roir is at {schema.init(database)}")
    with database.transaction() as connection:
        if not schema.is_guarded(connection):
            say("no superuser: DDL that takes rows from an index is detected, not prevented (SELECT roir.guard())")


@app.command()
def plan(
    context: typer.Context,
    index: Index,
    table: TableName = None,
    keys: Keys = None,
    include: Include = None,
    parallelism: Parallelism = None,
    ranges: Ranges = None,
    segments: Segments = None,
    covering: Covering = "auto",
    ignore_row_security: IgnoreRowSecurity = False,
    as_json: AsJson = False,
) -> None:
    """Validate a build and show what it would do. Changes nothing."""
    options = _options(
        parallelism=parallelism,
        ranges=ranges,
        segments=segments,
        covering=covering,
        ignore_row_security=ignore_row_security,
    )
    database = database_of(context)
    rehearsal = prepare.rehearse(database, IndexDefinition.parse(index, table, keys, include), options)
    with database.transaction() as connection:
        guarded = schema.is_guarded(connection)
    entry = rehearsal.entry
    uncovered = [entry.columns[i].source for i in entry.included_positions if not entry.columns[i].covered]
    facts: dict[str, Any] = {
        "index": str(rehearsal.index),
        "kind": rehearsal.kind,
        "source": str(rehearsal.source.name),
        "key": list(rehearsal.definition.key),
        "primary_key": list(rehearsal.source.primary_key),
        "include": list(rehearsal.definition.include),
        "not_covered": uncovered,
        "entry_size": str(rehearsal.entry_size),
        "rows_estimate": rehearsal.plan.rows,
        "source_bytes": rehearsal.plan.source_bytes,
        "ranges": rehearsal.plan.ranges,
        "segments": rehearsal.plan.segments,
        "parallelism": options.parallelism,
        # Of DDL that takes rows from an index, or brings rows that it hasn't got, past every trigger.
        "uncaptured_ddl": "refused" if guarded else "detected; a superuser can have it refused: SELECT roir.guard()",
        "view": view.statement(rehearsal.index, 0, entry, rehearsal.kind == "rebuild").replace("g0", "g<id>"),
    }
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        out.print(f"{name.replace('_', ' '):16} {shown}", markup=False)


@app.command()
def build(
    context: typer.Context,
    index: Index,
    table: TableName = None,
    keys: Keys = None,
    include: Include = None,
    parallelism: Parallelism = None,
    batch_rows: BatchRows = None,
    ranges: Ranges = None,
    segments: Segments = None,
    max_rows_per_second: MaxRows = None,
    covering: Covering = "auto",
    revert_window: RevertWindow = BuildOptions.revert_window_s,
    ignore_row_security: IgnoreRowSecurity = False,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Create an index, or rebuild one that exists (then without --table and --keys), through all phases."""
    database = database_of(context)
    options = _options(
        parallelism=parallelism,
        batch_rows=batch_rows,
        ranges=ranges,
        segments=segments,
        max_rows_per_second=max_rows_per_second,
        covering=covering,
        revert_window_s=revert_window,
        ignore_row_security=ignore_row_security,
    )
    prepared = prepare.prepare(database, IndexDefinition.parse(index, table, keys, include), options, report=say)
    if prepared.adopted:
        say(f"going on with unfinished operation {prepared.operation_id}")
    _carry_on(database, prepared.index, master, conf, False, as_json)


@app.command()
def resume(
    context: typer.Context,
    index: Index,
    parallelism: Parallelism = None,
    batch_rows: BatchRows = None,
    master: Master = None,
    conf: Conf = None,
    take_over: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Carry a paused or interrupted operation on to its end, from its last committed batch."""
    database = database_of(context)
    row = control.find_operation(database, index)
    if parallelism is not None or batch_rows is not None:
        control.set_options(database, index, control.default_actor(), parallelism, batch_rows)
    say(f"operation {row.id} goes on in phase {row.phase}")
    _carry_on(database, index, master, conf, take_over, as_json)


def _options(**given: Any) -> BuildOptions:
    return BuildOptions(**{name: value for name, value in given.items() if value is not None})


def _carry_on(
    database: Database, index: str, master: str | None, conf: list[str] | None, take_over: bool, as_json: bool
) -> None:
    """From whatever phase the operation is in to the end; exits with 3 where it was paused on the way."""
    from airflow_roir.spark.launch import Driver, driver_command, driver_environment
    from airflow_roir.spark.options import SparkOptions

    owner = f"{control.default_actor()} pid {os.getpid()}"
    row = control.find_operation(database, index)
    if wrong := [setting for setting in conf or [] if "=" not in setting]:
        raise typer.BadParameter(f"--conf takes key=value, not {wrong[0]!r}")
    spark = SparkOptions(master, dict(setting.split("=", 1) for setting in conf or []))
    with _progress(database, row.id, quiet=as_json):
        if row.phase in (Phase.BUILD, Phase.SEAL):
            if row.status == Status.PAUSED:
                # Now, and not when the driver is up: a pause that comes in between must not be lifted with this one.
                control.resume(database, index, control.default_actor())
            command = driver_command(index, owner, spark, take_over=take_over, keep_pause=True)
            driver = Driver(command, driver_environment(database.dsn), _relay)
            code = _follow(driver, lambda: _pause_quietly(database, index))
            if code not in (0, OperationPaused.exit_code):
                raise typer.Exit(code)
        if operation_status(database, row.id).phase in (Phase.FOLD, Phase.PUBLISH):
            paused = operation_status(database, row.id).status == Status.PAUSED and row.phase in (
                Phase.BUILD,
                Phase.SEAL,
            )
            if not paused:
                finalize.finalize(database, index, owner, say, take_over=take_over)
    ended = operation_status(database, row.id)
    if as_json:
        print_json(ended.as_dict())
    else:
        out.print(status_table([ended]))
    if ended.notice:
        say(ended.notice)
    if ended.status == Status.PAUSED:
        say(f"paused by {ended.paused_by}: {ended.pause_reason}; go on with: roir resume {index}")
        raise typer.Exit(OperationPaused.exit_code)


def _follow(driver: Any, on_interrupt: Callable[[], None]) -> int:
    """Wait for the driver; what it says goes to stderr. Ctrl-C pauses first, and waits for the open batches."""
    try:
        return int(driver.wait())
    except KeyboardInterrupt:
        say("pausing; interrupt again to stop at once")
        try:
            on_interrupt()
            return int(driver.wait())
        except KeyboardInterrupt:
            return OperationPaused.exit_code
    finally:
        driver.kill()


def _relay(line: str) -> None:
    if line.startswith("roir: "):
        say(line.removeprefix("roir: "))


def _pause_quietly(database: Database, index: str) -> None:
    try:
        control.pause(database, index, control.default_actor(), "interrupted")
    except RoirError as error:
        say(str(error))


@contextmanager
def _progress(database: Database, operation_id: int, quiet: bool) -> Iterator[None]:
    """A progress bar from the committed state, where a person watches."""
    if quiet or not err.is_terminal:
        yield
        return
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=err
    )
    stop = threading.Event()

    def show() -> None:
        task = bar.add_task("build", total=100)
        while not stop.wait(0.5):
            try:
                now = operation_status(database, operation_id)
            except SQLAlchemyError:
                continue
            rate = f", {now.rows_per_second:,.0f} rows/s" if now.rows_per_second else ""
            bar.update(task, completed=now.percent_complete, description=f"{now.phase}: {now.rows:,} rows{rate}")

    thread = threading.Thread(target=show, daemon=True)
    with bar:
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
