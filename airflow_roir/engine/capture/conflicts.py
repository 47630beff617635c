"""Installs the function and triggers of `roir.on_conflict` for a source (conflict_function.py has their text)."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.capture.conflict_function import (
    conflict_body,
    conflict_function_name,
    conflict_triggers,
    render_conflict,
)
from airflow_roir.engine.capture.target import Target
from airflow_roir.engine.database import execute
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source import owner as owners
from airflow_roir.engine.source.source import Source

# True if the server has the setting, from a minor version on, that forbids a user's session to read views.
VIEWS_MAY_BE_BARRED = "SELECT current_setting('restrict_nonsystem_relation_kind', true) IS NOT NULL"
BODY = "SELECT prosrc FROM pg_proc WHERE oid = to_regprocedure(%(function)s)"
GENERATED = "SELECT attname FROM pg_attribute WHERE attrelid = %(source)s AND attgenerated <> '' AND NOT attisdropped"
LEVELS = """
SELECT r.oid::regclass::text
  FROM (SELECT %(source)s::oid AS oid
        UNION ALL SELECT t.relation FROM roir.partition_tree(%(source)s) t WHERE NOT t.leaf) r ORDER BY 1
"""
MADE = """
SELECT t.tgrelid::regclass::text AS relation, quote_ident(t.tgname) AS name FROM pg_trigger t
 WHERE t.tgfoid = to_regprocedure(%(function)s) AND t.tgparentid = 0 ORDER BY 1, 2
"""
# By its function: after a restore the name has an old oid.
IS_MADE = """
SELECT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = %(relation)s::regclass AND t.tgtype = %(kind)s
                  AND t.tgfoid = to_regprocedure(%(function)s))
"""


def is_installed(connection: Connection, source_oid: int) -> bool:
    """True if the setting works for a source."""
    return _body(connection, source_oid) is not None


def refresh(connection: Connection, source: Source, generations: Sequence[Target]) -> None:
    """Make the function ask for the keys of these generations, as their capture does. Needs the drain lock."""
    name = f"{conflict_function_name(source.oid)}()"
    execute(connection, render_conflict(source, generations, _generated(connection, source)))
    rights.take_back(connection, functions=[name])
    if execute(connection, VIEWS_MAY_BE_BARRED).scalar_one():
        execute(connection, f"ALTER FUNCTION {name} SET restrict_nonsystem_relation_kind = ''")
    owners.hand_over(connection, source, name)


def is_stale(connection: Connection, source: Source, generations: Sequence[Target]) -> bool:
    """True if there is a function, and it isn't the one that `refresh` would make."""
    found = _body(connection, source.oid)
    return found is not None and found.strip() != conflict_body(source, generations, _generated(connection, source))


def add_triggers(connection: Connection, source: Source) -> None:
    """Creates the triggers that aren't there. Needs the drain lock."""
    function = f"{conflict_function_name(source.oid)}()"
    levels = list(execute(connection, LEVELS, {"source": source.oid}).scalars())
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    for relation, kind, said in conflict_triggers(source, levels):
        wanted = {"relation": relation, "kind": kind, "function": function}
        if not execute(connection, IS_MADE, wanted).scalar_one():
            execute(connection, f"CREATE TRIGGER {said} EXECUTE FUNCTION {function}")


def remove(connection: Connection, source_oid: int) -> None:
    """Drops the triggers and the function. Takes ACCESS EXCLUSIVE locks on the tables of the triggers."""
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    function = f"{conflict_function_name(source_oid)}()"
    for row in execute(connection, MADE, {"function": function}).all():
        execute(connection, f"DROP TRIGGER {row.name} ON {row.relation}")
    execute(connection, f"DROP FUNCTION IF EXISTS {function}")


def _body(connection: Connection, source_oid: int) -> str | None:
    found: str | None = execute(connection, BODY, {"function": f"{conflict_function_name(source_oid)}()"}).scalar()
    return found


def _generated(connection: Connection, source: Source) -> list[str]:
    return list(execute(connection, GENERATED, {"source": source.oid}).scalars())
