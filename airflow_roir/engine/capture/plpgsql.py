"""What both capture functions are written with: the statement around them, nested blocks, literals."""

from __future__ import annotations

# Nobody's search_path finds anything here, and without rows that a policy hides the careful path would take entries
# away: then rather an error.
_PINNED = "SET search_path = pg_catalog, pg_temp SET row_security = off"


def function(name: str, text: str, settings: str = "") -> str:
    """A statement that makes a capture function. settings: more that it pins, as SQL."""
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
