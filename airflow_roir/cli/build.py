"""Commands that build: init, plan, build, resume."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

import typer

from airflow_roir.cli.app import (
    AbortAfter,
    AsJson,
    BatchMs,
    BatchRows,
    Beside,
    Census,
    Conf,
    Covering,
    IgnorePublications,
    IgnoreRowSecurity,
    Include,
    Index,
    Indexes,
    Keys,
    Master,
    MaxDuration,
    MaxRows,
    NullsNotDistinct,
    OnDuplicate,
    Parallelism,
    Priority,
    Ranges,
    RevertWindow,
    Scan,
    Segments,
    TableName,
    TakeOver,
    Throttle,
    Unique,
    Verify,
    WarnAfter,
    Windows,
    app,
    database_of,
    dsn_of,
    print_json,
    say,
    show,
    work_options,
)
from airflow_roir.definition import SOURCE, VERIFY_BEFORE, BuildOptions, IndexDefinition, VerifyOptions, parse_beside
from airflow_roir.windows import parse_windows


@app.command()
def init(context: typer.Context, ignore_publications: IgnorePublications = False) -> None:
    """Create or upgrade the control schema `roir` in the database."""
    from airflow_roir.engine import checks, publications, schema

    database = database_of(context)
    with database.transaction() as connection:
        if schema.current(connection) is None:
            # A subscriber to all tables would stop at the control schema's first row.
            publications.check(connection, ignore_publications)
    show(f"the control schema roir is at version {schema.init(database)}")
    with database.transaction() as connection:
        if untried := checks.untried_server(connection):
            say(untried)
        if not schema.is_guarded(connection):
            say(
                "DDL that would make an index wrong is detected afterwards; a superuser can have it refused: "
                "SELECT roir.guard()"
            )


@app.command()
def plan(
    context: typer.Context,
    index: Index,
    table: TableName = None,
    keys: Keys = None,
    include: Include = None,
    unique: Unique = False,
    nulls_not_distinct: NullsNotDistinct = False,
    on_duplicate: OnDuplicate = BuildOptions.on_duplicate,
    census: Census = False,
    parallelism: Parallelism = None,
    ranges: Ranges = None,
    segments: Segments = None,
    scan: Scan = BuildOptions.scan,
    covering: Covering = "auto",
    ignore_row_security: IgnoreRowSecurity = False,
    ignore_publications: IgnorePublications = False,
    as_json: AsJson = False,
) -> None:
    """Validate a build and show what it would do. Changes nothing."""
    from airflow_roir.engine import checks, rehearse, schema, slow, view
    from airflow_roir.engine.early import hashing

    options = _options(
        parallelism=parallelism,
        ranges=ranges,
        segments=segments,
        scan=scan,
        covering=covering,
        ignore_row_security=ignore_row_security,
        ignore_publications=ignore_publications,
        on_duplicate=on_duplicate,
        census=census,
    )
    database = database_of(context)
    definition = IndexDefinition.parse(index, table, keys, include, unique, nulls_not_distinct)
    rehearsal = rehearse.rehearse(database, definition, options)
    with database.transaction() as connection:
        guarded = schema.is_guarded(connection)
        untried = checks.untried_server(connection)
        untold = hashing.untold(connection, rehearsal.entry)
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
        **_uniqueness(rehearsal.definition, options, as_json),
        "entry_size": str(rehearsal.entry_size),
        "rows_estimate": rehearsal.plan.rows,
        "source_bytes": rehearsal.plan.source_bytes,
        "ranges": rehearsal.plan.ranges,
        "segments": rehearsal.plan.segments,
        "scan": f"{rehearsal.choice.scan.value}: {rehearsal.choice.why}",
        "parallelism": options.parallelism,
        "expects": str(rehearsal.expectation),
        # DDL that removes or brings rows, past every trigger.
        "uncaptured_ddl": "refused" if guarded else "detected; a superuser can have it refused: SELECT roir.guard()",
        "view": view.statement(rehearsal.index, 0, entry, rehearsal.kind == "rebuild").replace("g0", "g<id>"),
    }
    if untold:
        facts["early"] = untold
    if untried:
        facts["server"] = untried
    if warnings := slow.slow(options, rehearsal.plan.rows, rehearsal.plan.ranges):
        facts["slow"] = warnings
    if as_json:
        print_json(facts | rehearsal.expectation.as_dict())
        return
    # As the seal counts them.
    facts["segments"] = f"{facts['segments']}, and one for keys that are NULL"
    for name, value in facts.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        show(f"{name.replace('_', ' '):16} {shown}")


@app.command()
def build(
    context: typer.Context,
    indexes: Indexes,
    table: TableName = None,
    keys: Keys = None,
    include: Include = None,
    unique: Unique = False,
    nulls_not_distinct: NullsNotDistinct = False,
    on_duplicate: OnDuplicate = BuildOptions.on_duplicate,
    census: Census = False,
    parallelism: Parallelism = None,
    batch_rows: BatchRows = None,
    batch_ms: BatchMs = BuildOptions.batch_ms,
    ranges: Ranges = None,
    segments: Segments = None,
    max_rows_per_second: MaxRows = None,
    scan: Scan = BuildOptions.scan,
    covering: Covering = "auto",
    revert_window: RevertWindow = BuildOptions.revert_window_s,
    ignore_row_security: IgnoreRowSecurity = False,
    ignore_publications: IgnorePublications = False,
    verify: Verify = BuildOptions.verify,
    throttle: Throttle = None,
    windows: Windows = None,
    max_duration: MaxDuration = None,
    priority: Priority = None,
    warn_after: WarnAfter = None,
    abort_after: AbortAfter = None,
    beside: Beside = None,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Create an index, or rebuild one that exists: then leave out --table and --keys.

    Several indexes of one table, rebuilt or by --with, are built by one scan of it.
    """
    from airflow_roir.cli.spark import CommandSpark

    work = work_options(throttle, windows, max_duration, priority, warn_after, abort_after)
    index = indexes[0]
    definitions = [
        IndexDefinition.parse(index, table, keys, include, unique, nulls_not_distinct),
        *(parse_beside(one, table) for one in beside or ()),
        *map(IndexDefinition.parse, indexes[1:]),
    ]
    if len(definitions) > 1 and scan == BuildOptions.scan:
        scan = SOURCE
    options = _options(
        parallelism=parallelism,
        batch_rows=batch_rows,
        batch_ms=batch_ms,
        ranges=ranges,
        segments=segments,
        max_rows_per_second=max_rows_per_second,
        scan=scan,
        covering=covering,
        revert_window_s=revert_window,
        ignore_row_security=ignore_row_security,
        ignore_publications=ignore_publications,
        verify=verify,
        on_duplicate=on_duplicate,
        census=census,
        **work,
    )
    if len(definitions) > 1:
        from airflow_roir.cli.together import build_together

        build_together(database_of(context), definitions, options, master, conf, as_json)
        return
    definition = definitions[0]
    with CommandSpark(dsn_of(context), master, conf) as spark:
        if _opens_now(options.windows):
            # Beside all that follows, imports included.
            spark.start()
        from airflow_roir.cli.execute import carry_on, carry_on_verification
        from airflow_roir.engine import operations, prepare
        from airflow_roir.engine.verify import verification

        database = database_of(context)
        if verify in VERIFY_BEFORE and prepare.is_rebuild(database, definition):
            compare = VerifyOptions(parallelism=options.parallelism, **work)
            begun = verification.begin(database, index, compare, operations.default_actor(), "before")
            say(f"the index before its rebuild: {carry_on_verification(database, begun.index, spark)}")
        prepared = prepare.prepare(database, definition, options, report=say)
        if prepared.adopted:
            say(f"continuing unfinished operation {prepared.operation_id}")
        carry_on(database, prepared.index, spark, False, as_json)


@app.command()
def resume(
    context: typer.Context,
    index: Index,
    parallelism: Parallelism = None,
    batch_rows: BatchRows = None,
    max_rows_per_second: MaxRows = None,
    throttle: Throttle = None,
    windows: Windows = None,
    max_duration: MaxDuration = None,
    priority: Priority = None,
    warn_after: WarnAfter = None,
    abort_after: AbortAfter = None,
    master: Master = None,
    conf: Conf = None,
    take_over: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Run a paused or interrupted operation to its end, from its last committed batch."""
    from airflow_roir.cli.execute import carry_on, print_census
    from airflow_roir.cli.spark import CommandSpark
    from airflow_roir.engine import abort, operations
    from airflow_roir.errors import LockNotAcquired

    database = database_of(context)
    row = operations.find_operation(database, index)
    if operations.has_outcome(row):
        # It was killed while it removed what it had built.
        with suppress(LockNotAcquired):
            abort.finish_abort(database, row.id, operations.default_actor(), say)
        print_census(database, row.id, as_json)
        return
    row = operations.find_resumable(database, index)
    given = {"parallelism": parallelism, "batch_rows": batch_rows, "max_rows_per_second": max_rows_per_second}
    given |= work_options(throttle, windows, max_duration, priority, warn_after, abort_after)
    if any(value is not None for value in given.values()):
        operations.change_options(database, index, actor=operations.default_actor(), **given)
    say(f"operation {row.id} continues in phase {row.phase}")
    with CommandSpark(database.dsn, master, conf) as spark:
        carry_on(database, index, spark, take_over, as_json)


def _uniqueness(definition: IndexDefinition, options: BuildOptions, as_json: bool) -> dict[str, Any]:
    """What the plan tells of a unique index; of another one that it is none."""
    facts: dict[str, Any] = {"unique": definition.unique}
    if definition.unique:
        facts |= {
            "nulls_not_distinct": definition.nulls_not_distinct,
            "on_duplicate": options.on_duplicate,
            "census": options.census,
        }
    if as_json:
        return facts
    if not definition.unique:
        return {"unique": "no"}
    nulls = "NULLs are equal, too" if definition.nulls_not_distinct else "NULLs are never equal"
    return {"unique": f"over all partitions; {nulls}", "on_duplicate": _ON_DUPLICATE[_then(options)]}


_ON_DUPLICATE = {
    "pause": "pauses once all rows that share a key are listed; no write is refused until none does",
    "stop": "pauses at the first rows that share a key; no write is refused until none does",
    "census": "a census: lists all rows that share a key, then removes what was built",
}


def _then(options: BuildOptions) -> str:
    return "census" if options.census else options.on_duplicate


def _options(**given: Any) -> BuildOptions:
    return BuildOptions.asked(**given)


def _opens_now(windows: str | None) -> bool:
    """Whether to start Spark already. By the machine's clock, which decides nothing else."""
    return parse_windows(windows).is_open(datetime.now(timezone.utc))
