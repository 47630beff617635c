"""Splits lists of key columns and expressions at their commas, as the server's lexer reads them.

The server judges an expression (`engine/source/expressions.py`). Here a text must only be one expression, so that
statements can contain it: brackets and quotes are closed, and there is no semicolon, comment or dollar quote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_roir.errors import InvalidInput

# Signs of an expression. A name may have a minus: users forget quotes.
_NO_NAME = re.compile(
    r"[('\[+*/%<>=~!]|::|\|\||->|\s-\s|\s(?:as|collate|nulls)\s|\s(?:asc|desc|\w+_ops)\s*(?:,|$)", re.IGNORECASE
)
_OPENING, _CLOSING = "([", ")]"
_IDENTIFIER = r'(?:"(?:[^"]|"")+"|[^\W\d][\w$]*)'
_AS = re.compile(rf"\s+as\s+(?P<name>{_IDENTIFIER})\s*", re.IGNORECASE)
_NULLS = re.compile(r"\s+nulls\s+(first|last)$", re.IGNORECASE)
_ORDER = re.compile(r"\s+(asc|desc)$", re.IGNORECASE)
_OPERATOR_CLASS = re.compile(rf"\s+(?:{_IDENTIFIER}\s*\.\s*)?(\w+_ops)$", re.IGNORECASE)
_COLLATION = re.compile(rf"\s*\bcollate\s+(?:{_IDENTIFIER}\s*\.\s*)?{_IDENTIFIER}$", re.IGNORECASE)
# Their order is that of the collation "C".
_PATTERN_OPERATORS = ("text_pattern_ops", "varchar_pattern_ops", "bpchar_pattern_ops")
_FUNCTION = re.compile(rf"\(*\s*(?:{_IDENTIFIER}\s*\.\s*)?(?P<name>{_IDENTIFIER})\s*\(")
# A text in quotes may have any of these; outside of them they end an expression, or hide what follows.
_REFUSED = {";": "a semicolon", "--": "a comment", "/*": "a comment", "\0": "a NUL character"}
_DOLLAR = re.compile(r"\$(?:[^\W\d]\w*)?\$")


def has_expression(text: str) -> bool:
    """True if a list has an item that is more than a column's name."""
    return _NO_NAME.search(re.sub(r'"(?:[^"]|"")*"', '""', text)) is not None


def split(text: str, what: str) -> list[str]:
    """The items of a list, at the commas outside of quotes and brackets. Raises InvalidInput."""
    items, start = [], 0
    for position, sign, depth in _outside_quotes(text, what):
        if sign == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    items.append(text[start:])
    if not all(item.strip() for item in items):
        raise InvalidInput(f"{what} {text!r}: an item is empty")
    return [item.strip() for item in items]


def check(text: str, what: str) -> None:
    """Raises InvalidInput if a text isn't one expression."""
    if any(sign == "," and depth == 0 for _, sign, depth in _outside_quotes(text, what)):
        raise InvalidInput(f"{what} {text!r}: a comma outside of brackets; give one expression")


def named(item: str, what: str) -> tuple[str, str | None]:
    """The expression of an item, and the name after its `AS`, as it was typed; None if it has none."""
    found = None
    for position, sign, depth in _outside_quotes(item, what):
        if depth == 0 and sign.isspace() and (match := _AS.fullmatch(item, position)):
            found = (item[:position].strip(), match["name"])
            break
    return found or (item, None)


def without_order(item: str) -> tuple[str, str]:
    """An item without its order (`DESC`, `NULLS FIRST`), and the order in lower case; '' for the default one."""
    item = item.strip()
    nulls = _NULLS.search(item)
    item = item[: nulls.start()] if nulls else item
    direction = _ORDER.search(item)
    item = item[: direction.start()] if direction else item
    is_descending = direction is not None and direction[1].lower() == "desc"
    nulls_first = nulls[1].lower() == "first" if nulls else is_descending
    if is_descending == nulls_first:
        return item, "desc" if is_descending else ""
    return item, f"{'desc' if is_descending else 'asc'} nulls {'first' if nulls_first else 'last'}"


def with_collation(item: str, what: str) -> str:
    """An item with the collation that has the order of its operator class instead of the class, if it has one.

    Raises InvalidInput for an operator class without such a collation.
    """
    found = _OPERATOR_CLASS.search(item)
    if found is None:
        return item
    if found[1].lower() not in _PATTERN_OPERATORS:
        raise InvalidInput(
            f"{what} {item!r}: entries can't have the order of an operator class; leave {found[1]} out. The classes "
            f'{", ".join(_PATTERN_OPERATORS)} are taken as COLLATE "C"'
        )
    return f'{_COLLATION.sub("", item[: found.start()])} COLLATE "C"'


def default_name(expression: str) -> str:
    """The name of an expression: that which `CREATE INDEX` gives it, of its outermost function, else `expr`.

    A column with a collation gets `_key` behind its name: the view's readers know its name as the table's column.
    """
    collated = _COLLATION.search(expression)
    if collated is not None:
        expression = expression[: collated.start()].strip()
        if re.fullmatch(_IDENTIFIER, expression):
            return (expression[1:-1].replace('""', '"') if expression[0] == '"' else expression.lower()) + "_key"
    found = _FUNCTION.match(expression)
    if found is None:
        return "expr"
    name = found["name"]
    name = name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()
    end = end_of_brackets(expression, found.end() - 1)
    rest = expression[end:] if end is not None else ""
    return name if not rest.strip(") \t\n") else "expr"


def end_of_brackets(text: str, start: int) -> int | None:
    """The position after the bracket that closes the one at `start`; None if none does."""
    level = None
    try:
        for position, sign, depth in _outside_quotes(text, "list"):
            if position == start:
                level = depth
            elif level is not None and sign in _CLOSING and depth == level - 1:
                return position + 1
    except InvalidInput:
        return None
    return None


def _outside_quotes(text: str, what: str) -> Iterator[tuple[int, str, int]]:
    """Each sign outside of quotes: its position, the sign, and how many brackets are open after it."""
    position, depth, length = 0, 0, len(text)
    while position < length:
        sign = text[position]
        if sign in "'\"":
            position = _end_of_quote(text, position, what)
            continue
        refused = _REFUSED.get(sign) or _REFUSED.get(text[position : position + 2])
        if refused is None and _DOLLAR.match(text, position):
            refused = "a dollar quote"
        if refused is not None:
            raise InvalidInput(f"{what} {text!r}: {refused} can't be part of an expression")
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth < 0:
            raise InvalidInput(f"{what} {text!r}: a bracket closes that none opens, at position {position + 1}")
        yield position, sign, depth
        position += 1
    if depth:
        raise InvalidInput(f"{what} {text!r}: a bracket isn't closed")


def _end_of_quote(text: str, start: int, what: str) -> int:
    quote, position = text[start], start + 1
    # In E'…' a backslash takes the next sign with it.
    escapes = quote == "'" and re.search(r"(?<![\w$])[eE]$", text[:start]) is not None
    while position < len(text):
        if escapes and text[position] == "\\":
            position += 2
        elif text[position] != quote:
            position += 1
        elif text[position + 1 : position + 2] == quote:
            position += 2
        else:
            return position + 1
    raise InvalidInput(f"{what} {text!r}: a quote isn't closed")
