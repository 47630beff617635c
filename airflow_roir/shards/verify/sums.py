"""The SQL that hashes and sums rows in a shard and entries on the index server, so that equal ones have equal sums.

The sides may have different versions, encodings and collations. So a row is hashed as a record, whose hash is made of
the hashes of its columns. Numbers, times and bytes have the same hash in all versions; text is hashed as bytes
(collation "C") in UTF8, all else by its text, under pinned settings. If a hash differed between two servers, all rows
would be looked at but no difference found, since only texts decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.generation.entry import Entry, EntryColumn
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.verify import hashes
from airflow_roir.errors import SourceChanged

# The most buckets of a feed: a bucket's number is made of its feed's place and its own number.
MOST_BUCKETS = 65_536


def is_utf8(connection: Connection) -> bool:
    """True if the server's texts are in UTF8, or in an unknown encoding."""
    raw: Any = connection.connection.dbapi_connection
    return raw.get_parameter_status("server_encoding") in ("UTF8", "SQL_ASCII")


def without(entry: Entry, position: int) -> Entry:
    """An entry of the index server without the column of the shard's name: as a shard has it."""
    columns = entry.columns[:position] + entry.columns[position + 1 :]
    return replace(entry, columns=columns, identity=entry.identity - 1, key=entry.key - (position < entry.key))


def followed(entry: Entry, source: Source) -> Entry:
    """A shard's entry with the present names of its columns. Raises SourceChanged."""
    names = {column.attnum: column.name for column in source.columns.values()}
    for column in entry.columns:
        if column.attnum not in names:
            raise SourceChanged(f"column {column.source} of {source.name}, which is in an index, was dropped")
    return replace(entry, columns=tuple(replace(one, source=names[one.attnum]) for one in entry.columns))


def image(column: EntryColumn, value: str, utf8: bool) -> str:
    """SQL that turns a value into one with the same hash on all servers; two different values stay different."""
    if column.cast == "boolean":
        return f"{value}::int"
    found = hashes.image(column, value)
    if found.endswith('COLLATE "C"') and not utf8:
        return f"convert_to({found}::text, 'UTF8')"
    return found


def key_hash(entry: Entry, values: Sequence[str], utf8: bool) -> str:
    """SQL for the hash of the primary key."""
    key = [
        image(column, value, utf8) for column, value in zip(entry.columns, values, strict=True) if column.primary_key
    ]
    return f"hash_record_extended(ROW({', '.join(key)}), 0)"


def row_hash(entry: Entry, values: Sequence[str], utf8: bool) -> str:
    """SQL for the hash of all columns, seeded by the primary key: if two rows swap values, the sum changes."""
    images = []
    for column, value in zip(entry.columns, values, strict=True):
        images.append(image(column, value, utf8))
        if column.cast == "bigint":
            # The hash of a bigint folds its halves into one: 1 and 2^32 have the same.
            images.append(f"{value} >> 32")
    return f"hash_record_extended(ROW({', '.join(images)}), {key_hash(entry, values, utf8)})"


def bucket(entry: Entry, values: Sequence[str], utf8: bool, buckets: int, place: str) -> str:
    """SQL for a row's bucket. place: SQL for its feed's. buckets: of each feed, a power of two."""
    return f"({place} * {MOST_BUCKETS} + ({key_hash(entry, values, utf8)} & {buckets - 1}))::int"


def whole(entry: Entry, prefix: str) -> str:
    """SQL for a digest of the texts of all columns: two rows, on any servers, are the same if it is."""
    listed = ", ".join(hashes.text(column, f"{prefix}c{i + 1}") for i, column in enumerate(entry.columns))
    return f"encode(sha256(convert_to(ARRAY[{listed}]::text[]::text, 'UTF8')), 'hex')"
