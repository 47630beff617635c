"""Completes names of indexes and tables in bash and zsh: `eval "$(_ROIR_COMPLETE=source_bash roir)"`.

Silent if there is no database to ask. It opens its own session, by psycopg2 alone: SQLAlchemy takes too long to import.
"""

from __future__ import annotations

import os
import shlex
import threading
from typing import Any

import typer

VARIABLE = "_ROIR_COMPLETE"
# A user waits for the answer at the prompt: afterwards the process ends without one.
PATIENCE_S = 0.6
MOST = 200

_MATCHES = """
 AND (starts_with(lower(schema || '.' || name), %(begin)s) OR starts_with(lower(name), %(begin)s))
 ORDER BY 1, 2 LIMIT %(most)s
"""
INDEXES = f"""
SELECT schema, name FROM (SELECT schema_name, name, dropped_at FROM roir.index) i (schema, name, dropped)
 WHERE dropped IS NULL {_MATCHES}
"""
TABLES = f"""
SELECT schema, name FROM (SELECT n.nspname, c.relname FROM pg_catalog.pg_class c
                            JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                           WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition) t (schema, name)
 WHERE schema !~ '^pg_' AND schema NOT IN ('information_schema', 'roir', 'roir_data') {_MATCHES}
"""

BASH = """
_roir() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(
        COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _ROIR_COMPLETE=complete_bash "$1" 2>/dev/null)
}
complete -o default -F _roir roir
"""
# compadd quotes for the shell by itself; -U: a name may begin otherwise than what was typed.
ZSH = """
#compdef roir
_roir() {
    local -a found
    found=("${(@f)$(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT - 1)) _ROIR_COMPLETE=complete_zsh \\
        ${words[1]} 2>/dev/null)}")
    [[ -n "$found" ]] && compadd -U -- $found
}
compdef _roir roir
"""
SOURCES = {"source_bash": BASH, "source_zsh": ZSH}


class _Match(str):
    """A name that the query has matched: typer drops names that don't begin as typed, as without their schema."""

    __slots__ = ()

    def startswith(self, *_: Any) -> bool:
        """Always true."""
        return True


def indexes(context: typer.Context, incomplete: str) -> list[str]:
    """The names of indexes that begin so, with or without their schema."""
    return _names(context, INDEXES, incomplete)


def tables(context: typer.Context, incomplete: str) -> list[str]:
    """The names of tables that begin so, with or without their schema."""
    return _names(context, TABLES, incomplete)


def answer(wanted: str, app: typer.Typer) -> str:
    """The answer to a shell: a script, or the words that complete a command, each in a line; empty if there is none."""
    if wanted in SOURCES:
        return SOURCES[wanted]
    from typer._completion_classes import BashComplete, completion_init
    from typer.main import get_command

    completion_init()
    raw = os.environ.get("COMP_WORDS", "")
    found = BashComplete(get_command(app), {}, "roir", VARIABLE)
    words = [item.value for item in found.get_completions(*found.get_completion_args())]
    quote = wanted == "complete_bash" and not _is_open(raw)
    return "".join(f"{shlex.quote(word) if quote else word}\n" for word in words)


def _is_open(raw: str) -> bool:
    """True inside of a quote: bash keeps the quote that the user has typed, and closes it."""
    try:
        shlex.split(raw)
    except ValueError:
        return True
    return False


def _names(context: typer.Context, query: str, incomplete: str) -> list[str]:
    dsn = context.find_root().params.get("dsn") or os.environ.get("ROIR_DSN")
    if not dsn:
        return []
    # libpq's own limits are whole seconds, two at least.
    timer = threading.Timer(PATIENCE_S, os._exit, [0])
    timer.daemon = True
    timer.start()
    import psycopg2

    from airflow_roir.definition import QualifiedName

    session: Any = None
    try:
        session = psycopg2.connect(dsn, application_name="roir complete", client_encoding="UTF8")
        with session.cursor() as cursor:
            cursor.execute(query, {"begin": incomplete.replace('"', "").lower(), "most": MOST})
            names = [str(QualifiedName(schema, name)) for schema, name in cursor.fetchall()]
    except (psycopg2.Error, ValueError):
        return []
    finally:
        timer.cancel()
        if session is not None:
            session.close()
    return [_Match(name) for name in names if name.isprintable()]
