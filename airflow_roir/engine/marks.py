"""What must have been there all the while for entries to be right, and was gone or altered for a while.

`roir.marks` tells by oids and rows of the catalogs what has the looks of before and isn't the same.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.database import execute

KEY, TRIGGER, FUNCTION, VIEW, ENTRIES = "key", "trigger", "function", "view", "entries"

# Of the delta of a generation that is being built only: afterwards nothing of it is read.
CHANGED = """
SELECT x.kind, x.column, min(r.oid::regclass::text) AS relation, count(DISTINCT r.oid) AS relations
  FROM (SELECT (regexp_match(m.name, '^[a-z]+'))[1] AS kind, (regexp_match(m.name, '^[a-z]+ (\\d+)/'))[1]::oid AS oid,
               (regexp_match(m.name, '^expression \\d+/\\d*/(.*)'))[1] AS column
          FROM roir.mark_changes(%(generation)s) m) x
  JOIN roir.generation g ON g.id = %(generation)s
  LEFT JOIN pg_class r ON r.oid = x.oid
 WHERE x.kind <> 'delta' OR g.status = 'building'
 GROUP BY 1, 2 ORDER BY 1, 2
"""
# As the marks were before a capture function is made anew: by us, and so not unseen.
UNTOUCHED = """
SELECT g.id FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND g.status IN ('building', 'active', 'retired') AND g.shape ? 'marks'
   AND NOT EXISTS (SELECT FROM roir.mark_changes(g.id) m WHERE m.name LIKE 'function %%')
 ORDER BY g.id
"""
KEEP_FUNCTIONS = "SELECT roir.keep_marks(%(generation)s, ARRAY['function capture', 'function truncate'])"
# Functions are replaced without a lock on the table: a writer that ran another one may not have committed yet, and no
# verification sees what it missed. So of theirs only those that were kept, or looked at when no writer was in flight.
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
LOCK = "SELECT FROM roir.generation WHERE id = %(generation)s FOR UPDATE"
LOOK_AT_FUNCTIONS = """
UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{looked}', coalesce(g.shape -> 'looked', '{}') || (
         SELECT coalesce(jsonb_object_agg(n.key, n.value), '{}') FROM jsonb_each(roir.marks(g.id)) n
          WHERE n.key LIKE 'function %%'))
 WHERE g.id = %(generation)s AND g.shape IS NOT NULL
"""
# What came or went meanwhile, partitions, is none of it.
FORGIVE = """
UPDATE roir.generation g SET shape = (g.shape - 'looked') || jsonb_build_object('marks', (g.shape -> 'marks') || (
         SELECT coalesce(jsonb_object_agg(n.key, n.value), '{}') FROM jsonb_each(roir.marks(g.id)) n
          WHERE g.shape -> 'looked' -> n.key = n.value AND g.shape -> 'marks' ? n.key))
 WHERE g.id = %(generation)s AND g.shape ?& ARRAY['looked', 'marks'] AND roir.moved() IS NULL
"""


def changes(connection: Connection, generation_id: int, source: str) -> dict[str, str]:
    """What was gone or altered while nobody looked, though it looks as before: words by kind.

    source: the table's name, as SQL writes it.
    """
    words = {
        KEY: f"the primary key of {source} was dropped and added again, and rows may have shared one meanwhile",
        FUNCTION: f"a capture function of {source} was altered for a while, and may have missed writes",
        VIEW: f"the view by which the capture reads {source} was made anew, and may have hidden rows meanwhile",
        ENTRIES: "segments of its entries were out for a while, and writes may have missed them",
        "delta": "its delta was made anew, and the writes that it held are gone",
    }
    found: dict[str, str] = {}
    for row in execute(connection, CHANGED, {"generation": generation_id}):
        named = f"{row.relation} and {row.relations - 1} more" if row.relations > 1 else row.relation
        if row.kind == TRIGGER:
            said = f"capture triggers on {named} were altered, disabled or gone for a while, and may have missed writes"
        elif row.kind == "expression":
            said = f"column {quote(row.column)} of {named} was generated otherwise for a while"
        else:
            said = words[row.kind]
        found[row.kind] = f"{found[row.kind]}; {said}" if row.kind in found else said
    return found


def untouched_captures(connection: Connection, source_oid: int) -> list[int]:
    """The generations of a source whose capture functions are still those that roir made, by their ids."""
    return list(execute(connection, UNTOUCHED, {"source": source_oid}).scalars())


def keep_captures(connection: Connection, generations: list[int]) -> None:
    """Keep the marks of capture functions that we have just made anew, for generations that knew the last ones."""
    for generation_id in generations:
        execute(connection, KEEP_FUNCTIONS, {"generation": generation_id})


def follow(connection: Connection, generation_id: int) -> None:
    """Keep the marks of partitions that came."""
    execute(connection, "SELECT roir.follow_marks(%(generation)s)", {"generation": generation_id})


def are_functions_replaced(connection: Connection, generation_id: int) -> bool:
    """True where a capture function was another one for a while, and no operation of the index is under way."""
    return bool(execute(connection, REPLACED, {"generation": generation_id}).scalar_one())


def look_at_functions(connection: Connection, generation_id: int) -> None:
    """Note the marks of the capture functions for the next verification. Needs the drain lock."""
    execute(connection, LOCK, {"generation": generation_id})
    # A verification that has begun meanwhile may have read already what a writer has changed since.
    if are_functions_replaced(connection, generation_id):
        execute(connection, LOOK_AT_FUNCTIONS, {"generation": generation_id})


def look(connection: Connection, generation_id: int) -> None:
    """Note the marks as they are when a verification of the whole index begins."""
    execute(connection, LOOK, {"generation": generation_id})


def forgive(connection: Connection, generation_id: int) -> None:
    """Keep the marks that were the same from the verification's begin to its end, which has left nothing wrong."""
    execute(connection, FORGIVE, {"generation": generation_id})
