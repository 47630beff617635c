"""Follows the partitions of a source: those that a generation holds, those that came or went without a capture.

Every partition's row events are captured: row triggers are cloned to each table that becomes a partition. No trigger
sees DDL that brings or takes rows: DROP, DETACH and ATTACH. `roir.source_partition` lists the partitions that a
generation holds, so a difference from the catalog is such a change, or a partition that was created empty, which is
harmless.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.definition import argument
from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.target import CAPTURE, DIRECT
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.locks.table_lock import check_name, lock_table
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.source import Source
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import PartitionsChanged

CHANGES = "SELECT * FROM roir.partition_changes(%(generation)s, %(source)s)"
ADOPT = "SELECT roir.adopt_partitions(%(generation)s, %(source)s, %(leaves)s::oid[], links => %(links)s::text[])"


@dataclass(frozen=True)
class Change:
    """A partition that a generation holds and that is gone, or a leaf that the generation doesn't know.

    link: identifies the attach that made it a leaf: if it is attached again, nothing is known of it.
    """

    relation: int
    name: str
    gone: bool
    link: str | None


def register(connection: Connection, source: Source, generation_id: int) -> None:
    """Record that a generation holds all partitions of its source. A no-op for those that it knows."""
    values = {"generation": generation_id, "source": source.oid}
    execute(connection, "SELECT roir.register_partitions(%(generation)s, %(source)s)", values)


def changes(connection: Connection, source: Source, generation_id: int) -> list[Change]:
    """The partitions that came or went since the generation's were recorded. Waits for no lock."""
    if not source.partitioned:
        return []
    rows = execute(connection, CHANGES, {"source": source.oid, "generation": generation_id})
    return [Change(row.relation, row.name, row.gone, row.link) for row in rows]


def check(
    connection: Connection, index: str, source: Source, generation_id: int, entry: Entry, known: set[Change]
) -> list[Change]:
    """Raise PartitionsChanged if rows came or went that no capture saw. Returns the new leaves, all harmless.

    known: leaves that were found harmless before; adds to it. A harmless leaf stays so: all writes are captured.
    """
    found = changes(connection, source, generation_id)
    for change in found:
        if change.gone:
            raise PartitionsChanged(
                f"index {index}: partition {change.name} of {source.name} was dropped or detached without roir; "
                f"run: roir sync-partitions {argument(source.name)}"
            )
        if change not in known and brings_rows(connection, source, generation_id, entry, change.relation):
            raise PartitionsChanged(
                f"index {index}: partition {change.name} was attached to {source.name} with rows, without roir; "
                f"run: roir sync-partitions {argument(source.name)}"
            )
        known.add(change)
    return found


def adopt(connection: Connection, source: Source, generation_id: int, leaves: Collection[Change]) -> None:
    """Record leaves that `check` found harmless, and follow their TRUNCATE. Locks them against writers.

    A leaf that was detached since isn't recorded, even if it is attached again, since it may have other rows by then.
    If a leaf was truncated before this call, roir can't know the rows that it lost. So its bounds are searched for
    entries without a row, as for a partition that leaves.
    """
    if leaves:
        values = {
            "generation": generation_id,
            "source": source.oid,
            "leaves": [leaf.relation for leaf in leaves],
            "links": [leaf.link for leaf in leaves],
        }
        execute(connection, ADOPT, values)
        tamper.follow(connection, generation_id)


def brings_rows(connection: Connection, source: Source, generation_id: int, entry: Entry, leaf: int) -> bool:
    """True if a leaf has rows without an entry in this snapshot: a captured row and its entry commit together.

    An entry with another included value doesn't count: the row was changed while its leaf was detached.
    Before the switch only the delta counts, since the build doesn't copy from a leaf that it doesn't know.
    """
    mode, base = installation.mode(connection, generation_id), physical.base(generation_id)
    written = f"{physical.delta(generation_id)} WHERE state = '{EntryState.REGULAR.value}'"
    stores = {CAPTURE: [written], DIRECT: [written, base]}.get(mode, [base])
    name = execute(connection, "SELECT %(leaf)s::oid::regclass::text", {"leaf": leaf}).scalar_one()
    # The lock keeps the leaf's owner as it is from here on.
    lock_table(connection, name, leaf, "ACCESS SHARE", only=True)
    projected = ", ".join(f"{column.of(None)} AS c{i + 1}" for i, column in enumerate(entry.columns))
    row, kept = (f"ROW({', '.join(entry.physical(prefix=side))})::record" for side in ("s.", "e."))
    nullable = entry.nullable_positions
    any_null = " OR ".join(is_null(f"s.c{i + 1}") for i in nullable) or "false"
    # Keys with a NULL have a condition of their own, so that the others can use the index.
    plain, with_nulls = (
        " AND ".join(
            f"NOT EXISTS (SELECT FROM (SELECT * FROM {store}) e "
            f"WHERE {entry.equal('s.', 'e.', nulls)} AND {row} *= {kept})"
            for store in stores
        )
        for nulls in (dict.fromkeys(nullable, False), None)
    )
    rows = f"(SELECT {projected} FROM {name} WHERE {entry.satisfied(None)}) s"
    brings = owner.rows(
        connection,
        source,
        f"SELECT EXISTS (SELECT FROM {rows} WHERE NOT ({any_null}) AND {plain}) "
        f"OR EXISTS (SELECT FROM {rows} WHERE ({any_null}) AND {with_nulls})",
        "brings boolean",
        reads=[name],
    ).scalar_one()
    check_name(connection, name, leaf)
    return bool(brings)
