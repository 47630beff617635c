"""Helpers to write both capture functions: the statement around them, nested blocks, literals."""

from __future__ import annotations

# No user's search_path matters here. If a policy hid rows, the careful path would remove their entries: so the function
# fails instead.
PINNED = "SET search_path = pg_catalog, pg_temp SET row_security = off"


def function(name: str, text: str, settings: str = "") -> str:
    """A statement that makes a function of a trigger. settings: SQL that pins more settings."""
    return _function(f"{name}() RETURNS trigger", f" SECURITY DEFINER {PINNED}{settings}", text)


def called_function(name: str, parameters: str, text: str) -> str:
    """A statement that makes a function for the function of a trigger to call, with its rights and settings."""
    return _function(f"{name}({parameters}) RETURNS boolean", "", text)


def _function(head: str, how: str, text: str) -> str:
    tag = "roir"
    while f"${tag}$" in text:  # a column may be called anything, `$roir$` too
        tag += "_"
    return f"CREATE OR REPLACE FUNCTION {head}\nLANGUAGE plpgsql{how}\nAS ${tag}$\n{text}\n${tag}$"


def literal(text: str) -> str:
    """Text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def indent(lines: list[str], levels: int = 1) -> list[str]:
    """Lines of a nested block."""
    return ["  " * levels + line if line else "" for line in lines]
