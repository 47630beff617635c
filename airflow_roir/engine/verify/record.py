"""The record of a verification: begins it with its units, counts its discrepancies, and closes it.

A verification is an operation of kind `verify`, with its runs, pauses and events, or a part of a build.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import BegunOperation, OverActive, begin_or_adopt, begin_over_active
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.engine.verify import units
from airflow_roir.engine.verify.apart import TablesApart, apart
from airflow_roir.errors import InvalidInput, LockNotAcquired, NotFound, OperationRunning
from airflow_roir.operation import Kind, Phase
from airflow_roir.options import VerifyOptions

# How long a verification waits for writers that still run a replaced capture function.
PATIENCE_S = 5.0


def begin(
    database: Database,
    index: str,
    options: VerifyOptions,
    actor: str,
    mode: str = "only",
    report: Callable[[str], None] = lambda line: None,
) -> BegunOperation:
    """Begins to verify the active generation of an index, or adopts its unfinished verification; starts a run.

    mode: `only`, or `before` if a rebuild follows. Raises NotFound, InvalidInput, and all that `begin_or_adopt` raises.
    """

    def new(row: Row[Any] | None) -> BegunOperation:
        if not options.is_partial:
            _await_writers(database, index)
        tables = _tables(database, index, options)

        def write(connection: Connection, begun: OverActive) -> tuple[int, str]:
            if options.amcheck:
                _check_amcheck(connection)
            found, generation = begun.index, begun.generation
            if (found.shard_column is not None) != (tables is not None and tables.generation_id == generation.id):
                raise OperationRunning(
                    f"index {operations.index_name(found)}: something else was done with it just now; try again"
                )
            if tables is not None:
                _, rows = tables.plan(connection, found.id, begun.operation_id, options, mode)
            else:
                of = found.id, begun.operation_id, generation.id, begun.source
                _, rows = units.plan(connection, *of, options, mode, with_delta=False)
            tamper.look(connection, generation.id)
            return rows, "of the published index" if mode == "only" else "of the index that is rebuilt next"

        phase = Phase.CHECK if options.is_partial else Phase.SUM
        return begin_over_active(database, row, Kind.VERIFY, phase, options, actor, write, report)

    asked = parse_name(index, "index")
    return begin_or_adopt(
        database, lambda c: operations.find_index(c, asked), [Kind.VERIFY], options, actor, new, report
    )


def _tables(database: Database, index: str, options: VerifyOptions) -> TablesApart | None:
    """The tables of an index over shards, looked up before anything is locked here; None for other indexes."""
    with database.transaction() as connection:
        check_schema(connection)
        found = operations.find_index(connection, parse_name(index, "index"))
        if found.shard_column is None:
            return None
        generation = operations.active_generation(connection, found)
    return apart().tables(database, generation.id, options)


def _await_writers(database: Database, index: str) -> None:
    """If a capture function was replaced, waits up to `PATIENCE_S` for the writers that ran the old one.

    If a writer doesn't end in time, the verification begins all the same, but doesn't end the status's warning.
    """
    with database.transaction() as connection:
        check_schema(connection)
        found = operations.find_index(connection, parse_name(index, "index"))
        generation = operations.active_generation(connection, found)
        if not tamper.are_functions_replaced(connection, generation.id):
            return
        source = catalog.read_source_by_oid(connection, found.source_oid)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        lock()
        tamper.look_at_functions(connection, generation.id)

    with suppress(LockNotAcquired):
        Drain(database, source.sql, source.relations, database.limits.attempt_ms, PATIENCE_S).run(
            body, lambda line: None
        )


def _check_amcheck(connection: Connection) -> None:
    if not execute(connection, "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'amcheck')").scalar_one():
        raise InvalidInput("the database has no extension amcheck; a superuser can create it: CREATE EXTENSION amcheck")


UNFINISHED = "SELECT * FROM roir.verification WHERE operation_id = %(operation)s AND finished_at IS NULL"
LAST = """
SELECT *, missing + extra + different + corrupt + damaged + duplicate AS found
  FROM roir.verification WHERE operation_id = %(operation)s ORDER BY id DESC LIMIT 1
"""


def unfinished(connection: Connection, operation_id: int) -> Row[Any]:
    """The unfinished verification of an operation. Raises NotFound."""
    row = execute(connection, f"{UNFINISHED} ORDER BY id DESC LIMIT 1", {"operation": operation_id}).first()
    if row is None:
        raise NotFound(f"operation {operation_id} has no unfinished verification")
    return row


def stage(connection: Connection, verification_id: int) -> str:
    """The verification's stage: `total`, `sum`, `check` or `whole`.

    It is the last stage that has units, or `check` if the suspicious buckets are known or nothing has units.
    """
    query = (
        "SELECT CASE WHEN EXISTS (SELECT FROM roir.verification_unit u WHERE u.verification_id = v.id "
        "AND u.stage = 'whole') THEN 'whole' WHEN v.suspicious IS NOT NULL THEN 'check' ELSE coalesce((SELECT u.stage "
        "FROM roir.verification_unit u WHERE u.verification_id = v.id ORDER BY u.id DESC LIMIT 1), 'check') END "
        "FROM roir.verification v WHERE v.id = %(id)s"
    )
    return str(execute(connection, query, {"id": verification_id}).scalar_one())


def is_open(connection: Connection, verification_id: int) -> bool:
    """True until the verification has ended."""
    query = "SELECT finished_at IS NULL FROM roir.verification WHERE id = %(id)s"
    return bool(execute(connection, query, {"id": verification_id}).scalar_one())


def last(connection: Connection, operation_id: int) -> Row[Any] | None:
    """The newest verification of an operation; `found` counts its discrepancies of all kinds."""
    return execute(connection, LAST, {"operation": operation_id}).first()


# --- results


COUNTS = """
SELECT count(*) FILTER (WHERE kind = 'missing') AS missing, count(*) FILTER (WHERE kind = 'extra') AS extra,
       count(*) FILTER (WHERE kind = 'different') AS different, count(*) FILTER (WHERE kind = 'corrupt') AS corrupt,
       count(*) FILTER (WHERE kind = 'damaged') AS damaged, count(*) FILTER (WHERE kind = 'duplicate') AS duplicate,
       count(*) FILTER (WHERE outcome IS NOT NULL) AS repaired
  FROM roir.discrepancy WHERE verification_id = %(id)s
"""
LOOKED_AT = """
SELECT coalesce(sum(rows) FILTER (WHERE side IN ('source', 'heap')), 0) AS rows,
       coalesce(sum(rows) FILTER (WHERE side IN ('entry', 'delta')), 0) AS entries, bool_and(done) AS done
  FROM roir.verification_unit WHERE verification_id = %(id)s AND (stage = 'total' OR %(parts)s)
"""
CLOSE = """
UPDATE roir.verification
   SET missing = %(missing)s, extra = %(extra)s, different = %(different)s, corrupt = %(corrupt)s,
       damaged = %(damaged)s, duplicate = %(duplicate)s, repaired = %(repaired)s,
       rows = %(rows)s, entries = %(entries)s, complete = %(complete)s, finished_at = clock_timestamp()
 WHERE id = %(id)s AND finished_at IS NULL
"""
FORGET_UNITS = "DELETE FROM roir.verification_unit WHERE verification_id = %(id)s AND (done OR NOT %(left)s)"


def close(connection: Connection, row: Row[Any]) -> None:
    """Ends a verification: stores its counts, and deletes its units, except those for the next slice."""
    options = VerifyOptions(**row.options)
    counts = execute(connection, COUNTS, {"id": row.id}).one()
    looked_at = execute(connection, LOOKED_AT, {"id": row.id, "parts": options.is_partial}).one()
    values = {
        "id": row.id,
        **dict(counts._mapping),
        "rows": looked_at.rows,
        "entries": looked_at.entries,
        "complete": bool(looked_at.done) and options.sample is None and options.slices is None,
    }
    execute(connection, CLOSE, values)
    forget_units(connection, row.id, left=options.slices is not None)


def forget_units(connection: Connection, verification_id: int, left: bool = False) -> None:
    """Deletes the units of a verification that has ended. left: keep those that aren't done."""
    execute(connection, "DELETE FROM roir.suspect WHERE verification_id = %(id)s", {"id": verification_id})
    execute(connection, FORGET_UNITS, {"id": verification_id, "left": left})


def give_up(connection: Connection, operation_id: int) -> None:
    """Ends the verifications of an aborted operation, with their counts so far."""
    for row in execute(connection, UNFINISHED, {"operation": operation_id}).all():
        close(connection, row)
        execute(connection, "UPDATE roir.verification SET complete = false WHERE id = %(id)s", {"id": row.id})
        forget_units(connection, row.id)
