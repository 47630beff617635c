"""Fits texts into a terminal's cells: a name may contain control characters, or characters two cells wide."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

INDENT = "    "


def printable(text: str) -> str:
    """The text in one line that does nothing to a terminal: control and bidi characters are escaped, as `\\x1b`.

    So two different names look different. Blanks stay.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape", "replace").decode("ascii") for sign in text
    )


def width(text: str) -> int:
    """The cells that a printable text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(sign: str) -> int:
    if unicodedata.combining(sign) or unicodedata.category(sign) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in ("W", "F") else 1


def padded(text: str, cells: int, right: bool = False) -> str:
    """The text padded with blanks to `cells`."""
    blanks = " " * (cells - width(text))
    return blanks + text if right else text + blanks


def wrapped(text: str, cells: int | None, indent: str = "") -> Iterator[str]:
    """The text in lines of `cells`, broken at blanks, or within a word that is longer. None: one line."""
    if cells is None:
        yield indent + text
        return
    room = max(cells - width(indent), 10)
    line = ""
    for word in text.split(" "):
        if line and width(line) + 1 + width(word) > room:
            yield indent + line
            line = ""
        line = f"{line} {word}" if line else word
        while width(line) > room:
            head = _head(line, room)
            yield indent + head
            line = line[len(head) :]
    yield indent + line


def listed(pieces: Sequence[str], cells: int, indent: str = "") -> Iterator[str]:
    """The pieces with commas, in lines that break between two of them, and within one that is longer than a line."""
    line = ""
    for number, piece in enumerate(pieces):
        piece += "," if number < len(pieces) - 1 else ""
        if line and width(indent) + width(line) + 1 + width(piece) > cells:
            yield from wrapped(line, cells, indent)
            line = ""
        line = f"{line} {piece}" if line else piece
    if line:
        yield from wrapped(line, cells, indent)


def _head(text: str, cells: int) -> str:
    taken = 0
    for number, sign in enumerate(text):
        taken += _cells(sign)
        if taken > cells:
            return text[: max(number, 1)]
    return text


def table(rows: Sequence[Sequence[str]], texts: int) -> list[str]:
    """Lines with the columns in line: the first `texts` to the left, numbers to the right. Nothing is cut."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            padded(cell, cells, right=number >= texts)
            for number, (cell, cells) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fitted(
    columns: Sequence[str], texts: int, rows: list[tuple[str, ...]], notes: list[list[str]], cells: int | None
) -> Iterator[str]:
    """A table, each row with its notes. If it is wider than `cells`, a paragraph for each row.

    texts: as in `table`; notes: lines, for each row.
    """
    lines = table([columns, *rows], texts)
    if cells is None or max(map(width, lines)) <= cells:
        head, *body = lines
        yield head
        for line, more in zip(body, notes, strict=True):
            yield line
            for note in more:
                yield from wrapped(note, cells, INDENT)
        return
    for row, more in zip(rows, notes, strict=True):
        yield from wrapped(row[0], cells)
        named = [f"{name} {cell}" for name, cell in zip(columns[1:], row[1:], strict=True) if cell]
        yield from listed(named, cells, INDENT)
        for note in more:
            yield from wrapped(note, cells, INDENT)
