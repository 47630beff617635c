"""Attaches a loaded table to an indexed source; the source and its indexes show its rows from the same moment on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, argument
from airflow_roir.engine.database import Database, execute, is_transient, said
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.partitions import copy_rows, remove_entries, unique_rows
from airflow_roir.engine.partitions.detach import find_table
from airflow_roir.engine.readers.old_snapshots import holders
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.unique.statements import literal
from airflow_roir.errors import AttachDisturbed, DuplicatesFound, InvalidInput, LockNotAcquired, RoirError

# How long to try to make a table take writes again that can't be attached.
GIVE_UP_PATIENCE_S = 10.0
# The meaning of a text as bounds depends on these settings. The values are those of psql with this DSN: the defaults of
# role, database and server, PGTZ and PGDATESTYLE.
MEANING = (
    "TimeZone",
    "DateStyle",
    "IntervalStyle",
    "lc_monetary",
    "array_nulls",
    "transform_null_equals",
    "search_path",
)
AS_GIVEN = "; ".join(f"SET LOCAL {name} TO DEFAULT" for name in MEANING)
CLOSED = """
SELECT EXISTS (SELECT FROM roir.source_partition WHERE relation = %(partition)s AND status = 'joining')
    OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = %(partition)s AND tgname = 'roir_joining')
"""
TARGETS = """
SELECT p.id, p.generation_id, g.entry, format('%%I.%%I', i.schema_name, i.name) AS index_name
  FROM roir.source_partition p JOIN roir.generation g ON g.id = p.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE p.relation = %(partition)s AND p.status = 'joining' AND g.status <> 'dropped' ORDER BY p.generation_id
"""
VIEWS = (
    "SELECT format('%%I.%%I', schema_name, name) FROM roir.index WHERE source_oid = %(source)s AND dropped_at IS NULL"
)


@in_one_history
def attach_partition(
    database: Database,
    table: str,
    partition: str,
    bounds: str,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> int:
    """Makes a loaded table a partition of `table`, or of a level below it; returns how many entries were copied.

    bounds: as in ATTACH PARTITION, from FOR VALUES on, or DEFAULT. From the first step on `partition` refuses writes.
    The entries of its rows are copied in batches, and stay hidden until the last step attaches it. After a crash, call
    the function again: it continues. `roir.cancel_attach` cancels the attach. Works in every phase of an operation.
    Raises NotFound; InvalidInput (the table can't become that partition, and takes writes again); DuplicatesFound (its
    rows share keys of a unique index with each other or with the source, all listed in roir.duplicate; it takes writes
    again); LockNotAcquired (call again to continue). If the table still refuses writes after an error, the message or
    `report` says so.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        parent, joining = find_table(connection, table), find_table(connection, partition)
    try:
        return _attach(database, parent, joining, bounds, actor, report, patience_s)
    except RoirError as error:
        if "roir.cancel_attach(" not in str(error) and (left := _left(database, *joining)):
            error.args = (f"{str(error).removesuffix('.')}. {left}",)
        raise
    except DBAPIError:
        # The trouble may pass, so the server's error is raised as it is.
        if left := _left(database, *joining):
            report(left)
        raise


def _attach(
    database: Database,
    parent_table: tuple[int, QualifiedName],
    joining: tuple[int, QualifiedName],
    bounds: str,
    actor: str,
    report: Callable[[str], None],
    patience_s: float,
) -> int:
    (parent_oid, parent), (oid, name) = parent_table, joining
    with database.transaction() as connection:
        root = "SELECT coalesce(pg_partition_root(%(oid)s), %(oid)s)::oid::bigint"
        source_oid = execute(connection, root, {"oid": parent_oid}).scalar_one()
        source = catalog.read_source_by_oid(connection, source_oid)
        views = list(execute(connection, VIEWS, {"source": source_oid}).scalars())
    values = {"parent": parent_oid, "partition": oid, "actor": actor}
    given, written = bounds, ""

    def begin(connection: Connection) -> str:
        call = (
            "SELECT roir.begin_attach(%(parent)s::pg_catalog.oid, %(partition)s::pg_catalog.oid, %(bounds)s, %(actor)s)"
        )
        if not written:
            execute(connection, AS_GIVEN)
        elif not execute(connection, CLOSED, values).scalar_one():
            raise InvalidInput(f"{name} is not being attached any more: another session has cancelled or finished that")
        attempts.outlast(connection, [parent_oid, oid])
        return str(execute(connection, call, {**values, "bounds": written or given}).scalar_one())

    def validate(connection: Connection) -> Sequence[Row[Any]]:
        # This waits for an ANALYZE or VACUUM of either table, also an automatic one.
        attempts.outlast(connection, [parent_oid, oid])
        execute(connection, "SELECT roir.validate_attach(%(parent)s::oid, %(partition)s::oid)", values)
        return execute(connection, TARGETS, {"partition": oid}).all()

    def finish(connection: Connection) -> bool:
        call = "SELECT roir.finish_attach(%(parent)s::oid, %(partition)s::oid)"
        attempts.outlast(connection, [parent_oid, oid])
        return bool(execute(connection, call, values).scalar_one())

    attempts = Attempts(
        database, parent.sql, [*source.relations, oid], database.limits.attempt_ms, patience_s, waiter=Waiter("attach")
    )
    copied = 0
    try:
        while True:
            written = attempts.run(begin, report, [parent.sql, name.sql, *views])
            targets = attempts.run(validate, report)
            try:
                for target in targets:
                    entry, generation = Entry.from_json(target.entry), target.generation_id
                    copied += copy_rows.bring_in(
                        database, source, generation, entry, oid, target.id, patience_s, report
                    )
                with database.transaction() as connection:
                    for target in targets:
                        unique_rows.forget(connection, target.generation_id)
            except AttachDisturbed as disturbed:
                # The last step sees the disturbance, too, and returns False.
                report(f"{disturbed}; they are copied again")
            except unique_rows.Collision:
                if message := _collisions(database, source, targets, oid):
                    try:
                        _give_up(database, [*source.relations, oid], name.sql)
                    except LockNotAcquired as error:
                        raise LockNotAcquired(f"{message}. {error}") from error
                    _take_copies_away(database, oid, report)
                    raise DuplicatesFound(f"{message}. The attach was cancelled: {name} takes writes again") from None
                # The duplicates are healed by now.
                continue
            # After a disturbance, too: if that was the end of a generation, the last step still succeeds.
            _wait_for_older_snapshots(database, report, patience_s)
            if attempts.run(finish, report, [parent.sql, name.sql, *views]):
                return copied
    except DBAPIError as error:
        if is_transient(error):
            raise
        # Bounds, columns or rows don't fit, or another error that would come again. An attach that has begun here is
        # cancelled. If none has, an earlier attach of this table may exist, and stays.
        reason = (
            f"{name} can't be attached to {parent}, the table of {', '.join(views)}: {said(error).removesuffix('.')}"
        )
        again = f"With other bounds, or another table: roir attach-partition {argument(parent)} {argument(name)} '…'"
        try:
            cancelled = bool(written) and _give_up(database, [*source.relations, oid], name.sql)
        except LockNotAcquired as busy:
            raise LockNotAcquired(f"{reason}. {busy}") from error
        if cancelled:
            raise InvalidInput(f"{reason}. The attach was cancelled: {name} takes writes again. {again}") from error
        raise InvalidInput(f"{reason}. {again}" if views else said(error)) from error


def _left(database: Database, oid: int, name: QualifiedName) -> str:
    """The next step for a table that refuses writes; '' if it takes them."""
    cancel = f"SELECT roir.cancel_attach({literal(name.sql)})"
    try:
        with database.transaction() as connection:
            closed = execute(connection, CLOSED, {"partition": oid}).scalar_one()
    except (DBAPIError, RoirError):
        return f"If {name} still refuses writes: run the attach again, which continues it, or cancel it: {cancel}"
    return (
        f"{name} still refuses writes. Run the attach again, which continues it, or cancel it: {cancel}"
        if closed
        else ""
    )


def _collisions(database: Database, source: Source, targets: Sequence[Row[Any]], oid: int) -> str:
    """Writes down the rows that share keys of unique indexes; returns a text about them, '' if there are none."""
    said = []
    for target in targets:
        entry, generation = Entry.from_json(target.entry), target.generation_id
        groups, rows, first = copy_rows.record_collisions(database, source, generation, entry, oid)
        if groups:
            more = "" if groups == len(first) else f"; and {groups - len(first)} more"
            said.append(
                f"index {target.index_name}: {rows} rows would share {groups} {'key' if groups == 1 else 'keys'} "
                f"of the unique index: {'; '.join(first)}{more}. roir duplicates {argument(target.index_name)} "
                "lists them"
            )
    return ". ".join(said)


def _take_copies_away(database: Database, oid: int, report: Callable[[str], None]) -> None:
    """Removes the copied entries, which are hidden; a clean-up removes those that can't be removed now."""
    try:
        with database.transaction() as connection:
            rows = [row for row in remove_entries.leaving(connection) if row.relation == oid]
        for row in rows:
            remove_entries.remove(database, row, report, GIVE_UP_PATIENCE_S)
    except LockNotAcquired as error:
        report(str(error))


def _give_up(database: Database, relations: Sequence[int], name: str) -> bool:
    """Makes a table that can't become a partition take writes again; returns True if it refused them.

    relations: the source, its partitions, the table last. Drops the table's triggers, and the one on the default
    partition. Raises LockNotAcquired.
    """
    oid = relations[-1]
    with database.transaction() as connection:
        closed = execute(connection, CLOSED, {"partition": oid}).scalar_one()

    def cancel(connection: Connection) -> None:
        execute(connection, "SELECT roir.cancel_attach(%(partition)s::oid)", {"partition": oid})

    if closed:
        try:
            attempts = Attempts(database, name, relations, database.limits.attempt_ms, GIVE_UP_PATIENCE_S)
            attempts.run(cancel, lambda _line: None, [name])
        except LockNotAcquired as error:
            raise LockNotAcquired(f"{name} can't be attached, and still refuses writes: {error}") from error
    return bool(closed)


def _wait_for_older_snapshots(database: Database, report: Callable[[str], None], patience_s: float) -> None:
    """Waits for snapshots that are older than the copies: they would see the attached rows, but not their entries.

    A standby without feedback doesn't report its snapshots: the attach names it by `report`, and doesn't wait for it.
    Raises LockNotAcquired.
    """
    with database.transaction() as connection:
        xid = execute(connection, "SELECT pg_current_xact_id()::text").scalar_one()
    deadline = time.monotonic() + patience_s
    while True:
        with database.transaction() as connection:
            found = holders(connection, xid)
        older = [one for one in found if one.known]
        if not older:
            for one in found:
                report(
                    f"{one}, may have a snapshot that is older than the copied entries; the attach doesn't wait for it"
                )
            return
        report(f"waiting for {older[0]}, whose snapshot is older than the copied entries")
        if time.monotonic() > deadline:
            raise LockNotAcquired(
                f"{older[0]} has a snapshot that is older than the copied entries. End that transaction, then run "
                "the attach again"
            )
        time.sleep(0.5)
