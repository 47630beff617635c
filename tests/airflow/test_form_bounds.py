"""Airflow's own form refuses, before the trigger, what an option refuses: by the bounds and choices of `options.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import Param
from airflow.sdk.exceptions import ParamValidationError

from airflow_roir.definition import COLUMNS_PATTERN, NAME_PATTERN, parse_columns, parse_name
from airflow_roir.errors import InvalidInput
from airflow_roir.option import Kind, Option
from airflow_roir.options import LIVE_OPTIONS, BuildOptions, CompactOptions, VerifyOptions, WorkOptions, options_of
from airflow_roir.task.forms import fields_of
from airflow_roir.task.given import value_of

FORMS: dict[str, tuple[type[WorkOptions], dict[str, Any]]] = {
    "build": (BuildOptions, {}),
    "verification": (VerifyOptions, {}),
    "compaction": (CompactOptions, {}),
    "change": (BuildOptions, {"names": LIVE_OPTIONS, "changes": True}),
}
# Texts that only their reader refuses: a pattern knows no zone, no weekday and no size.
ONLY_READ = {"1 2 3 for 8h", "0 22 * * 1-5 for 8h in Nowhere", "replica_lag=much", "400d"}
TEXTS = {
    Kind.SPAN: (
        "2h",
        "1h 30min",
        "90",
        "1_000",
        "off",
        "never",
        "3 d",
        "soon",
        "2 fortnights",
        "h",
        "-1h",
        "1h;",
        "2 hours",
    ),
    Kind.WINDOWS: (
        "off",
        "now",
        "0 22 * * 1-5 for 8h",
        "0 22 * * * for 8h in UTC; 0 8 * * 6 for 1d",
        "a for b; c",
        ";",
        "",
    ),
    Kind.LIMITS: ("off", "lag=1", "much", "query=1;lock_waits=4", "replicas=a,b replica_lag=off", "query = 1", ""),
}


def values_of(option: Option) -> list[Any]:
    values: list[Any] = [None, *TEXTS.get(option.kind, ()), *ONLY_READ]
    if option.kind in (Kind.NUMBER, Kind.SPAN):
        ends = (option.least, option.least_asked, option.most)
        return [*TEXTS.get(option.kind, ()), "many", True, 1.5, 0, -1, *(end + by for end in ends for by in (-1, 0, 1))]
    if option.kind is Kind.SHARE:
        return [0, -1, 0.1, 100, 101, 100.5, "many", True]
    if option.kind is Kind.CHOICE:
        return [*(option.choices or ()), "nonsense"]
    return [True, False, 1, "nonsense"] if option.kind is Kind.TRUTH else values


def takes(field: Param, value: Any) -> bool:
    try:
        field.resolve(value)
    except ParamValidationError:
        return False
    return True


def reads(option: Option, value: Any) -> bool:
    try:
        option.check(value_of(option, value), asked=True)
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize("form", FORMS)
def test_a_form_refuses_what_its_options_refuse(form: str) -> None:
    declared, about = FORMS[form]
    options = {one.name: one for one in options_of(declared)}
    for name, field in fields_of(declared, **about).items():
        option = options[name]
        for value in values_of(option):
            if value is None or value in ONLY_READ:
                continue
            if value == 0 and option.kind is Kind.NUMBER and option.zero == option.empty and "changes" not in about:
                # An empty field says the same.
                continue
            if isinstance(value, str) and option.kind in (Kind.NUMBER, Kind.SHARE):
                assert not takes(field, value), (name, value)
                continue
            if isinstance(value, str) and option.kind in TEXTS:
                # Airflow's message would be the bare pattern; the first task names all errors in words.
                assert takes(field, value), (name, value)
                continue
            assert takes(field, value) == reads(option, value), (name, value)


def test_the_bounds_of_each_number_are_those_of_its_option() -> None:
    for declared, about in FORMS.values():
        options = {one.name: one for one in options_of(declared)}
        for name, field in fields_of(declared, **about).items():
            option, schema = options[name], field.schema
            if option.kind in (Kind.NUMBER, Kind.SPAN):
                least = 0 if option.zero and (about or option.kind is Kind.SPAN) else option.least_asked
                assert (schema["minimum"], schema["maximum"]) == (least, option.most), name
            assert schema.get("enum") == (list(option.choices) if option.choices else None), name
            assert "pattern" not in schema, name
            if option.kind is Kind.SPAN:
                assert str(option.example) in schema["title"], name
                # Two types without examples are a field of JSON, with several lines.
                assert schema["examples"] == [option.example], name


def test_each_number_field_says_its_bounds() -> None:
    """Found: Parallelism and Ranges refused a number without ever having named their bounds."""
    seen = 0
    for declared, about in FORMS.values():
        options = {one.name: one for one in options_of(declared)}
        for name, field in fields_of(declared, **about).items():
            if options[name].kind is Kind.NUMBER:
                least, most = options[name].least_asked, options[name].most
                assert f". {least:,} to {most:,}." in str(field.description), name
                seen += 1
    assert seen > 10


def test_each_number_field_of_each_dag_says_its_bounds(dags_folder: Path) -> None:
    """Also those that a DAG's file declares."""
    bag = DagBag(dag_folder=str(dags_folder), load_op_links=False, collect_dags=True)
    seen = 0
    for dag in bag.dags.values():
        for name, value in dag.params.items():
            field = dag.params.get_param(name)
            schema, types = field.schema, field.schema.get("type", ())
            kinds = {types} if isinstance(types, str) else set(types)
            if "string" in kinds or not kinds & {"integer", "number"}:
                continue
            most = f"{schema['maximum']:,}"
            ends = (f"{schema['minimum']:,} to {most}",) if "minimum" in schema else ("More than 0", f"at most {most}")
            if name in LIVE_OPTIONS and "null" in kinds and schema.get("minimum") == 0:
                # The form's 0 has its own sentence.
                ends = (f"to {most}", "0: ")
            assert all(end in str(field.description) for end in ends), (dag.dag_id, name, value, field.description)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize(
    ("pattern", "read", "texts"),
    [
        (
            NAME_PATTERN,
            parse_name,
            (
                "t",
                "s.t",
                ' "S x" . "T ""1""" ',
                "a.b.c",
                "",
                " ",
                '"',
                '""',
                "a b",
                ".a",
                "a.",
                "a..b",
                'a"b',
                "ÉTÉ",
                "x$1",
            ),
        ),
        (
            COLUMNS_PATTERN,
            parse_columns,
            ("k", "k, v", '"A,b",c', "", "  ", "k,,v", ",", "k v", '"', "k,", 'k"', '"a" b', "a.b"),
        ),
    ],
)
def test_the_patterns_of_names_take_what_is_read(pattern: str, read: Any, texts: tuple[str, ...]) -> None:
    field = Param("x", type="string", pattern=pattern)
    for text in texts:
        try:
            read(text)
        except InvalidInput:
            assert not takes(field, text), text
        else:
            assert takes(field, text), text
