"""Gives operators the options of operations as arguments, by their declarations: `@takes(BuildOptions)` adds them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from airflow_roir.errors import Complaints
from airflow_roir.one_line import one_line
from airflow_roir.option import Kind, Option
from airflow_roir.options import Declared, WorkOptions, checked, options_of
from airflow_roir.span import seconds
from airflow_roir.task.form_values import number, optional_text, whole_number, yes_or_no

# The fields of operators that say, besides the index, on which things the operation works.
WHAT = ("table", "keys", "include", "where", "unique", "nulls_not_distinct", "shards", "shard_column", "mode", "budget")

Initializer = Callable[..., None]


def names_of(declared: type[WorkOptions]) -> tuple[str, ...]:
    """The names of the options that an operator takes, each a templated field."""
    return tuple(one.name for one in options_of(declared) if one.offered)


def takes(names: Sequence[str]) -> Callable[[Initializer], Initializer]:
    """Gives an operator's `__init__` these arguments besides its own, and the operator attributes of these names; None
    if they aren't given.

    They are in its signature, so that Airflow refuses an unknown name and takes them from `default_args` and `partial`.
    """

    def around(init: Initializer) -> Initializer:
        signature = inspect.signature(init)
        *own, rest = signature.parameters.values()
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]

        @functools.wraps(init)
        def made(self: Any, **given: Any) -> None:
            options = {name: given.pop(name, None) for name in names}
            init(self, **given)
            for name, value in options.items():
                setattr(self, name, value)

        made.__signature__ = signature.replace(parameters=[*own, *added, rest])  # type: ignore[attr-defined]
        return made

    return around


def given_to(
    operator: Any, declared: type[Declared], complaints: Complaints | None = None, told: bool = False
) -> Declared:
    """The options that an operator's rendered fields give, defaults for empty ones.

    Logs what differs from the defaults.
    told: an earlier look of the same wait has logged it.
    Raises one InvalidInput for all values that are wrong; or adds them to `complaints`.
    """
    found = {one.name: one for one in options_of(declared) if one.offered}
    values = checked(found.values(), lambda one: value_of(one, getattr(operator, one.name)), complaints=complaints)
    about = {name: getattr(operator, name, None) for name in WHAT}
    given = {name: value for name, value in about.items() if value and value not in ("None", "False")}
    for name, option in found.items():
        # A value that can't be used is shown as it was given.
        value = values[name] if name in values else getattr(operator, name)
        if not _is_default(option, value):
            given[name] = value
    said = " ".join(f"{name}={_shown(value)}" for name, value in given.items())
    if not told:
        operator.log.info("Options given: %s", f"{said}; the rest by default" if said else "none")
    return declared.asked(**values)


def _is_default(option: Option, value: Any) -> bool:
    """True if the value, as it was read, says no more than an empty field."""
    is_zero = option.default is None and value == 0 and option.zero == option.empty
    return value is None or value == option.default or is_zero or str(value) == option.empty


def _shown(value: Any) -> str:
    return one_line(",".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def value_of(option: Option, value: Any) -> Any:
    """A value as a form or a template gives it: None, '' and 'None' are None. Raises InvalidInput."""
    if option.kind is Kind.NUMBER:
        return whole_number(option.name, value)
    if option.kind is Kind.SPAN:
        # For JSON Schema 2.0 is a whole number, too, and a template renders it as `2.0`.
        is_text = isinstance(value, str)
        return seconds(option.name, value.strip().removesuffix(".0")) if is_text else whole_number(option.name, value)
    if option.kind is Kind.SHARE:
        return number(option.name, value)
    if option.kind is Kind.TRUTH:
        return yes_or_no(option.name, value)
    return optional_text(value)
