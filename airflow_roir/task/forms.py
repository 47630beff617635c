"""Makes the fields of a DAG's form from the declarations of options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import Param

from airflow_roir.option import Kind, Option
from airflow_roir.options import WORK_OPTIONS, WorkOptions, options_of
from airflow_roir.task.formats import format_of

TYPES = {
    Kind.NUMBER: ["integer"],
    Kind.SPAN: ["string", "integer"],
    Kind.SHARE: ["number"],
    Kind.CHOICE: ["string"],
    Kind.TRUTH: ["boolean"],
    Kind.LIMITS: ["string"],
    Kind.WINDOWS: ["string"],
}


def names_in_form(declared: type[WorkOptions], without: Sequence[str] = ()) -> tuple[str, ...]:
    """The options of which a form has a field: those with a title."""
    return tuple(one.name for one in options_of(declared) if one.title is not None and one.name not in without)


def fields_of(
    declared: type[WorkOptions],
    names: Sequence[str] | None = None,
    how: str | None = None,
    when: str | None = None,
    changes: bool = False,
    **values: Any,
) -> dict[str, Param]:
    """The fields of a form, by name. names: of the options; by default all that have a title.

    how, when: the sections of an operation's own options, and of those about when and how hard it works; by default
    none. changes: the form changes an operation that has begun, so an empty field keeps the present value. values: the
    fields' first values, by their names, instead of the options' defaults.
    """
    wanted = names_in_form(declared) if names is None else names
    found = {one.name: one for one in options_of(declared)}
    return {
        name: _field(
            declared,
            found[name],
            when if name in WORK_OPTIONS and when is not None else how,
            changes,
            values.get(name),
        )
        for name in wanted
    }


def templates_of(names: Sequence[str]) -> dict[str, str]:
    """Templates for an operator's arguments, each of the field of its name. An empty field is rendered as None."""
    return {name: f"{{{{ params.{name} }}}}" for name in names}


def _field(declared: type[WorkOptions], option: Option, section: str | None, changes: bool, value: Any) -> Param:
    # The field of a span is empty: its default would be shown in seconds.
    is_empty = changes or option.is_optional or option.kind is Kind.SPAN
    types = [*(["null"] if is_empty else []), *TYPES[option.kind]]
    schema: dict[str, Any] = {
        "type": types if len(types) > 1 else types[0],
        "title": _title(option),
        # It has the bounds, too: by `minimum` and `maximum` the form would move a number without a word.
        "format": format_of(declared, option),
    }
    if option.kind is Kind.SPAN:
        # Without examples Airflow's form shows a large field of JSON, since there are two types.
        schema["examples"] = str(option.example).split(", ")
    elif option.choices is not None:
        shown = {value: f"{value}: {said}" if said else value for value, said in option.choices.items()}
        schema |= {"enum": list(option.choices), "values_display": shown}
    if section is not None:
        schema["section"] = section
    first = value if value is not None or is_empty else option.default
    return Param(first, description=_description(option, changes, is_empty), **schema)


def _title(option: Option) -> str | None:
    return f"{option.title}, as {option.example}" if option.kind is Kind.SPAN else option.title


def _description(option: Option, changes: bool, is_empty: bool) -> str:
    text = option.form or option.help
    said = [f"For resume and change: {text[0].lower()}{text[1:]}" if changes else text]
    if option.kind is Kind.SPAN:
        said.append("d, h, min or s; a number alone is seconds")
    elif option.kind.is_text:
        said[0] += f": {option.example}"
    if option.kind is Kind.NUMBER:
        said.append(f"{option.least_asked:,} to {option.most:,}")
    elif option.kind is Kind.SHARE:
        said.append("More than 0, at most 100")
    if option.zero is not None and (changes or option.zero != option.empty):
        said.append(f"{'off' if option.kind.is_text else 0}: {option.zero}")
    if is_empty:
        said.append(f"Empty: {'as before' if changes else option.empty}")
    if option.live and not changes:
        said.append("You can change it while it runs")
    return ". ".join(said) + "."
