"""The hash of an entry's key, in SQL: the same for keys that are equal in the unique index, NULL for no key at all."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import execute, said, sqlstate
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry

# The functions of the hash class with the same equality operator as the index: by it 1.0 equals 1.00, -0 equals 0, and
# the cases of a citext are equal. Its second function takes a seed, and returns 64 bits.
FUNCTIONS = """
SELECT k.position, f.name
  FROM pg_index i
 CROSS JOIN LATERAL unnest(i.indclass) WITH ORDINALITY AS k (opclass, position)
  LEFT JOIN LATERAL (
       SELECT quote_ident(n.nspname) || '.' || quote_ident(p.proname) AS name
         FROM pg_opclass oc
         JOIN pg_amop tree ON tree.amopfamily = oc.opcfamily AND tree.amoplefttype = oc.opcintype
              AND tree.amoprighttype = oc.opcintype AND tree.amopstrategy = 3
         JOIN pg_amop hash ON hash.amopopr = tree.amopopr AND hash.amopstrategy = 1
         JOIN pg_am am ON am.oid = hash.amopmethod AND am.amname = 'hash'
         JOIN pg_amproc f ON f.amprocfamily = hash.amopfamily AND f.amproclefttype = hash.amoplefttype
              AND f.amprocrighttype = hash.amoprighttype AND f.amprocnum = 2
         JOIN pg_proc p ON p.oid = f.amproc
         JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE oc.oid = k.opclass
        LIMIT 1) f ON true
 WHERE i.indexrelid = %(index)s::regclass
 ORDER BY k.position
"""
# The hash of a NULL, if two NULLs are the same.
NULL_HASH = 7_046_029_254_386_353_131


def missing(connection: Connection, types: Sequence[str]) -> str | None:
    """Why keys of these types have no hash to find duplicates by early; None if they have one."""
    try:
        with connection.begin_nested():
            # This also checks the elements of arrays, ranges and rows.
            values = ", ".join(f"NULL::{one}" for one in types)
            execute(connection, f"SELECT hash_record_extended(ROW({values}), 0)")
    except DBAPIError as error:
        if sqlstate(error) != "42883":
            raise
        return said(error)
    return None


def untold(connection: Connection, entry: Entry) -> str | None:
    """Why no duplicates are found before the seal; None if they are, or if the index isn't unique."""
    if not entry.enforced:
        return None
    why = missing(connection, [column.cast for column in entry.columns[: entry.key]])
    return why and f"duplicates are found by the seal alone, once all is copied: {why}"


def key_hash(connection: Connection, generation_id: int, entry: Entry, prefix: str) -> str | None:
    """SQL for the hash of a key, an int8, from columns with the given prefix. None if a type of the key has no hash."""
    types = [column.cast for column in entry.columns[: entry.key]]
    if missing(connection, types) is not None:
        return None
    index = {"index": physical.base_key(generation_id)}
    names = [row.name for row in execute(connection, FUNCTIONS, index)][: entry.key]
    if len(names) < entry.key or None in names:
        return None
    # A seed for each column: without it the keys (1, 2) and (2, 1) would have the same hash.
    hashes = [f"{name}({prefix}c{i + 1}, {i})" for i, name in enumerate(names)]
    if not entry.apart_positions:
        hashes = [f"coalesce({one}, {NULL_HASH - i})" for i, one in enumerate(hashes)]
    return " # ".join(hashes)
