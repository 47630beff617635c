"""Removes a reference: the foreign key, its triggers, functions and views, and the columns that it added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import QualifiedName, argument, parse_name, quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.locks.table_lock import check_name, telling_of_names
from airflow_roir.engine.reference import record
from airflow_roir.engine.reference.reference import object_name
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import IllegalTransition, NotFound

TRIGGERS = """
SELECT t.tgrelid::regclass::text AS relation, quote_ident(t.tgname) AS name
  FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
 WHERE p.pronamespace = 'roir_data'::regnamespace AND t.tgparentid = 0
   AND p.proname = ANY (ARRAY[%(prefix)s || 'fill', %(prefix)s || 'check', %(prefix)s || 'change'])
 ORDER BY 1, 2
"""
FUNCTIONS = """
SELECT p.oid::regprocedure::text FROM pg_proc p
 WHERE p.pronamespace = 'roir_data'::regnamespace
   AND p.proname = ANY (SELECT %(prefix)s || x FROM unnest(%(names)s::text[]) x) ORDER BY 1
"""
NAMES = ["find", "fill", "check", "children", "adopt", "change"]
HAS_KEY = """
SELECT EXISTS (SELECT FROM pg_constraint WHERE conrelid = %(child)s AND conname = %(name)s AND contype = 'f')
"""
FORGET = "DELETE FROM roir.reference WHERE id = %(id)s"


def of_operation(database: Database, operation_id: int) -> Row[Any] | None:
    """The reference that an operation makes; None if it is removed."""
    with database.transaction() as connection:
        return execute(connection, record.OF_OPERATION, {"operation": operation_id}).first()


def remove_named(
    database: Database,
    index: str,
    child: str,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> list[str]:
    """Remove the references of a child to an index; returns their constraints' names.

    child: the child's name, with or without columns. Raises NotFound, IllegalTransition (one is unfinished: abort it),
    LockNotAcquired.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = operations.find_index(connection, parse_name(index, "index"))
        oid, _ = catalog.found(connection, parse_name(child.partition("(")[0].strip(), "child"))
        rows = [row for row in record.all_of(connection, found.id) if record.child_oid(connection, row.id) == oid]
        if not rows:
            raise NotFound(f"table {child} has no foreign key to index {index}; `roir status` names all")
        last = operations.newest_operation(connection, found.id)
        if last is not None and last.status in operations.LIVE and last.id in [row.operation_id for row in rows]:
            raise IllegalTransition(
                f"index {index}: {operations.named(last)} is unfinished; abort it: roir abort {argument(index)}"
            )
    for row in rows:
        remove(database, row, actor, report, patience_s)
    return [row.name for row in rows]


def remove(
    database: Database,
    row: Row[Any],
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> None:
    """Remove one reference, in one transaction. Safe to repeat. Raises LockNotAcquired."""
    with database.transaction() as connection:
        oid = record.child_oid(connection, row.id)
        child = None if oid is None else catalog.read_source_by_oid(connection, oid, check=False)
        parent = catalog.source_if_there(connection, row.index_id)
    there = [one for one in (parent, child) if one is not None]
    named = " or ".join(one.sql for one in there) or f"foreign key {row.name}"
    relations = [oid for one in there for oid in one.relations]
    waiter = Waiter("reference", str(QualifiedName(row.schema_name, row.index_name)))
    attempts = Attempts(database, named, relations, database.limits.attempt_ms, patience_s, waiter=waiter)

    def body(connection: Connection) -> None:
        for one in there:
            attempts.lock(connection, [one.sql], "ACCESS EXCLUSIVE")
            check_name(connection, one.sql, one.oid)
        _drop(connection, row, child)
        execute(connection, FORGET, {"id": row.id})
        operations.record_event(connection, row.index_id, row.operation_id, actor, "unreferenced", quote(row.name))

    with telling_of_names():
        attempts.run(body, report, [one.sql for one in there])


def _drop(connection: Connection, row: Row[Any], child: Source | None) -> None:
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    prefix = {"prefix": f"r{row.id}_"}
    if child is not None:
        asked = {"child": child.oid, "name": row.name}
        if execute(connection, HAS_KEY, asked).scalar_one():
            execute(connection, f"ALTER TABLE {child.sql} DROP CONSTRAINT {quote(row.name)}")
    for trigger in execute(connection, TRIGGERS, prefix).all():
        execute(connection, f"DROP TRIGGER {trigger.name} ON {trigger.relation}")
    for function in execute(connection, FUNCTIONS, {**prefix, "names": NAMES}).scalars().all():
        execute(connection, f"DROP FUNCTION {function}")
    for view in ("index", "parent"):
        execute(connection, f"DROP VIEW IF EXISTS {object_name(row.id, view)}")
    if child is not None:
        for column in row.made_columns:
            execute(connection, f"ALTER TABLE {child.sql} DROP COLUMN IF EXISTS {quote(column)}")
