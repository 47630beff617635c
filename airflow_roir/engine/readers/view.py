"""The view that readers of an index use: which generation it shows, and its guard against older snapshots.

A transaction whose snapshot is older than a publish can't see all of the new generation's entries. So a publish makes
the view *guarded*: once per query it checks that the caller's snapshot sees the publish, and raises 40001 if it
doesn't. The check costs a lookup, so clean-up makes the view plain when no older snapshot can exist any more.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, argument, quote
from airflow_roir.engine.database import execute, said, sqlstate
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.table_lock import WHOSE
from airflow_roir.engine.readers.old_snapshots import Holder, holders
from airflow_roir.errors import InvariantViolated, LockNotAcquired

# How long the guard stays for a standby that sends no feedback, and so doesn't show its snapshots. Reports on standbys
# are allowed hours (max_standby_streaming_delay), hardly ever a day.
STANDBY_PATIENCE = "1 day"

IS_OURS = """
SELECT c.oid::bigint AS oid, c.relkind::text = 'v' AND EXISTS (
         SELECT FROM pg_rewrite r
           JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
           JOIN roir.generation g ON d.refobjid = to_regclass('roir_data.g' || g.id)
          WHERE r.ev_class = c.oid AND d.refclassid = 'pg_class'::regclass AND g.index_id = %(index)s) AS ours
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relname = %(name)s
"""
HOLD = "SELECT roir.hold_view(%(index)s)"
STATEMENT = "SELECT roir.view_statement(%(name)s, %(generation)s, %(guarded)s, %(replaced)s::oid::regclass)"

# For the view of a partial index.
COMMENT = """
SELECT format('COMMENT ON VIEW %%s IS %%L', %(name)s, 'Only rows that satisfy: ' || i.condition)
  FROM roir.index i WHERE i.id = %(index)s AND i.condition <> ''
"""

# The relation exists already, is no view, or is a view with other columns.
NO_VIEW = ("42P07", "42809", "42P16")
# Other errors of that statement, with their remedies.
NO_PLACE = {
    "3F000": "Give the schema its name back, or create it",
    "42501": "Give the role that roir connects as this right",
}

IS_GUARDED = """
SELECT EXISTS (
  SELECT FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_rewrite r ON r.ev_class = c.oid
    JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
   WHERE n.nspname = %(schema)s AND c.relname = %(name)s
     AND d.refclassid = 'pg_proc'::regclass AND d.refobjid = 'roir.published(bigint, integer)'::regprocedure)
"""

HIDE = """
SELECT roir.refresh_view(%(generation)s) WHERE EXISTS (
  SELECT FROM roir.source_partition WHERE generation_id = %(generation)s AND status <> 'present')
"""

PUBLISHED = """
SELECT mode_xid, at, at > clock_timestamp() - %(patience)s::interval AS recent
  FROM (SELECT mode_xid, greatest(published_at, laid_out_at) AS at FROM roir.generation WHERE id = %(generation)s) g
"""


def statement(name: QualifiedName, generation_id: int, entry: Entry, replace: bool = False) -> str:
    """The statement that creates the unguarded view of a generation that doesn't exist yet, for a plan.

    `roir.view_statement` makes the statement for an existing generation.
    """
    columns = ", ".join(f"b.c{i + 1} AS {quote(column.source)}" for i, column in enumerate(entry.columns))
    return (
        f"CREATE {'OR REPLACE ' if replace else ''}VIEW {name.sql} "
        f"AS SELECT {columns} FROM {physical.seen(generation_id)}"
    )


def lock_statement(name: QualifiedName) -> str:
    """A statement that only locks a view, in ACCESS EXCLUSIVE mode; LOCK TABLE would lock the tables that it reads."""
    return f"ALTER VIEW {name.sql} SET SCHEMA {quote(str(name.schema))}"


def hold(connection: Connection, index_id: int) -> None:
    """Keep all that the definition of an index's view depends on as it is, until the transaction ends.

    Call it after the locks on the source and before that on the view, and read afterwards whatever you decide by.
    """
    execute(connection, HOLD, {"index": index_id})


def show(connection: Connection, name: QualifiedName, index_id: int, generation_id: int, guarded: bool = True) -> None:
    """Make the view show a generation, in the caller's transaction. Locks the view in ACCESS EXCLUSIVE mode.

    It hides the entries of partitions that are leaving or joining. The view keeps its grants, owner and options, and
    the views that users built on it. Raises InvariantViolated if another relation took the name.
    """
    hold(connection, index_id)
    row = execute(connection, IS_OURS, {"schema": name.schema, "name": name.name, "index": index_id}).first()
    if row is not None and not row.ours:
        raise InvariantViolated(_taken(name))
    execute(connection, "SELECT roir.only_read(%(generation)s)", {"generation": generation_id})
    values = {
        "name": name.sql,
        "generation": generation_id,
        "guarded": guarded,
        "replaced": None if row is None else row.oid,
    }
    try:
        with connection.begin_nested():
            if row is not None:
                # The view's options are read under the lock.
                execute(connection, lock_statement(name))
            execute(connection, execute(connection, STATEMENT, values).scalar_one())
    except DBAPIError as error:
        if remedy := NO_PLACE.get(sqlstate(error)):
            raise InvariantViolated(
                f"index {name}: its view can't be made: {said(error)}; nothing was changed. {remedy}, then try again"
            ) from error
        if sqlstate(error) not in NO_VIEW:
            raise
        raise InvariantViolated(renamed_column(connection, name, index_id) or _taken(name)) from error
    if row is None and (comment := execute(connection, COMMENT, {"index": index_id, "name": name.sql}).scalar()):
        execute(connection, comment)
    if row is not None:
        # Names were exchanged meanwhile, and the statement replaced another view: the error undoes that.
        now = execute(connection, WHOSE, {"name": name.sql}).scalar()
        if now != row.oid:
            raise InvariantViolated(_taken(name))


def _taken(name: QualifiedName) -> str:
    return (
        f"index {name}: another relation has taken its name meanwhile; nothing was published. Rename that "
        "relation, then resume"
    )


def drop(connection: Connection, name: QualifiedName, index_id: int) -> None:
    """Drop an index's view, if the relation of that name is it. Raises LockNotAcquired if names are exchanged."""
    hold(connection, index_id)
    row = execute(connection, IS_OURS, {"schema": name.schema, "name": name.name, "index": index_id}).first()
    if row is None or not row.ours:
        return
    try:
        execute(connection, f"DROP VIEW IF EXISTS {name.sql}")
    except DBAPIError as error:
        if sqlstate(error) not in NO_VIEW:
            raise
        raise LockNotAcquired(f"index {name}: its view was renamed meanwhile. Try again") from error
    if execute(connection, "SELECT FROM pg_class WHERE oid = %(oid)s::oid", {"oid": row.oid}).first() is not None:
        raise LockNotAcquired(f"index {name}: its view was renamed meanwhile. Try again")


def is_ours(connection: Connection, name: QualifiedName, index_id: int) -> bool:
    """True if the relation of that name is the view of that index, not one that took its name."""
    row = execute(connection, IS_OURS, {"schema": name.schema, "name": name.name, "index": index_id}).first()
    return row is not None and bool(row.ours)


RENAMED = """
SELECT roir.view_of(g.id)::text AS view, quote_ident(a.attname) AS now, quote_ident(c.value ->> 'source') AS was
  FROM roir.generation g CROSS JOIN jsonb_array_elements(g.entry -> 'columns') WITH ORDINALITY AS c (value, position)
  JOIN pg_attribute a ON a.attrelid = roir.view_of(g.id) AND a.attnum = c.position
 WHERE g.index_id = %(index)s AND g.status = 'active' AND a.attname <> c.value ->> 'source' ORDER BY c.position LIMIT 1
"""


def renamed_column(connection: Connection, name: QualifiedName, index_id: int) -> str:
    """The remedy if a column of the view was renamed, so that it can't show another generation; '' if none was."""
    row = execute(connection, RENAMED, {"index": index_id}).first()
    if row is None:
        return ""
    return (
        f"index {name}: column {row.was} of its view is called {row.now} now, and a rebuild can't be shown there. "
        f"Rename it back: ALTER VIEW {row.view} RENAME COLUMN {row.now} TO {row.was}"
    )


def lost(connection: Connection, name: QualifiedName, generation_id: int) -> str:
    """The problem, with the remedy, if no view under the index's name shows its active generation."""
    shows = execute(connection, "SELECT roir.view_of(%(id)s)::text", {"id": generation_id}).scalar()
    renamed = f"view {shows} shows its entries now; rename that view back" if shows else "no view shows its entries"
    return (
        f"index {name}: there is no view of that name, or it isn't roir's: {renamed}. Or drop the index and "
        f"build it again: roir drop {argument(name)}"
    )


def hide(connection: Connection, generation_id: int) -> None:
    """If readers see the generation, make its view hide the entries of partitions that are leaving or joining."""
    execute(connection, HIDE, {"generation": generation_id})


def refuse_older(connection: Connection, generation_id: int) -> None:
    """If readers see the generation, make its view refuse snapshots that don't see the caller's transaction.

    Such snapshots may miss entries of rows that they see. Also hides the entries that `hide` hides.
    """
    execute(connection, "SELECT roir.refuse_older(%(generation)s)", {"generation": generation_id})


def is_guarded(connection: Connection, name: QualifiedName) -> bool:
    """True if the view of that name checks the caller's snapshot."""
    return bool(execute(connection, IS_GUARDED, {"schema": name.schema, "name": name.name}).scalar_one())


def old_snapshots(connection: Connection, generation_id: int) -> list[Holder]:
    """The holders of snapshots older than a generation's publish, for which the guard stays. Look twice, not once.

    Known holders count as long as they exist, unknown ones for a day (`STANDBY_PATIENCE`). `unknown` names the latter
    for longer.
    """
    row = _published(connection, generation_id)
    return [one for one in holders(connection, row.mode_xid) if one.known or row.recent]


def began_before(connection: Connection, generation_id: int) -> list[Holder]:
    """The known holders whose transaction began before the publish: their snapshots are certainly older."""
    row = _published(connection, generation_id)
    return [one for one in holders(connection, row.mode_xid) if one.since is not None and one.since < row.at]


def unknown(connection: Connection, generation_id: int) -> list[Holder]:
    """Standbys that don't show their snapshots, and may still have an older one when the guard ends."""
    return [one for one in holders(connection, _published(connection, generation_id).mode_xid) if not one.known]


def _published(connection: Connection, generation_id: int) -> Row[Any]:
    return execute(connection, PUBLISHED, {"generation": generation_id, "patience": STANDBY_PATIENCE}).one()
