"""Installs the capture of a source: its functions and triggers (docs/architecture.md#touched-wins).

The functions of a source serve all its generations. New functions under the drain lock switch modes and add or remove
generations, without the ACCESS EXCLUSIVE lock that dropping a trigger takes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.definition import Scan, quote
from airflow_roir.engine.capture import conflicts, trigger_gaps
from airflow_roir.engine.capture.row_function import (
    body,
    function_name,
    render,
    row_columns,
    row_function,
    row_function_name,
    row_type_name,
    trigger_body,
    trigger_name,
    undo,
)
from airflow_roir.engine.capture.target import ACTIVE, Target
from airflow_roir.engine.capture.truncate_function import (
    render_truncate,
    truncate_body,
    truncate_function_name,
    truncate_trigger_name,
)
from airflow_roir.engine.database import execute, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Bound, KeyRange, in_key_order
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.schema import rights, tamper
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source import owner as owners
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvariantViolated

ROWS, TRUNCATE = "rows", "truncate"
# Without clones, which are dropped with the trigger that they were cloned from.
FOLLOWED = """
SELECT tgrelid::regclass::text AS relation, quote_ident(tgname) AS name FROM pg_trigger
 WHERE tgfoid IN (SELECT to_regprocedure(f)::oid FROM unnest(%(functions)s::text[]) f) AND tgparentid = 0
 ORDER BY tgrelid, tgname
"""
# Keeps the present names of columns, types and operators.
KEEP_ENTRY = (
    "UPDATE roir.generation SET entry = %(entry)s::jsonb WHERE id = %(generation)s AND entry <> %(entry)s::jsonb"
)
# Only grants to the owner by name count: a superuser, or a member of our role, may cease to be one.
GRANTED = """
SELECT bool_and(c.relowner = o.oid OR EXISTS (
         SELECT FROM aclexplode(c.relacl) a WHERE a.grantee = o.oid AND a.privilege_type = r))
  FROM pg_class c, pg_roles o, unnest(%(rights)s::text[]) r
 WHERE c.oid = to_regclass(%(name)s) AND o.rolname = %(owner)s
"""
# All tables in one query, since each check of an index asks. A table that doesn't exist gives NULL and doesn't count.
LACKS = """
SELECT coalesce(bool_or(NOT has_table_privilege(%(owner)s, to_regclass(n.name)::oid, n.wanted)), false)
       OR EXISTS (SELECT FROM pg_inherits h CROSS JOIN unnest(ARRAY['SELECT', 'UPDATE', 'DELETE']) AS wanted
                   WHERE h.inhparent IN (SELECT to_regclass(b)::oid FROM unnest(%(bases)s::text[]) b)
                     AND NOT has_table_privilege(%(owner)s, h.inhrelid, wanted))
  FROM unnest(%(names)s::text[], %(rights)s::text[]) n (name, wanted)
"""
# The owner needs rights on each segment: a verification reads it by its own name, the capture writes to it.
SEGMENTS_NOT_GRANTED = """
SELECT string_agg(c.oid::regclass::text, ', ')
  FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid, pg_roles o
 WHERE h.inhparent = to_regclass(%(base)s) AND o.rolname = %(owner)s AND c.relowner <> o.oid
   AND NOT (ARRAY(SELECT a.privilege_type FROM aclexplode(c.relacl) a WHERE a.grantee = o.oid)
            @> ARRAY['SELECT', 'UPDATE', 'DELETE'])
"""
FORMER_OWNERS = "SELECT DISTINCT name FROM roir.former_owners(%(source)s::oid) ORDER BY 1"
ROW_TYPE = "SELECT t.typrelid::bigint FROM pg_type t WHERE t.oid = to_regtype(%(type)s)"
MADE = """
SELECT r.prosrc AS rows, t.prosrc AS truncate, w.prosrc AS row,
       r.prosecdef AND t.prosecdef AND pg_get_userbyid(r.proowner) = %(owner)s
       AND NOT w.prosecdef AND w.proconfig IS NULL AND w.proowner = r.proowner
       AND 'enable_seqscan=off' = ANY (r.proconfig)
       AND array_remove(r.proconfig, 'enable_seqscan=off') = t.proconfig AS as_made
  FROM (SELECT to_regprocedure(%(rows)s) AS rows, to_regprocedure(%(truncate)s) AS truncate,
               to_regproc(%(row)s) AS row) f
  LEFT JOIN pg_proc r ON r.oid = f.rows LEFT JOIN pg_proc t ON t.oid = f.truncate LEFT JOIN pg_proc w ON w.oid = f.row
"""
MAINTAINED = """
SELECT g.id, g.entry, g.capture_mode, g.scan, g.layout, i.name
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND g.status <> 'dropped' ORDER BY g.id
"""
BOUNDS = """
SELECT s.generation_id, s.ordinal, s.lower, s.upper
  FROM roir.segment s JOIN roir.generation g ON g.id = s.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND s.ordinal > %(default)s ORDER BY s.generation_id, s.ordinal
"""


def targets(
    connection: Connection, source_oid: int, names_of_now: bool = True, with_bounds: bool = True
) -> list[Target]:
    """The generations that a source's writes maintain, by the control tables. Read them under the drain lock.

    names_of_now: False for the names that types and operators had when the capture was made.
    with_bounds: False leaves out the bounds of segments, which contain values of keys.
    """
    rows = execute(connection, MAINTAINED, {"source": source_oid})
    bounds = _bounds(connection, source_oid) if with_bounds else {}
    found = []
    for row in rows.all():
        entry = Entry.from_json(row.entry)
        if names_of_now:
            entry = physical.followed(connection, row.id, entry)
        between, segments = bounds.get(row.id, (None, ()))
        mode, scan = row.capture_mode, Scan(row.scan)
        found.append(Target(row.id, entry, mode, scan, between, row.name, segments, row.layout))
    return found


def _bounds(connection: Connection, source_oid: int) -> dict[int, tuple[tuple[Bound, ...], tuple[int, ...]]]:
    """The bounds between the segments of each generation of a source, and their ordinals, in the order of keys.

    Reads them in one query, since it is called often.
    """
    asked = {"source": source_oid, "default": physical.DEFAULT_SEGMENT}
    pieces: dict[int, list[KeyRange]] = {}
    for row in execute(connection, BOUNDS, asked).all():
        piece = KeyRange(row.ordinal, row.lower and tuple(row.lower), row.upper and tuple(row.upper))
        pieces.setdefault(row.generation_id, []).append(piece)
    found = {}
    for generation_id, of in pieces.items():
        try:
            ordered = in_key_order(of)
        except InvariantViolated:
            # Then all writes go through the base.
            continue
        # The first segment has no bound below.
        bounds = tuple(piece.lower for piece in ordered[1:] if piece.lower is not None)
        found[generation_id] = (bounds, tuple(piece.ordinal for piece in ordered))
    return found


def mode(connection: Connection, generation_id: int) -> str:
    """A generation's capture mode."""
    query = "SELECT capture_mode FROM roir.generation WHERE id = %(id)s"
    return str(execute(connection, query, {"id": generation_id}).scalar_one())


def refresh(connection: Connection, source: Source) -> None:
    """Make the source's writes maintain exactly the generations that the control tables name. Needs the drain lock.

    Leaves the triggers as they are: if one is missing, the capture missed writes, and the warning must stay until a
    rebuild. Raises InvalidInput if our role may not give the capture function to the source's owner.
    """
    source = owners.of_now(connection, source)
    generations = targets(connection, source.oid)
    untouched = tamper.untouched_captures(connection, source.oid)
    for target in generations:
        physical.create_source_view(connection, target.generation_id, source, target.entry)
        entry = {"generation": target.generation_id, "entry": to_json(target.entry.as_json())}
        execute(connection, KEEP_ENTRY, entry)
    for statement in (*statements_for_rows(connection, source, generations), render_truncate(source, generations)):
        execute(connection, statement)
    rows, truncate = function_name(source.oid), truncate_function_name(source.oid)
    rights.take_back(connection, functions=[f"{rows}()", f"{truncate}()", row_function(source.oid)])
    if conflicts.is_installed(connection, source.oid):
        conflicts.refresh(connection, source, generations)
    if execute(connection, conflicts.VIEWS_MAY_BE_BARRED).scalar_one():
        for name in (rows, truncate):
            execute(connection, f"ALTER FUNCTION {name}() SET restrict_nonsystem_relation_kind = ''")
    _hand_over(connection, source, generations)
    tamper.keep_captures(connection, untouched)


def statements_for_rows(connection: Connection, source: Source, generations: list[Target]) -> list[str]:
    """The statements that make the functions for rows in place of those that are there."""
    row_type = execute(connection, ROW_TYPE, {"type": row_type_name(source.oid)}).scalar()
    if row_type is None:
        return render(source, generations)
    columns = catalog.columns_of(connection, row_type).values()
    # A session frees what it keeps of a function that is replaced, but never what it keeps of one that was dropped.
    if [(column.name, column.type, column.collation) for column in columns] == row_columns(generations):
        return render(source, generations, kept=True)
    return [*undo(source.oid), *render(source, generations)]


def _hand_over(connection: Connection, source: Source, generations: list[Target]) -> None:
    """Give the capture of rows to the source's owner, as whom it runs.

    It evaluates casts and conditions of indexes that this owner wrote. So these get no rights that the owner lacks,
    whatever role roir connects as.
    """
    execute(connection, "SELECT roir.take_from_former_owners(%(source)s::oid)", {"source": source.oid})
    for function in (f"{function_name(source.oid)}()", row_function(source.oid)):
        owners.hand_over(connection, source, function)
    owners.install(connection, source)
    for statement in grants(connection, source, generations):
        execute(connection, statement)


def grants(connection: Connection, source: Source, generations: Sequence[Target]) -> list[str]:
    """Statements that grant the source's owner the missing rights on roir's tables that the capture needs."""
    owner, found = quote(source.owner), []
    for target in generations:
        wanted = {"owner": source.owner, "base": physical.base(target.generation_id)}
        segments = execute(connection, SEGMENTS_NOT_GRANTED, wanted).scalar()
        if segments is not None:
            found.append(f"GRANT SELECT, UPDATE, DELETE ON {segments} TO {owner}")
    if any(target.entry.enforced for target in generations):
        found.append(grant_note(source))
    for name, needed in _needed(generations):
        asked = {"owner": source.owner, "name": name, "rights": list(needed)}
        if not execute(connection, GRANTED, asked).scalar_one():
            found.append(f"GRANT {', '.join(needed)} ON {name} TO {owner}")
    return found


def grant_note(source: Source) -> str:
    """The statement that lets the owner's writes note that they took over a key."""
    return f"GRANT EXECUTE ON FUNCTION roir.note_taken(bigint, oid, tid) TO {quote(source.owner)}"


def _needed(generations: Sequence[Target]) -> list[tuple[str, tuple[str, ...]]]:
    """The rights on roir's tables that the source's owner needs for the capture, by table."""
    needed: list[tuple[str, tuple[str, ...]]] = []
    for target in generations:
        stores = [physical.base(target.generation_id)]
        stores += [physical.delta(target.generation_id)] if target.mode != ACTIVE else []
        needed += [(name, ("SELECT", "INSERT", "UPDATE", "DELETE")) for name in stores]
        # A row lock needs the right to update.
        needed += [(physical.source_view(target.generation_id), ("SELECT", "UPDATE"))]
        if target.entry.enforced:
            rest = physical.segment(target.generation_id, physical.DEFAULT_SEGMENT)
            needed += [(rest, ("SELECT", "INSERT", "UPDATE", "DELETE"))]
    return needed


def lacks_rights(connection: Connection, source: Source) -> bool:
    """True if the capture can't write: the table has another owner now, or its owner is no superuser any more."""
    # By the generations' ids and modes only: to look for the present names of each entry's types would take most of the
    # time, and a role that only watches may not read bounds.
    generations = targets(connection, source.oid, names_of_now=False, with_bounds=False)
    needed = _needed(generations)
    pairs = [(name, right) for name, rights in needed for right in rights]
    values = {
        "owner": source.owner,
        "names": [name for name, _ in pairs],
        "rights": [right for _, right in pairs],
        "bases": [physical.base(target.generation_id) for target in generations],
    }
    return bool(execute(connection, LACKS, values).scalar_one())


def former_owners(connection: Connection, source_oid: int) -> list[str]:
    """Quoted roles that no longer own the source, but may still write its entries, or its rows through roir's view."""
    return list(execute(connection, FORMER_OWNERS, {"source": source_oid}).scalars())


def install(connection: Connection, source: Source) -> None:
    """As `refresh`, and make every write fire the capture triggers from now on. Needs the drain lock."""
    refresh(connection, source)
    # The capture relies on the keys of all levels, and another session may have attached a partition just now.
    execute(connection, "SELECT roir.check_source(%(oid)s::oid)", {"oid": source.oid})
    # The guard needn't check the DDL that follows: it is roir's own.
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    missing = {gap.kind for gap in trigger_gaps.gaps(connection, source.oid) if gap.missing and gap.oid == source.oid}
    if ROWS in missing:
        execute(connection, rows_trigger(source))
    if TRUNCATE in missing:
        execute(connection, truncate_trigger(source))
    execute(connection, "SELECT roir.watch_truncate(%(oid)s)", {"oid": source.oid})
    # ALWAYS, so that changes by a logical-replication apply worker fire them, too. The source's own triggers come
    # first, since partitions inherit the change.
    for gap in trigger_gaps.gaps(connection, source.oid):
        execute(connection, f"ALTER TABLE {gap.relation} ENABLE ALWAYS TRIGGER {gap.trigger}")


def rows_trigger(source: Source) -> str:
    """The statement that makes the capture trigger of rows."""
    return (
        f"CREATE TRIGGER {trigger_name(source.oid)} AFTER INSERT OR UPDATE OR DELETE ON {source.sql} "
        f"FOR EACH ROW EXECUTE FUNCTION {function_name(source.oid)}()"
    )


def truncate_trigger(source: Source) -> str:
    """The statement that makes the source's own capture trigger of TRUNCATE."""
    return (
        f"CREATE TRIGGER {truncate_trigger_name(source.oid)} AFTER TRUNCATE ON {source.sql} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {truncate_function_name(source.oid)}()"
    )


def drop_functions(connection: Connection, source_oid: int) -> None:
    """Drop a source's capture functions and all triggers that call them, also those of detached partitions.

    Takes ACCESS EXCLUSIVE locks on the tables of the triggers.
    """
    if conflicts.is_installed(connection, source_oid):
        conflicts.remove(connection, source_oid)
    functions = [f"{function_name(source_oid)}()", f"{truncate_function_name(source_oid)}()"]
    for row in execute(connection, FOLLOWED, {"functions": functions}).all():
        execute(connection, f"DROP TRIGGER {row.name} ON {row.relation}")
    functions += [f"{owners.function_name(source_oid)}(text)", row_function_name(source_oid)]
    execute(connection, f"DROP FUNCTION IF EXISTS {', '.join(functions)}")
    execute(connection, f"DROP TYPE IF EXISTS {row_type_name(source_oid)}")


# The generation, its mode, and its layout, if it has one.
LAYOUT = re.compile(r"(is_in_mode\(\d+, '\w+')(?:, \d+)?\)")


def is_stale(connection: Connection, source: Source, names_of_now: bool = True) -> bool:
    """True if the capture functions aren't those that `refresh` would make.

    Types or operators have other names, the source has another owner or primary key, the functions were altered, or
    another version of roir made them.

    names_of_now: False to ignore other names and a newer layout, which a sync or a repair makes. Writes are right under
    both layouts: an older snapshot gets 40001 if it meets an entry that it doesn't see.
    """
    generations = targets(connection, source.oid, names_of_now)
    values = {
        "rows": f"{function_name(source.oid)}()",
        "truncate": f"{truncate_function_name(source.oid)}()",
        "row": row_function_name(source.oid),
        "owner": source.owner,
    }
    made = execute(connection, MADE, values).one()
    if made.rows is None:
        return False
    # Removals and views cast by type, even if the functions don't.
    if names_of_now and [one.entry for one in generations] != [
        one.entry for one in targets(connection, source.oid, names_of_now=False)
    ]:
        return True
    wanted = [trigger_body(source, generations), truncate_body(source, generations), body(source, generations)]
    found = [(text or "").strip() for text in (made.rows, made.truncate, made.row)]
    if not names_of_now:
        found, wanted = ([LAYOUT.sub(r"\1)", text) for text in texts] for texts in (found, wanted))
    changed = found != wanted or not made.as_made
    if names_of_now and conflicts.is_stale(connection, source, generations):
        return True
    return changed or lacks_rights(connection, source) or bool(former_owners(connection, source.oid))
