"""Finds objects that entries depend on, and that were gone or altered for a while.

Such an object looks as before, but its *marks* (`roir.marks`: oids and rows of the catalogs) differ.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.database import execute

KEY, TRIGGER, FUNCTION, VIEW, ENTRIES = "key", "trigger", "function", "view", "entries"
COMPUTED = "computed"

# The delta matters only while its generation is being built: afterwards nothing in it is read.
CHANGED = """
SELECT x.kind, x.column, min(r.oid::regclass::text) AS relation, count(DISTINCT r.oid) AS relations, x.plain,
       min(x.function::regprocedure::text) AS function, count(x.function) AS functions
  FROM (SELECT (regexp_match(m.name, '^[a-z]+'))[1] AS kind, (regexp_match(m.name, '^[a-z]+ (\\d+)/'))[1]::oid AS oid,
               (regexp_match(m.name, '^computed (\\d+)'))[1]::oid AS function,
               (regexp_match(m.name, '^expression \\d+/[\\d.]*/(.*)'))[1] AS column, m.is_now LIKE ' %%' AS plain
          FROM roir.mark_changes(%(generation)s) m) x
  JOIN roir.generation g ON g.id = %(generation)s
  LEFT JOIN pg_class r ON r.oid = x.oid
 WHERE x.kind <> 'delta' OR g.status = 'building'
 GROUP BY 1, 2, x.plain ORDER BY 1, 2
"""
# Read before roir itself replaces capture functions, a change that needs no warning.
UNTOUCHED = """
SELECT g.id FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND g.status IN ('building', 'active', 'retired') AND g.shape ? 'marks'
   AND NOT EXISTS (SELECT FROM roir.mark_changes(g.id) m WHERE m.name LIKE 'function %%')
 ORDER BY g.id
"""
KEEP_FUNCTIONS = (
    "SELECT roir.keep_marks(%(generation)s, ARRAY['function capture', 'function truncate', 'function row'])"
)
# Functions are replaced without a lock on the table: a writer that ran another one may not have committed yet, and no
# verification sees the writes that this one missed. So marks of functions count only if they were kept before, or
# looked at when no writer was in flight.
LOOK = """
UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{looked}', (
         SELECT coalesce(jsonb_object_agg(n.key, n.value), '{}') FROM jsonb_each(roir.marks(g.id)) n
          WHERE n.key NOT LIKE 'function %%'
             OR n.value IN (g.shape -> 'marks' -> n.key, g.shape -> 'looked' -> n.key)))
 WHERE g.id = %(generation)s AND g.shape IS NOT NULL
"""
REPLACED = """
SELECT EXISTS (SELECT FROM roir.mark_changes(%(generation)s) m WHERE m.name LIKE 'function %%')
   AND NOT EXISTS (SELECT FROM roir.generation g JOIN roir.operation o ON o.index_id = g.index_id
                    WHERE g.id = %(generation)s AND o.status IN ('running', 'paused'))
"""
HOLD = "SELECT roir.hold_marks(%(generation)s)"
LOOK_AT_FUNCTIONS = """
UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{looked}', coalesce(g.shape -> 'looked', '{}') || (
         SELECT coalesce(jsonb_object_agg(n.key, n.value), '{}') FROM jsonb_each(roir.marks(g.id)) n
          WHERE n.key LIKE 'function %%'))
 WHERE g.id = %(generation)s AND g.shape IS NOT NULL
"""
# Partitions that came or went meanwhile don't count.
FORGIVE = """
UPDATE roir.generation g SET shape = (g.shape - 'looked') || jsonb_build_object('marks', (g.shape -> 'marks') || (
         SELECT coalesce(jsonb_object_agg(n.key, n.value), '{}') FROM jsonb_each(roir.marks(g.id)) n
          WHERE g.shape -> 'looked' -> n.key = n.value AND g.shape -> 'marks' ? n.key))
 WHERE g.id = %(generation)s AND g.shape ?& ARRAY['looked', 'marks'] AND roir.moved() IS NULL
"""


def changes(connection: Connection, generation_id: int, source: str) -> dict[str, str]:
    """Says what was gone or altered for a while, though it looks as before: sentences by kind.

    source: the table's name, quoted for SQL.
    """
    words = {
        KEY: f"the primary key of {source} was dropped and added again, and rows may have shared a key meanwhile",
        FUNCTION: f"a capture function of {source} was altered for a while, and may have missed writes",
        VIEW: f"the view by which the capture reads {source} was replaced, and may have hidden rows meanwhile",
        ENTRIES: "segments of its entries were detached for a while, and writes may have missed them",
        "delta": "its delta was replaced, and the writes that it held are gone",
    }
    found: dict[str, str] = {}
    for row in execute(connection, CHANGED, {"generation": generation_id}):
        named = f"{row.relation} and {row.relations - 1} more" if row.relations > 1 else row.relation
        if row.kind == TRIGGER:
            said = f"capture triggers on {named} were altered, disabled or gone for a while, and may have missed writes"
        elif row.kind == COMPUTED:
            more = f" and {row.functions - 1} more" if row.functions > 1 else ""
            said = f"function {row.function}{more}, which computes its keys or its condition, has another body now"
        elif row.kind == "expression":
            was = "isn't generated any more, and may have been" if row.plain else "was"
            said = f"column {quote(row.column)} of {named} {was} generated by another expression for a while"
        else:
            said = words[row.kind]
        found[row.kind] = f"{found[row.kind]}; {said}" if row.kind in found else said
    return found


def untouched_captures(connection: Connection, source_oid: int) -> list[int]:
    """The ids of a source's generations whose capture functions are still those that roir made."""
    return list(execute(connection, UNTOUCHED, {"source": source_oid}).scalars())


def keep_captures(connection: Connection, generations: list[int]) -> None:
    """Keep the marks of capture functions that roir has just replaced, for generations that knew the former ones."""
    for generation_id in generations:
        execute(connection, KEEP_FUNCTIONS, {"generation": generation_id})


def follow(connection: Connection, generation_id: int) -> None:
    """Keep the marks of new partitions."""
    execute(connection, "SELECT roir.follow_marks(%(generation)s)", {"generation": generation_id})


def are_functions_replaced(connection: Connection, generation_id: int) -> bool:
    """True if a capture function was replaced by others for a while, and no operation of the index is under way."""
    return bool(execute(connection, REPLACED, {"generation": generation_id}).scalar_one())


def look_at_functions(connection: Connection, generation_id: int) -> None:
    """Note the marks of the capture functions for the next verification. Needs the drain lock."""
    execute(connection, HOLD, {"generation": generation_id})
    # A verification that has begun meanwhile may already have read rows that a writer has changed since.
    if are_functions_replaced(connection, generation_id):
        execute(connection, LOOK_AT_FUNCTIONS, {"generation": generation_id})


def look(connection: Connection, generation_id: int) -> None:
    """Note the marks as they are when a verification of the whole index begins."""
    execute(connection, HOLD, {"generation": generation_id})
    execute(connection, LOOK, {"generation": generation_id})


def forgive(connection: Connection, generation_id: int) -> None:
    """Keep the marks that were the same from the beginning of a verification to its end, once the index is right."""
    execute(connection, HOLD, {"generation": generation_id})
    execute(connection, FORGIVE, {"generation": generation_id})
