"""The command `roir`, for those without Airflow at hand and for scripts."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from airflow_roir.definition import BuildOptions, IndexDefinition
from airflow_roir.engine import abort as aborts
from airflow_roir.engine import attach as attaching
from airflow_roir.engine import cleanup, control, finalize, prepare, schema, sync, verify, view
from airflow_roir.engine import detach as detaching
from airflow_roir.engine import revert as reverts
from airflow_roir.engine.database import Database
from airflow_roir.engine.status import OperationStatus, operation_status
from airflow_roir.engine.status import status as read_status
from airflow_roir.errors import OperationPaused, RoirError
from airflow_roir.operation import Phase, Status

EXIT_CODES = """
Exit codes: 0 done; 1 failed, or verify found a difference; 2 bad input, nothing was changed; 3 the operation is
paused; 4 another run drives the operation.
"""

app = typer.Typer(
    name="roir",
    help="Resumable online index builds for PostgreSQL, on Spark.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    # Else [n] in a help text is taken for a colour.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Index = Annotated[str, typer.Argument(help="The index, as SQL writes it: name, schema.name, quoted or not.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Parallelism = Annotated[int | None, typer.Option(help="Workers.")]
BatchRows = Annotated[int | None, typer.Option(help="Source rows per batch, the unit that commits.")]
Master = Annotated[str | None, typer.Option(help="Spark master: local[n], spark://…, sc://…")]
Conf = Annotated[list[str] | None, typer.Option(help="A Spark setting, key=value. May be repeated.")]
TakeOver = Annotated[bool, typer.Option("--take-over", help="Take over from a run that is alive.")]
Reason = Annotated[str, typer.Option(help="Why; it is kept with the operation.")]
TableName = Annotated[str | None, typer.Option("--table", help="The source, for an index that is new.")]
Keys = Annotated[str | None, typer.Option("--keys", help="Key columns, comma-separated, in order.")]
Include = Annotated[str | None, typer.Option("--include", help="Included columns, comma-separated.")]
Ranges = Annotated[int | None, typer.Option(help="Pieces of the scan; by default as many as fit the table.")]
Segments = Annotated[int | None, typer.Option(help="Pieces of the index, each sealed as one unit.")]
MaxRows = Annotated[int | None, typer.Option("--max-rows-per-second", help="A rate limit over all workers.")]
Covering = Annotated[
    str, typer.Option(help="Included columns that index-only scans see: auto (bounded ones), all, none.")
]
IgnoreRowSecurity = Annotated[
    bool,
    typer.Option("--ignore-row-security", help="The view may show rows that the table's policies hide."),
]
RevertWindow = Annotated[
    int, typer.Option("--revert-window", help="Seconds for which a replaced generation is kept and maintained.")
]


@app.callback()
def common(
    context: typer.Context,
    dsn: Annotated[
        str | None,
        typer.Option(
            envvar="ROIR_DSN",
            help="The database: postgresql://… or libpq's key=value. Prefer ROIR_DSN: arguments can be seen by all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    context.obj = dsn


def _database(context: typer.Context) -> Database:
    if not context.obj:
        raise typer.BadParameter("name the database by --dsn or the environment variable ROIR_DSN")
    return Database(context.obj, "roir cli")


@app.command()
def init(context: typer.Context) -> None:
    """Create or upgrade the control schema `roir` in the database."""
    database = _database(context)
    out.print(f"control schema roir is at {schema.init(database)}")
    with database.transaction() as connection:
        if not schema.is_guarded(connection):
            _say("no superuser: DDL that takes rows from an index is detected, not prevented (SELECT roir.guard())")


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
    rehearsal = prepare.rehearse(_database(context), IndexDefinition.parse(index, table, keys, include), options)
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
        "rows_estimate": rehearsal.plan.rows,
        "source_bytes": rehearsal.plan.source_bytes,
        "ranges": rehearsal.plan.ranges,
        "segments": rehearsal.plan.segments,
        "parallelism": options.parallelism,
        "view": view.statement(rehearsal.index, 0, entry, rehearsal.kind == "rebuild").replace("g0", "g<id>"),
    }
    if as_json:
        _print_json(facts)
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
    database = _database(context)
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
    prepared = prepare.prepare(database, IndexDefinition.parse(index, table, keys, include), options, report=_say)
    if prepared.adopted:
        _say(f"going on with unfinished operation {prepared.operation_id}")
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
    database = _database(context)
    row = control.find_operation(database, index)
    if parallelism is not None or batch_rows is not None:
        control.set_options(database, index, control.default_actor(), parallelism, batch_rows)
    _say(f"operation {row.id} goes on in phase {row.phase}")
    _carry_on(database, index, master, conf, take_over, as_json)


@app.command()
def pause(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Pause the running operation of an index; workers stop within one batch, which they commit."""
    database = _database(context)
    row = control.pause(database, index, control.default_actor(), reason)
    status = operation_status(database, row.id)
    out.print(f"paused at {status.percent_complete:g} %; resume with: roir resume {index}", markup=False)


@app.command()
def abort(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Abort an unfinished operation: source and active generation stay as they are."""
    row = aborts.abort(_database(context), index, control.default_actor(), reason, _say)
    out.print(f"operation {row.id} is {row.status}", markup=False)


@app.command()
def revert(context: typer.Context, index: Index, reason: Reason = "") -> None:
    """Show the generation again that the last rebuild replaced, within its revert window."""
    done = reverts.revert(_database(context), index, control.default_actor(), reason, _say)
    out.print(f"index {done.index} shows generation {done.shown}; {done.retired} is kept for a while", markup=False)


@app.command()
def drop(context: typer.Context, index: Index) -> None:
    """Drop an index: its view, its generations, and the capture of its source's writes."""
    aborts.drop_index(_database(context), index, control.default_actor(), _say)
    out.print(f"index {index} dropped", markup=False)


@app.command(name="detach-partition")
def detach_partition(
    context: typer.Context,
    partition: Annotated[str, typer.Argument(help="The partition, as SQL writes it.")],
    reason: Reason = "",
    drop: Annotated[bool, typer.Option("--drop", help="Drop it, once it is detached.")] = False,
) -> None:
    """Take a partition out of its table and out of all indexes: hidden at once, then removed in batches."""
    removed = detaching.detach_partition(
        _database(context), partition, control.default_actor(), reason, drop, report=_say
    )
    out.print(f"partition {partition} {'dropped' if drop else 'detached'}; {removed:,} entries removed", markup=False)


@app.command(name="attach-partition")
def attach_partition(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The source, or a level of its partitions.")],
    partition: Annotated[str, typer.Argument(help="The loaded table that becomes a partition.")],
    bounds: Annotated[str, typer.Argument(help="As in ATTACH PARTITION: FOR VALUES … or DEFAULT.")],
) -> None:
    """Make a loaded table a partition, with its entries in all indexes; both are seen from the same moment on."""
    copied = attaching.attach_partition(_database(context), table, partition, bounds, control.default_actor(), _say)
    out.print(f"{partition} attached to {table}; {copied:,} entries added", markup=False)


@app.command(name="sync-partitions")
def sync_partitions(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The source, as SQL writes it.")],
    as_json: AsJson = False,
) -> None:
    """Put all indexes of a table right after partitions were dropped, detached or attached without roir."""
    report = sync.sync_partitions(_database(context), table, control.default_actor(), _say)
    if as_json:
        _print_json(report.as_dict())
        return
    out.print(
        f"gone: {', '.join(report.gone) or 'none'}, {report.entries_removed:,} entries removed; "
        f"came: {', '.join(report.came) or 'none'}, {report.entries_added:,} entries added",
        markup=False,
    )


@app.command()
def status(
    context: typer.Context,
    index: Annotated[str | None, typer.Argument(help="One index; all of them by default.")] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until nothing runs.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Who did what, when and why, to one index.")] = False,
) -> None:
    """Show how operations stand."""
    database = _database(context)
    if history:
        if index is None:
            raise typer.BadParameter("--history needs an index")
        _print_history(database, index, as_json)
        return
    while True:
        found = read_status(database, index)
        if as_json:
            _print_json(found[0].as_dict() if index else [one.as_dict() for one in found])
        else:
            out.print(_status_table(found))
            for one in found:
                for name in one.partitions_gone:
                    _say(
                        f"index {one.index}: partition {name} was dropped or detached without roir; see sync-partitions"
                    )
        if not watch or all(one.status != Status.RUNNING for one in found):
            return
        time.sleep(1.0)


@app.command(name="verify")
def verify_command(context: typer.Context, index: Index, as_json: AsJson = False) -> None:
    """Compare an index with its source, in one snapshot. Exit code 1 on a difference."""
    report = verify.verify(_database(context), index)
    if as_json:
        _print_json(report.as_dict())
    else:
        out.print(
            f"{report.index}: {report.rows} rows; missing {report.missing}, extra {report.extra}, "
            f"different {report.different}",
            markup=False,
        )
    if not report.is_exact:
        raise typer.Exit(1)


@app.command(name="clean-up")
def clean_up(context: typer.Context, as_json: AsJson = False) -> None:
    """Remove ghosts, empty deltas, and retired generations whose revert window is over."""
    report = cleanup.clean_up(_database(context), control.default_actor())
    if as_json:
        _print_json(report.as_dict())
        return
    out.print(
        f"{report.ghosts} ghosts, {report.deltas_dropped} deltas, {report.generations_dropped} generations removed; "
        f"{report.operations_aborted} operations aborted, {report.guards_removed} guards removed from views, "
        f"{report.partition_entries} entries of partitions that left"
    )
    for line in report.warnings:
        out.print(f"warning: {line}", markup=False)
    for line in report.waiting:
        out.print(f"left for the next time: {line}", markup=False)


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
                finalize.finalize(database, index, owner, _say, take_over=take_over)
    ended = operation_status(database, row.id)
    if as_json:
        _print_json(ended.as_dict())
    else:
        out.print(_status_table([ended]))
    if ended.notice:
        _say(ended.notice)
    if ended.status == Status.PAUSED:
        _say(f"paused by {ended.paused_by}: {ended.pause_reason}; go on with: roir resume {index}")
        raise typer.Exit(OperationPaused.exit_code)


def _follow(driver: Any, on_interrupt: Callable[[], None]) -> int:
    """Wait for the driver; what it says goes to stderr. Ctrl-C pauses first, and waits for the open batches."""
    try:
        return int(driver.wait())
    except KeyboardInterrupt:
        _say("pausing; interrupt again to stop at once")
        try:
            on_interrupt()
            return int(driver.wait())
        except KeyboardInterrupt:
            return OperationPaused.exit_code
    finally:
        driver.kill()


def _relay(line: str) -> None:
    if line.startswith("roir: "):
        _say(line.removeprefix("roir: "))


def _pause_quietly(database: Database, index: str) -> None:
    try:
        control.pause(database, index, control.default_actor(), "interrupted")
    except RoirError as error:
        _say(str(error))


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


def _status_table(found: list[OperationStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("index", "status", "phase", "%", "rows", "rows/s", "left", "time", "workers"):
        table.add_column(column, justify="left" if column in ("index", "status", "phase") else "right")
    for one in found:
        table.add_row(
            one.index,
            one.status,
            one.phase,
            f"{one.percent_complete:g}",
            f"{one.rows:,}",
            f"{one.rows_per_second:,.0f}" if one.rows_per_second is not None else "",
            f"{one.seconds_left:g} s" if one.seconds_left is not None else "",
            f"{one.total_execution_time:.1f} s",
            str(one.parallelism),
        )
    return table


def _print_history(database: Database, index: str, as_json: bool) -> None:
    events = control.events(database, index)
    if as_json:
        _print_json(
            [
                {
                    "at": e.at.isoformat(),
                    "operation_id": e.operation_id,
                    "actor": e.actor,
                    "action": e.action,
                    "detail": e.detail,
                }
                for e in events
            ]
        )
        return
    for e in events:
        out.print(f"{e.at:%Y-%m-%d %H:%M:%S}  {e.action:20} {e.actor}  {e.detail or ''}", markup=False)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _say(line: str) -> None:
    err.print(f"roir: {line}", markup=False)


def main() -> None:
    """The entry point: turns the errors of this package and of the database into a line and an exit code."""
    try:
        app()
    except RoirError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except DBAPIError as error:
        # The statement and its values stay out of it: only what the server said.
        _say(str(error.orig).strip())
        sys.exit(1)


if __name__ == "__main__":
    main()
