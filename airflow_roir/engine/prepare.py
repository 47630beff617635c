"""Prepare: one transaction creates the generation's tables, begins to capture the source's writes, stores the plan.

docs/architecture.md#phases. All work that needs no lock is done before it asks for the drain lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import IndexDefinition, argument
from airflow_roir.engine import dry_run
from airflow_roir.engine.apart import apart
from airflow_roir.engine.capture import installation, partition_changes, trigger_gaps
from airflow_roir.engine.capture.target import CAPTURE
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import BegunOperation, begin_or_adopt, insert_operation, unfinished
from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.control.slow_options import slow
from airflow_roir.engine.control.stored_definition import check_shards, existing_index, stored_definition, uniqueness
from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.dry_run import check_columns
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Piece
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.retry.patience import Patience, Saying
from airflow_roir.engine.scan import choosing, sharing
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.engine.source import catalog, checks, expressions
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, SourceChanged
from airflow_roir.operation import BLOCK_FORMAT_VERSION, BUILDS, FORMAT_VERSION, Kind, Phase
from airflow_roir.options import BuildOptions

OTHER_BUILD = """
SELECT o.id, i.schema_name, i.name FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE i.source_oid = %(source)s AND o.status IN ('running', 'paused') LIMIT 1
"""
INSERT_INDEX = """
INSERT INTO roir.index (schema_name, name, source_oid, key_columns, included_columns, is_unique, nulls_not_distinct,
                        expressions, condition, shard_table, shard_column)
VALUES (%(schema)s, %(name)s, %(source)s, %(key)s, %(include)s, %(is_unique)s, %(nulls_not_distinct)s,
        %(expressions)s, %(condition)s, %(shard_table)s, %(shard_column)s)
RETURNING id
"""
INSERT_GENERATION = """
INSERT INTO roir.generation (index_id, status, capture_mode, mode_xid, entry, scan)
VALUES (%(index)s, 'building', %(mode)s, pg_current_xact_id()::text, %(entry)s, %(scan)s)
RETURNING id
"""
SET_ENTRY = "UPDATE roir.generation SET entry = %(entry)s WHERE id = %(generation)s"
INSERT_SEGMENTS = """
INSERT INTO roir.segment (generation_id, ordinal, lower, upper)
SELECT %(generation)s, s.ordinal, s.lower, s.upper
  FROM jsonb_to_recordset(%(segments)s) AS s (ordinal int, lower jsonb, upper jsonb)
"""
INSERT_RANGES = """
INSERT INTO roir.scan_range (operation_id, ordinal, relation, lower, upper, filenode, shard_id)
SELECT %(operation)s, r.ordinal, r.relation, r.lower, r.upper, r.filenode, r.shard_id
  FROM jsonb_to_recordset(%(ranges)s)
       AS r (ordinal int, relation bigint, lower jsonb, upper jsonb, filenode bigint, shard_id bigint)
"""


@dataclass(frozen=True)
class Foreseen:
    """A look ahead at a planned build. lines: for the user; worth: whether the index will pay, in words."""

    lines: Sequence[str] = ()
    worth: str | None = None


Foresee = Callable[[Connection, DryRun, BuildOptions], Foreseen]


def prepare(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    actor: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    foresee: Foresee = lambda connection, dry, options: Foreseen(),
) -> BegunOperation:
    """Begin a build: a create, or a rebuild if the index exists. Idempotent.

    foresee: looks ahead, in the planning transaction, before writers are locked out; `lifecycle.prepare` gives it.
    An unfinished operation of the index is adopted with its own options; only those of LIVE_OPTIONS change. Raises
    InvalidInput, NotFound, LockNotAcquired (nothing stays behind), OperationFailed (an operation of the index failed
    and must be aborted first), SourceChanged (an operation of another index on the source must be aborted first).
    """
    who = actor or operations.default_actor()

    # A wrong DSN is reported at once; all that follows is tried again.
    def check() -> None:
        with database.transaction() as connection:
            check_schema(connection, writes=True)
            checks.check_rights(connection)

    told = Saying(report)
    database.retry(check, Patience(database.limits, told=told, outage_s=0))
    # Nothing has begun yet. A table of many partitions may run out of locks at once, and such a shortage mostly lasts.
    limits = replace(database.limits, exhausted_s=min(database.limits.exhausted_s, database.limits.outage_s))
    patience = Patience(limits, told=told)
    return database.retry(lambda: _begin(database, definition, options, who, report, foresee), patience)


@in_one_history
def _begin(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    actor: str,
    report: Callable[[str], None],
    foresee: Foresee,
) -> BegunOperation:
    """Makes one attempt. If the answer to its commit is lost, the next attempt adopts the operation."""

    def check(connection: Connection, row: OperationRow, existing: Row[Any]) -> None:
        _check_same(connection, row, existing, definition, options)

    prepared = begin_or_adopt(
        database,
        lambda connection: existing_index(connection, definition),
        BUILDS,
        options,
        actor,
        lambda existing: _new(database, definition, options, actor, report, foresee),
        report,
        check,
    )
    # Does nothing for an index whose source is in this database. A worker, or a resume, does the rest if this fails.
    apart().capture(database, prepared.generation_id, options, report)
    return prepared


def _new(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    actor: str,
    report: Callable[[str], None],
    foresee: Foresee,
) -> BegunOperation:
    # Each attempt for the lock looks; the last look counts.
    seen: list[Foreseen] = []
    dry = dry_run.run(
        database,
        definition,
        options,
        report,
        options.lock_patience_s,
        "prepare",
        lambda connection, dry: seen.append(foresee(connection, dry, options)),
    )
    foreseen = seen[-1]
    for line in foreseen.lines:
        report(line)
    begun = time.monotonic()
    with telling_of_names():
        if dry.survey is not None and dry.kind == "create":
            with database.transaction() as connection:
                # No other session knows the table that stands for the source: there is no writer to drain.
                dry = apart().with_source(connection, dry)
                prepared = _prepare(connection, lambda: None, dry, options, actor, begun, foreseen)
        else:
            prepared = _drain(database, dry, options).run(
                lambda connection, lock: _prepare(connection, lock, dry, options, actor, begun, foreseen), report
            )
    for line in slow(options, dry.plan.rows, dry.plan.ranges):
        report(line)
    return prepared


def _drain(database: Database, dry: DryRun, options: BuildOptions) -> Drain:
    source = dry.source
    waiter = Waiter("prepare", str(dry.index))
    return Drain(database, source.sql, source.relations, options.lock_timeout_ms, options.lock_patience_s, waiter)


def is_rebuild(database: Database, definition: IndexDefinition) -> bool:
    """True if the index has a published generation, and no unfinished operation."""
    with database.transaction() as connection:
        check_schema(connection)
        existing = existing_index(connection, definition)
        return existing is not None and unfinished(connection, existing) is None


def _prepare(
    connection: Connection,
    lock: Callable[[], None],
    dry: DryRun,
    options: BuildOptions,
    actor: str,
    begun: float,
    foreseen: Foreseen,
) -> BegunOperation:
    source, plan, name = dry.source, dry.plan, dry.index
    index_id = _index_row(connection, dry)
    if dry.expressions:
        dry = replace(dry, entry=dry.entry.calling(expressions.create_of_index(connection, index_id, dry.expressions)))
    values = {"index": index_id, "mode": CAPTURE, "entry": to_json(dry.entry.as_json())}
    values["scan"] = dry.choice.scan.value
    generation_id = int(execute(connection, INSERT_GENERATION, values).scalar_one())
    entry = physical.create(connection, generation_id, dry.entry, plan)
    execute(connection, SET_ENTRY, {"generation": generation_id, "entry": to_json(entry.as_json())})
    bounds = [(None, None), *physical.segment_bounds(plan)]
    segments = [
        {"ordinal": n, "lower": low, "upper": high} for n, (low, high) in enumerate(bounds, physical.DEFAULT_SEGMENT)
    ]
    execute(connection, INSERT_SEGMENTS, {"generation": generation_id, "segments": to_json(segments)})
    lock()
    # From here to the commit writers wait: check again, install the capture, write the operation.
    _check_other_builds(connection, source)
    check_columns(connection, source, dry.definition)
    installation.install(connection, source)
    execute(connection, "SELECT roir.keep_shape(%(generation)s)", {"generation": generation_id})
    # Only now: the capture of each generation that is being built is complete again.
    shared, pieces = _cut(connection, dry, index_id, options)
    warnings = slow(options, plan.rows, plan.ranges)
    operation_id = insert_operation(
        connection,
        index_id=index_id,
        generation_id=generation_id,
        kind=Kind(dry.kind),
        phase=Phase.BUILD,
        options=options,
        source=source,
        entry=entry,
        actor=actor,
        format_version=BLOCK_FORMAT_VERSION if dry.choice.scan.by_blocks else FORMAT_VERSION,
        scan_of=shared.of if shared else None,
        rows_estimate=plan.rows,
        notice=" ".join(warnings) or None,
        worth=foreseen.worth,
        phase_seconds=to_json({"prepare": round(time.monotonic() - begun, 3)}),
    )
    partition_changes.register(connection, source, generation_id)
    if dry.survey is not None:
        apart().write_down(connection, generation_id, dry, entry)
    ranges = [{"ordinal": n, **asdict(piece)} for n, piece in pieces]
    execute(connection, INSERT_RANGES, {"operation": operation_id, "ranges": to_json(ranges)})
    what = Kind(dry.kind).noun
    if dry.definition.unique:
        what += f", {'census' if options.census else uniqueness(dry.definition)},"
    over = source.sql if dry.survey is None else dry.survey.listed
    said = f"{what} over {over}, scan by {dry.choice.scan.value}: {dry.choice.why}"
    if shared is not None:
        said += f"; it takes the ranges of {shared.name}: one scan serves both while their limits are the same"
    operations.record_event(connection, index_id, operation_id, actor, "prepare", said)
    return BegunOperation(operation_id, generation_id, str(name), dry.kind, adopted=False)


def _check_other_builds(connection: Connection, source: Source) -> None:
    """Raise SourceChanged if the capture is disabled while another index of the source is built.

    This build enables the capture again. The other build couldn't notice the gap then.
    """
    gaps = trigger_gaps.gaps(connection, source.oid)
    other = execute(connection, OTHER_BUILD, {"source": source.oid}).first() if gaps else None
    if other is not None:
        name = operations.index_name(other)
        raise SourceChanged(
            f"{gaps[0]} while operation {other.id} builds index {name}, which may therefore lack writes. Abort it "
            f"first: roir abort {argument(name)}"
        )


def _cut(
    connection: Connection, dry: DryRun, index_id: int, options: BuildOptions
) -> tuple[sharing.Cut | None, Sequence[tuple[int, Piece]]]:
    """The ranges with their numbers: those of a build under way, to share one scan with it, or the plan's own."""
    source, leaves = dry.source, _leaves(connection, dry.source)
    own = list(enumerate(_pieces(connection, dry, index_id, leaves)))
    if options.ranges is None:
        least = min(options.parallelism, len(own))
        shared = sharing.cut_under_way(connection, source, dry.choice.scan, leaves, least)
        if shared is not None:
            return shared, shared.pieces
    return None, own


def _leaves(connection: Connection, source: Source) -> list[int]:
    """The leaves of the source as they are now, under the drain lock."""
    if not source.partitioned:
        return list(source.leaves)
    return [row.relation for row in execute(connection, catalog.PARTITIONS, {"oid": source.oid}) if row.leaf]


def _pieces(connection: Connection, dry: DryRun, index_id: int, leaves: list[int]) -> list[Piece]:
    """The plan's pieces, for the leaves that exist under the drain lock; a leaf that the plan lacks is one piece.

    Blocks are cut again: they must include all rows written until now; from now on the capture sees each write.
    """
    source, plan, choice = dry.source, dry.plan, dry.choice
    if choice.scan.by_blocks:
        return choosing.pieces(connection, source, choice, leaves, index_id, plan.ranges)
    if not source.partitioned:
        return list(plan.pieces)
    planned = {piece.relation for piece in plan.pieces}
    kept = [piece for piece in plan.pieces if piece.relation in leaves]
    return kept + [Piece(leaf, None, None) for leaf in leaves if leaf not in planned]


def _check_same(
    connection: Connection,
    row: OperationRow,
    existing: Row[Any],
    definition: IndexDefinition,
    options: BuildOptions,
) -> None:
    """Raise InvalidInput if an unfinished build differs from the one that the caller asked for."""
    name = operations.index_name(existing)
    stored = stored_definition(connection, existing, definition)
    check_shards(connection, row, str(name), stored)
    if bool(row.options.get("census")) != options.census:
        what = "is a census and" if row.options.get("census") else "is no census but a build, and"
        raise InvalidInput(
            f"index {name}: operation {row.id} {what} is unfinished. Finish it (roir resume {argument(name)}) or abort "
            f"it (roir abort {argument(name)}) first, or take another name"
        )


def _index_row(connection: Connection, dry: DryRun) -> int:
    if dry.kind == "rebuild":
        found = operations.find_index(connection, dry.index)
        # A drop may have begun meanwhile.
        dry_run.refuse_kept(connection, found)
        return int(found.id)
    survey, definition = dry.survey, dry.definition
    values = {
        "schema": dry.index.schema,
        "name": dry.index.name,
        "source": dry.source.oid,
        "key": to_json(list(definition.key)),
        "include": to_json(list(definition.include)),
        "is_unique": definition.unique,
        "nulls_not_distinct": definition.nulls_not_distinct,
        **expressions.kept(dry.expressions),
        "shard_table": None if survey is None else str(survey.table),
        "shard_column": None if survey is None else survey.shard_column,
    }
    return int(execute(connection, INSERT_INDEX, values).scalar_one())
