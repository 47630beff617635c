"""Begins an operation, or adopts the unfinished operation of its index: a build, a verification or a compaction.

An index has at most one unfinished operation. If two begin at once, the control table's unique index refuses the later
one; its caller then adopts the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import IntegrityError

from airflow_roir.definition import QualifiedName, argument
from airflow_roir.engine.control import live_options, operations, sign_of_life
from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.readers import view
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import OperationFailed, OperationRunning
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.operation import FORMAT_VERSION, Kind, Phase, Status
from airflow_roir.options import WorkOptions

# A transaction that detaches or attaches a partition locks the index's row, and the source exclusively.
PATIENCE_S = 60.0
HELD_BY = ["RowShareLock", "AccessExclusiveLock"]
TABLES = "SELECT %(oid)s::bigint UNION ALL SELECT relation::bigint FROM roir.partition_tree(%(oid)s)"

DOES = {
    Kind.CREATE: "builds",
    Kind.REBUILD: "builds",
    Kind.VERIFY: "verifies",
    Kind.COMPACT: "compacts",
    Kind.REFERENCE: "makes a foreign key to",
}
STATUS = "SELECT status FROM roir.generation WHERE id = %(id)s"
SET_ROWS = "UPDATE roir.operation SET rows_estimate = %(rows)s WHERE id = %(operation)s"
# columns, values: of the row, by their names.
INSERT = """
INSERT INTO roir.operation (status, working_since, {columns}) VALUES ('running', clock_timestamp(), {values})
RETURNING id
"""
# Records the present names of labels. Only bounds and watermarks use names, and no former operation's matter any more;
# entries have a label's number.
LABELS = """
UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{labels}', (
         SELECT jsonb_object_agg(l.key, e.enumlabel)
           FROM jsonb_each(g.shape -> 'labels') l JOIN pg_enum e ON e.oid = l.key::oid))
 WHERE g.id = %(generation)s AND g.shape -> 'labels' <> '{}'
"""


@dataclass(frozen=True)
class BegunOperation:
    """An operation that a run can drive. adopted: True if it was unfinished, and continues with its own options."""

    operation_id: int
    generation_id: int
    index: str
    kind: str
    adopted: bool


@dataclass(frozen=True)
class OverActive:
    """The subject of an operation over the generation that readers see. index, generation: their rows."""

    operation_id: int
    index: Row[Any]
    generation: Row[Any]
    source: Source


def unfinished(connection: Connection, index: Row[Any] | None) -> OperationRow | None:
    """The unfinished operation of an index, which must end before another one can begin; None if there is none."""
    row = None if index is None else operations.newest_operation(connection, index.id)
    return row if row is not None and row.status in operations.LIVE else None


def begin_or_adopt(
    database: Database,
    find: Callable[[Connection], Row[Any] | None],
    kinds: Collection[Kind],
    options: WorkOptions,
    actor: str,
    begin: Callable[[Row[Any] | None], BegunOperation],
    report: Callable[[str], None],
    check: Callable[[Connection, OperationRow, Row[Any]], object] = lambda connection, row, index: None,
) -> BegunOperation:
    """Begins an operation, or adopts the unfinished one of the index, of which only the live options change.

    find: the index's row, None if there is none yet. kinds: of operations that can be adopted. begin: makes a new one
    for the index that `find` found, in transactions of its own. check: raises if the unfinished one isn't the wanted
    one. Raises OperationRunning (one of another kind is unfinished, or another run drives it), OperationFailed (it must
    be aborted first), LockNotAcquired as `begin_over_active`.
    """

    def adopt(connection: Connection) -> BegunOperation | None:
        index = find(connection)
        row = unfinished(connection, index)
        if index is None or row is None:
            return None
        name = operations.index_name(index)
        if row.kind not in kinds:
            raise OperationRunning(
                f"index {name}: {operations.named(row)} {DOES[Kind(row.kind)]} the index and is {row.status}; "
                f"wait until it ends, resume it (roir resume {argument(name)}), or abort it"
            )
        _refuse_ended(row, name)
        check(connection, row, index)
        if sign_of_life.heart_beats(row, connection):
            raise sign_of_life.running_elsewhere(row, str(name), connection)
        live_options.adopt_options(connection, row, actor, options)
        operations.record_event(connection, row.index_id, row.id, actor, "adopt", f"in phase {Phase(row.phase).shown}")
        return BegunOperation(row.id, row.generation_id, str(name), row.kind, adopted=True)

    def look() -> tuple[Row[Any] | None, BegunOperation | None]:
        with database.transaction() as connection:
            check_schema(connection, writes=True)
            index = find(connection)
            if index is None or unfinished(connection, index) is None:
                return index, None
            attempts = _attempts(database, connection, index, "adopt")
        return index, attempts.run(adopt, report)

    index, adopted = look()
    if adopted is None:
        try:
            return begin(index)
        except IntegrityError:
            # Another caller has begun an operation of this index meanwhile.
            _, adopted = look()
            if adopted is None:
                raise
    return adopted


def _refuse_ended(row: OperationRow, name: QualifiedName) -> None:
    if row.status == Status.FAILED:
        raise OperationFailed(
            f"index {name}: operation {row.id} failed ({row.error}); abort it first: roir abort {argument(name)}"
        )
    if row.status == Status.ABORTING:
        raise OperationFailed(f"index {name}: operation {row.id} is being aborted; finish that first: roir clean-up")


def _attempts(database: Database, connection: Connection, index: Row[Any], command: str) -> Attempts:
    """Short attempts at a transaction that waits while the index's partitions or its source are changed."""
    name = str(operations.index_name(index))
    row_of = int(execute(connection, "SELECT 'roir.index'::regclass::oid::bigint").scalar_one())
    relations = [row_of, *execute(connection, TABLES, {"oid": index.source_oid}).scalars()]
    waiter = Waiter(command, name)
    return Attempts(database, f"index {name}", relations, database.limits.attempt_ms, PATIENCE_S, HELD_BY, waiter)


def insert_operation(
    connection: Connection,
    *,
    index_id: int,
    generation_id: int,
    kind: Kind,
    phase: Phase,
    options: WorkOptions,
    source: Source,
    entry: Entry,
    actor: str,
    format_version: int = FORMAT_VERSION,
    **columns: Any,
) -> int:
    """Writes the row of a new operation, with the status running; returns its id.

    phase: its first one. source, entry: their shape, which must not change. columns: the row's columns that depend on
    the kind of operation. Raises InvalidInput for a throttle that the server can't read, IntegrityError if another
    operation of the index is unfinished.
    """
    values = {
        "index_id": index_id,
        "generation_id": generation_id,
        "kind": kind.value,
        "phase": phase.value,
        **live_options.columns(connection, options),
        "options": to_json(options.fixed()),
        "fingerprint": catalog.fingerprint(connection, source.oid, entry.fingerprinted(source)),
        "format_version": format_version,
        "created_by": actor,
        **columns,
    }
    statement = INSERT.format(columns=", ".join(values), values=", ".join(f"%({name})s" for name in values))
    return int(execute(connection, statement, values).scalar_one())


def begin_over_active(
    database: Database,
    index: Row[Any] | None,
    kind: Kind,
    phase: Phase,
    options: WorkOptions,
    actor: str,
    write: Callable[[Connection, OverActive], tuple[int, str]],
    report: Callable[[str], None],
) -> BegunOperation:
    """Begins an operation over the generation that readers see, in one transaction.

    index: the row that `begin_or_adopt` found, after it checked the schema. write: writes the operation's units in that
    transaction, and returns about how many rows they have, and the detail of its event.
    Waits in short attempts while the index's partitions or its source are changed. Raises LockNotAcquired after a
    minute, with the sessions that hold them; InvalidInput as `insert_operation`; NotFound if nothing is published;
    OperationRunning if readers don't see that generation any more; IntegrityError if another operation of the index has
    just begun.
    """

    assert index is not None
    name = operations.index_name(index)

    def insert(connection: Connection) -> BegunOperation:
        found = operations.find_index(connection, name)
        generation = operations.active_generation(connection, found)
        source = catalog.read_source_by_oid(connection, found.source_oid)
        operation_id = insert_operation(
            connection,
            index_id=found.id,
            generation_id=generation.id,
            kind=kind,
            phase=phase,
            options=options,
            source=source,
            entry=Entry.from_json(generation.entry),
            actor=actor,
            batch_rows=database.limits.unit_rows,
            rows_estimate=0,
        )
        # After all reads of the source. A drop takes this lock, too, before it looks for an unfinished operation.
        view.hold(connection, found.id)
        if execute(connection, STATUS, {"id": generation.id}).scalar_one() != GenerationStatus.ACTIVE:
            raise OperationRunning(f"index {name}: it was dropped, published or reverted just now; try again")
        execute(connection, LABELS, {"generation": generation.id})
        rows, detail = write(connection, OverActive(operation_id, found, generation, source))
        execute(connection, SET_ROWS, {"operation": operation_id, "rows": rows})
        operations.record_event(connection, found.id, operation_id, actor, kind.value, detail)
        return BegunOperation(operation_id, generation.id, str(name), kind.value, adopted=False)

    with database.transaction() as connection:
        attempts = _attempts(database, connection, index, kind.value)
    return attempts.run(insert, report)
