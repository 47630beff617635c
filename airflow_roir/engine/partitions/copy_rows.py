"""Copies the rows of one table into a generation, in batches: a partition that was, or will be, attached with rows.

Each row gets the entry that the capture would have written for its insert, under a lock on the row. So it is right in
every capture mode, as the capture is, even if an older copy of the entry exists.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.target import ACTIVE, CAPTURE
from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.in_batches import in_batches
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.locks.table_lock import check_name, lock_table, telling_of_names
from airflow_roir.engine.partitions import unique_rows
from airflow_roir.engine.scan.reader import last_key
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import AttachDisturbed
from airflow_roir.scan_range import ScanRange

NAME = "SELECT %(oid)s::oid::regclass::text"
POSITION = "SELECT watermark FROM roir.source_partition WHERE id = %(id)s AND status = 'joining'"
ADVANCE = """
UPDATE roir.source_partition SET watermark = %(watermark)s::jsonb
 WHERE id = %(id)s AND status = 'joining' AND watermark IS NOT DISTINCT FROM %(before)s::jsonb
"""

COPIED = "UPDATE roir.source_partition SET copied = true WHERE id = %(id)s AND status = 'joining' AND NOT copied"

DISTURBED = "SELECT roir.is_disturbed(%(id)s)"

# The entries of {rows}, the SQL after FROM: in capture mode, in active mode, and in direct mode, in which the delta may
# have entries of the same rows. {same}: of `d` and `p`.
PUT_IN_DELTA = """
INSERT INTO {delta} ({columns}, state) SELECT {projected}, '{regular}' FROM {rows} {on_conflict}
"""
PUT = "INSERT INTO {base} ({columns}) SELECT {projected} FROM {rows} {on_conflict}"
PUT_IN_BASE = """
WITH put AS (INSERT INTO {base} ({columns}) SELECT {projected} FROM {rows} {on_conflict} RETURNING {identity}),
     gone AS (DELETE FROM {delta} d USING put p WHERE {same})
SELECT count(*) FROM put
"""


def bring_in(
    database: Database,
    source: Source,
    generation_id: int,
    entry: Entry,
    relation: int,
    joining_id: int,
    patience_s: float = 60.0,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Copies the rows of `relation` (oid) after its watermark in `source_partition`; returns how many.

    Safe to kill and to repeat. patience_s: how long each batch tries for locks that others hold on its rows, or
    on the source, and waits for a server that can't be reached. report: hears of the sessions that it waits for.
    Raises AttachDisturbed if rows came into the bounds of a table that is being attached; Collision if other rows have
    keys of an enforced unique index (`record_collisions` lists them); LockNotAcquired.
    """

    def batch(connection: Connection, _piece: None) -> int | None:
        return _batch(connection, database.limits.attach_rows, source, generation_id, entry, relation, joining_id)

    with database.transaction() as connection:
        name = execute(connection, NAME, {"oid": relation}).scalar_one()
    attempts = Attempts(
        database,
        f"the rows of {name}",
        [*source.relations, relation],
        database.limits.attempt_ms,
        patience_s,
        then="What was copied stays: run the command again to copy the rest",
    )
    rows = 0
    for brought in in_batches(attempts, repeat(None), batch, report, patience_s):
        if brought is None:
            break
        rows += brought
    return rows


def _batch(
    connection: Connection,
    most: int,
    source: Source,
    generation_id: int,
    entry: Entry,
    relation: int,
    joining_id: int,
) -> int | None:
    """Copies one batch of `most` rows: entries and watermark together; returns its rows, None if no row remained."""
    with telling_of_names():
        path = ", ".join(["pg_catalog", *map(quote, source.operator_schemas), "pg_temp"])
        execute(connection, f"SET LOCAL search_path = {path}")
        # A writer's lock: a switch or a publish waits for it, so the capture mode can't change.
        lock_table(connection, source.sql, source.oid, "ROW EXCLUSIVE", only=True)
        mode = installation.mode(connection, generation_id)
        name = execute(connection, NAME, {"oid": relation}).scalar_one()
        _position(connection, joining_id, name)
        # Under this lock the table keeps its owner and its name.
        lock_table(connection, name, relation, "ROW SHARE", only=True)
        # A session that cancels the attach, or detaches the partition, locks the table exclusively: it has committed
        # before, or waits for us.
        before = _position(connection, joining_id, name)
        todo = ScanRange(None, None, before)
        last, _ = last_key(connection, source, name, todo, most, only="")
        if last is None:
            execute(connection, COPIED, {"id": joining_id})
            return None
        values: dict[str, Any] = {}
        where = todo.condition(source.primary_key, source.comparands, last, values) + entry.and_satisfied("s")
        columns, rest, bindings = (
            ", ".join(column.of("s") for column in entry.columns),
            f"{name} s WHERE {where} FOR SHARE",
            values,
        )
        if not owner.is_trusted(connection, source, [name]):
            # A read as the owner can't keep rows locked, so this transaction locks the table against writers.
            execute(connection, f"LOCK TABLE ONLY {name} IN SHARE ROW EXCLUSIVE MODE")
            query = f"SELECT {columns} FROM {name} s WHERE {where}"
            types = owner.row_type(connection, physical.base(generation_id))
            rest, bindings = owner.relation(connection, source, query, types, values, [name])
            columns = "r.*"
        if entry.enforced and mode != CAPTURE:
            given = unique_rows.Rows(relation, name, columns, rest, bindings)
            rows = unique_rows.put(connection, source, generation_id, entry, mode, given)
        else:
            rows = _write(connection, generation_id, entry, mode, columns, rest, bindings)
        # A writer of such an entry that came before us has committed, since we waited for it; a later one overwrites
        # our entry.
        if execute(connection, DISTURBED, {"id": joining_id}).scalar_one():
            raise AttachDisturbed(f"rows within the bounds of {name} were written while its entries were copied")
        moved = {
            "id": joining_id,
            "watermark": to_json(last),
            "before": None if before is None else to_json(before),
        }
        # No row matches if another session copies the same rows, and has moved the watermark. That does no harm;
        # to move it back would.
        execute(connection, ADVANCE, moved)
        check_name(connection, name, relation)
        return rows


def _position(connection: Connection, joining_id: int, name: str) -> Any:
    """The watermark of the copy. Raises AttachDisturbed if the copy was cancelled or finished."""
    position = execute(connection, POSITION, {"id": joining_id}).first()
    if position is None:
        raise AttachDisturbed(f"another session has cancelled or finished what brings in the rows of {name}")
    return position.watermark


def record_collisions(
    database: Database, source: Source, generation_id: int, entry: Entry, relation: int
) -> tuple[int, int, list[str]]:
    """Writes down all groups of a new partition's rows that share a key with each other or with the source's rows.

    They replace those of an earlier attempt. Returns the numbers of keys and of rows, and the first keys in words.
    """
    with telling_of_names(), database.transaction() as connection:
        unique_rows.forget(connection, generation_id)
        mode = installation.mode(connection, generation_id)
        if not entry.enforced or mode == CAPTURE:
            return 0, 0, []
        name = execute(connection, NAME, {"oid": relation}).scalar_one()
        unique_rows.record(connection, source, generation_id, entry, mode, relation, name)
        return unique_rows.recorded(connection, generation_id)


def _write(
    connection: Connection,
    generation_id: int,
    entry: Entry,
    mode: str,
    projected: str,
    rows: str,
    values: dict[str, Any],
) -> int:
    """Writes the entries of rows; returns how many. projected: the entry's columns; rows: the SQL after FROM."""
    parts = {
        "base": physical.base(generation_id),
        "delta": physical.delta(generation_id),
        "columns": ", ".join(entry.physical()),
        "projected": projected,
        "rows": rows,
        "on_conflict": entry.on_conflict(state=mode == CAPTURE),
    }
    if mode == CAPTURE:
        put = PUT_IN_DELTA.format(**parts, regular=EntryState.REGULAR.value)
        return execute(connection, put, values).rowcount
    if mode == ACTIVE:
        return execute(connection, PUT.format(**parts), values).rowcount
    identity = ", ".join(entry.physical(entry.identity_positions))
    put = PUT_IN_BASE.format(**parts, identity=identity, same=entry.equal("d.", "p."))
    return int(execute(connection, put, values).scalar_one())
