"""Writes the row of an operation that begins: a build, a verification or a compaction.

Whether the index has an unfinished one is asked before; the table's unique index refuses the later one of two that
begin at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Row
from sqlalchemy.exc import IntegrityError

from airflow_roir.definition import QualifiedName, argument, parse_name
from airflow_roir.engine.control import live_options, operations
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

T = TypeVar("T")

# Whoever detaches or attaches holds the index's row for as long as his transaction is open, and his table against all.
PATIENCE_S = 60.0
HELD_BY = ["RowShareLock", "AccessExclusiveLock"]
TABLES = "SELECT %(oid)s::bigint UNION ALL SELECT relation::bigint FROM roir.partition_tree(%(oid)s)"

# columns, values: of the row, by their names.
INSERT = """
INSERT INTO roir.operation (status, working_since, {columns}) VALUES ('running', clock_timestamp(), {values})
RETURNING id
"""
# What bounds and watermarks of a former operation called a label doesn't matter any more; entries hold its number.
LABELS = """
UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{labels}', (
         SELECT jsonb_object_agg(l.key, e.enumlabel)
           FROM jsonb_each(g.shape -> 'labels') l JOIN pg_enum e ON e.oid = l.key::oid))
 WHERE g.id = %(generation)s AND g.shape -> 'labels' <> '{}'
"""


def begin_over_active(
    database: Database, index: str, command: str, begin: Callable[[Connection], T], report: Callable[[str], None]
) -> T:
    """Run `begin`, a transaction that calls `insert_over_active`, or adopts an operation.

    It waits in short attempts for whoever changes the index's partitions or its table. Raises LockNotAcquired, which
    names him, after a minute.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = operations.find_index(connection, parse_name(index, "index"))
        name = str(operations.index_name(found))
        row_of = int(execute(connection, "SELECT 'roir.index'::regclass::oid::bigint").scalar_one())
        relations = [row_of, *execute(connection, TABLES, {"oid": found.source_oid}).scalars()]
    waiter = Waiter(command, name)
    attempts = Attempts(database, f"index {name}", relations, database.limits.attempt_ms, PATIENCE_S, HELD_BY, waiter)
    return attempts.run(begin, report)


def refuse_ended(row: OperationRow, name: QualifiedName | str) -> None:
    """Raise OperationFailed if an operation that is live can't be continued any more."""
    if row.status == Status.FAILED:
        raise OperationFailed(
            f"index {name}: operation {row.id} failed ({row.error}); abort it first: roir abort {argument(name)}"
        )
    if row.status == Status.ABORTING:
        raise OperationFailed(f"index {name}: operation {row.id} is being aborted; finish that first: roir clean-up")


def adopt(
    connection: Connection, row: OperationRow, name: QualifiedName | str, options: WorkOptions, actor: str
) -> None:
    """Take an unfinished operation up, with the options that may change while it runs.

    Raises OperationRunning if another run drives it.
    """
    if operations.heart_beats(row, connection):
        raise operations.running_elsewhere(row, str(name))
    live_options.adopt_options(connection, row, actor, options)
    operations.record_event(connection, row.index_id, row.id, actor, "adopt", f"in phase {row.phase}")


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
    """Write the row of an operation, which is running from now on; returns its id.

    phase: its first one. source, entry: what it works on must keep their shape. columns: of the row, those that not
    every kind of operation fills alike. Raises InvalidInput for a throttle that the server can't read, IntegrityError
    if another operation of the index is unfinished.
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


def insert_over_active(
    connection: Connection,
    index: Row[Any],
    generation: Row[Any],
    kind: Kind,
    phase: Phase,
    options: WorkOptions,
    *,
    source: Source,
    actor: str,
    batch_rows: int,
) -> int:
    """Write the row of an operation over the generation that readers see; returns its id.

    index, generation: their rows. batch_rows: rows per unit; how many rows it has in all is written once its units are.
    Raises InvalidInput as `insert_operation`, OperationRunning if another operation of the index has just begun, or
    readers don't see that generation any more: after that nothing more can be done in this transaction.
    """
    name = operations.index_name(index)
    try:
        operation_id = insert_operation(
            connection,
            index_id=index.id,
            generation_id=generation.id,
            kind=kind,
            phase=phase,
            options=options,
            source=source,
            entry=Entry.from_json(generation.entry),
            actor=actor,
            batch_rows=batch_rows,
            rows_estimate=0,
        )
    except IntegrityError:
        raise OperationRunning(f"index {name}: another operation has just begun; try again") from None
    # After all that was read of the source. A drop holds it, too, before it asks whether an operation is unfinished.
    view.hold(connection, index.id)
    if execute(
        connection, "SELECT status FROM roir.generation WHERE id = %(id)s", {"id": generation.id}
    ).scalar_one() != (GenerationStatus.ACTIVE):
        raise OperationRunning(f"index {name}: it was dropped, published or reverted just now; try again")
    execute(connection, LABELS, {"generation": generation.id})
    return operation_id
