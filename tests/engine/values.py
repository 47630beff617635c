"""Edge values of every type: SQL literals, at least three that differ for each type with an order."""

from __future__ import annotations

import psycopg2.errors
import pytest

from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

SETUP = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok', 'it''s \"%s\"', '')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE TYPE priced AS (id int, price numeric)",
    "CREATE TYPE span AS RANGE (subtype = float8)",
    "CREATE DOMAIN positive AS int NOT NULL CHECK (VALUE > 0)",
    "CREATE DOMAIN amount AS numeric(10, 2)",
    "CREATE DOMAIN code AS varchar(5)",
    "CREATE DOMAIN padded AS char(6)",
    "CREATE DOMAIN inner_code AS code CHECK (VALUE <> 'no')",
    "CREATE DOMAIN ints AS int[]",
    "CREATE DOMAIN moody AS mood",
    "CREATE DOMAIN paired AS pair",
    'CREATE DOMAIN posix AS text COLLATE "C"',
    # The embedded server has no ICU; other servers have it.
    "DO $$ BEGIN CREATE COLLATION ignore_case (provider = icu, locale = 'und-u-ks-level1', deterministic = false); "
    "EXCEPTION WHEN feature_not_supported THEN NULL; END $$",
)


def _texts(*values: str) -> list[str]:
    return ["'" + value.replace("'", "''") + "'" for value in values]


_NETS = _texts("10.0.0.0/8", "10.0.0.0/9", "::1/128", "2001:db8::/32", "0.0.0.0/0")
_WORDS = _texts(
    "", " ", "a", "A", "a ", "é", "e\u0301", "ß", "🦀", "%s", "it's", 'say "x"', "\\", "a\nb", "\u10ffff", "~"
)
# A character of each plane of Unicode, alone and together.
_PLANES = _texts("".join(chr(plane * 0x10000 + 0xFFFD) for plane in range(17)), chr(0x20000), chr(0x10FFFD))
_NAMES = _texts("pg_class", "pg_type", "pg_proc", "pg_index")

ORDERED: dict[str, list[str]] = {
    "boolean": _texts("t", "f"),
    "smallint": _texts("-32768", "0", "32767"),
    "integer": _texts("-2147483648", "-1", "0", "7", "2147483647"),
    "bigint": _texts("-9223372036854775808", "0", "9223372036854775807"),
    "numeric": _texts(
        "NaN", "-Infinity", "Infinity", "0", "-1.5", "1.00", "1e-1000", "9" * 1000, "-" + "9" * 1000 + "." + "1" * 500
    ),
    "numeric(6,2)": _texts("NaN", "0", "1234.56", "-0.01"),
    "real": _texts("NaN", "-Infinity", "Infinity", "-0", "1e-45", "0.1", "3.4028235e38"),
    "double precision": _texts("NaN", "-Infinity", "Infinity", "-0", "5e-324", "0.1", "1.7976931348623157e308"),
    "money": _texts("-92233720368547758.08", "0", "1,234.56", "92233720368547758.07"),
    "text": [*_WORDS, *_PLANES, "repeat('long ', 300)"],
    "character varying": _WORDS,
    "character varying(7)": _texts("", "a", "a ", "1234567", "ééééééé"),
    "character": _texts("", "a", "b", "é"),
    "character(5)": _texts("", "a", "a b", "ab\n", "é%s"),
    '"char"': _texts("", "a", "\\377", " ", "%", '"', "\\"),
    "name": _texts("", "a", "A", "é", "%s", "x" * 63),
    'text COLLATE "C"': [*_WORDS, *_PLANES],
    'text COLLATE "ignore_case"': _texts("", "a", "Å", "b", "%s", "zz"),
    'name COLLATE "POSIX"': _texts("", "a", "B", "é"),
    'character varying(9) COLLATE "ucs_basic"': _texts("", "a", "B", "é", "🦀"),
    "bytea": _texts("", "\\x00", "\\x00ff", "\\xff", "\\x5c27", "\\x2573"),
    "bit": _texts("0", "1"),
    "bit(9)": _texts("000000000", "101010101", "111111111"),
    "bit varying": _texts("", "0", "00", "1", "1" * 100),
    "date": _texts("-infinity", "infinity", "4714-11-24 BC", "0044-03-15 BC", "2026-02-28", "5874897-12-31"),
    "time without time zone": _texts("00:00", "24:00", "12:34:56.789012"),
    "time with time zone": _texts("00:00+14", "24:00-15:59", "12:00:00.000001+00", "12:00+05:30:15"),
    "timestamp without time zone": _texts("-infinity", "infinity", "4714-11-24 00:00:00 BC", "2026-11-01 01:30"),
    "timestamp with time zone": _texts(
        "-infinity", "infinity", "0044-03-15 12:00 BC", "2026-11-01 01:30:00.000001-04", "294276-12-31 23:59:59.999999Z"
    ),
    "timestamp(0) with time zone": _texts("2026-11-01 01:30-04", "2026-11-01 01:30-05", "epoch"),
    "interval": _texts(
        "-infinity", "infinity", "0", "1 day", "23:59:59.999999", "-1 mon +30 days", "1 year -1 day 00:00:00.000001",
        "178000000 years",
    ),
    "uuid": _texts("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff", "a" * 32),
    "inet": [*_NETS, *_texts("10.0.0.1", "10.0.0.1/8", "fe80::1")],
    "cidr": _NETS,
    "macaddr": _texts("00:00:00:00:00:00", "08:00:2b:01:02:03", "ff:ff:ff:ff:ff:ff"),
    "macaddr8": _texts("00:00:00:00:00:00:00:00", "08:00:2b:01:02:03:04:05", "ff:ff:ff:ff:ff:ff:ff:ff"),
    "jsonb": _texts("null", '"%s"', "1", "1.10", "[]", "{}", '{"a": [1, "\\u00e9"]}', "true", "[1, null]"),
    "pg_lsn": _texts("0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"),
    "xid8": _texts("0", "4294967296", "18446744073709551615"),
    "tid": _texts("(0,0)", "(0,1)", "(4294967295,65535)"),
    "oid": _texts("0", "1", "4294967295"),
    "oidvector": _texts("", "1", "1 2", "4294967295 0"),
    "tsvector": _texts("", "a:1", "'it''s' 'x y':2A", "a:1 b:2"),
    "tsquery": _texts("a", "a & b", "!a | 'it''s'", "a <-> b"),
    "int4range": _texts("empty", "[1,5)", "(,)", "[1,)"),
    "int8range": _texts("empty", "[1,5)", "(,)", "[1,)"),
    "numrange": _texts("empty", "[1.5,2.50)", "(,NaN]", "[-Infinity,1)"),
    "daterange": _texts("empty", "[2026-01-01,infinity)", "(,)", "[0044-03-15 BC,)"),
    "tsrange": _texts("empty", "[2026-01-01 00:00,infinity]", "(,)"),
    "tstzrange": _texts("empty", "[2026-01-01 00:00+05,infinity]", "(,)"),
    "int4multirange": _texts("{}", "{[1,2),[5,9)}", "{(,)}"),
    "int8multirange": _texts("{}", "{[1,2),[5,9)}", "{(,)}"),
    "nummultirange": _texts("{}", "{[1.0,2),(5,9]}", "{(,)}"),
    "datemultirange": _texts("{}", "{[2026-01-01,2026-02-01)}", "{(,)}"),
    "tsmultirange": _texts("{}", "{[2026-01-01,2026-02-01)}", "{(,)}"),
    "tstzmultirange": _texts("{}", "{[2026-01-01,2026-02-01)}", "{(,)}"),
    "regclass": _NAMES,
    "regtype": _texts("int", "text[]", "-", "4294967295"),
    "regproc": _texts("now", "-", "4294967295", "pg_catalog.version"),
    "regprocedure": _texts("now()", "abs(int)", "abs(numeric)", "-"),
    "regoper": _texts("||/", "|/", "0", "4294967295"),
    "regoperator": _texts("=(int,int)", "=(text,text)", "0"),
    "regrole": _texts("pg_monitor", "pg_read_all_data", "-"),
    "regnamespace": _texts("pg_catalog", "public", "-"),
    "regconfig": _texts("english", "simple", "german"),
    "regdictionary": _texts("simple", "english_stem", "german_stem"),
    "regcollation": _texts('"C"', '"POSIX"', '"default"'),
    "mood": _texts("sad", "ok", 'it\'s "%s"', ""),
    "moody": _texts("sad", "ok", ""),
    "pair": _texts("(1,a)", "(1,)", "(,)", '(1,"a""b, c")', '(,"%s")'),
    "paired": _texts("(1,a)", "(1,)", "(,)"),
    "priced": _texts("(1,1.0)", "(1,NaN)", "(,)"),
    "span": _texts("empty", "[-0,1)", "(,NaN]"),
    "amount": _texts("1.00", "-99999999.99", "NaN"),
    "code": _texts("", "a", "a b", "12345"),
    "inner_code": _texts("", "a", "yes"),
    "padded": _texts("", "a", "b  "),
    "posix": _texts("", "a", "B", "é"),
    "ints": _texts("{}", "{1}", "{NULL}", "{1,NULL}", "[2:3]={1,2}"),
}  # fmt: skip

ARRAYS: dict[str, list[str]] = {
    "integer[]": _texts("{}", "{1}", "{NULL}", "{1,NULL,2}", "{{1,2},{3,4}}", "[0:1]={1,2}"),
    "text[]": _texts("{}", '{""}', "{NULL}", '{"NULL"}', '{"a,b","c\\"d","{}","\\\\"}', "{%s}"),
    "mood[]": _texts("{}", "{sad}", "{sad,NULL}"),
    "code[]": _texts("{}", "{a}", "{a,NULL}"),
    "pair[]": _texts("{}", '{"(1,a)"}', '{"(1,a)",NULL,"(,)"}'),
    "bytea[]": _texts("{}", '{"\\\\x00"}', '{"\\\\x00",NULL}'),
    "regclass[]": _texts("{pg_class}", "{pg_type,NULL}", "{}"),
}

INCLUDED: dict[str, list[str]] = {
    "json": _texts('{"a": 1,  "a": 2}', "1.0"),
    "point": _texts("(1,-0)", "(NaN,Infinity)"),
    "line": _texts("{1,2,3}", "{-1,0,0.1}"),
    "lseg": _texts("[(0,0),(1,1)]", "[(0,0),(0,0)]"),
    "box": _texts("(1,1),(0,0)", "(0,0),(0,0)"),
    "path": _texts("((0,0),(1,1))", "[(0,0),(1,1)]"),
    "polygon": _texts("((0,0),(1,1),(1,0))", "((0,0))"),
    "circle": _texts("<(0,0),1>", "<(1,1),0>"),
    "pg_snapshot": _texts("10:20:10,14,15", "10:10:"),
    "txid_snapshot": _texts("10:20:10,14,15", "10:10:"),
    "xid": _texts("0", "4294967295"),
    "cid": _texts("0", "4294967295"),
    "int2vector": _texts("1 2", ""),
    "aclitem": _texts("postgres=r/postgres", "=w/postgres"),
    "jsonpath": _texts("$.a[*] ? (@ > 1)", "strict $"),
    "refcursor": _texts("c", ""),
    "json[]": _texts("{}", '{"1",NULL}'),
    "point[]": _texts("{}", '{"(1,1)",NULL}'),
    "text": ["repeat('0123456789', 100000)", "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 30000) i)"],
    "bytea": ["decode(repeat('00ff', 300000), 'hex')", "'\\x'"],
    "jsonb": ["to_jsonb(repeat('x', 100000))", "'{}'"],
    "numeric(1000,10)": _texts("9" * 900, "0"),
    "bit varying": ["repeat('10', 100000)::bit varying", "''"],
    "xml": _texts("<a>%s</a>", "text"),
    "tsvector": ["to_tsvector('simple', repeat('a b c ', 1000))", "''"],
    "mood": _texts("sad", "ok"),
    "pair": ["ROW(1, repeat('x', 100000))", "ROW(NULL, NULL)"],
    "ints": ["(SELECT array_agg(i) FROM generate_series(1, 20000) i)", "'{}'"],
}


def set_up(dsn: str) -> None:
    """Creates the types that aren't built in."""
    run_sql(dsn, *SETUP)


def supported(dsn: str, name: str, values: list[str]) -> list[str]:
    """The values that this server knows (infinite intervals came with 17). Skips the test if the type isn't there."""
    user = steps.session(dsn)
    user.autocommit = True
    known = []
    for value in values:
        try:
            sql(user, f"DO $$ BEGIN PERFORM {value}::{name}; END $$")
            known.append(value)
        except psycopg2.errors.UndefinedObject:
            pytest.skip(f"this server has no {name}")
        except psycopg2.errors.FeatureNotSupported:
            pytest.skip(f"this server was built without {name}")
        except (psycopg2.errors.InvalidDatetimeFormat, psycopg2.errors.InvalidTextRepresentation):
            continue
    return known
