"""Sends all queries that read a source, so that code of its owner runs as the owner, whatever role roir connects as.

To read a table may run code of its owner: conditions and expressions of its indexes and its CHECKs (the planner
evaluates their constant parts), checks of domains, casts, views and rules behind a name. If the owner may do all that
our role may, a query is sent directly. Otherwise it goes through a SECURITY DEFINER function that the owner owns, but
whose body only roir can write (docs/architecture.md, "Whose code runs as whom").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, CursorResult, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import DATA_SCHEMA, quote
from airflow_roir.engine.database import bound, execute, sqlstate
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import RightMissing, SourceChanged

# The owner of roir's schema counts as roir. Another role with CREATE on it could replace roir's function by its own. A
# query that is sent directly must read tables: if a view has taken a name, a server that has this setting refuses it.
RIGHTS = """
SELECT s.*, CASE WHEN s.trusted AND current_setting('restrict_nonsystem_relation_kind', true) IS NOT NULL
                 THEN set_config('restrict_nonsystem_relation_kind', 'view', true) END AS barred
  FROM roir.standing(%(source)s::oid, %(others)s::oid[], %(names)s::text[], %(body)s) s
"""
OWNED = """
SELECT current_user::text AS role, pg_get_userbyid(p.proowner) = %(owner)s AS owned,
       (SELECT o.rolsuper FROM pg_roles o WHERE o.rolname = %(owner)s) AS of_super,
       has_schema_privilege(%(owner)s, p.pronamespace, 'CREATE') OR u.rolsuper AS may_create,
       CASE WHEN current_setting('server_version_num')::int >= 160000 THEN ' WITH SET TRUE' ELSE '' END AS options
  FROM pg_proc p, pg_roles u WHERE p.oid = to_regprocedure(%(function)s) AND u.rolname = current_user
"""
TYPES = """
SELECT string_agg(quote_ident(attname) || ' ' || format_type(atttypid, -1), ', ' ORDER BY attnum)
  FROM pg_attribute WHERE attrelid = to_regclass(%(relation)s) AND attnum > 0 AND NOT attisdropped
"""
# Domains are the only types whose input runs code of a role that isn't a superuser.
CHECKED = """
SELECT EXISTS (SELECT FROM pg_attribute a CROSS JOIN LATERAL roir.type_tree(a.atttypid) x (oid)
                 JOIN pg_type t ON t.oid = x.oid JOIN pg_roles o ON o.oid = t.typowner
                WHERE a.attrelid = %(oid)s AND a.attname = ANY (%(names)s) AND NOT a.attisdropped
                  AND t.typtype = 'd' AND NOT o.rolsuper)
"""
# Two sessions that hand over objects at once would fail: both change the schema's row in the catalog.
ONE_BY_ONE = "SELECT pg_advisory_xact_lock(hashtext('roir'), hashtext('owner'))"


def function_name(source_oid: int) -> str:
    """The name of the function that reads a source as its owner."""
    return f"{DATA_SCHEMA}.read_{source_oid}"


def rows(
    connection: Connection,
    source: Source,
    query: str,
    columns: str,
    values: Mapping[str, Any] | None = None,
    reads: Sequence[str] | None = None,
) -> CursorResult[Any]:
    """Send a query that reads a source. columns: its result, as a column definition list of built-in types.

    reads: names of the owner's tables in the query, by default the source's. They are locked already. If the owner
    isn't trusted, locks that the query takes are gone afterwards. Raises RightMissing if our role can't become the
    owner.
    """
    if is_trusted(connection, source, reads):
        return execute(connection, query, values)
    item, bindings = _item(connection, source, query, columns, values)
    return execute(connection, f"SELECT * FROM {item}", bindings)


def relation(
    connection: Connection,
    source: Source,
    query: str,
    columns: str,
    values: Mapping[str, Any] | None = None,
    reads: Sequence[str] | None = None,
) -> tuple[str, dict[str, Any]]:
    """As `rows`, as an item for FROM of roir's own statement, which gets values and runs no code of the owner.

    Returns the item, with the alias `r`, and the values to bind.
    """
    if is_trusted(connection, source, reads):
        return f"({query}) r", dict(values or {})
    return _item(connection, source, query, columns, values)


def is_trusted(connection: Connection, source: Source, reads: Sequence[str] | None = None) -> bool:
    """True if the source's owner is our role, or may do all that our role may. Raises RightMissing for several owners.

    reads: names of the tables to read, by default the source's. An owner changes only under an ACCESS EXCLUSIVE lock:
    if the tables were locked before, the answer holds to the transaction's end.
    """
    return bool(_standing(connection, source, reads)[1].trusted)


def of_now(connection: Connection, source: Source) -> Source:
    """The source with its present owner. A lock on the source keeps that owner to the transaction's end."""
    query = "SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = %(oid)s"
    return replace(source, owner=execute(connection, query, {"oid": source.oid}).scalar() or source.owner)


def row_type(connection: Connection, table: str) -> str:
    """The columns of one of roir's tables, as a column definition list; without modifiers, which queries may lack."""
    return str(execute(connection, TYPES, {"relation": table}).scalar_one())


def runs_checks(connection: Connection, source: Source, names: Sequence[str]) -> bool:
    """True if to read values of these columns from text runs a domain's checks: another role's code, as our role."""
    if not names or is_trusted(connection, source):
        return False
    return bool(execute(connection, CHECKED, {"oid": source.oid, "names": list(names)}).scalar_one())


@contextmanager
def for_a_while(connection: Connection, source: Source) -> Iterator[None]:
    """Drops the function that reads the source after the block, unless it existed before. One transaction."""
    function = f"{function_name(source.oid)}(text)"
    made = execute(connection, "SELECT to_regprocedure(%(f)s)", {"f": function}).scalar() is not None
    yield
    if not made:
        execute(connection, f"DROP FUNCTION IF EXISTS {function}")


def install(connection: Connection, source: Source) -> None:
    """Make the function that reads the source as its owner, if the owner isn't trusted and it doesn't exist."""
    source, standing = _standing(connection, source)
    if standing.trusted or standing.made:
        return
    if standing.may_create:
        raise RightMissing(
            f"table {source.name}: its owner {quote(source.owner)} has CREATE on schema {DATA_SCHEMA}, and could "
            f"replace roir's functions there. Run: REVOKE CREATE ON SCHEMA {DATA_SCHEMA} FROM {quote(source.owner)}"
        )
    name = function_name(source.oid)
    with connection.begin_nested():
        execute(connection, ONE_BY_ONE)
        source, standing = _standing(connection, source)
        if standing.made:
            return
        # Dropped, not replaced: CREATE OR REPLACE keeps its owner, who may alter all but the body.
        execute(connection, f"DROP FUNCTION IF EXISTS {name}(text)")
        execute(connection, render(source))
        rights.take_back(connection, functions=[f"{name}(text)"])
        hand_over(connection, source, f"{name}(text)")
        # The owner's function also reads roir's tables, and needs the rights: REASSIGN OWNED doesn't bring them.
        execute(connection, "SELECT roir.give_to_owner(%(source)s::oid)", {"source": source.oid})


def render(source: Source) -> str:
    """The statement that creates the function. Depends on nothing but its argument."""
    tag = "$roir$"
    while tag in source.owner:
        tag = f"{tag[:-1]}_$"
    return (
        f"CREATE FUNCTION {function_name(source.oid)}(statement text) RETURNS SETOF record\n"
        f"LANGUAGE plpgsql SECURITY DEFINER AS {tag}{_body(source)}{tag}"
    )


def _body(source: Source) -> str:
    """The function's body. However the owner alters the function, the body runs as that owner and can set no role."""
    literal = source.owner.replace("'", "''")
    return f"""
DECLARE
  whole boolean := false;
BEGIN
  IF current_user OPERATOR(pg_catalog.<>) '{literal}'::pg_catalog.name THEN
    RAISE EXCEPTION USING ERRCODE = 'RO003', MESSAGE = 'a source is read as its owner only';
  END IF;
  BEGIN
    -- Only SECURITY DEFINER, where no role can be set, refuses this.
    PERFORM pg_catalog.set_config('role', 'none', true);
    RAISE EXCEPTION USING ERRCODE = 'RO003', MESSAGE = 'a source is read by SECURITY DEFINER only';
  EXCEPTION WHEN insufficient_privilege THEN NULL;
  END;
  BEGIN
    RETURN QUERY EXECUTE statement;
    whole := true;
    -- The rows stay. Side effects are undone: settings, cursors, deferred triggers, temporary tables.
    RAISE EXCEPTION USING ERRCODE = 'RO002';
  EXCEPTION WHEN SQLSTATE 'RO002' THEN
    IF NOT whole THEN
      RAISE;
    END IF;
  END;
END
"""


def hand_over(connection: Connection, source: Source, function: str) -> None:
    """Make the source's owner the owner of one of roir's functions. function: with its arguments' types.

    Raises RightMissing if our role may not.
    """
    row = execute(connection, OWNED, {"function": function, "owner": source.owner}).one()
    if row.owned:
        return
    owner = quote(source.owner)
    # To become the owner of a function, a role needs CREATE on its schema at that moment.
    before = f"GRANT CREATE ON SCHEMA {DATA_SCHEMA} TO {owner}"
    after = f"REVOKE CREATE ON SCHEMA {DATA_SCHEMA} FROM {owner}"
    try:
        with connection.begin_nested():
            if not row.may_create:
                execute(connection, ONE_BY_ONE)
            for statement in (
                *([] if row.may_create else [before]),
                f"ALTER FUNCTION {function} OWNER TO {owner}",
                *([] if row.may_create else [after]),
            ):
                execute(connection, statement)
    except DBAPIError as error:
        if sqlstate(error) != "42501":
            raise
        if row.of_super:
            raise RightMissing(
                f"table {source.name} belongs to the superuser {owner}, whose members can become superuser, too. Give "
                f"the table to another role: ALTER TABLE {source.sql} OWNER TO {quote(row.role)}"
            ) from error
        raise RightMissing(
            f"table {source.name}: its capture must run as its owner, but role {quote(row.role)} can't become the "
            f"owner. Run: GRANT {owner} TO {quote(row.role)}{row.options}"
        ) from error


def _item(
    connection: Connection, source: Source, query: str, columns: str, values: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    install(connection, source)
    return f"{function_name(source.oid)}(%(as_owner)s) AS r({columns})", {"as_owner": bound(connection, query, values)}


def _standing(connection: Connection, source: Source, reads: Sequence[str] | None = None) -> tuple[Source, Row[Any]]:
    """The rights of the source's owner; and the source with that owner, which may have changed since it was read."""
    values = {
        "source": source.oid,
        "others": list(source.relations) if reads is None else [],
        "names": [source.sql] if reads is None else list(reads),
        "body": _body(source),
    }
    row = execute(connection, RIGHTS, values).one()
    if row.owner is not None and row.owner != source.owner and row.owners == 1:
        return _standing(connection, replace(source, owner=row.owner), reads)
    if not row.trusted and row.owners > 1:
        raise RightMissing(
            f"table {source.name} belongs to {quote(source.owner)}, its partition {row.other} to another role, but "
            f"one role must read both. Run: ALTER TABLE {row.other} OWNER TO {quote(source.owner)}; and the same for "
            "each partition that roir plan lists"
        )
    if reads is None and not row.named:
        raise SourceChanged(f"table {source.name} was renamed meanwhile; start again")
    return source, row
