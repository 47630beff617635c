"""Compares evidence that a shard's capture existed all the while, and that its values compare as before.

The shard sends it in each poll (`roir_shard.evidence`), and the index server keeps it. So an object that was removed
and put back between two polls is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_roir.definition import quote
from airflow_roir.shards import rules

CHANGED = {
    "trigger": "a trigger of its capture was disabled, dropped or replaced for a while",
    "function": "a function of its capture was replaced for a while",
    "view": "the view that its rows are read by was replaced",
    "outbox": "its outbox was replaced",
    "first": "its outbox was emptied, by a TRUNCATE, a DELETE, a crash while it was unlogged, or refused a write",
    "columns": "a column of its outbox, or its default, was altered",
    "sequence": "the sequence that its outbox is numbered by was altered",
}
SILENT = "what announces its writes was disabled, dropped, replaced or altered for a while"


def change(kept: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str | None:
    """Why writes of a shard may have been missed, or not be found, since the last poll; None if nothing says so.

    kept: None before the first poll; found: None if nothing has changed.
    """
    # In a database that pg_upgrade made, or that was restored from a dump, all evidence differs.
    if not kept or not found or kept["schema"] != found["schema"]:
        return None
    for name, was in kept.items():
        kind = name.split(" ", 1)[0]
        if kind in CHANGED and _is_another(kind, was, found.get(name)):
            return CHANGED[kind]
    for column, before in kept["rules"].items():
        if unlike := rules.unlike(before, found["rules"].get(column, before), growing=True):
            return f"its server compares column {quote(column)} by other rules than before ({rules.told(unlike)})"
    return None


def silence(kept: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> str | None:
    """Why writes may have committed without an announcement since the last poll; as `change`."""
    if not kept or not found or kept["schema"] != found["schema"]:
        return None
    before, now = kept.get("announcing", {}), found["announcing"]
    gone = any(name not in now or _is_altered(was, now[name]) for name, was in before.items())
    return SILENT if gone else None


def is_readable(found: Any) -> bool:
    """True if this has the form of evidence: a shard may send anything."""
    if not isinstance(found, dict) or not all(isinstance(found.get(one), dict) for one in ("rules", "announcing")):
        return False
    texts = [value for name, value in found.items() if name not in ("rules", "announcing")]
    texts += found["announcing"].values()
    listed = list(found["rules"].values())
    return (
        "schema" in found
        and all(isinstance(one, list) for one in listed)
        and all(isinstance(one, str) for one in [*texts, *(rule for rules_of in listed for rule in rules_of)])
    )


def _is_another(kind: str, was: str, now: str | None) -> bool:
    if now is None:
        # A partition that went has taken its triggers along; if one lacks them, the shard reports it.
        return kind != "trigger"
    if kind == "function" and was.split(" ")[1:2] != now.split(" ")[1:2]:
        # REASSIGN OWNED.
        return False
    return was != now


def _is_altered(was: str, now: str) -> bool:
    """True if an object was altered: its text changed, but not its owner, the first word. REASSIGN OWNED changes
    both."""
    return was != now and was.split(" ", 1)[0] == now.split(" ", 1)[0]
