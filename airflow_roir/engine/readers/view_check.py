"""Checks that an index's view is the one that the control tables require: the generation shown, the entries hidden.

A verification compares entries with rows, so it wouldn't notice a view that shows other entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, argument
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.readers import view
from airflow_roir.engine.retry.trouble import Trouble, trouble_of
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.errors import InvariantViolated

# condition: the entries that it must hide. ours: it shows entries of the index, of any generation; else it is a user's.
LOOK = """
SELECT c.oid::bigint AS oid, pg_get_viewdef(c.oid) AS definition,
       roir.is_shown(%(generation)s, 'b', true) AS condition,
       'roir.published(bigint, integer)'::regprocedure = ANY (r.functions) AS guarded,
       to_regclass(%(base)s)::oid = ANY (r.relations) AS shows,
       EXISTS (SELECT FROM roir.generation x
                WHERE x.index_id = i.id AND to_regclass('roir_data.g' || x.id)::oid = ANY (r.relations)) AS ours,
       r.relations <@ ARRAY[c.oid, to_regclass(%(base)s)::oid, to_regclass(%(shown)s)::oid, i.source_oid::oid]
       AS reads_ours,
       roir.is_open(%(generation)s, c.oid) AS open,
       g.status = 'active' AS active
  FROM roir.generation g
  JOIN roir.index i ON i.id = g.index_id
  JOIN pg_namespace n ON n.nspname = %(schema)s
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = %(name)s AND c.relkind = 'v'
 CROSS JOIN LATERAL (
       SELECT array_agg(d.refobjid) FILTER (WHERE d.refclassid = 'pg_class'::regclass) AS relations,
              coalesce(array_agg(d.refobjid) FILTER (WHERE d.refclassid = 'pg_proc'::regclass), '{}') AS functions
         FROM pg_rewrite w JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid
        WHERE w.ev_class = c.oid) r
 WHERE g.id = %(generation)s
"""
# Matches once for each partition, whatever else the condition has.
HIDDEN = re.compile(r"FROM\s+\(\s*SELECT\s+b\.c\d+\s+AS\s")
# The end of the definition of a view that hides nothing.
WHOLE = re.compile(r"_shown b(?:\s+WHERE \( SELECT roir\.published\(\(\d+\)::bigint(?:, \d+)?\) AS published\))?;$")


def remedy(name: QualifiedName) -> str:
    """The command that makes the view again."""
    return f"Run: roir verify {argument(name)} --repair, which replaces the view"


def seen(connection: Connection, name: QualifiedName, generation_id: int) -> str | None:
    """The problem of the view, as far as its definition shows it; None if there is none. Needs no right, only reads."""
    # Twice: a publish or a detach may come between the statement's read of the tables and that of the view.
    return _seen(connection, name, generation_id) and _seen(connection, name, generation_id)


def _seen(connection: Connection, name: QualifiedName, generation_id: int) -> str | None:
    asked = _asked(generation_id)
    row = execute(connection, LOOK, {**asked, "schema": name.schema, "name": name.name}).first()
    if row is None or not row.active or not row.ours:
        return None
    if not row.shows:
        return "shows another generation than the active one"
    if not row.reads_ours:
        return "reads other relations besides its entries"
    must, hides = (len(HIDDEN.findall(text or "")) for text in (row.condition, row.definition))
    if hides < must:
        return "shows entries of partitions that are leaving or joining"
    if hides > must:
        return "looks for entries of partitions that are leaving or joining where there are none"
    # A writable view may show all entries; the caller warns of its rights instead.
    if not must and not WHOLE.search(row.definition) and ("WHERE" in row.definition or not row.open):
        return "leaves entries out" if "WHERE" in row.definition else "was replaced by another query"
    if not row.guarded and (older := view.began_before(connection, generation_id)):
        return f"doesn't refuse the older snapshot of {older[0]}, which may miss entries"
    return None


def _asked(generation_id: int) -> dict[str, object]:
    return {
        "generation": generation_id,
        "base": physical.base(generation_id),
        "shown": physical.shown(generation_id),
    }


def difference(connection: Connection, name: QualifiedName, generation_id: int) -> str | None:
    """The problem of the view: its definition differs from that of a view that is made here and rolled back."""
    found = None
    for _ in range(2):
        if not (found := _seen(connection, name, generation_id) or _compared(connection, name, generation_id)):
            return None
    return found


def _compared(connection: Connection, name: QualifiedName, generation_id: int) -> str | None:
    asked = _asked(generation_id)
    row = execute(connection, LOOK, {**asked, "schema": name.schema, "name": name.name}).first()
    if row is None or not row.active or not row.ours:
        return None
    twin = QualifiedName("roir_data", f"g{generation_id}_wanted")
    values = {"name": twin.sql, "generation": generation_id, "guarded": row.guarded, "replaced": None}
    attempt = connection.begin_nested()
    try:
        execute(connection, execute(connection, view.STATEMENT, values).scalar_one())
        wanted = execute(connection, f"SELECT pg_get_viewdef('{twin.sql}'::regclass)").scalar_one()
    finally:
        attempt.rollback()
    if wanted != row.definition:
        return "was replaced by another query"
    return "lets roles with more than SELECT on it write or lock entries" if row.open else None


# A finding as by a worker of a verification, but without a unit.
NOTE = """
INSERT INTO roir.discrepancy (verification_id, unit_id, kind, key, primary_key, detail, outcome, repaired_at)
VALUES (%(verification)s, 0, 'damaged', '[]', '[]', %(detail)s, %(outcome)s,
        CASE WHEN %(outcome)s IS NOT NULL THEN clock_timestamp() END)
"""
IS_REPAIRED = """
SELECT EXISTS (SELECT FROM roir.discrepancy WHERE verification_id = %(verification)s AND outcome = 'repaired')
"""
ACTIVE = """
SELECT i.id AS index_id, i.schema_name, i.name FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE g.id = %(generation)s AND g.status = 'active'
"""


def verify(connection: Connection, verification_id: int, generation_id: int, repair: bool) -> None:
    """Check the view as a part of a verification: a problem counts as damage; a repair makes the view again.

    If readers hold the view for too long, the damage stays, and the remedy is another repair. After a repair of entries
    the view refuses older snapshots, which see the wrong entries, unless readers hold it for too long.
    """
    row = execute(connection, ACTIVE, {"generation": generation_id}).first()
    if row is None:
        return
    name = QualifiedName(row.schema_name, row.name)
    if repair and execute(connection, IS_REPAIRED, {"verification": verification_id}).scalar_one():
        _attempt(connection, generation_id, lambda: view.refuse_older(connection, generation_id))
    if (wrong := difference(connection, name, generation_id)) is None:
        return
    outcome = None
    if repair and _attempt(connection, generation_id, lambda: view.show(connection, name, row.index_id, generation_id)):
        outcome = "repaired"
    detail = f"view {name} {wrong}. {remedy(name)}"
    execute(connection, NOTE, {"verification": verification_id, "detail": detail, "outcome": outcome})


def _attempt(connection: Connection, generation_id: int, make: Callable[[], object]) -> bool:
    """Try to make the view again, within a time limit; True on success."""
    attempt = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).attempt_ms}")
        make()
        # Under the lock of the view: a publish has had this lock before, or waits for it.
        if execute(connection, ACTIVE, {"generation": generation_id}).first() is None:
            attempt.rollback()
            return False
        execute(connection, "SET LOCAL lock_timeout = 0")
        attempt.commit()
        return True
    except InvariantViolated:
        attempt.rollback()
        return False
    except DBAPIError as error:
        if trouble_of(error) is not Trouble.LOST or error.connection_invalidated:
            raise
        attempt.rollback()
        return False
