"""The declaration of an option: the kind of its values, its bounds, its texts. `options.py` declares each option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from airflow_roir.errors import InvalidInput
from airflow_roir.span import LONGEST_S
from airflow_roir.windows import parse_windows


class Kind(Enum):
    """The kind of an option's values. Those of SPAN are seconds, which users may also give as `2h`."""

    NUMBER = "whole number"
    SPAN = "span"
    SHARE = "share, in per cent"
    CHOICE = "choice"
    TRUTH = "true or false"
    # Texts. The server reads limits, `windows.parse_windows` windows.
    LIMITS = "limits of signals"
    WINDOWS = "windows"

    @property
    def is_text(self) -> bool:
        """True if any text is accepted here; the server or `parse_windows` finds its errors."""
        return self in (Kind.LIMITS, Kind.WINDOWS)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its values and its texts.

    help: one line, without a full stop. default: the engine's value if it isn't given; None is the operation's own, or
    `begins`. least, most: of a number. asked: the least that users may give; the engine accepts less. zero: the meaning
    of 0, or `off`, if it means none. empty: the effect if it isn't given, for people. choices: the values, each with
    its text in a form. example: a value as a user may write it.

    live: it can change while an operation lives, and is a column of the operation's row. begins: the row's first value
    if it isn't given. in_store: the Task State Store has it. apart: only indexes over shards have it. slows: if it is
    given, workers do less than they could. `roir.slowed_by` returns the values of these options: such an operation
    doesn't show the speed of others, and shares a scan only with operations that are slowed down alike.

    flag: of the command line, if that isn't its name. offered: to users; otherwise it is internal. planned: `roir plan`
    uses it. title: its label in a form; None if no form has it. form: the form's text in place of `help`.
    """

    kind: Kind
    help: str
    name: str = ""
    default: Any = None
    least: int = 0
    most: int = 0
    asked: int | None = None
    zero: str | None = None
    empty: str | None = None
    choices: Mapping[str, str] | None = None
    example: str | None = None
    live: bool = False
    slows: bool = False
    begins: int | None = None
    in_store: bool = True
    apart: bool = False
    flag: str | None = None
    offered: bool = True
    planned: bool = False
    title: str | None = None
    form: str | None = None

    @property
    def is_optional(self) -> bool:
        """True if None is a value."""
        return self.default is None

    @property
    def none(self) -> str | None:
        """The text that is shown if there is none of it."""
        return self.zero and ("off" if self.kind.is_text else self.zero)

    @property
    def least_asked(self) -> int:
        return self.least if self.asked is None else self.asked

    def check(self, value: Any, asked: bool = False, called: str | None = None) -> None:
        """Raises InvalidInput for a value that can't be used. asked: a user has given it; None means not given.

        called: the option's name in the error, by default its own.
        """
        if value is None and (self.is_optional or asked):
            return
        if wanted := self._wanted(value, self.least_asked if asked else self.least):
            raise InvalidInput(f"{called or self.name} is {value!r}; it must be {wanted}")
        if self.kind is Kind.WINDOWS:
            parse_windows(value)

    def _wanted(self, value: Any, least: int) -> str | None:
        """A description of the values that are right, if this one is wrong; else None."""
        if self.kind.is_text:
            return None if isinstance(value, str) else "text"
        if self.kind is Kind.TRUTH:
            return None if isinstance(value, bool) else "true or false"
        if self.kind is Kind.CHOICE:
            assert self.choices is not None
            return None if isinstance(value, str) and value in self.choices else f"one of {', '.join(self.choices)}"
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if self.kind is Kind.SHARE:
            fits = (is_number or isinstance(value, float)) and 0 < value <= 100
            return None if fits else "more than 0 and at most 100, in per cent"
        if is_number and (least <= value <= self.most or (value == 0 and self.zero is not None)):
            return None
        return f"a whole number from {least} to {self.most}" + (f", or 0 for {self.zero}" if self.zero else "")


def option(kind: Kind, default: Any, help: str, **about: Any) -> Any:
    """A field of a class of options, declared as an `Option` says."""
    said = Option(kind=kind, default=default, help=help, **about)
    return field(default=default, metadata={Option: said})


def number(default: int | None, help: str, least: int, most: int, **about: Any) -> Any:
    """A whole number from `least` to `most`."""
    return option(Kind.NUMBER, default, help, least=least, most=most, **about)


def span(default: int | None, help: str, least: int = 1, most: int = LONGEST_S, **about: Any) -> Any:
    """A span of time, in seconds; users may give it as `2h`, too."""
    return option(Kind.SPAN, default, help, least=least, most=most, **about)


def choice(default: str, help: str, choices: Mapping[str, str], **about: Any) -> Any:
    """One of `choices`, each with its text in a form."""
    return option(Kind.CHOICE, default, help, choices=choices, **about)


def truth(default: bool, help: str, **about: Any) -> Any:
    """True or false."""
    return option(Kind.TRUTH, default, help, **about)
