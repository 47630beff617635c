"""Every corruption that lasts is found, to the row, with any types, names and shapes, and repaired exactly."""

from __future__ import annotations

import random

import psycopg2
import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.steps import sql
from tests.engine.values import ARRAYS, INCLUDED, ORDERED, set_up, supported
from tests.engine.verifying import build_index
from tests.engine.writers import Writer, at_work

pytestmark = pytest.mark.sample(1)

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v numeric, w text, b bigint)"
FILL = "INSERT INTO t SELECT i, nullif(i % 50, 7)::text, i / 10.0, 'row ' || i, i FROM generate_series(1, 500) i"
REPAIRED = VerifyOptions(repair=True)
EVERY_ROW = VerifyOptions(sample=100)

# Each of these keeps some sum over rows, columns, or halves of a column as it was. k is c1, id c2, v c3, w c4, b c5.
SUBTLE = {
    "two rows have swapped values": "c4 = CASE c2 WHEN 1 THEN 'row 2' ELSE 'row 1' END WHERE c2 IN (1, 2)",
    "two rows have swapped keys": "c1 = CASE c2 WHEN 1 THEN '2' ELSE '1' END WHERE c2 IN (1, 2)",
    "values went round three rows": "c5 = CASE c2 WHEN 3 THEN 4 WHEN 4 THEN 5 ELSE 3 END WHERE c2 IN (3, 4, 5)",
    "NULL and a value are swapped": "c1 = CASE c2 WHEN 7 THEN '8' END WHERE c2 IN (7, 8)",
    "the halves of a bigint are swapped": "c5 = 1::bigint << 32 WHERE c2 = 1",
    "rows with a NULL have swapped values": "c4 = CASE c2 WHEN 7 THEN 'row 57' ELSE 'row 7' END WHERE c2 IN (7, 57)",
    "two columns are swapped": "c1 = c4, c4 = c1 WHERE c2 = 11",
    "trailing zeros": "c3 = c3::numeric(10, 3) WHERE c2 = 10",
    "an empty text for a NULL": "c1 = '' WHERE c2 = 7",
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("corruption", SUBTLE)
def test_what_a_sum_could_hide_is_found(database: Database, dsn: str, corruption: str) -> None:
    base = build_index(dsn, database, TABLE, FILL, include="v, w, b")
    run_sql(dsn, f"UPDATE {base} SET {SUBTLE[corruption]}")
    assert lifecycle.verify(database, "ix").found > 0
    assert lifecycle.verify(database, "ix", REPAIRED).is_exact
    steps.assert_exact(database)
    assert lifecycle.verify(database, "ix").found == 0


@pytest.mark.by_hand("sweeps")
def test_swapped_values_are_found_where_no_type_has_a_hash_of_its_own(database: Database, dsn: str) -> None:
    base = build_index(
        dsn,
        database,
        "CREATE TABLE t (id numeric PRIMARY KEY, k float8, v point)",
        "INSERT INTO t SELECT i, i % 9, point(i, i) FROM generate_series(1, 99) i",
        include="v",
    )
    # It depends on the overflow of 64-bit hashes whether a sum hides one of them.
    for one in range(1, 11, 2):
        other = 2 * one + 1
        swapped = f"c3 = point({other} - c2::int, {other} - c2::int) WHERE c2 IN ({one}, {one + 1})"
        run_sql(dsn, f"UPDATE {base} SET {swapped}")
        assert lifecycle.verify(database, "ix", REPAIRED).different == 2
    steps.assert_exact(database)


# As key and primary key: each kind of image and of equality.
KEYS = ("numeric", "double precision", "text", "character(5)", '"char"', "bytea", "timestamp with time zone", "jsonb",
        "mood", "moody", "padded", "pair", "regclass", "integer[]", "pair[]", "bigint")  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KEYS)
def test_of_every_kind_of_key_each_corruption_is_found_and_mended(database: Database, dsn: str, name: str) -> None:
    set_up(dsn)
    values = supported(dsn, name, {**ORDERED, **ARRAYS}[name])
    rows = ", ".join(f"({i}, {value}::{name})" for i, value in enumerate(values, start=1))
    base = build_index(
        dsn,
        database,
        f"CREATE TABLE t (x {name}, k {name}, i int, v {name}, PRIMARY KEY (x, i))",
        f"INSERT INTO t SELECT x, x, i, x FROM (VALUES {rows}) v (i, x)",
        "INSERT INTO t SELECT x, NULL, 100 + i, NULL FROM t",
        include="v",
        ranges=2,
    )
    last = len(values)
    # k is c1, the primary key c2 and c3, v c4.
    run_sql(
        dsn,
        f"DELETE FROM {base} WHERE c3 IN (1, 102)",
        f"UPDATE {base} SET c4 = CASE WHEN c4 IS NULL THEN c2 END WHERE c3 IN ({last}, {100 + last})",
        f"INSERT INTO {base} SELECT k, x, 1000, v FROM t WHERE i = 1",
        f"INSERT INTO {base} SELECT NULL, x, 1001, v FROM t WHERE i = 1",
    )
    found = lifecycle.verify(database, "ix", REPAIRED)
    extra = 4 if last == 1 else 2
    assert (found.missing, found.different, found.extra, found.repaired) == (2, 2, extra, 4 + extra)
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_of_every_type_another_included_value_is_found_and_mended(database: Database, dsn: str) -> None:
    """One row for each type, which differs from its entry in the column of that type."""
    set_up(dsn)
    every = {**ORDERED, **ARRAYS, **INCLUDED}
    user = steps.session(dsn)
    user.autocommit = True
    known = []
    for name, values in every.items():
        try:
            sql(user, f"DO $$ DECLARE x {name}; BEGIN x := {values[0]}; x := {values[1]}; END $$")
            known.append(name)
        except psycopg2.Error:  # this server has no such type, or not all of its values
            continue
    assert len(known) > 90
    columns = ", ".join(f"i{n} {name}" for n, name in enumerate(known))
    base = build_index(
        dsn,
        database,
        f"CREATE TABLE t (id int PRIMARY KEY, k int, {columns})",
        f"INSERT INTO t SELECT i, i % 3 FROM generate_series(1, {len(known)}) i",
        *(f"UPDATE t SET i{n} = {every[name][0]} WHERE id = {n + 1}" for n, name in enumerate(known)),
        include=", ".join(f"i{n}" for n in range(len(known))),
        covering="none",
    )
    assert lifecycle.verify(database, "ix", EVERY_ROW).found == 0
    run_sql(
        dsn,
        *(f"UPDATE {base} SET c{n + 3} = {every[name][1]} WHERE c2 = {n + 1}" for n, name in enumerate(known)),
    )
    found = lifecycle.verify(database, "ix", REPAIRED)
    missed = set(range(1, len(known) + 1)) - {int(key) for _, key, _ in verifying.found(dsn)}
    assert [known[n - 1] for n in sorted(missed)] == []
    assert (found.different, found.found, found.repaired) == (len(known), len(known), len(known))
    steps.assert_exact(database)
    [(longest,)] = sql(user, "SELECT max(length(source_values::text)) FROM roir.discrepancy")
    assert longest < 30_000  # what is kept of a megabyte


EQUAL = {
    "numeric": ("1.0", "1.00"),
    "float8": ("0", "-0"),
    "interval": ("1 day", "24 hours"),
    "bpchar": ("a", "a  "),
    "numeric[]": ("{1.0,NULL}", "{1,NULL}"),
    "numrange": ("[1.0,2.0)", "[1,2)"),
    "jsonb": ("1.0", "1.00"),
    "priced": ("(1,1.0)", "(1,1.00)"),
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("name", EQUAL)
def test_an_equal_yet_distinct_value_is_found_and_mended(database: Database, dsn: str, name: str) -> None:
    set_up(dsn)
    one, two = (f"'{value}'::{name}" for value in EQUAL[name])
    base = build_index(
        dsn,
        database,
        f"CREATE TABLE t (x {name}, i int, k {name}, v {name}, PRIMARY KEY (x, i))",
        f"INSERT INTO t SELECT {one}, i, {one}, {one} FROM generate_series(1, 9) i",
        include="v",
    )
    for n, column in enumerate(("c1", "c2", "c4"), start=1):
        run_sql(dsn, f"UPDATE {base} SET {column} = {two} WHERE c3 = {n}")
    found = lifecycle.verify(database, "ix", REPAIRED)
    assert (found.missing, found.extra, found.different, found.repaired) == (0, 0, 3, 3)
    steps.assert_exact(database)


WEIRD = '"Weird Schema"."Order ""Items"" 50%"'
SHAPES: dict[str, tuple[list[str], dict[str, str]]] = {
    "names": (
        [
            'CREATE SCHEMA "Weird Schema"',
            f'CREATE TABLE {WEIRD} ("line%no" int, n text, kind int, rows int, present int, bucket int, '
            'total text, c1 int, s int, r int, x int, "where" text, PRIMARY KEY ("line%no", c1, x))',
            f"INSERT INTO {WEIRD} SELECT i, i % 3, i, i, i, i, '%(where)s', i, i, i, i, '%s' FROM "
            "generate_series(1, 40) i",
        ],
        {"table": WEIRD, "keys": "n, bucket, kind", "include": 'rows, present, total, s, r, "where"'},
    ),
    "five nullable keys": (
        [
            "CREATE TABLE t (a int, b int, c int, d int, e int, id int PRIMARY KEY)",
            "INSERT INTO t SELECT nullif(i & 1, 0), nullif(i & 2, 0), nullif(i & 4, 0), nullif(i & 8, 0), "
            "nullif(i & 16, 0), i FROM generate_series(1, 64) i",
        ],
        {"keys": "a, b, c, d, e"},
    ),
    "composite keys of NULLs": (
        [
            "CREATE TYPE two AS (a int, b int)",
            "CREATE TABLE t (k two, l two, id int PRIMARY KEY)",
            "INSERT INTO t SELECT CASE i % 3 WHEN 0 THEN ROW(NULL, NULL)::two WHEN 1 THEN NULL ELSE ROW(i, NULL)::two "
            "END, CASE i % 4 WHEN 0 THEN ROW(NULL, NULL)::two WHEN 1 THEN ROW(1, 2)::two END, i "
            "FROM generate_series(1, 48) i",
        ],
        {"keys": "k, l"},
    ),
    "120 included columns": (
        [
            f"CREATE TABLE t (id int PRIMARY KEY, k int, {', '.join(f'i{n} text' for n in range(120))})",
            f"INSERT INTO t SELECT i, i % 5, {', '.join('i' for _ in range(120))} FROM generate_series(1, 40) i",
        ],
        {"include": ", ".join(f"i{n}" for n in range(120))},
    ),
    "uuid primary key": (
        [
            "CREATE TABLE t (id uuid PRIMARY KEY, k varchar(9) NOT NULL)",
            "INSERT INTO t SELECT md5(i::text)::uuid, i % 7 FROM generate_series(1, 50) i",
        ],
        {},
    ),
    "identity, one key": (
        [
            "CREATE TABLE t (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, k text)",
            "INSERT INTO t (k) SELECT 'the same' FROM generate_series(1, 3000) i",
        ],
        {},
    ),
    "one row": (["CREATE TABLE t (id int PRIMARY KEY, k text)", "INSERT INTO t VALUES (1, 'a')"], {}),
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_found_right_and_wrong(database: Database, dsn: str, shape: str) -> None:
    setup, definition = SHAPES[shape]
    base = build_index(dsn, database, *setup, **definition)
    for options in (VerifyOptions(), EVERY_ROW):
        assert lifecycle.verify(database, "ix", options).found == 0
    [(rows,)] = sql(steps.session(dsn), f"SELECT count(*) FROM {base}")
    run_sql(dsn, f"DELETE FROM {base} WHERE ctid IN (SELECT ctid FROM {base} LIMIT {max(1, rows // 4)})")
    assert lifecycle.verify(database, "ix").missing >= max(1, rows // 4)
    assert lifecycle.verify(database, "ix", REPAIRED).is_exact
    steps.assert_exact(database)
    run_sql(dsn, f"TRUNCATE {base}")
    lost = lifecycle.verify(database, "ix", REPAIRED)
    assert (lost.missing, lost.repaired) == (rows, rows)
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_an_empty_table_and_a_fake_entry(database: Database, dsn: str) -> None:
    base = build_index(dsn, database, TABLE)
    assert lifecycle.verify(database, "ix").rows == 0
    assert lifecycle.verify(database, "ix", EVERY_ROW).found == 0
    run_sql(dsn, f"INSERT INTO {base} VALUES ('a', 1), (NULL, 2)")
    assert lifecycle.verify(database, "ix", REPAIRED).extra == 2
    assert sql(steps.session(dsn), f"SELECT * FROM {base}") == []


class _Elsewhere(Writer):
    """Leaves the corrupted rows alone, so that their corruption lasts."""

    def _write(self, cursor: object, identity: int) -> None:
        super()._write(cursor, identity + CORRUPT)


CORRUPT = 2_000


# The id is the same in every process of a test run, whatever the seed is.
@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("seed", [random.SystemRandom().randrange(2**32)], ids=["random"])
def test_200_random_corruptions_under_writers(database: Database, dsn: str, seed: int) -> None:
    """All corruptions are found and repaired, and nothing else is reported."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    base = build_index(
        dsn,
        database,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v numeric)",
        f"INSERT INTO t SELECT i, nullif(i % 37, 5), i / 10.0 FROM generate_series(1, {CORRUPT * 2}) i",
        include="v",
        segments=5,
    )
    kinds = {
        "missing": "DELETE FROM {base} WHERE c2 = {id}",
        "different": "UPDATE {base} SET c3 = c3 + 1 WHERE c2 = {id}",
        "equal": "UPDATE {base} SET c3 = c3::decimal(9, 4) WHERE c2 = {id}",
        "extra": "INSERT INTO {base} VALUES ({key}, {id} + 100000, 1)",
        "stale": "UPDATE {base} SET c1 = 'stale ' || c2 WHERE c2 = {id}",
        "twin": "INSERT INTO {base} SELECT 'twin', c2, c3 FROM {base} WHERE c2 = {id}",
    }
    expected = []
    writers = [_Elsewhere(dsn, seed, number, CORRUPT) for number in range(3)]
    with at_work(writers):
        for identity in chance.sample(range(1, CORRUPT), 200):
            kind = chance.choice(list(kinds))
            key = chance.choice(["NULL", "'1'", "'new'"])
            run_sql(dsn, kinds[kind].format(base=base, id=identity, key=key))
            expected += {
                "missing": [("missing", identity)],
                "extra": [("extra", identity + 100_000)],
                "stale": [("missing", identity), ("extra", identity)],
                "twin": [("extra", identity)],
            }.get(kind, [("different", identity)])
        report = lifecycle.verify(database, "ix", REPAIRED)
        found = [(kind, int(key)) for kind, key, _ in verifying.found(dsn)]
        assert sorted(found) == sorted(expected)
        assert report.is_exact
        assert lifecycle.verify(database, "ix").found == 0
    steps.assert_exact(database)
