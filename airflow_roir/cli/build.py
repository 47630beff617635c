"""Commands that build: init, build, resume, change."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import typer

from airflow_roir.cli.app import (
    AsJson,
    Beside,
    Conf,
    IgnorePublications,
    Index,
    Indexes,
    Master,
    TakeOver,
    WithoutSpark,
    app,
    database_of,
    dsn_of,
    last_look,
    say,
    show,
)
from airflow_roir.cli.defined import Defined, definition_of
from airflow_roir.cli.given import Given, Wrong, flag_of, in_flags, is_live, settle, settle_of_index, takes
from airflow_roir.cli.last_line import begins
from airflow_roir.definition import IndexDefinition, argument, parse_beside
from airflow_roir.errors import InvalidInput
from airflow_roir.options import SOURCE, VERIFY_BEFORE, BuildOptions
from airflow_roir.windows import parse_windows

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database


@app.command()
def init(context: typer.Context, ignore_publications: IgnorePublications = False) -> None:
    """Create or upgrade the control schema `roir`."""
    from airflow_roir.engine import install
    from airflow_roir.engine.schema import schema
    from airflow_roir.engine.source import checks, replication

    database = database_of(context)
    with database.transaction() as connection:
        if is_new := schema.current(connection) is None:
            # A subscriber to all tables would stop at the control schema's first row.
            replication.check_publications(connection, ignore_publications)
    show(f"the control schema roir is at version {install.init(database, say)}")
    with last_look("the control schema is made", "roir doctor"), database.transaction() as connection:
        if untried := checks.untried_server(connection):
            say(untried)
        if not schema.is_guarded(connection):
            say(
                "the DDL guard was removed by roir.unguard(), and stays so: DDL that would make an index wrong is "
                "detected afterwards. A superuser can install it again: SELECT roir.guard()"
                if schema.is_unguarded(connection)
                else "DDL that would make an index wrong is detected afterwards; a superuser can have it refused: "
                "SELECT roir.guard()"
            )
    if is_new:
        say("next: roir doctor --table SCHEMA.TABLE checks what a first build needs, roir plan shows what it takes")


@app.command()
@takes(BuildOptions)
def build(
    context: typer.Context,
    indexes: Indexes,
    *,
    defined: Defined,
    given: Given,
    wrong: Wrong,
    beside: Beside = None,
    without_spark: WithoutSpark = False,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Create an index, or rebuild one that exists. To rebuild, leave out --table and --keys.

    Several indexes of one table, rebuilt or added by --with, share one scan of the table.
    """
    from airflow_roir.cli.spark import spark_of

    index = indexes[0]
    definitions = [definition_of(index, defined, wrong)]
    for one in beside or ():
        with wrong.noted():
            definitions.append(parse_beside(one, defined["table"]))
    definitions += [IndexDefinition.parse(one, complaints=wrong) for one in indexes[1:]]
    for name in sorted({str(one.name) for one in definitions if definitions.count(one) > 1}):
        wrong.add(InvalidInput(f"index {name} is named twice; name it once"))
    if len(definitions) > 1 and given.get("scan") == BuildOptions.scan:
        given["scan"] = SOURCE
    options = BuildOptions.asked(**given)
    if len(definitions) > 1 and defined["shards"]:
        wrong.add(InvalidInput("an index over shards is built alone: give one index, without --with"))

    def look(database: Database) -> None:
        from airflow_roir.engine.forecast import objections

        objections.settle(wrong, database, definitions, options)

    settle(context, wrong, look)
    if len(definitions) > 1:
        from airflow_roir.cli.together import build_together

        build_together(database_of(context), definitions, options, without_spark, master, conf, as_json)
        return
    definition = definitions[0]
    if options.throttle is not None:
        from airflow_roir.engine.control.live_options import check_throttle

        with wrong.noted():
            check_throttle(database_of(context), options.throttle)
        settle(context, wrong, look)
    with spark_of(without_spark, dsn_of(context), master, conf) as spark:
        if _opens_now(options.windows):
            # Spark starts while this goes on, imports included.
            spark.start()
        else:
            spark.check()
        from airflow_roir.cli.execute import run_and_print, verify_before
        from airflow_roir.engine import lifecycle, prepare
        from airflow_roir.engine.control import operations
        from airflow_roir.engine.verify import record

        database = database_of(context)
        begins()
        if options.verify in VERIFY_BEFORE and prepare.is_rebuild(database, definition):
            compare = options.for_comparison()
            begun = record.begin(database, index, compare, operations.default_actor(), "before", say)
            say(f"the index before its rebuild: {verify_before(database, begun.index, spark)}")
        prepared = lifecycle.prepare(database, definition, options, report=say, on_spark=not without_spark)
        if prepared.adopted:
            say(f"index {prepared.index}: continuing unfinished operation {prepared.operation_id}")
        run_and_print(database, prepared.index, spark, as_json=as_json)


@app.command()
@takes(BuildOptions, is_live, changes=True)
def resume(
    context: typer.Context,
    index: Index,
    *,
    given: Given,
    without_spark: WithoutSpark = False,
    master: Master = None,
    conf: Conf = None,
    take_over: TakeOver = False,
    as_json: AsJson = False,
    wrong: Wrong,
) -> None:
    """Run a paused or interrupted operation to its end. Continues from its last committed batch."""
    from airflow_roir.cli.execute import print_census, run_and_print
    from airflow_roir.cli.spark import spark_or_threads
    from airflow_roir.engine import abort
    from airflow_roir.engine.control import operations, requests, sign_of_life
    from airflow_roir.errors import LockNotAcquired

    settle_of_index(context, wrong, index, given)
    database = database_of(context)
    row = operations.find_operation(database, index)
    if operations.has_outcome(row):
        # An abort was killed while it removed the generation.
        with suppress(LockNotAcquired):
            abort.finish_abort(database, row.id, operations.default_actor(), say)
        print_census(database, row.id, as_json)
        return
    row = operations.find_resumable(database, index)
    if not take_over:
        # Otherwise this command would change the options and then refuse to drive the operation.
        sign_of_life.refuse_running(database, row, index)
    if row.without_spark and not (without_spark or master or conf):
        say(f"index {index}: threads of this command work, as before; --master names a Spark instead")
        without_spark = True
    # An error in the options of Spark is found before anything is changed.
    command_spark = spark_or_threads(without_spark, database.dsn, master, conf)
    command_spark.check()
    if any(value is not None for value in given.values()):
        requests.change_options(database, index, actor=operations.default_actor(), **given)
    say(f"index {index}: operation {row.id} continues in phase {row.phase}")
    with command_spark as spark:
        run_and_print(database, index, spark, take_over, as_json)


def _opens_now(windows: str | None) -> bool:
    """True if a window is open, so that Spark can start early. By this machine's clock, which decides nothing else."""
    return parse_windows(windows).is_open(datetime.now(timezone.utc))


@app.command()
@takes(BuildOptions, is_live, changes=True)
def change(
    context: typer.Context,
    index: Index,
    *,
    given: Given,
    wrong: Wrong,
) -> None:
    """Change an unfinished operation, running or paused. Workers follow at their next batch."""
    from airflow_roir.engine.control import live_options, operations, requests
    from airflow_roir.engine.control.slow_options import slow_operation

    settle_of_index(context, wrong, index, given)
    database = database_of(context)
    before = operations.find_operation(database, index)
    after = requests.change_options(
        database,
        index,
        actor=operations.default_actor(),
        **given,
    )
    show(f"index {index}: {live_options.told(before, after, flag_of)}")
    with last_look(f"index {index}: operation {after.id} is changed", f"roir status {argument(index)}"):
        for line in slow_operation(database, after):
            say(in_flags(line))
