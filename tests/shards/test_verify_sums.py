"""Hashes of rows are the same on servers of other versions and encodings, and look at every bit."""

from __future__ import annotations

from contextlib import suppress

import pytest

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry, EntryColumn
from airflow_roir.engine.source import catalog
from airflow_roir.shards.verify import sums
from servers.postgres import embedded_postgres
from servers.shards import on_server, run_sql

VALUES = {
    "smallint": ("-3", "32767"),
    "integer": ("7", "-2147483648"),
    "bigint": ("1", "4294967296", "-9"),
    "oid": ("4294967295",),
    "boolean": ("true", "false"),
    "uuid": ("6ecd8c99-4036-403d-bf84-cf8400f67836",),
    "date": ("2026-02-28", "infinity", "0044-03-15 BC"),
    "time": ("24:00:00", "00:00:00.000001"),
    "timetz": ("12:00+02",),
    "timestamp": ("2026-02-28 12:00:00.123456", "-infinity"),
    "timestamptz": ("2026-02-28 12:00:00.123456+09", "infinity"),
    "interval": ("1 mon -3 days 00:00:01",),
    "numeric": ("1.0", "1.00", "NaN", "123456789012345678901234567890.1"),
    "numeric(12, 2)": ("1.00", "-5.25"),
    "real": ("0.1", "-0", "NaN"),
    "double precision": ("0.1", "1e300", "-0", "3.141592653589793"),
    "text": ("", "straße", "a"),
    "varchar(20)": ("née",),
    "char(8)": ("née", "a  "),
    "name": ("name",),
    '"char"': ("x",),
    "bytea": (r"\x00ff",),
    "macaddr": ("08:00:2b:01:02:03",),
    "inet": ("10.0.0.1/8", "::1"),
    "cidr": ("10.0.0.0/8",),
    "pg_lsn": ("16/B374D848",),
    "money": ("12.34",),
    "bit varying": ("10101",),
    "jsonb": ('{"b": 1.0, "a": [1, null]}',),
    "int[]": ("{1,NULL,3}",),
    "text[]": ('{"é",NULL,"NULL"}',),
    "int4range": ("[1,5)",),
    "tsvector": ("'a':1 'b':2",),
    "point": ("(0.1,2)",),
}


def _table() -> list[str]:
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(VALUES))
    made = [f"CREATE TABLE t (id bigint PRIMARY KEY, {columns})"]
    row = 0
    for n, values in enumerate(VALUES.values()):
        for value in values:
            row += 1
            made.append(f"INSERT INTO t (id, c{n}) VALUES ({row}, $v${value}$v$)")
    return [*made, "INSERT INTO t (id) VALUES (4294967296)"]


def _hashes(dsn: str) -> dict[int, tuple[int, int]]:
    with Database(dsn).transaction() as connection:
        columns = catalog.columns_of(connection, execute(connection, "SELECT 'public.t'::regclass::oid").scalar_one())
        entry = Entry(
            tuple(
                EntryColumn(one.name, one.type, one.cast, one.collation, one.name == "id", False, one.oid_alias)
                for one in columns.values()
            ),
            1,
            1,
            1,
        )
        values = [one.of("t") for one in entry.columns]
        utf8 = sums.is_utf8(connection)
        query = f"SELECT id, {sums.row_hash(entry, values, utf8)}, {sums.key_hash(entry, values, utf8)} FROM public.t t"
        return {id_: (row, key) for id_, row, key in map(tuple, execute(connection, query))}


@pytest.mark.slow
def test_a_row_has_one_hash_in_every_version_and_encoding() -> None:
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for version in (15, 16, 17, 18):
        with suppress(FileNotFoundError), embedded_postgres(version) as dsn:
            for encoding in ("UTF8", "LATIN1"):
                name = f"of_{encoding}".lower()
                run_sql(
                    dsn,
                    f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
                )
                run_sql(on_server(dsn, name), "SET client_encoding = 'UTF8'; " + "; ".join(_table()))
                found[f"{version} {encoding}"] = _hashes(on_server(dsn, name))
    assert len(found) >= 4, found.keys()
    first, *others = found.values()
    assert all(other == first for other in others)
    # No two of these rows have one.
    assert len({row for row, _ in first.values()}) == len(first)
