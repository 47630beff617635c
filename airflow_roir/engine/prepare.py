"""Prepare: one transaction that makes the generation's tables, captures the source's writes and writes the plan.

docs/architecture.md#phases. Everything that needs no lock is done before the drain lock is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from airflow_roir.definition import BuildOptions, IndexDefinition, QualifiedName, quote
from airflow_roir.engine import (
    catalog,
    checks,
    entry_size,
    health,
    operations,
    owner,
    publications,
    scan_choice,
    subscriptions,
    tables,
)
from airflow_roir.engine import generation as physical
from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.row_function import CAPTURE
from airflow_roir.engine.catalog import Source
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.entry import Entry
from airflow_roir.engine.entry_size import EntrySize
from airflow_roir.engine.locks import EXCLUSIVE, Attempts, Drain, check_name, lock_table, telling_of_names
from airflow_roir.engine.partitions import changes
from airflow_roir.engine.plan import Bound, Piece, Plan, make_plan
from airflow_roir.engine.scan_choice import Choice
from airflow_roir.engine.schema import check_schema
from airflow_roir.errors import InvalidInput, NotFound, OperationFailed, OperationRunning, SourceChanged
from airflow_roir.operation import Phase, Status

# The format of watermarks and bounds in the control tables; another version of the code must know it to go on.
FORMAT_VERSION = 2
# Where ranges are blocks.
BLOCK_FORMAT_VERSION = 3

OTHER_BUILD = """
SELECT o.id, i.schema_name, i.name FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE i.source_oid = %(source)s AND o.status IN ('running', 'paused') LIMIT 1
"""


@dataclass(frozen=True)
class PreparedOperation:
    """What `prepare` left behind. adopted: an unfinished operation of the index was found and taken instead."""

    operation_id: int
    generation_id: int
    index: str
    kind: str
    adopted: bool


@dataclass(frozen=True)
class Rehearsal:
    """Everything that prepare would do, found out without changing anything."""

    index: QualifiedName
    source: Source
    definition: IndexDefinition
    entry: Entry
    plan: Plan
    choice: Choice
    kind: str
    entry_size: EntrySize


def rehearse(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 5.0,
) -> Rehearsal:
    """Validate a definition against the database and plan its ranges and segments. Changes nothing.

    patience_s: how long to try where somebody holds the whole table (a TRUNCATE, an ALTER).
    Raises InvalidInput or NotFound, naming the thing and the remedy; LockNotAcquired, naming who holds the table.
    """
    with database.transaction() as connection:
        checks.check_rights(connection)
        check_schema(connection)
        checks.check_server(connection)
        _check_lock_timeout(connection, options)
        existing = _existing_index(connection, definition)
        if existing is not None:
            definition = _stored_definition(connection, existing, definition)
        elif definition.source is None:
            raise NotFound(
                f"there is no index {definition.name} to rebuild; to create it, give the table and key columns"
            )
        assert definition.source is not None
        source = catalog.read_source(connection, definition.source)
        checks.check_row_security(connection, source, options.ignore_row_security)
        checks.check_partition_key(connection, source)
        publications.check(connection, options.ignore_publications)
        subscriptions.check(connection, source)
        checks.check_collations(connection, source)
        checks.check_bounds(connection, source)
        if existing is not None:
            _check_shape(connection, existing, source)

    def plan(connection: Connection) -> Rehearsal:
        checks.check_definition(connection, source, definition)
        name = QualifiedName(definition.name.schema or source.name.schema, definition.name.name)
        if existing is None:
            _check_name_is_free(connection, name)
        found = make_plan(connection, source, definition, options)
        choice = scan_choice.choose(connection, source, options, found, existing.id if existing else None)
        entry = Entry.of(source, definition, options.covering, found.partition)
        entry = entry_size.cover(connection, name, source, entry, options.covering)
        size = entry_size.measure(connection, name, source, entry)
        return Rehearsal(name, source, definition, entry, found, choice, "rebuild" if existing else "create", size)

    readers = Attempts(database, source.sql, source.relations, options.lock_timeout_ms, patience_s, modes=EXCLUSIVE)

    def plan_as_owner(connection: Connection) -> Rehearsal:
        # By its owner of now, which it then keeps.
        lock_table(connection, source.sql, source.oid, "ACCESS SHARE")
        _check_columns(connection, source, definition)
        with owner.for_a_while(connection, source):
            found = plan(connection)
        check_name(connection, source.sql, source.oid)
        return found

    with telling_of_names():
        return readers.run(plan_as_owner, report)


def prepare(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    actor: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> PreparedOperation:
    """Begin an operation: a create, or a rebuild where the index exists. Idempotent.

    An unfinished operation of the index is adopted as it is: `options` then change nothing but parallelism and
    batch rows. Raises InvalidInput, NotFound, LockNotAcquired (nothing stays behind), OperationFailed where an
    operation of the index failed and must be aborted first, SourceChanged where one of another index should be.
    """
    who = actor or operations.default_actor()
    # Not tried again, as all that follows is: a DSN that leads nowhere is to be said at once.
    with database.transaction() as connection:
        checks.check_rights(connection)
        check_schema(connection)
    return database.retry(lambda: _begin(database, definition, options, who, report))


def _begin(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    actor: str,
    report: Callable[[str], None],
) -> PreparedOperation:
    """One attempt. An operation whose commit was not answered for is adopted by the next one."""
    with database.transaction() as connection:
        adopted = _adopt(connection, definition, options, actor)
    if adopted is not None:
        return adopted
    rehearsal = rehearse(database, definition, options, report, options.lock_patience_s)
    source = rehearsal.source
    drain = Drain(database, source.sql, source.relations, options.lock_timeout_ms, options.lock_patience_s)
    begun = time.monotonic()
    try:
        with telling_of_names():
            return drain.run(
                lambda connection, lock: _prepare(connection, lock, rehearsal, options, actor, begun), report
            )
    except IntegrityError:
        # Somebody else has begun an operation of this index meanwhile.
        with database.transaction() as connection:
            adopted = _adopt(connection, definition, options, actor)
        if adopted is None:
            raise
        return adopted


def is_rebuild(database: Database, definition: IndexDefinition) -> bool:
    """True where the index has a published generation, and no unfinished operation."""
    with database.transaction() as connection:
        check_schema(connection)
        existing = _existing_index(connection, definition)
        if existing is None:
            return False
        row = operations.newest_operation(connection, existing.id)
        return row is not None and row.status not in operations.LIVE


def _prepare(
    connection: Connection,
    lock: Callable[[], None],
    rehearsal: Rehearsal,
    options: BuildOptions,
    actor: str,
    begun: float,
) -> PreparedOperation:
    source, plan, name = rehearsal.source, rehearsal.plan, rehearsal.index
    index_id = _index_row(connection, rehearsal)
    generation_id = int(
        connection.execute(
            insert(tables.generation)
            .values(
                index_id=index_id,
                status="building",
                capture_mode=CAPTURE,
                mode_xid=_xid(connection),
                entry=rehearsal.entry.as_json(),
                scan=rehearsal.choice.scan.value,
            )
            .returning(tables.generation.c.id)
        ).scalar_one()
    )
    entry = physical.create(connection, generation_id, rehearsal.entry, plan)
    connection.execute(
        update(tables.generation).where(tables.generation.c.id == generation_id).values(entry=entry.as_json())
    )
    segments: list[tuple[int, Bound | None, Bound | None]] = [(physical.DEFAULT_SEGMENT, None, None)]
    segments += [(n, low, high) for n, (low, high) in enumerate(physical.segment_bounds(plan), start=1)]
    connection.execute(
        insert(tables.segment),
        [{"generation_id": generation_id, "ordinal": n, "lower": low, "upper": high} for n, low, high in segments],
    )
    lock()
    # From here to the commit writers wait: install the capture, look once more, write the operation.
    _check_other_builds(connection, source)
    _check_columns(connection, source, rehearsal.definition)
    installation.install(connection, source)
    execute(connection, "SELECT roir.keep_shape(%(generation)s)", {"generation": generation_id})
    operation_id = int(
        connection.execute(
            insert(tables.operation)
            .values(
                index_id=index_id,
                generation_id=generation_id,
                kind=rehearsal.kind,
                status=Status.RUNNING.value,
                phase=Phase.BUILD.value,
                parallelism=options.parallelism,
                batch_rows=options.batch_rows,
                max_rows_per_second=options.max_rows_per_second,
                options=options.as_dict(),
                rows_estimate=plan.rows,
                fingerprint=catalog.fingerprint(connection, source.oid, entry.fingerprinted(source)),
                format_version=BLOCK_FORMAT_VERSION if rehearsal.choice.scan.by_blocks else FORMAT_VERSION,
                created_by=actor,
                phase_seconds={"prepare": round(time.monotonic() - begun, 3)},
            )
            .returning(tables.operation.c.id)
        ).scalar_one()
    )
    changes.register(connection, source, generation_id)
    ranges = [
        {"operation_id": operation_id, "ordinal": n, **asdict(piece)}
        for n, piece in enumerate(_pieces(connection, rehearsal, index_id))
    ]
    # A partitioned table may have no partition yet.
    if ranges:
        connection.execute(insert(tables.scan_range), ranges)
    said = f"{rehearsal.kind} over {source.sql}, scan by {rehearsal.choice.scan.value}: {rehearsal.choice.why}"
    operations.record_event(connection, index_id, operation_id, actor, "prepare", said)
    return PreparedOperation(operation_id, generation_id, str(name), rehearsal.kind, adopted=False)


def _check_other_builds(connection: Connection, source: Source) -> None:
    """Another build over the source, during which its capture was disabled, would not see that once it is enabled."""
    gaps = installation.gaps(connection, source.oid)
    other = execute(connection, OTHER_BUILD, {"source": source.oid}).first() if gaps else None
    if other is not None:
        name = operations.index_name(other)
        raise SourceChanged(
            f"{gaps[0]} while operation {other.id} builds index {name}, which may lack writes by that; abort it "
            f"first: roir abort '{name}'"
        )


def _check_columns(connection: Connection, source: Source, definition: IndexDefinition) -> None:
    """Raise SourceChanged where columns were renamed or retyped since they were looked at. Under a lock they stay.

    Names that were exchanged would make entries of other columns, a type that was widened would be cut to what it was.
    """
    names = {*definition.key, *definition.include, *source.primary_key}
    now = catalog.read_source_by_oid(connection, source.oid)
    if now.primary_key != source.primary_key or any(now.columns.get(n) != source.columns.get(n) for n in names):
        raise SourceChanged(f"table {source.name} was altered since it was looked at; nothing was changed, begin again")


def _pieces(connection: Connection, rehearsal: Rehearsal, index_id: int) -> list[Piece]:
    """The plan's pieces, for the leaves that there are under the drain lock: one that came since is a piece itself.

    Blocks are cut anew: what was written until now must be within them, what is written from now on is captured.
    """
    source, plan, choice = rehearsal.source, rehearsal.plan, rehearsal.choice
    leaves = list(source.leaves)
    if source.partitioned:
        leaves = [row.relation for row in execute(connection, catalog.PARTITIONS, {"oid": source.oid}) if row.leaf]
    if choice.scan.by_blocks:
        return scan_choice.pieces(connection, source, choice, leaves, index_id, plan.ranges)
    if not source.partitioned:
        return list(plan.pieces)
    planned = {piece.relation for piece in plan.pieces}
    kept = [piece for piece in plan.pieces if piece.relation in leaves]
    return kept + [Piece(leaf, None, None) for leaf in leaves if leaf not in planned]


def _adopt(
    connection: Connection, definition: IndexDefinition, options: BuildOptions, actor: str
) -> PreparedOperation | None:
    existing = _existing_index(connection, definition)
    if existing is None:
        return None
    row = operations.newest_operation(connection, existing.id)
    if row is None or row.status not in operations.LIVE:
        return None
    name = operations.index_name(existing)
    if row.kind == "verify":
        raise OperationRunning(
            f"index {name}: operation {row.id} verifies it and is {row.status}; wait for it, finish it "
            f"(roir resume '{name}'), or abort it"
        )
    if row.status == Status.FAILED:
        raise OperationFailed(
            f"index {name}: operation {row.id} failed ({row.error}); abort it first: roir abort '{name}'"
        )
    if row.status == Status.ABORTING:
        raise OperationFailed(f"index {name}: operation {row.id} is being aborted; finish that first: roir clean-up")
    _stored_definition(connection, existing, definition)
    if operations.heart_beats(row, connection):
        raise operations.running_elsewhere(row, str(name))
    operations.change_options(connection, row, actor, options.parallelism, options.batch_rows)
    operations.record_event(connection, existing.id, row.id, actor, "adopt", f"in phase {row.phase}")
    return PreparedOperation(row.id, row.generation_id, str(name), row.kind, adopted=True)


def _existing_index(connection: Connection, definition: IndexDefinition) -> Row[Any] | None:
    """The live index of the definition's name. A name without schema means the source's, or the only one."""
    name = definition.name
    if name.schema is None and definition.source is not None:
        source = catalog.read_source(connection, definition.source)
        name = QualifiedName(source.name.schema, name.name)
    try:
        return operations.find_index(connection, name)
    except NotFound:
        return None


def _stored_definition(connection: Connection, existing: Row[Any], given: IndexDefinition) -> IndexDefinition:
    """The definition of an index that exists; where one was given too, it must be the same."""
    name = operations.index_name(existing)
    source_name = catalog.name_of(connection, existing.source_oid)
    stored = IndexDefinition(name, source_name, tuple(existing.key_columns), tuple(existing.included_columns))
    if given.source is not None:
        source = catalog.read_source(connection, given.source)
        if source.oid != existing.source_oid or (given.key, given.include) != (stored.key, stored.include):
            keys, included = (", ".join(map(quote, c)) or "none" for c in (stored.key, stored.include))
            raise InvalidInput(
                f"index {name} exists with another definition: on {source_name}, key {keys}, included {included}. "
                "A rebuild keeps it: leave out table and columns. To change it, drop the index first"
            )
    return stored


def _index_row(connection: Connection, rehearsal: Rehearsal) -> int:
    if rehearsal.kind == "rebuild":
        return int(operations.find_index(connection, rehearsal.index).id)
    return int(
        connection.execute(
            insert(tables.index)
            .values(
                schema_name=rehearsal.index.schema,
                name=rehearsal.index.name,
                source_oid=rehearsal.source.oid,
                key_columns=list(rehearsal.definition.key),
                included_columns=list(rehearsal.definition.include),
            )
            .returning(tables.index.c.id)
        ).scalar_one()
    )


def _check_shape(connection: Connection, existing: Row[Any], source: Source) -> None:
    """What readers see keeps its columns and their types: PostgreSQL replaces no view by another kind of one."""
    generation = tables.generation
    active = connection.execute(
        select(generation).where(generation.c.index_id == existing.id, generation.c.status == "active")
    ).first()
    if active is not None:
        name = str(operations.index_name(existing))
        problems = health.shape_problems(connection, name, source, active.id, Entry.from_json(active.entry))
        if problems:
            raise InvalidInput(problems[0])


def _check_name_is_free(connection: Connection, name: QualifiedName) -> None:
    """The view of that name must be creatable: the schema is there, nothing has the name, and we may."""
    row = execute(
        connection,
        "SELECT n.oid, has_schema_privilege(n.oid, 'CREATE') AS may, current_user AS role, "
        "(SELECT relkind::text FROM pg_class c WHERE c.relnamespace = n.oid AND c.relname = %(name)s) AS taken, "
        "(SELECT true FROM pg_type t WHERE t.typnamespace = n.oid AND t.typname = %(name)s) AS taken_by_type "
        "FROM pg_namespace n WHERE n.nspname = %(schema)s",
        {"schema": name.schema, "name": name.name},
    ).first()
    assert name.schema is not None
    if row is None:
        raise NotFound(f"index {name}: there is no schema {quote(name.schema)}; create it first")
    if row.taken or row.taken_by_type:
        raise InvalidInput(
            f"index {name}: the name is taken by another relation or type in {quote(name.schema)}; choose another"
        )
    if not row.may:
        raise InvalidInput(
            f"index {name}: role {row.role} has no right to create in schema {quote(name.schema)}; "
            f'run: GRANT CREATE ON SCHEMA {quote(name.schema)} TO "{row.role}"'
        )


def _check_lock_timeout(connection: Connection, options: BuildOptions) -> None:
    deadlock = int(execute(connection, "SELECT setting FROM pg_settings WHERE name = 'deadlock_timeout'").scalar_one())
    if options.lock_timeout_ms >= deadlock:
        raise InvalidInput(
            f"lock_timeout_ms is {options.lock_timeout_ms}, the server's deadlock_timeout {deadlock} ms; "
            "choose a smaller one, so that it is always the build that gives way to writers"
        )


def _xid(connection: Connection) -> str:
    return str(execute(connection, "SELECT pg_current_xact_id()::text").scalar_one())
