"""Reads the columns in the expressions of a plan, as EXPLAIN (VERBOSE) writes them.

The server writes every column as `alias.column`, and doubles quotes within quotes; so its texts can be cut into words.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile

# String, quoted name, name or number or parameter, any other sign.
_WORD = re.compile(r"""('(?:[^']|'')*')|"((?:[^"]|"")*)"|([\w$]+)|([-+*/<>=~!@\#%^&|`?]+|\S)""")
# The fields of a plan's node that have conditions.
FIELDS = (
    "Filter",
    "Index Cond",
    "Recheck Cond",
    "Hash Cond",
    "Merge Cond",
    "Join Filter",
    "TID Cond",
    "One-Time Filter",
)
WHOLE_ROW = "*"

# Kind and text of a word.
Word = tuple[str, str]
NAME, QUOTED, STRING, SIGN = "name", "quoted", "string", "sign"
NAMES = (NAME, QUOTED)
EQUALS = (SIGN, "=")
JOINTS = ((NAME, "AND"), (NAME, "OR"))


def words(text: str) -> list[Word]:
    """The words of an expression; a quoted name without its quotes."""
    found: list[Word] = []
    for string, quoted, plain, sign in _WORD.findall(text):
        if string:
            found.append((STRING, string))
        elif plain:
            found.append((NAME, plain))
        else:
            found.append((SIGN, sign) if sign else (QUOTED, quoted.replace('""', '"')))
    return found


def columns(text: str, aliases: Collection[str]) -> set[str]:
    """The columns of the relations with these aliases; `*` for a whole row."""
    return {column for column, _, _ in _columns(text, aliases)}


@dataclass(frozen=True)
class Known:
    """An expression that an index holds, or its condition (name: ''). arguments: the columns of the table in it."""

    name: str
    text: str
    arguments: tuple[str, ...]


def computed(text: str, aliases: Collection[str], known: Collection[Known]) -> tuple[str, set[str]]:
    """The text without the known expressions, as far as the server writes them alike; and the names of those found."""
    found, names, position = words(text), set(), 0
    rest: list[Word] = []
    while position < len(found):
        for one in known:
            end = _end(found, position, words(one.text), aliases, one.arguments)
            if end is not None:
                names.add(one.name)
                position = end
                break
        else:
            rest.append(found[position])
            position += 1
    return " ".join(_written(word) for word in rest), names - {""}


def _end(
    found: list[Word], position: int, wanted: list[Word], aliases: Collection[str], arguments: Collection[str]
) -> int | None:
    """The position after the wanted words, if they begin here; the server puts an alias before each column."""
    for kind, word in wanted:
        if kind in NAMES and word in arguments:
            named = found[position : position + 2]
            if len(named) == 2 and named[0][0] in NAMES and named[0][1] in aliases and named[1] == (SIGN, "."):
                position += 2
        if position >= len(found) or found[position][1] != word:
            return None
        position += 1
    return position


def _written(word: Word) -> str:
    return '"' + word[1].replace('"', '""') + '"' if word[0] == QUOTED else word[1]


def with_parameters(text: str, aliases: Collection[str]) -> dict[str, bool]:
    """The columns of the relations with these aliases in comparisons with parameters; True: by `=`, each time."""
    found: dict[str, bool] = {}
    for column, before, after in _columns(text, aliases):
        n = next((n for n in range(len(before), 0, -1) if before[n - 1] in JOINTS), 0)
        rest = list(takewhile(lambda word: word not in JOINTS, after))
        if any(map(_is_parameter, [*before[n:], *rest])):
            equal = (rest[:1] == [EQUALS] and any(map(_is_parameter, rest[1:2]))) or (
                before[-1:] == [EQUALS] and any(map(_is_parameter, before[-2:-1]))
            )
            found[column] = equal and found.get(column, True)
    return found


def _is_parameter(word: Word) -> bool:
    return word[0] == NAME and word[1].startswith("$")


def _columns(text: str, aliases: Collection[str]) -> list[tuple[str, list[Word], list[Word]]]:
    """Each column, with the words before and after it."""
    found = words(text)
    return [
        (found[n + 2][1], found[:n], found[n + 3 :])
        for n in range(len(found) - 2)
        if found[n][0] in NAMES
        and found[n][1] in aliases
        and found[n + 1] == (SIGN, ".")
        and (found[n + 2][0] in NAMES or found[n + 2] == (SIGN, WHOLE_ROW))
        # A schema may have the name of an alias: what follows is then a function.
        and found[n + 3 : n + 4] != [(SIGN, "(")]
        and found[max(0, n - 1) : n] != [(SIGN, ".")]
    ]
