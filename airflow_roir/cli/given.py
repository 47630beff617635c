"""The options of operations as options of commands: `@takes(BuildOptions)` adds them, from their declarations."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from airflow_roir.cli.defined import PARAMETERS
from airflow_roir.errors import Complaints, InvalidInput, RoirError
from airflow_roir.option import Kind, Option
from airflow_roir.options import (
    BuildOptions,
    CompactOptions,
    ReferenceOptions,
    VerifyOptions,
    WorkOptions,
    checked,
    options_of,
)
from airflow_roir.span import seconds

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database

# The placeholder for options in a command's signature: the decorator replaces it by the options, by their names.
Given = Annotated[dict[str, Any], "the options of an operation that were given"]

# The same for what is wrong with them. A command with this parameter begins all the same, and looks for more.
Wrong = Annotated[Complaints, "what is wrong with the options that were given"]

Command = Callable[..., None]
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")


def takes(
    declared: type[WorkOptions],
    fits: Callable[[Option], bool] = lambda option: option.offered,
    changes: bool = False,
) -> Callable[[Command], Command]:
    """Gives a command the options of a class in place of its parameter `given`, which gets their values.

    A parameter `defined` gets the options that define an index. If any of the others is wrong, the command isn't
    called, unless it has a parameter `wrong`. fits: chooses the options. changes: the command changes an operation that
    has begun, so an option that isn't given stays as it is. Then a flag that isn't given is None; another option is
    None or its default.
    """
    options = [one for one in options_of(declared) if fits(one)]

    def around(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        taken: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            if name == "given":
                taken += [_parameter(one, changes) for one in options]
            elif name == "defined":
                taken += PARAMETERS
            elif name != "wrong":
                taken.append(parameter)
        goes_on = "wrong" in signature.parameters
        defines = "defined" in signature.parameters

        @functools.wraps(command)
        def called(**values: Any) -> None:
            wrong = Complaints() if goes_on else None
            given = checked(options, lambda one: _value(one, values.pop(_dest(one))), complaints=wrong, called=flag_of)
            if defines:
                values["defined"] = {one.name: values.pop(one.name) for one in PARAMETERS}
            command(given=given, **values, **({"wrong": wrong} if goes_on else {}))

        called.__signature__ = signature.replace(parameters=taken)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in taken}
        return called

    return around


def settle(context: typer.Context, wrong: Complaints, look: Callable[[Database], object]) -> None:
    """Raises all that is wrong with an input, if `wrong` has anything. look: finds what is wrong by the database, too;
    if the database can't be asked, only `wrong` is raised."""
    if wrong and context.obj:
        from sqlalchemy.exc import DBAPIError

        from airflow_roir.cli.app import database_of

        with suppress(RoirError, DBAPIError), wrong.noted():
            look(database_of(context))
    wrong.settle()


def settle_of_index(context: typer.Context, wrong: Complaints, index: str, given: Mapping[str, Any]) -> None:
    """As `settle`, for the options of an index that exists."""

    def look(database: Database) -> None:
        from airflow_roir.engine.control import requests

        requests.look_further(wrong, database, index, given)

    settle(context, wrong, look)


def is_live(option: Option) -> bool:
    """True if it changes while an operation lives."""
    return option.live


def flag_of(option: Option) -> str:
    """The flag of an option: `--max-duration` for `max_duration_s`; `--no-verify` for a truth that is on by default."""
    if option.flag is not None:
        return option.flag
    name = option.name.removesuffix("_s") if option.kind is Kind.SPAN else option.name
    return ("--no-" if option.default is True else "--") + name.replace("_", "-")


@functools.cache
def _flags() -> dict[str, str]:
    """The flags of the options whose names are no words of English."""
    every = (BuildOptions, VerifyOptions, CompactOptions, ReferenceOptions)
    return {one.name: flag_of(one) for of in every for one in options_of(of) if "_" in one.name and one.offered}


def in_flags(text: str) -> str:
    """A message of the engine with the flags of options in place of their names."""
    names = "|".join(sorted(_flags(), key=len, reverse=True))
    text = re.sub(rf"(?<!set )(?<![\w.\"'-])({names})(?![\w\"'(])", lambda found: _flags()[found[1]], text)
    # A word of English is an option before a colon, and in a list of options.
    text = re.sub(r"(?m)^(- )?(throttle|windows)(?=: )", r"\1--\2", text)
    return re.sub(r"(?<=: give one of )[\w, -]+", lambda found: re.sub(r"(?<![\w-])(?=[a-z])", "--", found[0]), text)


def help_of(option: Option, changes: bool = False) -> str:
    """An option's help in one line: its meaning, its values, its default."""
    text = option.help
    if option.kind is Kind.TRUTH and option.default is True:
        text = f"Don't {text[0].lower()}{text[1:]}"
    if option.kind is Kind.NUMBER:
        text += f", {option.least_asked:,} to {option.most:,}"
    elif option.example is not None:
        text += f": {option.example}"
    none = f"{'off' if option.kind.is_text else 0}: {option.zero}" if option.zero else None
    if none is not None and not changes and option.zero == option.empty:
        none += ", the default"
    elif option.empty is not None and not changes:
        none = f"by default {option.empty}" + (f", {none}" if none else "")
    return text + (f"; {none}." if none else ".")


def _dest(option: Option) -> str:
    return flag_of(option).removeprefix("--").replace("-", "_")


def _parameter(option: Option, changes: bool) -> inspect.Parameter:
    sort: Any = str | None
    default: Any = None
    metavar = None
    if option.kind is Kind.TRUTH:
        sort, default = bool, False
    elif option.kind is Kind.SHARE:
        metavar = "PERCENTAGE"
    elif option.kind is Kind.NUMBER:
        # As text: typer would end the command at the first that is no number, and name no other error.
        metavar = "INTEGER"
    if option.kind in (Kind.NUMBER, Kind.CHOICE) and not option.live and option.default is not None:
        default = str(option.default)
    about = typer.Option(flag_of(option), help=help_of(option, changes), metavar=metavar, show_default=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(_dest(option), kind, default=default, annotation=Annotated[sort, about])


def _value(option: Option, value: Any) -> Any:
    """The value in the form that the classes of options have. Raises InvalidInput."""
    if value is None:
        return None
    if option.kind is Kind.SPAN:
        return seconds(flag_of(option), value)
    if option.kind is Kind.NUMBER:
        # `Option.check` refuses what stays text.
        return int(value) if _NUMBER.fullmatch(value) else value
    if option.kind is Kind.TRUTH:
        return not value if option.default else value
    if option.kind is Kind.SHARE:
        try:
            return float(value.removesuffix("%"))
        except ValueError:
            flag = flag_of(option)
            raise InvalidInput(f"{flag} takes a percentage, such as 1% or 1, not {value!r}") from None
    return value
