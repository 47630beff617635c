"""Reads the expressions of a plan, as EXPLAIN (VERBOSE) writes them: their columns, and those that an index could use.

The server writes every column as `alias.column`, and doubles quotes within quotes; so its texts can be cut into words.
An expression of another form counts as a condition that no index can use.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

# String, quoted name, name or number or parameter, cast, operator, any other sign.
_WORD = re.compile(r"""('(?:[^']|'')*')|"((?:[^"]|"")*)"|([\w$]+)|(::)|([-+*/<>=~!@\#%^&|`?]+)|(\S)""")
COMPARISONS = ("=", "<", "<=", ">", ">=")
WHOLE_ROW = "*"

# Kind and text of a word.
Word = tuple[str, str]
NAME, QUOTED, STRING, SIGN = "name", "quoted", "string", "sign"
NAMES = (NAME, QUOTED)
STEPS = {(SIGN, "("): 1, (SIGN, ")"): -1}


def words(text: str) -> list[Word]:
    """The words of an expression; a quoted name without its quotes."""
    found: list[Word] = []
    for match in _WORD.finditer(text):
        string, quoted, plain, *_ = match.groups()
        if string is not None:
            found.append((STRING, string))
        elif quoted is not None:
            found.append((QUOTED, quoted.replace('""', '"')))
        elif plain is not None:
            found.append((NAME, plain))
        else:
            found.append((SIGN, match[0]))
    return found


def columns(text: str, aliases: Collection[str]) -> set[str]:
    """The columns of the relations with these aliases; `*` for a whole row."""
    found = words(text)
    return {
        column
        for n in range(len(found) - 2)
        if (column := _column(found[n : n + 3], aliases)) is not None
        # A schema may have the name of an alias: what follows is then a function.
        and found[n + 3 : n + 4] != [(SIGN, "(")]
        and found[max(0, n - 1) : n] != [(SIGN, ".")]
    }


def usable(text: str, aliases: Collection[str], types: Mapping[str, str]) -> set[str]:
    """The columns by which a B-tree that begins with one of them could find the rows of a condition.

    types: of the relations' columns, without modifiers.
    """
    return _usable(words(text), aliases, types)


def first_sorted(text: str, aliases: Collection[str]) -> str | None:
    """The column that a sort key is, if it is one."""
    return _column(words(text)[:3], aliases) if len(words(text)) < 6 else None


def _usable(found: Sequence[Word], aliases: Collection[str], types: Mapping[str, str]) -> set[str]:
    found = _bare(found)
    alternatives = _split(found, "OR")
    if len(alternatives) > 1:
        return set.intersection(*(_usable(one, aliases, types) for one in alternatives))
    parts = _split(found, "AND")
    if len(parts) > 1:
        return set.union(*(_usable(one, aliases, types) for one in parts))
    if [text for _, text in found[-2:]] == ["IS", "NULL"]:
        column = _operand(found[:-2], aliases, types)
        return set() if column is None else {column}
    if (n := _outside(found, COMPARISONS)) is not None:
        return _compared(found[:n], found[n + 1 :], aliases, types)
    column = _operand(found[1:] if found[:1] == [(NAME, "NOT")] else found, aliases, types)
    return {column} if column is not None and types.get(column) == "boolean" else set()


def _compared(
    left: Sequence[Word], right: Sequence[Word], aliases: Collection[str], types: Mapping[str, str]
) -> set[str]:
    for one, other in ((left, right), (right, left)):
        column = _operand(one, aliases, types)
        own = any(_column(other[n : n + 3], aliases) for n in range(len(other) - 2))
        if column is not None and not own:
            return {column}
    return set()


def _operand(found: Sequence[Word], aliases: Collection[str], types: Mapping[str, str]) -> str | None:
    """The column, if the operand is one. A cast that changes the value is none; in a row its first column counts."""
    found = _bare(found)
    if found[:2] == [(NAME, "ROW"), (SIGN, "(")]:
        column = _column(found[2:5], aliases)
        return column if found[5:6] in ([(SIGN, ",")], [(SIGN, ")")]) else None
    if (cast := _outside(found, ("::",))) is None:
        return _column(found, aliases) if len(found) == 3 else None
    column = _operand(found[:cast], aliases, types)
    to = " ".join(text for _, text in found[cast + 1 :])
    kind = types.get(column or "")
    return column if to == kind or (to == "text" and kind == "character varying") else None


def _column(found: Sequence[Word], aliases: Collection[str]) -> str | None:
    if len(found) != 3 or found[0][0] not in NAMES or found[0][1] not in aliases or found[1] != (SIGN, "."):
        return None
    return found[2][1] if found[2][0] in NAMES or found[2] == (SIGN, WHOLE_ROW) else None


def _bare(found: Sequence[Word]) -> list[Word]:
    """Without parentheses around all of it."""
    left = list(found)
    while len(left) > 1 and left[0] == (SIGN, "(") and left[-1] == (SIGN, ")") and _is_whole(left[1:-1]):
        left = left[1:-1]
    return left


def _is_whole(found: Sequence[Word]) -> bool:
    """True if every parenthesis that ends here begins here."""
    depth = 0
    for word in found:
        depth += STEPS.get(word, 0)
        if depth < 0:
            return False
    return True


def _outside(found: Sequence[Word], signs: Collection[str]) -> int | None:
    """The place of the first of these signs that is in no parentheses."""
    depth = 0
    for n, word in enumerate(found):
        depth += STEPS.get(word, 0)
        if depth == 0 and word[0] == SIGN and word[1] in signs:
            return n
    return None


def _split(found: Sequence[Word], by: str) -> list[list[Word]]:
    parts: list[list[Word]] = [[]]
    depth = 0
    for word in found:
        depth += STEPS.get(word, 0)
        if depth == 0 and word == (NAME, by):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts
