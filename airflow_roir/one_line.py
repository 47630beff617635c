"""Texts that somebody else has written, as they may be shown."""

from __future__ import annotations


def one_line(text: str, most: int = 200) -> str:
    """The text printable, on one line, and at most so long, in characters; `…` stands for the rest."""
    line = "".join(sign if sign.isprintable() else " " for sign in text[:most])
    return line if len(text) <= most else f"{line}…"
