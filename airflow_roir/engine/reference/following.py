"""Follows what happens to the child of a reference: the clean-up's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Row

from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.reference import record, removal
from airflow_roir.engine.reference.prepare import make_functions
from airflow_roir.engine.reference.reference import ReferenceStatus

# Also with a right that its owner has lost since, or a new owner lacks.
RENAME = """
UPDATE roir.reference SET key_columns = %(keys)s::jsonb, added_columns = %(added)s::jsonb WHERE id = %(id)s
"""
OWNERS = """
SELECT count(*) FROM pg_proc p JOIN pg_class c ON c.oid = CASE WHEN p.proname IN (%(fill)s, %(check)s)
                                                               THEN %(child)s::oid ELSE %(parent)s::oid END
 WHERE p.pronamespace = 'roir_data'::regnamespace AND p.proname IN (%(fill)s, %(check)s, %(find)s)
   AND p.proowner <> c.relowner
"""


def follow(database: Database, row: Row[Any], actor: str, report: Callable[[str], None], patience_s: float) -> None:
    """Remove the rest of a reference whose child was dropped; make its functions again for renamed columns, or for a
    new owner of a table. Raises LockNotAcquired."""
    with database.transaction() as connection:
        oid = record.child_oid(connection, row.id)
        if oid is not None:
            reference, parent, child = record.load(connection, row)
            names = {what: reference.object(what).split(".")[1] for what in ("fill", "check", "find")}
            tables = {"child": child.oid, "parent": parent.oid}
            same = (list(reference.keys), list(reference.added)) == (list(row.key_columns), list(row.added_columns))
            if not same or execute(connection, OWNERS, {**names, **tables}).scalar_one():
                make_functions(connection, reference, parent, child, row.status == ReferenceStatus.FILLING)
                values = {"id": row.id, "keys": to_json(reference.keys), "added": to_json(reference.added)}
                execute(connection, RENAME, values)
    if oid is None:
        removal.remove(database, row, actor, report, patience_s)
