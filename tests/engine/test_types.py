"""Every type: as key and primary key if it has a B-tree order, and as included column."""

from __future__ import annotations

import json

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import MODES, follow, through_modes
from tests.engine.steps import sql
from tests.engine.values import ARRAYS, INCLUDED, ORDERED, set_up, supported

pytestmark = pytest.mark.sample(1)

ORDERED_BUILT_IN = """
SELECT format_type(t.oid, NULL)
  FROM pg_opclass o JOIN pg_am a ON a.oid = o.opcmethod JOIN pg_type t ON t.oid = opcintype
 WHERE amname = 'btree' AND opcdefault AND t.typtype <> 'p'
UNION SELECT format_type(oid, NULL) FROM pg_type
 WHERE typname LIKE 'reg%' AND typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b' AND typelem = 0
UNION SELECT format_type(oid, NULL) FROM pg_type
 WHERE typtype IN ('r', 'm') AND typnamespace = 'pg_catalog'::regnamespace
"""
BUILT_IN = """
SELECT format_type(oid, NULL) FROM pg_type
 WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'r', 'm') AND typelem = 0
   AND typname !~ '^pg_(node_tree|ndistinct|dependencies|mcv_list|brin_.*|ddl_command)' AND typname <> 'gtsvector'
"""


def test_no_built_in_type_is_forgotten(dsn: str) -> None:
    user = steps.session(dsn)
    ordered = {name for (name,) in sql(user, ORDERED_BUILT_IN)} - {"regdatabase"}
    assert ordered - set(ORDERED) == set()
    every = {name for (name,) in sql(user, BUILT_IN)} - {"regdatabase"}
    assert every - set(ORDERED) - set(INCLUDED) == set()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("name", [*ORDERED, *ARRAYS])
def test_a_type_with_an_order_is_key_and_primary_key_in_every_mode(database: Database, dsn: str, name: str) -> None:
    """Two tables in one: the type as key beside an integer, and as primary key with an integer as key."""
    set_up(dsn)
    values = supported(dsn, name, {**ORDERED, **ARRAYS}[name])
    rows = ", ".join(f"({i}, {value}::{name})" for i, value in enumerate(values, start=1))
    run_sql(
        dsn,
        f"CREATE TABLE ks (id int PRIMARY KEY, x {name}, again {name})",
        f"INSERT INTO ks SELECT i * 10 + n, x, x FROM (VALUES {rows}) v (i, x), generate_series(0, 2) n",
        "INSERT INTO ks SELECT 1000 + n, NULL, NULL FROM generate_series(0, 2) n",
        f"CREATE TABLE pks (x {name} PRIMARY KEY, k int, v int)",
        f"INSERT INTO pks SELECT x, i % 3, i FROM (VALUES {rows}) v (i, x) ON CONFLICT DO NOTHING",
    )

    def write_keys(mode: str) -> None:
        user = steps.session(dsn)
        for source, other in ((10, 20), (20, 10), (10, 1000), (1000, 11)):
            sql(
                user,
                f"UPDATE ks SET x = (SELECT again FROM ks WHERE id = {source}) WHERE id IN ({other}, {other} + 1)",
            )
        sql(user, "UPDATE ks SET again = NULL WHERE id % 10 = 2")
        sql(
            user, "DELETE FROM ks WHERE id IN (SELECT max(id) FROM ks WHERE x IS NOT NULL UNION SELECT max(id) FROM ks)"
        )
        sql(user, "INSERT INTO ks SELECT max(id) + 1, NULL FROM ks")
        user.commit()

    def write_primary_keys(mode: str) -> None:
        user = steps.session(dsn)
        sql(user, "CREATE TEMP TABLE gone ON COMMIT DROP AS SELECT * FROM pks ORDER BY v LIMIT 2 OFFSET 1")
        sql(user, "UPDATE pks SET k = k + 1 WHERE v % 2 = 0")
        sql(user, "DELETE FROM pks WHERE v IN (SELECT v FROM gone)")
        if mode != "direct":
            sql(user, "INSERT INTO pks SELECT x, k + 5, v FROM gone")
        user.commit()
        sql(user, "DELETE FROM pks")
        user.rollback()

    through_modes(database, write_keys, "by_key", "ks", keys="x", include="again", batch_rows=2, ranges=2, segments=3)
    through_modes(database, write_primary_keys, "by_pk", "pks", include="v", batch_rows=1, ranges=2, segments=2)
    _watermarks_read_back(database, dsn, name)


def _watermarks_read_back(database: Database, dsn: str, name: str) -> None:
    """Each watermark is the text of a source value. It reads back as an equal value, with the same text."""
    user = steps.session(dsn)
    marks = sql(user, "SELECT watermark::text FROM roir.scan_range WHERE operation_id = 2 AND watermark IS NOT NULL")
    assert marks
    for (mark,) in marks:
        (text,) = json.loads(mark)
        sql(user, "SET LOCAL timezone = UTC; SET LOCAL lc_monetary = 'C'")
        plain = name.split("(")[0] if "[" not in name else name
        cast = {"character": "bpchar", "bit": '"bit"'}.get(plain, plain)
        sql(user, f"SELECT 1 / (%s::{cast} IS DISTINCT FROM NULL)::int", text)
        user.rollback()


_ALWAYS_THERE = [name for name in INCLUDED if name != "xml"]
INCLUDED_GROUPS = [["xml"], *(_ALWAYS_THERE[start : start + 6] for start in range(0, len(_ALWAYS_THERE), 6))]


@pytest.mark.parametrize("names", INCLUDED_GROUPS, ids=lambda names: "-".join(names).replace(" ", "_"))
def test_a_type_without_an_order_is_included_in_every_mode(database: Database, dsn: str, names: list[str]) -> None:
    set_up(dsn)
    for name in names:
        supported(dsn, name, INCLUDED[name])
    columns = ", ".join(f"i{n} {name}" for n, name in enumerate(names))
    first, second = (", ".join(f"{INCLUDED[name][which]}::{name}" for name in names) for which in (0, 1))
    run_sql(
        dsn,
        f"CREATE TABLE t (id int PRIMARY KEY, k int, {columns})",
        f"INSERT INTO t SELECT i, i % 3, {first} FROM generate_series(1, 12) i",
        "INSERT INTO t SELECT i, i % 3 FROM generate_series(13, 15) i",
    )

    def write(mode: str) -> None:
        user = steps.session(dsn)
        for n, name in enumerate(names):
            sql(user, f"UPDATE t SET i{n} = {INCLUDED[name][1]}::{name} WHERE id % 4 = {MODES.index(mode)}")
            sql(user, f"UPDATE t SET i{n} = NULL WHERE id = {n + 1}")
        sql(user, f"INSERT INTO t VALUES ({20 + MODES.index(mode)}, 1, {second})")
        sql(user, "DELETE FROM t WHERE id = (SELECT min(id) FROM t)")
        user.commit()

    include = ", ".join(f"i{n}" for n in range(len(names)))
    through_modes(database, write, include=include, batch_rows=4)


EQUAL_BUT_DIFFERENT = {
    "numeric": ("1.0", "1.00", "1"),
    "float8": ("0", "-0", "0"),
    "float4": ("-0", "0", "-0"),
    "interval": ("1 day", "24 hours", "0.5 days 12:00"),
    "char(5)": ("a", "a  ", "a"),
    "numeric[]": ("{1.0,NULL}", "{1,NULL}", "{1.00,NULL}"),
    "numrange": ("[1.0,2.0)", "[1,2)", "[1.00,2.00)"),
    "nummultirange": ("{[1.0,2.0)}", "{[1,2)}", "{[1.00,2.00)}"),
    "jsonb": ("1.0", "1.00", "1"),
    "priced": ("(1,1.0)", "(1,1.00)", "(1,1)"),
    "amount": ("1.0", "1.00", "1"),
    'text COLLATE "ignore_case"': ("Straße", "STRASSE", "strasse"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EQUAL_BUT_DIFFERENT)
def test_equal_values_that_differ_are_told_apart_and_taken_for_one(
    database: Database, dsn: str, mode: str, name: str
) -> None:
    """As key and as primary key: there is one entry, and it shows the source's value."""
    set_up(dsn)
    one, two, three = EQUAL_BUT_DIFFERENT[name]
    assert len(supported(dsn, name, [f"'{value}'" for value in (one, two, three)])) == 3
    run_sql(dsn, f"CREATE TABLE t (id int, x {name}, k int, v int, PRIMARY KEY (x, id))")
    refill = f"INSERT INTO t SELECT i, CASE i % 3 WHEN 0 THEN '{one}' WHEN 1 THEN '{two}' ELSE '{three}' END::"
    refill += f"{name.split(' ')[0]}, i % 2, i FROM generate_series(1, 12) i"
    writes = {
        "there": f"UPDATE t SET x = '{two}'",
        "there and back": f"UPDATE t SET x = '{two}'; UPDATE t SET x = '{one}'",
        "round": f"UPDATE t SET x = '{one}'; UPDATE t SET x = '{two}'; UPDATE t SET x = '{three}'",
        "deleted, and inserted as another": (
            f"DELETE FROM t WHERE id < 5; INSERT INTO t SELECT i, '{three}', i % 2, i FROM generate_series(1, 4) i"
        ),
        "with what is included": f"UPDATE t SET x = '{three}', v = -v WHERE id < 7",
        "on conflict": (
            f"INSERT INTO t SELECT i, '{two}', 0, 0 FROM generate_series(1, 12) i "
            "ON CONFLICT (x, id) DO UPDATE SET x = excluded.x, v = t.v + 1"
        ),
    }
    follow(database, dsn, mode, writes, refill, keys="x", include="v")


def test_a_domain_that_forbids_null_is_key_and_included(database: Database, dsn: str) -> None:
    """The entry has the base type: antimatter has NULLs even if the domain forbids them."""
    set_up(dsn)
    refill = "INSERT INTO t SELECT i, i % 4 + 1, i FROM generate_series(1, 12) i"
    run_sql(dsn, "CREATE TABLE t (id positive PRIMARY KEY, k positive, v positive)", refill)

    def write(mode: str) -> None:
        user = steps.session(dsn)
        sql(user, "DELETE FROM t WHERE id IN (SELECT min(id) FROM t); UPDATE t SET k = k + 1 WHERE id % 2 = 0")
        sql(user, "UPDATE t SET v = v + 1, id = id + 100 WHERE id IN (SELECT max(id) FROM t)")
        user.commit()

    through_modes(database, write, include="v", batch_rows=2)


def test_primary_keys_of_mixed_types_are_scanned_row_by_row(database: Database, dsn: str) -> None:
    set_up(dsn)
    run_sql(
        dsn,
        'CREATE TABLE t (a numeric, b text COLLATE "C", c mood, d int[], e bytea, f pair, k regclass, '
        "PRIMARY KEY (b, a, c, d, e, f))",
        "INSERT INTO t SELECT (i % 3)::numeric / 2, chr(97 + i % 4), (enum_range(NULL::mood))[1 + i % 4], "
        "ARRAY[NULL, i % 2], decode(to_hex(16 + i), 'hex'), ROW(i % 2, NULL)::pair, 'pg_class' "
        "FROM generate_series(1, 60) i",
    )

    def write(mode: str) -> None:
        user = steps.session(dsn)
        sql(user, "UPDATE t SET b = upper(b), a = a * 1.00 WHERE c = 'sad'")
        sql(user, "UPDATE t SET f = ROW(NULL, NULL), k = 'pg_type' WHERE c = 'ok'")
        sql(user, "DELETE FROM t WHERE e = (SELECT e FROM t ORDER BY e LIMIT 1)")
        user.commit()

    through_modes(database, write, keys="k, a", batch_rows=5)
