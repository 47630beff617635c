"""The formats of a form's fields: Airflow's server refuses a value before the trigger, in the words of the first task.

JSON Schema's bounds and patterns would do less. Airflow's form moves a number to the nearest bound without a word, and
its refusal of a text is the bare pattern. A format's check raises the error itself, so that the form shows it.
The plugin imports this module in the server, DAG files in the other processes; where neither does, nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jsonschema import FormatChecker
from jsonschema.exceptions import ValidationError

from airflow_roir.definition import parse_condition, parse_keys, parse_name
from airflow_roir.errors import InvalidInput
from airflow_roir.one_line import one_line
from airflow_roir.option import Kind, Option
from airflow_roir.options import BuildOptions, CompactOptions, VerifyOptions, WorkOptions, options_of
from airflow_roir.signals import check_limits
from airflow_roir.span import seconds
from airflow_roir.task.given import value_of

VALUE = "the value"
# The message may quote the value, which may be anything.
LONGEST = 500
# NAME_IF_ANY: the field may be empty.
NAME, NAME_IF_ANY, COLUMNS, CONDITION = "roir name", "roir name, if any", "roir columns", "roir condition"
DURATION, BUDGET = "roir duration", "roir budget"


def format_of(declared: type[WorkOptions], option: Option) -> str:
    """The format of an option's field."""
    return f"roir {declared.__name__}.{option.name}"


def _checker(read: Callable[[Any], object]) -> tuple[Callable[[object], bool], tuple[()]]:
    """A format's check, and the errors of which jsonschema would make words of its own: none."""

    def check(value: object) -> bool:
        try:
            read(value)
        except InvalidInput as error:
            raise ValidationError(one_line(str(error), LONGEST)) from None
        return True

    return check, ()


def _option_checker(option: Option) -> tuple[Callable[[object], bool], tuple[()]]:
    # The form's refusal names the field already.
    named = replace(option, name=VALUE)

    def read(value: object) -> None:
        found = value_of(named, value)
        named.check(found, asked=True)
        if option.kind is Kind.LIMITS and found is not None:
            check_limits(found)

    return _checker(read)


def _name_if_any(value: Any) -> None:
    if value is not None and (not isinstance(value, str) or value.strip()):
        parse_name(value, VALUE)


def _budget(value: Any) -> None:
    from airflow_roir.engine.compact.budget import Budget

    Budget.parse(value, VALUE)


FormatChecker.checkers.update(
    {
        NAME: _checker(lambda value: parse_name(value, VALUE)),
        NAME_IF_ANY: _checker(_name_if_any),
        COLUMNS: _checker(lambda value: parse_keys(value, VALUE)),
        CONDITION: _checker(lambda value: parse_condition(value, VALUE)),
        DURATION: _checker(lambda value: seconds(VALUE, value)),
        BUDGET: _checker(_budget),
        **{
            format_of(declared, option): _option_checker(option)
            for declared in (BuildOptions, VerifyOptions, CompactOptions)
            for option in options_of(declared)
        },
    }
)
