"""What is wrong with published indexes while no operation runs: changes of a source that its capture can't follow.

While an operation runs the fingerprint stops it. Afterwards nothing does, so clean-up and status warn.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, quote
from airflow_roir.engine.capture import alterations, installation
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute, has_vanished, sqlstate
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.health import columns, own_tables, partman
from airflow_roir.engine.schema import rights, tamper
from airflow_roir.engine.source import catalog, replication
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT, PATIENCE_MS
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, NotFound

# Gaps that are named in one warning: a thousand leaves can be disabled by one statement.
MOST_NAMED = 3

ACTIVE = """
SELECT g.id, g.index_id, g.entry, i.schema_name, i.name, i.source_oid,
       coalesce((o.options ->> 'ignore_row_security')::boolean, false) AS ignore_row_security,
       coalesce((o.options ->> 'ignore_publications')::boolean, false) AS ignore_publications
  FROM roir.generation g
  JOIN roir.index i ON i.id = g.index_id
  JOIN roir.operation o ON o.generation_id = g.id AND o.kind IN ('create', 'rebuild')
 WHERE g.status = 'active'
   AND (%(operation)s IS NULL OR i.id = (SELECT index_id FROM roir.operation WHERE id = %(operation)s)) ORDER BY g.id
"""
BUILDING = """
SELECT g.id, g.entry, i.schema_name, i.name, i.source_oid
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.status = 'building'
   AND (%(operation)s IS NULL OR i.id = (SELECT index_id FROM roir.operation WHERE id = %(operation)s)) ORDER BY g.id
"""
IS_ROW_SECURE = "SELECT relrowsecurity FROM pg_class WHERE oid = %(oid)s"
REPLACED = """
SELECT quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index, r.recorded, r.present::regclass::text AS name
  FROM roir.replaced_sources() r JOIN roir.index i ON i.id = r.index
 WHERE %(operation)s IS NULL OR i.id = (SELECT index_id FROM roir.operation WHERE id = %(operation)s) ORDER BY 1
"""
VIEW_FAULTS = "SELECT roir.view_faults(%(generation)s) > 0"
# An owner can take rights from himself. Rows are locked for a unique key, and for a primary key that is deferrable.
READER = """
SELECT o.rolname::text AS role,
       concat_ws(', ', CASE WHEN NOT has_table_privilege(o.oid, s.oid, 'SELECT') THEN 'SELECT' END, CASE
                 WHEN %(locks)s AND NOT has_any_column_privilege(o.oid, s.oid, 'UPDATE') THEN 'UPDATE' END) AS lacks,
       s.relrowsecurity AND s.relforcerowsecurity AND NOT (o.rolsuper OR o.rolbypassrls) AS restricted
  FROM pg_class v JOIN pg_roles o ON o.oid = v.relowner, pg_class s
 WHERE v.oid = to_regclass(%(view)s) AND s.oid = %(source)s
"""
# 29: AFTER INSERT OR UPDATE OR DELETE, for each row; 32: AFTER TRUNCATE.
ALTERED_TRIGGERS = """
SELECT format('%%I on %%s', tgname, tgrelid::regclass) AS trigger, tgrelid::regclass::text AS relation,
       quote_ident(tgname) AS name
  FROM pg_trigger
 WHERE tgfoid IN (SELECT function FROM roir.captures(%(source)s::oid))
   AND (tgtype NOT IN (29, 32) OR tgqual IS NOT NULL OR tgattr <> '' OR tgnargs > 0)
 ORDER BY tgrelid <> %(source)s::oid, 1 LIMIT 1
"""
# No trigger tells of their TRUNCATE before a clean-up has taken them in; nobody knows what their first transaction did.
NEW_LEAVES = """
SELECT c.name, EXISTS (SELECT FROM roir.source_partition p WHERE p.generation_id = %(generation)s
                          AND p.relation = c.relation AND p.status = 'joining') AS half
  FROM roir.partition_changes(%(generation)s, %(source)s::oid) c WHERE NOT c.gone ORDER BY 1
"""
# By an attach of ours, not by a repair after a plain one.
JOINING = """
SELECT name, quote_literal(name) AS literal FROM roir.source_partition
 WHERE generation_id = %(generation)s AND status = 'joining' AND bounds IS NOT NULL ORDER BY id
"""
# The capture reads a leaf as the source's owner, and runs code of the leaf's by that; roir reads all as one role.
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
    """What is wrong with the published index of an operation, or with all published indexes: lines with the remedy.

    The lines tell the present state, and what was gone or altered for a while, by the marks (`tamper.py`). Where DDL
    of others takes a relation away during the look, it is repeated once.

    Raises DBAPIError if that happens to the repetition, too.
    """
    try:
        with connection.begin_nested():
            return _warnings(connection, operation_id)
    except DBAPIError as error:
        if not has_vanished(error):
            raise
    return _warnings(connection, operation_id)


def _warnings(connection: Connection, operation_id: int | None) -> list[str]:
    rows = execute(connection, ACTIVE, {"operation": operation_id}).all()
    found = [line for row in rows for line in _of_index(connection, row)]
    for row in execute(connection, BUILDING, {"operation": operation_id}).all():
        # All else stops the build.
        name = str(operations.index_name(row))
        try:
            source = catalog.read_source_by_oid(connection, row.source_oid, check=False)
        except NotFound:
            found.append(f"index {name}: its table was dropped. Give its operation up: roir abort {argument(name)}")
            continue
        if alterations.is_of_another(connection, source):
            of_another = alterations.of_another(source)
            found.append(f"index {name}: {of_another}. The build goes on after it: roir resume {argument(name)}")
        found += _renamed(connection, name, row.id, Entry.from_json(row.entry))
        found += _leaves_of_others(connection, name, source)
        found += _joining(connection, name, source, row.id)
    if rows and (closed := rights.closed(connection)):
        more = f" and {len(closed) - 1} more" if len(closed) > 1 else ""
        found.append(
            f"not all roles may call {closed[0]}{more}, functions of roir's, so reading an index, or writing to its "
            "table, fails for roles that need them. Run: roir init, which gives EXECUTE to PUBLIC again"
        )
    return [*dict.fromkeys(found), *replaced(connection, operation_id)]


def warnings_at_once(
    connection: Connection, operation_id: int, index: str, *more: Callable[[Connection, int], list[str]]
) -> list[str]:
    """As `warnings`, of one index, but never behind a lock: definitions of views and bounds are read under one.

    more: other looks at the operation's index, also of what is no fault.
    If somebody holds the table or the view for itself, a line says that it wasn't looked at.
    """
    savepoint = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        return [
            *warnings(connection, operation_id),
            *(line for look in more for line in look(connection, operation_id)),
        ]
    except DBAPIError as error:
        if sqlstate(error) != LOCK_TIMEOUT:
            raise
        return [
            f"index {index}: can't be checked now, since somebody holds a lock on its table or its view; look again "
            "when that is released"
        ]
    finally:
        savepoint.rollback()


def replaced(connection: Connection, operation_id: int | None = None) -> list[str]:
    """Indexes whose source was dropped, and another table has its place and its capture trigger: with the remedy.

    operation_id: of that operation's index only.
    """
    return [
        f"index {row.index}: its table (oid {row.recorded}) was dropped, and {row.name} has taken its place, as "
        "after a restore of that table alone. Its rows have no entries. Drop the index and build it again: "
        f"roir drop {argument(str(row.index))}"
        for row in execute(connection, REPLACED, {"operation": operation_id})
    ]


def _of_index(connection: Connection, row: Row[tuple[object, ...]]) -> list[str]:
    name = str(operations.index_name(row))
    found: list[str] = []
    try:
        # Whoever looks may be a role that only watches.
        source = catalog.read_source_by_oid(connection, row.source_oid, only_look=True)
    except NotFound:
        return [f"index {name}: its table was dropped; drop the index, too: roir drop {argument(name)}"]
    except InvalidInput as error:
        found.append(f"index {name}: {error}")
        source = catalog.read_source_by_oid(connection, row.source_oid, check=False)
    entry = Entry.from_json(row.entry)
    unseen = tamper.changes(connection, row.id, source.sql)
    if captured := _capture(connection, name, source):
        # The present state is reported first, with its remedy. The marks report the past until a verification is clean.
        found += captured
        unseen.pop(tamper.TRIGGER, None)
        unseen.pop(tamper.FUNCTION, None)
    others = columns.problems(connection, name, source, row.id, entry)
    if lacking := _lacking(connection, name, source, row.id, entry):
        found += lacking
    # Where the columns are others, a rebuild can't make it again, and the index is to be dropped.
    elif not others and execute(connection, VIEW_FAULTS, {"generation": row.id}).scalar_one():
        unseen.pop(tamper.VIEW, None)
        found.append(
            f"index {name}: {physical.source_view(row.id)}, by which the capture reads {source.sql}, is gone or was "
            "altered, so writes fail or are missed. Drop it, if it is there, then rebuild the index, which makes it "
            f"again: roir build {argument(name)}"
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
    # REINDEX would not do: entries may belong into other segments.
    found += [
        f"index {name}: the library of collation {one} was exchanged after the index was built, so lookups may "
        "miss entries. "
        f"Rebuild it: roir build {argument(name)}"
        for one in entry.resorted(source)
    ]
    if execute(connection, IS_ROW_SECURE, {"oid": source.oid}).scalar_one() and not row.ignore_row_security:
        # It came after the publish: nobody has said that the view may show every row.
        found.append(
            f"index {name}: {source.sql} has row-level security now; all who may read the view see the rows that "
            "the policies hide. Revoke SELECT on the view, or drop the index"
        )
    more = [*replication.in_subscriptions(connection, source), *partman.behind(connection, source)]
    if not row.ignore_publications:
        more += replication.in_publications(connection)
    return found + [f"index {name}: {line}" for line in more]


def _capture(connection: Connection, name: str, source: Source) -> list[str]:
    found = []
    gaps = installation.gaps(connection, source.oid)
    if gaps:
        missing = any(gap.missing for gap in gaps)
        more = len(gaps) - MOST_NAMED
        named = ", ".join(map(str, gaps[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
        enabled = "; ".join(f"ALTER TABLE {gap.relation} ENABLE ALWAYS TRIGGER {gap.trigger}" for gap in gaps)
        remedy = (
            f"rebuild the index, which makes it again: roir build {argument(name)}"
            if missing
            else f"{enabled}; then roir verify {argument(name)}, and if it finds a difference, "
            f"roir build {argument(name)}"
        )
        found.append(f"index {name}: not every write to {source.sql} is captured: {named}. Remedy: {remedy}")
    altered = execute(connection, ALTERED_TRIGGERS, {"source": source.oid}).first()
    if altered is not None:
        found.append(
            f"index {name}: {altered.trigger} was replaced by a trigger that doesn't fire for every write. Remedy: "
            f"DROP TRIGGER {altered.name} ON {altered.relation}; then rebuild the index, which makes it again: "
            f"roir build {argument(name)}"
        )
    if alterations.is_altered(connection, source):
        found.append(
            f"index {name}: the capture functions of {source.sql} were altered, or belong to a former owner of the "
            "table, so writes may fail or be missed. Run: roir clean-up, which makes them again; then roir "
            f"verify {argument(name)}, and if it finds a difference, roir build {argument(name)}"
        )
    if former := installation.former_owners(connection, source.oid):
        found.append(
            f"index {name}: {', '.join(former)} may still write its entries, as only the owner of {source.sql} may "
            f"({quote(source.owner)}). Run: roir clean-up, which takes these rights back; then roir "
            f"verify {argument(name)}, and if it finds a difference, roir verify --repair {argument(name)}"
        )
    return found


def _lacking(connection: Connection, name: str, source: Source, generation_id: int, entry: Entry) -> list[str]:
    """What keeps the owner of the view by which the capture reads from reading or locking rows: writes fail, then."""
    locks = entry.enforced or source.pk_deferrable
    asked = {"view": physical.source_view(generation_id), "source": source.oid, "locks": locks}
    reader = execute(connection, READER, asked).first()
    if reader is None:
        return []
    role = quote(reader.role)
    found = []
    if reader.lacks:
        found.append(
            f"index {name}: role {role}, by whose rights the capture reads {source.sql}, has lost {reader.lacks} on "
            f"it, so writes fail. Run: GRANT {reader.lacks} ON {source.sql} TO {role}"
        )
    if reader.restricted:
        found.append(
            f"index {name}: row-level security of {source.sql} applies to role {role}, too, by whose rights the "
            f"capture reads it, so writes fail. Run: ALTER TABLE {source.sql} NO FORCE ROW LEVEL SECURITY"
        )
    return found


def _changes(connection: Connection, name: str, source: Source, generation_id: int) -> list[str]:
    """What a rebuild repairs: the entries have other columns, or other values, than the source has now."""
    remedy = f"Rebuild it: roir build {argument(name)}"
    found = []
    for row in execute(connection, CHANGES, {"generation": generation_id}):
        if row.kind == "column":
            if row.is_now is None:
                continue  # columns.problems tells
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
            more = len(new) - MOST_NAMED
            named = ", ".join(new[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            found.append(
                f"index {name}: partitions of {source.sql} came without roir ({named}). Until they are registered, a "
                "TRUNCATE of them is missed, and rows that they brought have no entries. "
                f"Run: roir sync-partitions {argument(source.name)}"
            )
    return found


def _joining(connection: Connection, name: str, source: Source, generation_id: int) -> list[str]:
    return [
        f"index {name}: {row.name} is being attached to {source.sql}, and refuses writes until then. If no roir "
        "attach-partition runs, run it again, which continues it, or cancel it: "
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
    more = len(others) - MOST_NAMED
    named = ", ".join(f"{row.name} belongs to {quote(row.owner)}" for row in others[:MOST_NAMED])
    named += f" and {more} more" if more > 0 else ""
    return [
        f"index {name}: {source.sql} belongs to {quote(source.owner)}, but these partitions don't: {named}. So "
        "writes to them may fail, and roir doesn't read them. "
        f"Remedy: ALTER TABLE {others[0].name} OWNER TO {quote(source.owner)}"
    ]
