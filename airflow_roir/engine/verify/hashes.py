"""Hashes of rows and entries, equal for equal values, and their sums by buckets of the primary key.

The sides share no order, so a range of one side is no range of the other. Sums need no order: both sides are read once,
each piece in a snapshot of its own. If the totals differ, both sides are summed by buckets, and only the buckets whose
sums differ are compared row by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_roir.engine.generation.entry import Entry, EntryColumn

# Types with a hash function, of which two equal values are always the same value. Other types are compared by their
# texts, so that 1.0 and 1.00 differ.
EXACT = frozenset(
    (
        "smallint",
        "integer",
        "bigint",
        "oid",
        "boolean",
        "uuid",
        "date",
        "time without time zone",
        "timestamp without time zone",
        "timestamp with time zone",
        "bytea",
        "macaddr",
        "pg_lsn",
    )
)


INTEGERS = frozenset(("smallint", "integer", "bigint"))


TEXTUAL = frozenset(("text", "character varying", "name"))


PADDED = frozenset(("character", "bpchar"))


# Types whose hash function can be called directly, with a seed: several times as fast as through a record.
HASHES = {
    "smallint": "hashint2extended({value}, {seed})",
    "integer": "hashint4extended({value}, {seed})",
    "bigint": "hashint8extended({value}, {seed})",
    "oid": "hashoidextended({value}, {seed})",
    "boolean": "hashint4extended({value}::int, {seed})",
    "uuid": "uuid_hash_extended({value}, {seed})",
    "timestamp without time zone": "timestamp_hash_extended({value}, {seed})",
    # The session's time zone is UTC.
    "timestamp with time zone": "timestamp_hash_extended({value}::timestamp, {seed})",
    "text": "hashtextextended({value}, {seed})",
    "character varying": "hashtextextended({value}, {seed})",
    "numeric": "hash_numeric_extended({value}, {seed})",
    "time without time zone": "time_hash_extended({value}, {seed})",
    "pg_lsn": "pg_lsn_hash_extended({value}, {seed})",
    "macaddr": "hashmacaddrextended({value}, {seed})",
    "date": "hashdateextended({value}, {seed})",
    "bytea": "hashbyteaextended({value}, {seed})",
}


# These two came with PostgreSQL 18.
NEWER_HASHES = frozenset(("date", "bytea"))


def image(column: EntryColumn, value: str) -> str:
    """SQL for an expression that is equal for two values only if they are the same, down to trailing zeros."""
    if column.cast in EXACT or _has_scale(column):
        return value
    if column.oid_alias:
        return f"{value}::oid"
    if column.cast in PADDED:
        # Its text lacks the blanks at the end.
        return f"bpcharsend({value})"
    return f'({_output(column, value)}) COLLATE "C"' if column.cast not in TEXTUAL else f'{value} COLLATE "C"'


def _output(column: EntryColumn, value: str) -> str:
    """SQL for a value's text. The owner of a type may have made a cast to text that loses something."""
    if "." not in column.cast:
        return f"{value}::text"
    return f"CASE WHEN {value} IS DISTINCT FROM NULL THEN concat({value}) END"


def _has_scale(column: EntryColumn) -> bool:
    """True for a numeric with a declared scale, which all values have."""
    return column.type.startswith("numeric(")


def _is_fast(column: EntryColumn, newer: bool) -> bool:
    if column.oid_alias or (column.cast in NEWER_HASHES and not newer):
        return False
    return column.cast in HASHES and (column.cast != "numeric" or _has_scale(column))


def text(column: EntryColumn, value: str) -> str:
    """SQL for a value's lossless text, under pinned settings."""
    if column.cast in PADDED:
        return f"textin(bpcharout({value}))"
    return f"{value}::oid::text" if column.oid_alias else _output(column, value)


def row_hash(entry: Entry, values: Sequence[str], newer: bool) -> str:
    """SQL for the 64-bit hash of all columns. newer: the server is PostgreSQL 18 or newer.

    The hash of a record is linear in those of its columns: if two rows swapped values, the sum could stay the same. So
    each row is hashed with a seed of its own, from its primary key.
    """
    pairs = [(column, image(column, value)) for column, value in zip(entry.columns, values, strict=True)]
    key = [(column, value) for column, value in pairs if column.primary_key]
    seed = f"hash_record_extended(ROW({', '.join(value for _, value in key)}), 0)"
    if len(key) == 1 and _is_fast(key[0][0], newer):
        seed = HASHES[key[0][0].cast].format(value=key[0][1], seed="0")
    # The hash of a bigint folds its halves into one: 1 and 2^32 have the same hash.
    halves = [value for column, value in pairs for value in (value, *[f"{value} >> 32"] * (column.cast == "bigint"))]
    record = f"hash_record_extended(ROW({', '.join(halves)}), {seed})"
    slow = ", ".join(value for column, value in pairs if not _is_fast(column, newer))
    chain = f"hash_record_extended(ROW({slow}), {seed})" if slow else "0"
    for column, value in pairs:
        if _is_fast(column, newer):
            seed = f"{value} # {chain}" if column.cast == "bigint" else chain
            chain = HASHES[column.cast].format(value=value, seed=seed)
    # Each function of the chain returns NULL for a NULL.
    return f"coalesce({chain}, {record})"


def bucket(entry: Entry, values: Sequence[str], buckets: int) -> str:
    """SQL for the bucket of a row by its primary key. buckets: a power of two."""
    key = [(column, value) for column, value in zip(entry.columns, values, strict=True) if column.primary_key]
    if len(key) == 1 and key[0][0].cast in INTEGERS:
        # A hash would take longer than everything else here.
        return f"({key[0][1]} & {buckets - 1})::int"
    images = ", ".join(image(column, value) for column, value in key)
    return f"(hash_record_extended(ROW({images}), 0) & {buckets - 1})::int"


def of_source(entry: Entry, alias: str) -> list[str]:
    """SQL for the entry's columns, read from a row of the source."""
    return [column.of(alias) for column in entry.columns]


def total(entry: Entry, values: Sequence[str], relation: str, where: str, newer: bool) -> str:
    """SELECT of one row, as `sums` with a single bucket: several times as fast."""
    return f"""
    SELECT ARRAY[0] AS buckets, ARRAY[count(*)] AS counts,
           ARRAY[coalesce(sum({row_hash(entry, values, newer)}), 0)] AS sums, count(*) AS rows
      FROM {relation} WHERE {where}"""


def sums(entry: Entry, values: Sequence[str], relation: str, where: str, newer: bool, buckets: int) -> str:
    """SELECT of one row, as `summed`, with a group for each bucket."""
    return summed(relation, where, row_hash(entry, values, newer), bucket(entry, values, buckets))


def summed(relation: str, where: str, hashed: str, grouped: str) -> str:
    """SELECT of one row: the count of each group's rows and the sum of their hashes, and the count of all rows.

    The sum of 64-bit hashes is exact: it has 128 bits, and doesn't depend on any order.
    """
    return f"""
    SELECT coalesce(array_agg(bucket), '{{}}') AS buckets, coalesce(array_agg(rows), '{{}}') AS counts,
           coalesce(array_agg(total), '{{}}') AS sums, coalesce(sum(rows), 0)::bigint AS rows
      FROM (SELECT {grouped} AS bucket, count(*) AS rows, sum({hashed}) AS total
              FROM {relation} WHERE {where} GROUP BY 1) summed"""


SUSPICIOUS = """
SELECT bucket FROM (
    SELECT s.bucket, CASE WHEN u.side IN ('source', 'heap') THEN s.rows ELSE -s.rows END AS rows,
           CASE WHEN u.side IN ('source', 'heap') THEN s.total ELSE -s.total END AS total
      FROM roir.verification_unit u CROSS JOIN LATERAL unnest(u.buckets, u.counts, u.sums) AS s (bucket, rows, total)
     WHERE u.verification_id = %(verification)s AND u.stage = %(stage)s) sides
 GROUP BY bucket HAVING sum(rows) <> 0 OR sum(total) <> 0
 ORDER BY bucket
"""
