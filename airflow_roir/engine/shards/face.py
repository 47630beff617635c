"""The face of an index apart: an empty table on the index server that has the columns of the shards' tables."""

from __future__ import annotations

import secrets

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition, QualifiedName, quote
from airflow_roir.engine import rights
from airflow_roir.engine.database import execute, said, sqlstate
from airflow_roir.engine.shards.sources import columns_of
from airflow_roir.engine.source import Column, Source
from airflow_roir.engine.tables import DATA_SCHEMA
from airflow_roir.errors import InvalidInput

PREFIX = "face_"
# Undefined object, schema, type.
UNKNOWN = ("42704", "3F000", "42P01")
# Of no index, and older than a prepare takes.
LEFT = f"""
SELECT c.relname FROM pg_class c
 WHERE c.relnamespace = '{DATA_SCHEMA}'::regnamespace AND c.relkind = 'r' AND starts_with(c.relname, '{PREFIX}')
   AND NOT EXISTS (SELECT FROM roir.index i WHERE i.source_oid = c.oid AND i.dropped_at IS NULL)
"""


def create(connection: Connection, source: Source, definition: IndexDefinition, shard_column: str) -> QualifiedName:
    """Make the face for the table of one shard, which is alike in all. Raises InvalidInput."""
    columns = [source.columns[name] for name in columns_of(source, definition)]
    if shard_column in source.columns:
        raise InvalidInput(
            f"table {source.name} has a column {quote(shard_column)} itself; choose another name for the column that "
            "tells the shard: --shard-column"
        )
    name = QualifiedName(DATA_SCHEMA, f"{PREFIX}{secrets.token_hex(6)}")
    key = ", ".join(map(quote, (shard_column, *source.primary_key)))
    defined = [f'{quote(shard_column)} text COLLATE "C" NOT NULL', *map(_definition, columns), f"PRIMARY KEY ({key})"]
    try:
        with connection.begin_nested():
            execute(connection, f"CREATE TABLE {name.sql} ({', '.join(defined)})")
    except DBAPIError as error:
        if sqlstate(error) not in UNKNOWN:
            raise
        raise InvalidInput(
            f"the index server can't hold the columns of {source.name}: {said(error)}. Create there what they need, as "
            "it is in the shards"
        ) from error
    rights.take_back(connection, [name.sql])
    return name


def drop(connection: Connection, name: QualifiedName) -> None:
    """Drop a face that no index has any more."""
    execute(connection, f"DROP TABLE IF EXISTS {name.sql}")


def left_over(connection: Connection) -> list[QualifiedName]:
    """Faces of no index: of a prepare that was killed or is under way, or of an index that was dropped."""
    return [QualifiedName(DATA_SCHEMA, name) for name in execute(connection, LEFT).scalars()]


def _definition(column: Column) -> str:
    collation = f" COLLATE {column.collation}" if column.collation else ""
    return f"{quote(column.name)} {column.type}{collation}{' NOT NULL' if column.not_null else ''}"
