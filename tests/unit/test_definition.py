"""Names, definitions and options: read as psql reads them, refused with the reason."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_roir.definition import (
    IndexDefinition,
    QualifiedName,
    argument,
    parse_beside,
    parse_columns,
    parse_keys,
    parse_name,
    quote,
)
from airflow_roir.errors import InvalidInput
from airflow_roir.option import Kind, Option
from airflow_roir.options import BuildOptions, CompactOptions, VerifyOptions, WorkOptions, options_of

NAMES = st.text(
    st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=15
)  # up to 60 bytes


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("t", None, "t"),
        ("Public.T", "public", "t"),
        ('"Weird Schema"."Order ""Items"""', "Weird Schema", 'Order "Items"'),
        ('s."a.b"', "s", "a.b"),
        (' s . "t" ', "s", "t"),
        ("line%no", None, "line%no"),
        ('"""', None, None),
        ("ÉTÉ", None, "ÉtÉ"),  # PostgreSQL folds ASCII only
        ("\u212aelvin", None, "\u212aelvin"),  # Python would make it `kelvin`
        ('"x\ny"', None, "x\ny"),
        ("a\u00a0b", None, "a\u00a0b"),  # no white space to PostgreSQL
        ('"🦀"', None, "🦀"),
        ("x" * 63, None, "x" * 63),
    ],
)
def test_names_are_read_as_psql_reads_them(text: str, schema: str | None, name: str | None) -> None:
    if name is None:
        with pytest.raises(InvalidInput):
            parse_name(text)
    else:
        assert parse_name(text) == QualifiedName(schema, name)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ".", "a.", ".a", '""', 'a."".b', 'a.""', "a.b.c", '"a', 'a"b', '"a"b', "a b", '"a" "b"', "a..b"),
        *("x" * 64, "é" * 32, "a\0b", '"a\0b"', "a\udcff", '"\ud83d"'),
    ],
)
def test_a_malformed_name_is_refused_and_shown(text: str) -> None:
    with pytest.raises(InvalidInput, match="index"):
        parse_name(text, "index")


@given(schema=st.none() | NAMES, name=NAMES)
def test_what_is_shown_of_a_name_reads_back_as_that_name(schema: str | None, name: str) -> None:
    written = QualifiedName(schema, name)
    assert parse_name(str(written)) == written
    assert parse_name(written.sql) == written


@given(names=st.lists(NAMES, min_size=1, max_size=5))
def test_quoted_column_lists_read_back(names: list[str]) -> None:
    quoted = [quote(name) for name in names]
    assert parse_columns(", ".join(quoted)) == tuple(names)
    assert parse_columns(quoted) == tuple(names)


def test_column_lists_may_be_text_or_sequence_and_empty() -> None:
    assert parse_columns('a, B ,"C,"') == ("a", "b", "C,")
    assert parse_columns(["a", '"B"']) == ("a", "B")
    for nothing in (None, "", " ", ()):
        assert parse_columns(nothing) == ()
    for bad in ("a,", ",a", "a,,b", "a b", 'a,"b'):
        with pytest.raises(InvalidInput):
            parse_columns(bad)


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_quote_refuses_what_is_no_name(name: str) -> None:
    with pytest.raises(InvalidInput, match="not an SQL identifier"):
        quote(name)


@pytest.mark.parametrize(
    ("table", "keys", "include", "message"),
    [
        ("t", None, None, "together"),
        (None, "a", None, "together"),
        (None, None, "a", "included columns need"),
        ("t", "a,a", None, 'key column "a" is repeated'),
        ("t", 'A,"a"', None, 'key column "a" is repeated'),
        ("t", "a", "b,c,b", 'included column "b" is repeated'),
        ("t", "a,b", "b", '"b" is a key column already'),
        ("t.u.v", "a", None, "at most a schema and a name"),
    ],
)
def test_a_definition_that_contradicts_itself_is_refused(
    table: str | None, keys: str | None, include: str | None, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        IndexDefinition.parse("ix", table, keys, include)


CLASSES = (BuildOptions, VerifyOptions, CompactOptions)
NUMBERS = [
    (declared, one) for declared in CLASSES for one in options_of(declared) if one.kind in (Kind.NUMBER, Kind.SPAN)
]
WRONG: dict[Kind, tuple[Any, ...]] = {
    Kind.NUMBER: (True, False, "2", 2.0, float("nan"), 10**18, -(10**18), [1]),
    Kind.SPAN: (True, False, "2h", 2.0, float("nan"), 10**18, -1, [1]),
    Kind.SHARE: (0, -1, 100.1, float("nan"), True, "1", "1%", [1]),
    Kind.CHOICE: ("nonsense", "", " ", "None", 1, True, ["none"]),
    Kind.TRUTH: ("true", 1, 0, "", []),
    Kind.LIMITS: (1, True, ["lock_waits=5"]),
    Kind.WINDOWS: ("nonsense", "* * * * *", 1, True, ["0 22 * * 1-5 for 8h"]),
}


@pytest.mark.parametrize("declared", CLASSES)
def test_each_option_refuses_what_is_none_of_its_values_by_name(declared: type[WorkOptions]) -> None:
    for one in options_of(declared):
        for value in (*WRONG[one.kind], *(() if one.is_optional else (None,))):
            with pytest.raises(InvalidInput, match=one.name):
                declared(**{one.name: value})


@pytest.mark.parametrize(("declared", "one"), NUMBERS, ids=lambda part: getattr(part, "name", None))
def test_an_option_may_be_as_small_and_as_large_as_its_limits(declared: type[WorkOptions], one: Option) -> None:
    zero = "" if one.zero is None else f", or 0 for {one.zero}"
    for value in (one.least, one.most):
        assert getattr(declared(**{one.name: value}), one.name) == value
    for value in {one.least - 1, one.most + 1} - ({0} if one.zero else set()):
        said = f"{one.name} is {value}; it must be a whole number from {one.least} to {one.most}{zero}"
        with pytest.raises(InvalidInput, match=said):
            declared(**{one.name: value})
    assert getattr(declared.asked(**{one.name: one.least_asked}), one.name) == one.least_asked
    if one.zero or one.least_asked > one.least:
        with pytest.raises(InvalidInput, match=f"from {one.least_asked} to {one.most}{zero}"):
            declared.asked(**{one.name: one.least_asked - 1 or -1})
    if one.zero:
        assert getattr(declared.asked(**{one.name: 0}), one.name) == 0


def test_nothing_given_is_the_default_and_an_unknown_name_is_refused() -> None:
    for declared in CLASSES:
        assert declared.asked(**dict.fromkeys(one.name for one in options_of(declared))) == declared()
        with pytest.raises(TypeError, match="parallelisms"):
            declared.asked(parallelisms=2)


def test_an_argument_is_what_a_shell_reads_and_does_nothing_to_a_terminal() -> None:
    names = ["public.ix", "it's", '"a b"', "$(x) `y` !z", "back\\slash", "'\n\t\x1b[2J\x9b\u202e\U000e0001\\'", "漢🎉"]
    line = " ".join(map(argument, names))
    assert line.isprintable()
    command = ["bash", "-c", f"printf '%s\\0' {line}"]
    read = subprocess.run(command, env={**os.environ, "LC_ALL": "C.UTF-8"}, capture_output=True, check=True).stdout
    assert read.decode().split("\0") == [*names, ""]


def test_an_index_beside_another_one_is_written_as_in_create_index() -> None:
    assert parse_beside("public.b (k, v)", "t") == IndexDefinition.parse("public.b", "t", "k,v")
    assert parse_beside(
        ' UNIQUE "a.(b".c ("x)",y) include ( "z,z" ) nulls  not distinct', "t"
    ) == IndexDefinition.parse('"a.(b".c', "t", '"x)",y', '"z,z"', unique=True, nulls_not_distinct=True)
    assert parse_beside("unique (k)", "t") == IndexDefinition.parse("unique", "t", "k")


@pytest.mark.parametrize("text", ["b", "b ()", "b (k", "b (k) z", "(k)", "b (k) include ()"])
def test_what_is_no_index_beside_another_one_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no index"):
        parse_beside(text, "t")
    with pytest.raises(InvalidInput, match="--table"):
        parse_beside("b (k)", None)


# A list of keys as `CREATE INDEX` would have it, the names in the view, and the expressions by name.
KEYS = [
    ('email COLLATE "C"', ("email_key",), {"email_key": 'email COLLATE "C"'}),
    ('email COLLATE "C" AS c DESC', ("c",), {"c": 'email COLLATE "C"'}),
    ("email text_pattern_ops", ("email_key",), {"email_key": 'email COLLATE "C"'}),
    ('"E-mail" COLLATE pg_catalog."de_DE"', ("E-mail_key",), {"E-mail_key": '"E-mail" COLLATE pg_catalog."de_DE"'}),
    ('a COLLATE "de_DE" pg_catalog.varchar_pattern_ops', ("a_key",), {"a_key": 'a COLLATE "C"'}),
    ("lower(email) text_pattern_ops ASC NULLS LAST", ("lower",), {"lower": 'lower(email) COLLATE "C"'}),
    ("lower(email) DESC AS x", ("x",), {"x": "lower(email)"}),
    ("a DESC, lower(b) desc NULLS First", ("a", "lower"), {"lower": "lower(b)"}),
    ("a asc, b", ("a", "b"), {}),
    ("desc", ("desc",), {}),
    ('"my desc", "its_ops"', ("my desc", "its_ops"), {}),
    ("its_ops", ("its_ops",), {}),
    ("a || ' desc' AS nulls", ("nulls",), {"nulls": "a || ' desc'"}),
    (["a DESC", "b DESC"], ("a", "b"), {}),
]


@pytest.mark.parametrize(("text", "names", "expressions"), KEYS)
def test_options_of_keys_are_read_as_by_create_index(text: str, names: tuple[str, ...], expressions: object) -> None:
    assert parse_keys(text) == (names, expressions)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a, b DESC", "in ascending order"),
        (["a", "b DESC"], "in ascending order"),
        ("a NULLS FIRST", "in ascending order"),
        ("a DESC NULLS LAST", "in ascending order"),
        ("a DESC, b", "in ascending order"),
        ("doc jsonb_path_ops", "leave jsonb_path_ops out"),
    ],
)
def test_options_of_keys_that_entries_cannot_have_are_refused(text: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        parse_keys(text)
