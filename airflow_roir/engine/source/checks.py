"""Refuses, before anything is changed, a build that the server, the role, the source or the definition rules out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import MAX_KEY_COLUMNS, IndexDefinition, quote
from airflow_roir.engine.database import execute, said, sqlstate
from airflow_roir.engine.schema.schema import no_rights
from airflow_roir.engine.source import expressions, owner
from airflow_roir.engine.source.catalog import identity_columns
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, NotFound, RightMissing
from airflow_roir.nearest import meant_of

OLDEST_SERVER = 150000
NEWEST_TRIED = 18


def check_server(connection: Connection) -> None:
    """Raise InvalidInput if the server is older than PostgreSQL 15 (NULLS NOT DISTINCT, MERGE)."""
    version = int(execute(connection, "SELECT current_setting('server_version_num')").scalar_one())
    if version < OLDEST_SERVER:
        raise InvalidInput(f"the server is PostgreSQL {version // 10000}; roir needs {OLDEST_SERVER // 10000} or newer")


def untried_server(connection: Connection) -> str | None:
    """A warning if the server is newer than any that roir was tested with; None if it isn't."""
    version = int(execute(connection, "SELECT current_setting('server_version_num')").scalar_one()) // 10000
    return untried(version)


def untried(version: int) -> str | None:
    """As `untried_server`, given the server's major version."""
    if version <= NEWEST_TRIED:
        return None
    return (
        f"PostgreSQL {version} is untested: roir was tested with {OLDEST_SERVER // 10000} to {NEWEST_TRIED}. Its MERGE "
        "and SPLIT PARTITIONS should be detected as partitions that came and went, its REPACK as a rewritten table"
    )


def check_rights(connection: Connection) -> None:
    """Raise InvalidInput if the role may not use the control schema. Does nothing without a control schema."""
    row = execute(
        connection,
        "SELECT bool_and(has_schema_privilege(oid, 'USAGE') "
        "AND (nspname = 'roir' OR has_schema_privilege(oid, 'CREATE'))) AS may "
        "FROM pg_namespace WHERE nspname IN ('roir', 'roir_data')",
    ).one()
    if row.may is False:
        raise no_rights(connection)


ROW_SECURITY = """
SELECT c.relrowsecurity AS enabled, current_user AS role,
       ARRAY(SELECT r.oid::regclass::text FROM unnest(%(relations)s::oid[]) r (oid)
              WHERE row_security_active(r.oid)) AS hidden
  FROM pg_class c WHERE c.oid = %(oid)s
"""


def check_row_security(connection: Connection, source: Source, ignore: bool) -> None:
    """Raise InvalidInput if the index would undo row-level security, or if that would hide rows from the build.

    ignore: the user knows that the index's view shows rows that the policies hide. After prepare only the fingerprint
    checks this: it includes whether row-level security is enabled.
    """
    row = execute(connection, ROW_SECURITY, {"oid": source.oid, "relations": list(source.relations)}).one()
    if row.enabled and not ignore:
        raise InvalidInput(
            f"table {source.name} has row-level security; all who may read the index's view would see the rows "
            "that the policies hide. If you want that, set ignore_row_security (roir build --ignore-row-security), "
            "and grant SELECT on the view only to roles that may see all rows"
        )
    if row.hidden:
        raise InvalidInput(
            f"row-level security of {', '.join(row.hidden)} applies to role {quote(row.role)}, too, so a build would "
            f"miss rows. Use {'; '.join(f'ALTER TABLE {one} NO FORCE ROW LEVEL SECURITY' for one in row.hidden)}, or "
            f"ALTER ROLE {quote(row.role)} BYPASSRLS"
        )


MAY_LOCK = "SELECT current_user::text AS role, has_any_column_privilege(%(oid)s::oid, 'UPDATE') AS may"


def check_row_locks(connection: Connection, source: Source, unique: bool) -> None:
    """Raise RightMissing if the capture couldn't lock rows through roir's view of the source.

    It locks rows for a unique key, and for a deferrable primary key. Even an owner can lack the right.
    """
    row = execute(connection, MAY_LOCK, {"oid": source.oid}).one() if unique or source.pk_deferrable else None
    if row is not None and not row.may:
        raise RightMissing(
            f"role {quote(row.role)} may not lock rows of table {source.name}, as the capture does for a unique index "
            "or a deferrable primary key, so writes would fail. "
            f"Run: GRANT UPDATE ON {source.sql} TO {quote(row.role)}"
        )


HASHED_DOMAIN = """
SELECT t.oid::regclass::text AS table, a.attname AS name, format_type(a.atttypid, NULL) AS type
  FROM unnest(%(relations)s::oid[]) t (oid)
  JOIN pg_partitioned_table x ON x.partrelid = t.oid AND x.partstrat = 'h'
  JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = ANY (x.partattrs)
  JOIN pg_type y ON y.oid = a.atttypid AND y.typtype = 'd' ORDER BY 1, 2 LIMIT 1
"""


def check_partition_key(connection: Connection, source: Source) -> None:
    """Raise InvalidInput if partitions go by the hash of a domain: roir couldn't find an entry's partition.

    The server hashes values of the domain, and an entry has them as the domain's base type.
    """
    values = {"relations": list(source.relations)}
    row = execute(connection, HASHED_DOMAIN, values).first() if source.partitioned else None
    if row is not None:
        raise InvalidInput(
            f"table {row.table} is partitioned by the hash of {quote(row.name)}, which is of domain {row.type}; roir "
            "can't tell which partition an entry belongs to. Partition it by a column of the domain's base type"
        )


COLLATIONS = """
SELECT a.attname AS name, x.sql, x.recorded, x.actual, x.refresh
  FROM pg_index i
 CROSS JOIN LATERAL unnest(i.indkey[0:i.indnkeyatts - 1], i.indcollation[0:i.indnkeyatts - 1])
       AS k (attnum, coll)
  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 CROSS JOIN LATERAL (
       SELECT c.oid::regcollation::text AS sql, c.collversion AS recorded, pg_collation_actual_version(c.oid) AS actual,
              format('ALTER COLLATION %%s REFRESH VERSION', c.oid::regcollation) AS refresh
         FROM pg_collation c WHERE c.oid = k.coll AND c.oid <> 'pg_catalog."default"'::regcollation
       UNION ALL
       SELECT 'of the database', d.datcollversion, pg_database_collation_actual_version(d.oid),
              format('ALTER DATABASE %%I REFRESH COLLATION VERSION', d.datname)
         FROM pg_database d
        WHERE d.datname = current_database() AND k.coll = 'pg_catalog."default"'::regcollation) x
 WHERE i.indrelid = %(oid)s AND i.indisprimary AND x.recorded IS DISTINCT FROM x.actual AND x.recorded IS NOT NULL
"""


def check_bounds(connection: Connection, source: Source) -> None:
    """Raise InvalidInput if to read the bounds of partitions would run another role's code as our role."""
    try:
        execute(connection, "SELECT roir.check_source(%(source)s::oid)", {"source": source.oid})
    except DBAPIError as error:
        if sqlstate(error) not in ("42501", "0A000"):
            raise
        raise InvalidInput(said(error)) from error


def check_collations(connection: Connection, source: Source) -> None:
    """Raise InvalidInput if the library of a collation in the primary key was exchanged.

    Its order may be another one now; then the primary key's index, which scans use, doesn't find all rows. Types that
    have a collation inside (ranges, composites) aren't checked.
    """
    row = execute(connection, COLLATIONS, {"oid": source.oid}).first()
    if row is not None:
        raise InvalidInput(
            f"table {source.name}: collation {row.sql} of primary key column {quote(row.name)} is of version "
            f"{row.actual} and recorded as {row.recorded}: its library was exchanged, so the primary key's index "
            f"may be in the wrong order, and a scan may miss rows. Run REINDEX TABLE {source.name}, REINDEX all "
            f"other indexes of that collation, then {row.refresh}"
        )


# For a domain its base type, since entries have no domains; for an array its elements' type, which has the rights.
TYPES_NOT_USABLE = """
SELECT DISTINCT format_type(coalesce(e.oid, b.oid), NULL) AS type, current_user::text AS role
  FROM pg_attribute a
 CROSS JOIN LATERAL (
       WITH RECURSIVE up AS (
           SELECT t.oid, t.typtype, t.typbasetype FROM pg_type t WHERE t.oid = a.atttypid
           UNION ALL
           SELECT t.oid, t.typtype, t.typbasetype FROM up JOIN pg_type t ON t.oid = up.typbasetype
            WHERE up.typtype = 'd')
       SELECT up.oid FROM up WHERE up.typtype <> 'd') b
  LEFT JOIN pg_type e ON e.typarray = b.oid
 WHERE a.attrelid = %(oid)s
   AND (a.attname = ANY (%(columns)s)
        OR a.attnum = ANY ((SELECT i.indkey FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisprimary)::int2[]))
   AND NOT has_type_privilege(b.oid, 'USAGE') ORDER BY 1
"""


def types_not_usable(connection: Connection, oid: int, definition: IndexDefinition) -> Sequence[Row[Any]]:
    """The types of entries' columns that our role may not use in tables, each with our role's name."""
    columns = [*definition.key, *definition.include]
    return execute(connection, TYPES_NOT_USABLE, {"oid": oid, "columns": columns}).all()


def _check_types(connection: Connection, source: Source, definition: IndexDefinition) -> None:
    for row in types_not_usable(connection, source.oid, definition):
        raise RightMissing(
            f"index {definition.name}: role {quote(row.role)} may not use type {row.type}, which the index's entries "
            f"contain. Run: GRANT USAGE ON TYPE {row.type} TO {quote(row.role)}"
        )


def check_definition(connection: Connection, source: Source, definition: IndexDefinition, exists: bool = False) -> None:
    """Raise NotFound or InvalidInput if the definition doesn't fit the source. Changes nothing.

    exists: it is that of an index, whose own functions hold its expressions.
    """
    for check in of_definition(connection, source, definition, exists):
        check()


def of_definition(
    connection: Connection, source: Source, definition: IndexDefinition, exists: bool, alone: bool = False
) -> Iterator[Callable[[], None]]:
    """The checks of `check_definition`; each can be called whether or not another one refused.

    alone: the database has no control schema.
    """
    for name in definition.columns:
        yield partial(_check_column, source, definition, name)
    for name in definition.include:
        yield partial(_check_included, source, definition, name)
    yield partial(_check_width, source, definition)
    yield partial(_check_types, connection, source, definition)
    check_order = _check_order_of_type if alone else _check_order
    for name in definition.key:
        if name in source.columns and name in definition.columns:
            yield partial(check_order, connection, source, definition, name)
    if alone:
        yield partial(_check_readable, connection, source, definition)
    # Before there is a control schema, code of another owner would run as our role.
    if exists or (alone and source.owner != execute(connection, "SELECT current_user").scalar_one()):
        return
    # One by one: the user sees all that the server refuses.
    for expression in definition.expressions:
        yield partial(
            expressions.check, connection, source, replace(definition, expressions=(expression,), where=""), alone
        )
    if definition.where:
        yield partial(expressions.check, connection, source, replace(definition, expressions=()), alone)


def _check_column(source: Source, definition: IndexDefinition, name: str) -> None:
    index = definition.name
    if name not in source.columns:
        has = f"{', '.join(map(quote, source.columns))}{meant_of(name, source.columns)}"
        raise NotFound(f"index {index}: table {source.sql} has no column {quote(name)}; it has {has}")
    if source.columns[name].virtual:
        raise InvalidInput(
            f"index {index}: column {quote(name)} is a virtual generated column, which triggers can't "
            "see; make it STORED"
        )


def _check_included(source: Source, definition: IndexDefinition, name: str) -> None:
    if name in source.primary_key:
        raise InvalidInput(
            f"index {definition.name}: column {quote(name)} belongs to the primary key, which every entry has; "
            "don't include it"
        )


def _check_width(source: Source, definition: IndexDefinition) -> None:
    identity = identity_columns(source, definition)
    if len(identity) > MAX_KEY_COLUMNS:
        raise InvalidInput(
            f"index {definition.name}: key and primary key together have {len(identity)} columns; "
            f"PostgreSQL allows {MAX_KEY_COLUMNS}"
        )


# Roles that read the source: its owner, by whose rights the capture reads, and ours.
UNREADABLE = """
SELECT r.rolname::text AS role, quote_ident(n.nspname) AS schema, has_schema_privilege(r.oid, n.oid, 'USAGE') AS reaches
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_roles r ON r.oid = c.relowner OR r.rolname = current_user
 WHERE c.oid = %(oid)s
   AND NOT (has_schema_privilege(r.oid, n.oid, 'USAGE') AND has_table_privilege(r.oid, c.oid, 'SELECT'))
 ORDER BY r.oid = c.relowner DESC LIMIT 1
"""


def _unreadable(connection: Connection, source: Source, of: str) -> RightMissing:
    """The error of a source that can't be read, with the statement that gives the role what it lacks."""
    row = execute(connection, UNREADABLE, {"oid": source.oid}).first()
    if row is None:
        return RightMissing(f"{of}{source.sql} can't be read, though its owner and this role have the rights")
    role = quote(row.role)
    if not row.reaches:
        return RightMissing(
            f"{of}role {role} may not look into schema {row.schema}, where {source.sql} is; "
            f"run: GRANT USAGE ON SCHEMA {row.schema} TO {role}"
        )
    return RightMissing(f"{of}role {role} may not read {source.sql}; run: GRANT SELECT ON {source.sql} TO {role}")


def _check_order(connection: Connection, source: Source, definition: IndexDefinition, name: str) -> None:
    index = definition.name
    try:
        with connection.begin_nested():
            query = f"SELECT 1 FROM {source.sql} ORDER BY {quote(name)} LIMIT 0"
            owner.rows(connection, source, query, "one int")
    except DBAPIError as error:
        if sqlstate(error) == "42501":
            raise _unreadable(connection, source, f"index {index}: ") from error
        if sqlstate(error) != "42883":
            raise
        raise _without_order(source, definition, name) from error


def _check_order_of_type(connection: Connection, source: Source, definition: IndexDefinition, name: str) -> None:
    """As `_check_order`, by the type alone: the function that reads as the owner is part of the control schema."""
    try:
        with connection.begin_nested():
            execute(connection, f"SELECT NULL::{source.columns[name].type} ORDER BY 1 LIMIT 0")
    except DBAPIError as error:
        if sqlstate(error) != "42883":
            raise
        raise _without_order(source, definition, name) from error


def _without_order(source: Source, definition: IndexDefinition, name: str) -> InvalidInput:
    return InvalidInput(
        f"index {definition.name}: key column {quote(name)} is of type {source.columns[name].type}, which has "
        "no B-tree order. Choose another column, or include it instead"
    )


def _check_readable(connection: Connection, source: Source, definition: IndexDefinition) -> None:
    if execute(connection, UNREADABLE, {"oid": source.oid}).first() is not None:
        raise _unreadable(connection, source, f"index {definition.name}: ")
