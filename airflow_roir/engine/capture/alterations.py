"""Finds capture functions that are replaced, or whose table has another owner."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.capture import installation
from airflow_roir.engine.database import execute
from airflow_roir.engine.source.source import Source

# The capture functions name each generation that they maintain, and its mode.
CAPTURES = """
SELECT coalesce(bool_or(position(format('-- generation %%s, %%s mode', g.id, g.capture_mode) IN f.prosrc) = 0
                        OR w.prosrc !~ format('roir_data\\.g%%s\\M', g.id)
                        OR position(format('-- generation %%s, %%s mode', g.id, g.capture_mode) IN r.prosrc) = 0
                        OR NOT f.prosecdef OR NOT w.prosecdef OR r.oid IS NULL), false) AS replaced,
       coalesce(bool_or(f.proowner <> c.relowner OR r.proowner <> c.relowner), false) AS of_another
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
  JOIN pg_class c ON c.oid = i.source_oid::oid
  JOIN pg_proc f ON f.oid = to_regprocedure(format('roir_data.capture_%%s()', i.source_oid))
  LEFT JOIN pg_proc w ON w.oid = to_regprocedure(format('roir_data.truncate_%%s()', i.source_oid))
  LEFT JOIN pg_proc r ON r.oid = to_regproc(format('roir_data.capture_row_%%s', i.source_oid))
 WHERE i.source_oid = %(source)s AND g.capture_mode <> 'none' AND g.status IN ('building', 'active', 'retired')
"""


def is_altered(connection: Connection, source: Source) -> bool:
    """True if the capture functions were replaced, or belong to a former owner of the table, or can't write."""
    captures = execute(connection, CAPTURES, {"source": source.oid}).one()
    return bool(captures.replaced or captures.of_another) or installation.lacks_rights(connection, source)


def of_another(source: Source) -> str:
    """Problem and remedy if `is_of_another`."""
    return (
        f"the capture of {source.sql} is a former owner's, or {quote(source.owner)} lacks rights on its entries, so "
        "writes may fail. Run: roir clean-up, which gives the table's owner both"
    )


def is_of_another(connection: Connection, source: Source) -> bool:
    """True if writes may fail until a clean-up: the table's owner isn't the capture's, or lacks rights on entries.

    False for a capture that was replaced (`is_replaced`): it may have missed writes, and no clean-up repairs that.
    """
    captures = execute(connection, CAPTURES, {"source": source.oid}).one()
    return not captures.replaced and (bool(captures.of_another) or installation.lacks_rights(connection, source))


def is_replaced(connection: Connection, source_oid: int) -> bool:
    """True if another function replaces a capture function: it may have missed writes."""
    return bool(execute(connection, CAPTURES, {"source": source_oid}).one().replaced)
