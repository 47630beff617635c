"""Checks a unique index over shards: whether its tables allow it, and whether it is enforced
(docs/architecture-shards.md).
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput
from airflow_roir.shards.shard import SHARD_SCHEMA, Shard

OWN = f"SELECT {SHARD_SCHEMA}.is_unique(%(source)s, %(columns)s)"
# Two servers may differ about the equality of such a type, or of its parts.
BY_LIBRARY = f"""
SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type
  FROM pg_attribute a CROSS JOIN LATERAL {SHARD_SCHEMA}.type_tree(a.atttypid) x (oid) JOIN pg_type t ON t.oid = x.oid
 WHERE a.attrelid = %(source)s AND a.attname = ANY (%(columns)s)
   AND (t.typname = 'citext'
        OR EXISTS (SELECT FROM pg_collation c
                    WHERE NOT c.collisdeterministic
                      AND c.oid IN (SELECT a.attcollation
                                    UNION SELECT t.typcollation
                                    UNION SELECT r.rngcollation FROM pg_range r WHERE r.rngtypid = t.oid
                                    UNION SELECT p.attcollation FROM pg_attribute p
                                           WHERE t.typtype = 'c' AND p.attrelid = t.typrelid AND p.attnum > 0)))
 LIMIT 1
"""
PROBLEM = "SELECT roir.unique_problem(%(id)s)"


def check(connection: Connection, one: Shard, source: Source, definition: IndexDefinition) -> None:
    """Raises InvalidInput if an index over this table of a shard can't be unique. connection: in the shard."""
    where = f"index {definition.name}: shard {quote(one.name)}"
    if source.partitioned:
        raise InvalidInput(
            f"{where}: {source.name} has partitions, and an index over shards can't be unique then: an attached "
            "partition brings rows without a write that could be announced"
        )
    listed = {"source": source.oid, "columns": list(definition.key)}
    by_library = execute(connection, BY_LIBRARY, listed).first()
    if by_library is not None:
        raise InvalidInput(
            f"{where}: column {quote(by_library.name)} of {source.name} is of type {by_library.type}, whose equality "
            "each server's own libraries decide; an index over shards can't be unique by it. Take a column "
            'that is equal byte for byte, such as a generated column lower(…) of type text COLLATE "C"'
        )
    numbers = {"source": source.oid, "columns": [source.columns[name].attnum for name in definition.key]}
    if not execute(connection, OWN, numbers).scalar_one():
        columns = ", ".join(map(quote, definition.key))
        raise InvalidInput(
            f"{where}: {source.name} has no unique index of its own on ({columns}), or on some of these columns, that "
            "is valid, has no WHERE and no expressions: roir keeps keys apart between shards, each shard keeps its "
            f"own rows apart. There: CREATE UNIQUE INDEX CONCURRENTLY ON {source.sql} ({columns})"
        )


def problem(connection: Connection, generation_id: int) -> str | None:
    """Why the keys of a generation may be in two shards; None if they can't, or if it isn't unique over shards."""
    found: str | None = execute(connection, PROBLEM, {"id": generation_id}).scalar_one()
    return found
