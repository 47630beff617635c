"""Helpers to write both capture functions: the statement around them, nested blocks, literals."""

from __future__ import annotations

# No user's search_path matters here. If a policy hid rows, the careful path would remove their entries: so the function
# fails instead.
_PINNED = "SET search_path = pg_catalog, pg_temp SET row_security = off"


def function(name: str, text: str, settings: str = "") -> str:
    """A statement that makes a capture function. settings: SQL that pins more settings."""
    tag = "roir"
    while f"${tag}$" in text:  # a column may be called anything, `$roir$` too
        tag += "_"
    return (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger\n"
        f"LANGUAGE plpgsql SECURITY DEFINER {_PINNED}{settings}\n"
        f"AS ${tag}$\n{text}\n${tag}$"
    )


def literal(text: str) -> str:
    """Text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def indent(lines: list[str], levels: int = 1) -> list[str]:
    """Lines of a nested block."""
    return ["  " * levels + line if line else "" for line in lines]
