"""The shape table of an index apart: an empty table on the index server that has the columns of the shards' tables."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import DATA_SCHEMA, IndexDefinition, QualifiedName, quote
from airflow_roir.engine.database import execute, said, sqlstate
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source.catalog import columns_of
from airflow_roir.engine.source.source import Column, Source
from airflow_roir.errors import InvalidInput
from airflow_roir.shards.sources import indexed_columns

PREFIX = "shape_"
# Errors of a type's name: undefined object, schema or type; no name of a type.
UNKNOWN = ("42704", "3F000", "42P01", "42601")
# The shard sends the types' names, so each is resolved as a name before a statement contains it. It must exist here.
NAMED = """
SELECT x.name FROM unnest(%(names)s::text[], %(types)s::text[], %(collations)s::text[]) x (name, type, coll)
 WHERE to_regtype(x.type) IS NULL OR x.coll IS NOT NULL AND to_regcollation(x.coll) IS NULL LIMIT 1
"""
# Values are read from text with our rights, which would run the checks of a domain that another role owns.
CHECKED = """
SELECT a.attname AS name, t.oid::regtype::text AS domain, pg_get_userbyid(t.typowner) AS owner
  FROM pg_attribute a CROSS JOIN LATERAL roir.type_tree(a.atttypid) x (oid)
  JOIN pg_type t ON t.oid = x.oid JOIN pg_roles o ON o.oid = t.typowner
 WHERE a.attrelid = %(shape)s::regclass AND a.attnum > 0 AND NOT a.attisdropped
   AND t.typtype = 'd' AND NOT o.rolsuper AND o.rolname <> current_user LIMIT 1
"""
OID = "SELECT %(shape)s::regclass::oid::bigint"
# Shape tables whose index was dropped. That of a prepare under way isn't visible here: the table is created in the
# transaction that creates its index.
ORPHANS = f"""
SELECT c.relname FROM pg_class c
 WHERE c.relnamespace = '{DATA_SCHEMA}'::regnamespace AND c.relkind = 'r' AND starts_with(c.relname, '{PREFIX}')
   AND NOT EXISTS (SELECT FROM roir.index i WHERE i.source_oid = c.oid AND i.dropped_at IS NULL)
"""


def create(connection: Connection, source: Source, definition: IndexDefinition, shard_column: str) -> QualifiedName:
    """Creates the shape table for the table of one shard, which is alike in all shards. Raises InvalidInput."""
    columns = [source.columns[name] for name in indexed_columns(source, definition)]
    if shard_column in source.columns:
        raise InvalidInput(
            f"table {source.name} has a column {quote(shard_column)} itself; choose another name for the view's column "
            "with the shard's name: --shard-column"
        )
    name = QualifiedName(DATA_SCHEMA, f"{PREFIX}{secrets.token_hex(6)}")
    key = ", ".join(map(quote, (shard_column, *source.primary_key)))
    defined = [f'{quote(shard_column)} text COLLATE "C" NOT NULL', *map(_definition, columns), f"PRIMARY KEY ({key})"]
    try:
        with connection.begin_nested():
            _check_names(connection, source, columns)
            execute(connection, f"CREATE TABLE {name.sql} ({', '.join(defined)})")
    except DBAPIError as error:
        if sqlstate(error) not in UNKNOWN:
            raise
        raise InvalidInput(
            f"the index server can't hold the columns of {source.name}: {said(error)}. Create there what they need, as "
            "it is in the shards"
        ) from error
    _check_alike(connection, source, name, columns)
    rights.take_back(connection, [name.sql])
    return name


def _check_names(connection: Connection, source: Source, columns: Sequence[Column]) -> None:
    values = {
        "names": [one.name for one in columns],
        "types": [one.type for one in columns],
        "collations": [one.collation for one in columns],
    }
    name = execute(connection, NAMED, values).scalar()
    if name is not None:
        column = source.columns[name]
        told = column.type if column.collation is None else f"{column.type} COLLATE {column.collation}"
        raise InvalidInput(
            f"the index server can't hold column {quote(name)} of {source.name}: it has no {told}. Create there what "
            "it needs, as it is in the shards"
        )


def _check_alike(connection: Connection, source: Source, shape: QualifiedName, columns: Sequence[Column]) -> None:
    made = columns_of(connection, execute(connection, OID, {"shape": shape.sql}).scalar_one())
    for one in columns:
        found = made[one.name]
        if (found.type, found.collation, found.domain) != (one.type, one.collation, False):
            raise InvalidInput(
                f"column {quote(one.name)} of {source.name} is of type {one.type}, which is another type on the "
                f"index server{': a domain' if found.domain else ''}. Create it there as it is in the shards"
            )
    row = execute(connection, CHECKED, {"shape": shape.sql}).first()
    if row is not None:
        raise InvalidInput(
            f"column {quote(row.name)} of {source.name} has values of domain {row.domain}, which belongs to "
            f"{quote(row.owner)} on the index server: its checks would run with the rights of this role. Run: "
            f"ALTER DOMAIN {row.domain} OWNER TO CURRENT_USER"
        )


def drop(connection: Connection, name: QualifiedName) -> None:
    """Drops a shape table whose index was dropped."""
    execute(connection, f"DROP TABLE IF EXISTS {name.sql}")


def left_over(connection: Connection) -> list[QualifiedName]:
    """The shape tables whose index was dropped."""
    return [QualifiedName(DATA_SCHEMA, name) for name in execute(connection, ORPHANS).scalars()]


def _definition(column: Column) -> str:
    collation = f" COLLATE {column.collation}" if column.collation else ""
    return f"{quote(column.name)} {column.type}{collation}{' NOT NULL' if column.not_null else ''}"
