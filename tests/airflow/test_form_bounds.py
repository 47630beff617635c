"""Airflow's own form refuses, before the trigger, what an option refuses: by the bounds and choices of `options.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from airflow.dag_processing.dagbag import DagBag
from airflow.exceptions import ParamValidationError as ParamsRefused
from airflow.sdk import Param
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.definitions.param import SerializedParam, SerializedParamsDict

from airflow_roir.definition import parse_columns, parse_name
from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput
from airflow_roir.option import Kind, Option
from airflow_roir.options import LIVE_OPTIONS, BuildOptions, CompactOptions, VerifyOptions, WorkOptions, options_of
from airflow_roir.signals import SIGNALS
from airflow_roir.task.formats import COLUMNS, NAME, format_of
from airflow_roir.task.forms import fields_of
from airflow_roir.task.given import value_of

FORMS: dict[str, tuple[type[WorkOptions], dict[str, Any]]] = {
    "build": (BuildOptions, {}),
    "verification": (VerifyOptions, {}),
    "compaction": (CompactOptions, {}),
    "change": (BuildOptions, {"names": LIVE_OPTIONS, "changes": True}),
}
OF_FORMAT = {format_of(one, option): option for one, _ in FORMS.values() for option in options_of(one)}
# The server reads the values of limits.
ONLY_READ = {"replica_lag=much", "query=1;lock_waits=x", "replicas=,"}
ZONES = ("1 2 3 for 8h", "0 22 * * 1-5 for 8h in Nowhere", "400d")
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
    values: list[Any] = [None, *TEXTS.get(option.kind, ()), *ZONES]
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
    """Found: the form took `5 parsecs`, which the first task refused."""
    declared, about = FORMS[form]
    options = {one.name: one for one in options_of(declared)}
    for name, field in fields_of(declared, **about).items():
        option = options[name]
        for value in values_of(option):
            if value is None or option.kind is Kind.LIMITS:
                continue
            if isinstance(value, str) and option.kind in (Kind.NUMBER, Kind.SHARE):
                assert not takes(field, value), (name, value)
                continue
            assert takes(field, value) == reads(option, value), (name, value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("abort_after_s", "5 parsecs", "the value is '5 parsecs'; it must be a duration, such as 2h, 90min or"),
        ("parallelism", 999, "the value is 999; it must be a whole number from 1 to 256"),
        ("max_rows_per_second", 50, "the value is 50; it must be a whole number from 100 to 1000000000, or 0 for no"),
        ("windows", "0 22 * * * for 8h in Europe/Berln", "windows: there is no time zone 'Europe/Berln'; write CRON"),
        ("throttle", "replica_lagg=1MB", "there is no signal replica_lagg; there are replica_lag, replica_delay, "),
    ],
)
def test_the_form_says_in_words_what_is_wrong(name: str, value: Any, said: str) -> None:
    """As Airflow's server does at a trigger."""
    field = fields_of(BuildOptions)[name]
    server = SerializedParamsDict({name: SerializedParam(field.value, None, **field.schema)})
    with pytest.raises(ParamsRefused) as refusal:
        server.deep_merge({name: value}).validate()
    assert str(refusal.value).startswith(f"Invalid input for param {name}: {said}")
    assert "Failed validating" not in str(refusal.value)


def test_a_refusal_is_one_short_line_whatever_the_value_is() -> None:
    for value in ("x" * 100_000, "a\u202eb\n" * 9 + "c"):
        with pytest.raises(ParamValidationError) as refusal:
            fields_of(BuildOptions)["abort_after_s"].resolve(value)
        assert len(str(refusal.value)) <= 501
        assert str(refusal.value).isprintable()


def test_limits_are_refused_for_their_signals_and_their_form_alone(dsn: str) -> None:
    """A text that the form refuses is refused by the server as well."""
    field = fields_of(BuildOptions)["throttle"]
    texts = (*TEXTS[Kind.LIMITS], *ONLY_READ, *(f"{name}=1" for name in SIGNALS), "Query=1", "a=1")
    for text in texts:
        try:
            with Database(dsn, "roir tests").transaction() as connection:
                connection.execute(sa.text("SELECT roir.throttle_of(:text)"), {"text": text})
        except sa.exc.DataError:
            assert not takes(field, text) or text in ONLY_READ, text
        else:
            assert takes(field, text), text


def test_a_number_has_no_bounds_to_which_the_form_would_move_it() -> None:
    """Found: the form made 256 workers of 999."""
    for declared, about in FORMS.values():
        options = {one.name: one for one in options_of(declared)}
        for name, field in fields_of(declared, **about).items():
            option, schema = options[name], field.schema
            assert not schema.keys() & {"minimum", "maximum", "pattern"}, name
            assert schema.get("enum") == (list(option.choices) if option.choices else None), name
            if option.kind is Kind.SPAN:
                assert str(option.example) in schema["title"], name
                # Two types without examples are a field of JSON, with several lines.
                assert ", ".join(schema["examples"]) == option.example, name


def test_airflows_server_has_the_formats() -> None:
    """By the plugin alone: it imports no DAG file."""
    said = "import airflow_roir.page.plugin, sys; from jsonschema import FormatChecker; "
    said += "assert 'roir name' in FormatChecker.checkers and 'airflow_roir.engine' not in sys.modules"
    subprocess.run([sys.executable, "-c", said], check=True)


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
            assert not schema.keys() & {"minimum", "maximum"}, "the form would move a number to them"
            if option := OF_FORMAT.get(schema.get("format")):
                share, least, most = option.kind is Kind.SHARE, option.least_asked, option.most
            else:
                [bounds] = schema["allOf"]
                share, least, most = "exclusiveMinimum" in bounds, bounds.get("minimum"), bounds["maximum"]
            ends = ("More than 0", "at most 100") if share else (f"{least:,} to {most:,}",)
            assert all(end in str(field.description) for end in ends), (dag.dag_id, name, value, field.description)
            seen += 1
    assert seen > 10


@pytest.mark.parametrize(
    ("form", "read", "texts"),
    [
        (
            NAME,
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
            COLUMNS,
            parse_columns,
            ("k", "k, v", '"A,b",c', "", "  ", "k,,v", ",", "k v", '"', "k,", 'k"', '"a" b', "a.b"),
        ),
    ],
)
def test_the_formats_of_names_take_what_is_read(form: str, read: Any, texts: tuple[str, ...]) -> None:
    field = Param("x", type="string", format=form)
    for text in texts:
        try:
            read(text)
        except InvalidInput:
            assert not takes(field, text), text
        else:
            assert takes(field, text), text
