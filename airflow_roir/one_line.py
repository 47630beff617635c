"""Makes texts of other users fit to be shown."""

from __future__ import annotations


def one_line(text: str, most: int = 200) -> str:
    """The text made printable, on one line, of at most `most` characters; `…` stands for the rest."""
    line = "".join(sign if sign.isprintable() else " " for sign in text[:most])
    return line if len(text) <= most else f"{line}…"
