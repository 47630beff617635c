"""Finds faults of published indexes: changes of a source that its capture can't follow.

While an operation runs, the fingerprint stops it at such a change. Afterwards clean-up and status warn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, quote
from airflow_roir.engine.capture import alterations
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute, has_vanished
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.health import capture_faults, own_tables, source_faults
from airflow_roir.engine.schema import rights, tamper
from airflow_roir.engine.source import catalog, replication
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, NotFound

ACTIVE = """
SELECT g.id, g.index_id, g.entry, i.schema_name, i.name, i.source_oid,
       coalesce((o.options ->> 'ignore_row_security')::boolean, false) AS ignore_row_security,
       coalesce((o.options ->> 'ignore_publications')::boolean, false) AS ignore_publications
  FROM roir.generation g
  JOIN roir.index i ON i.id = g.index_id
  JOIN roir.operation o ON o.generation_id = g.id AND o.kind IN ('create', 'rebuild')
 WHERE g.status = 'active'
   AND (%(indexes)s::bigint[] IS NULL OR i.id = ANY (%(indexes)s::bigint[])) ORDER BY g.id
"""
BUILDING = """
SELECT g.id, g.index_id, g.entry, i.schema_name, i.name, i.source_oid
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.status = 'building'
   AND (%(indexes)s::bigint[] IS NULL OR i.id = ANY (%(indexes)s::bigint[])) ORDER BY g.id
"""
OF_OPERATION = "SELECT index_id FROM roir.operation WHERE id = %(operation)s"
IS_ROW_SECURE = "SELECT relrowsecurity FROM pg_class WHERE oid = %(oid)s"
REPLACED = """
SELECT i.id AS index_id, quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index, r.recorded,
       r.present::regclass::text AS name
  FROM roir.replaced_sources() r JOIN roir.index i ON i.id = r.index
 WHERE %(indexes)s::bigint[] IS NULL OR i.id = ANY (%(indexes)s::bigint[]) ORDER BY 2
"""
VIEW_FAULTS = "SELECT roir.view_faults(%(generation)s) > 0"
# A new leaf's TRUNCATE isn't captured before a clean-up has registered the leaf, and roir can't know what the leaf's
# first transaction did.
NEW_LEAVES = """
SELECT c.name, EXISTS (SELECT FROM roir.source_partition p WHERE p.generation_id = %(generation)s
                          AND p.relation = c.relation AND p.status = 'joining') AS half
  FROM roir.partition_changes(%(generation)s, %(source)s::oid) c WHERE NOT c.gone ORDER BY 1
"""
# Only leaves of roir's own attach, not of a repair after a plain ATTACH.
JOINING = """
SELECT name, quote_literal(name) AS literal FROM roir.source_partition
 WHERE generation_id = %(generation)s AND status = 'joining' AND bounds IS NOT NULL ORDER BY id
"""
# The capture reads a leaf as the source's owner, and may run code of the leaf's owner by that. roir reads all leaves as
# one role.
OTHERS_LEAVES = """
SELECT c.oid::regclass::text AS name, pg_get_userbyid(c.relowner) AS owner
  FROM roir.partition_tree(%(source)s) t JOIN pg_class c ON c.oid = t.relation
  JOIN pg_class s ON s.oid = %(source)s
 WHERE c.relowner <> s.relowner
   AND NOT (pg_has_role(c.relowner, s.relowner, 'USAGE') AND has_table_privilege(s.relowner, c.oid, 'SELECT')
            AND roir.trusts(c.relowner) AND roir.trusts(s.relowner))
 ORDER BY 1
"""
CHANGES = """
SELECT kind, name, was, is_now FROM roir.shape_changes(%(generation)s) WHERE kind NOT IN ('label', 'mark') ORDER BY 1, 2
"""


def warnings(connection: Connection, operation_id: int | None = None) -> list[str]:
    """Lines, with remedies, for faults of an operation's published index, or of all published indexes.

    They cover the present state, and objects that were gone or altered for a while, by the marks (`tamper.py`). If DDL
    of others drops a relation during the look, the look is repeated once.

    Raises DBAPIError if that happens again.
    """
    try:
        with connection.begin_nested():
            return _warnings(connection, operation_id)
    except DBAPIError as error:
        if not has_vanished(error):
            raise
    return _warnings(connection, operation_id)


def _warnings(connection: Connection, operation_id: int | None) -> list[str]:
    ids = (
        None if operation_id is None else list(execute(connection, OF_OPERATION, {"operation": operation_id}).scalars())
    )
    return warnings_in(connection, subject(connection, ids))


@dataclass(frozen=True)
class Subject:
    """The published and new generations in which faults are looked for, and indexes whose source was replaced."""

    active: list[Row[Any]] = field(default_factory=list)
    building: list[Row[Any]] = field(default_factory=list)
    replaced: list[Row[Any]] = field(default_factory=list)


def subject(connection: Connection, ids: Sequence[int] | None) -> Subject:
    """That of these indexes, or of all."""
    return Subject(*(list(execute(connection, query, {"indexes": ids})) for query in (ACTIVE, BUILDING, REPLACED)))


def subjects(connection: Connection, ids: Sequence[int]) -> dict[int, Subject]:
    """That of each of these indexes."""
    found = {index_id: Subject() for index_id in ids}
    whole = subject(connection, ids)
    for row in whole.active:
        found[row.index_id].active.append(row)
    for row in whole.building:
        found[row.index_id].building.append(row)
    for row in whole.replaced:
        found[row.index_id].replaced.append(row)
    return found


def warnings_in(connection: Connection, of: Subject) -> list[str]:
    """As `warnings`, for what was read before."""
    found = [line for row in of.active for line in _of_index(connection, row)]
    found += [line for row in of.building for line in _of_build(connection, row)]
    if of.active and (closed := rights.closed(connection)):
        more = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
        found.append(
            f"not all roles may call {closed[0]}{more}, functions of roir's, so reading an index, or writing to its "
            "table, fails for roles that need them. Run: roir init, which gives EXECUTE to PUBLIC again"
        )
    return [*dict.fromkeys(found), *map(_of_replaced, of.replaced)]


def _of_build(connection: Connection, row: Row[Any]) -> list[str]:
    # Any other fault stops the build.
    name = str(operations.index_name(row))
    found = []
    try:
        source = catalog.read_source_by_oid(connection, row.source_oid, check=False)
    except NotFound:
        return [f"index {name}: its table was dropped. Abort its operation: roir abort {argument(name)}"]
    if alterations.is_of_another(connection, source):
        of_another = alterations.of_another(source)
        found.append(f"index {name}: {of_another}. Then continue the build: roir resume {argument(name)}")
    found += _renamed(connection, name, row.id, Entry.from_json(row.entry))
    found += _leaves_of_others(connection, name, source)
    return found + _joining(connection, name, source, row.id)


def _of_replaced(row: Row[Any]) -> str:
    return (
        f"index {row.index}: its table (oid {row.recorded}) was dropped, and {row.name} has taken its place, as "
        "after a restore of that table alone. Its rows have no entries. Drop the index and build it again: "
        f"roir drop {argument(str(row.index))}"
    )


def _of_index(connection: Connection, row: Row[tuple[object, ...]]) -> list[str]:
    name = str(operations.index_name(row))
    found: list[str] = []
    try:
        # Our role may be one that only watches.
        source = catalog.read_source_by_oid(connection, row.source_oid, only_look=True)
    except NotFound:
        return [f"index {name}: its table was dropped; drop the index, too: roir drop {argument(name)}"]
    except InvalidInput as error:
        found.append(f"index {name}: {error}")
        source = catalog.read_source_by_oid(connection, row.source_oid, check=False)
    entry = Entry.from_json(row.entry)
    unseen = tamper.changes(connection, row.id, source.sql)
    if captured := capture_faults.capture_problems(connection, name, source):
        # The present state is reported first, with its remedy. The marks report the past until a verification is clean.
        found += captured
        unseen.pop(tamper.TRIGGER, None)
        unseen.pop(tamper.FUNCTION, None)
    others = source_faults.of_columns(connection, name, source, row.id, entry)
    if lacking := capture_faults.lacking(connection, name, source, row.id, entry):
        found += lacking
    # If the columns differ, a rebuild can't make the view again, and the index must be dropped.
    elif not others and execute(connection, VIEW_FAULTS, {"generation": row.id}).scalar_one():
        unseen.pop(tamper.VIEW, None)
        found.append(
            f"index {name}: {physical.source_view(row.id)}, by which the capture reads {source.sql}, is gone or was "
            "altered, so writes fail or are missed. Drop the view, if it is there, then rebuild the index, which "
            f"creates the view again: roir build {argument(name)}"
        )
    found += _renamed(connection, name, row.id, entry)
    if ours := own_tables.problems(connection, operations.index_name(row), row.id, entry):
        found += ours
        unseen.pop(tamper.ENTRIES, None)
    if others:
        found += others
        unseen.pop(tamper.KEY, None)
    found += _changes(connection, name, source, row.id)
    if unseen:
        found.append(
            f"index {name}: {'; '.join(unseen.values())}, so its entries may be wrong. Run: "
            f"roir verify {argument(name)}, which "
            "ends this warning if it finds nothing, or repairs all that it finds (--repair). Or rebuild it: "
            f"roir build {argument(name)}"
        )
    # REINDEX wouldn't help: entries may belong into other segments.
    found += [
        f"index {name}: the library of collation {one} was exchanged after the index was built, so lookups may "
        "miss entries. "
        f"Rebuild it: roir build {argument(name)}"
        for one in physical.resorted(connection, row.id, entry)
    ]
    if execute(connection, IS_ROW_SECURE, {"oid": source.oid}).scalar_one() and not row.ignore_row_security:
        # Row-level security came after the publish: no user has agreed that the view shows all rows.
        found.append(
            f"index {name}: {source.sql} has row-level security now; all who may read the view see the rows that "
            "the policies hide. Revoke SELECT on the view, or drop the index"
        )
    more = [*replication.in_subscriptions(connection, source), *source_faults.of_partman(connection, source)]
    if not row.ignore_publications:
        more += replication.in_publications(connection)
    return found + [f"index {name}: {line}" for line in more]


def _changes(connection: Connection, name: str, source: Source, generation_id: int) -> list[str]:
    """Lines for changes of the source's columns, types and partitions by which entries may be wrong or missing."""
    remedy = f"Rebuild it: roir build {argument(name)}"
    found = []
    for row in execute(connection, CHANGES, {"generation": generation_id}):
        if row.kind == "column":
            if row.is_now is None:
                continue  # source_faults.of_columns reports it
            what = f"column {quote(row.name)} of {source.sql} is another one now (dropped and added again, or renamed)"
        elif row.kind == "expression":
            what = f"column {quote(row.name)} of {source.sql} is generated as {row.is_now} now, and was as {row.was}"
        else:
            what = f"type {row.name}, which columns of {source.sql} have, has lost an attribute"
        found.append(f"index {name}: {what}, so its entries may be wrong. {remedy}")
    found += _leaves_of_others(connection, name, source)
    if source.partitioned:
        found += _joining(connection, name, source, generation_id)
        leaves = execute(connection, NEW_LEAVES, {"generation": generation_id, "source": source.oid}).all()
        found += [
            f"index {name}: only a part of the rows of {row.name}, which came to {source.sql} without roir, has "
            f"entries yet. Run: roir sync-partitions {argument(source.name)}"
            for row in leaves
            if row.half
        ]
        new = [row.name for row in leaves if not row.half]
        if new:
            more = len(new) - capture_faults.MOST_NAMED
            named = ", ".join(new[: capture_faults.MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            found.append(
                f"index {name}: partitions of {source.sql} came without roir ({named}). Until they are registered, a "
                "TRUNCATE of them is missed, and rows that they brought have no entries. "
                f"Run: roir sync-partitions {argument(source.name)}"
            )
    return found


def _joining(connection: Connection, name: str, source: Source, generation_id: int) -> list[str]:
    return [
        f"index {name}: {row.name} is being attached to {source.sql}, and refuses writes until then. If no roir "
        "attach-partition runs, run that command again, which continues the attach, or cancel the attach: "
        f"SELECT roir.cancel_attach({row.literal})"
        for row in execute(connection, JOINING, {"generation": generation_id})
    ]


def _renamed(connection: Connection, name: str, generation_id: int, entry: Entry) -> list[str]:
    now = physical.followed(connection, generation_id, entry)
    if all(
        a.equals == b.equals and a.to_base_type == b.to_base_type
        for a, b in zip(now.columns, entry.columns, strict=True)
    ):
        return []
    return [
        f"index {name}: a type, a collation or an operator of its entries has another name now, so writes fail. "
        "Run: roir clean-up, which adopts the new name"
    ]


def _leaves_of_others(connection: Connection, name: str, source: Source) -> list[str]:
    others = execute(connection, OTHERS_LEAVES, {"source": source.oid}).all() if source.partitioned else []
    if not others:
        return []
    more = len(others) - capture_faults.MOST_NAMED
    named = ", ".join(f"{row.name} belongs to {quote(row.owner)}" for row in others[: capture_faults.MOST_NAMED])
    named += f" and {more} more" if more > 0 else ""
    return [
        f"index {name}: {source.sql} belongs to {quote(source.owner)}, but these partitions don't: {named}. So "
        "writes to them may fail, and roir doesn't read them. "
        f"Remedy: ALTER TABLE {others[0].name} OWNER TO {quote(source.owner)}"
    ]
