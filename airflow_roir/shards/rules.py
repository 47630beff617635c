"""Compares the rules by which servers compare values: collations by their libraries' versions, the order of an enum's
labels (`roir.rules`). If two servers have different rules, they may order or equate values differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

READ = "SELECT roir.rules(%(relation)s::oid, %(columns)s::text[])"
# The beginnings of rules of equality, and of the rule about the bytes of texts.
EQUALITY, ENCODING = "= ", "encoding "


def read(connection: Connection, relation: int, columns: Sequence[str]) -> dict[str, list[str]]:
    """The rules of a relation's columns, in a shard or on the index server."""
    values = {"relation": relation, "columns": list(columns)}
    found: dict[str, list[str]] = execute(connection, READ, values).scalar_one()
    return found


def unlike(ours: Iterable[str], theirs: Iterable[str], growing: bool = False) -> list[str]:
    """The rules of a column that two servers don't share. Labels that only one has make no difference.

    growing: theirs are the same server's at a later time: it may have got labels, but not lost or renamed one.
    """
    one, other = _by_name(ours), _by_name(theirs)
    return [
        rule
        for mine, yours in ((one, other), (other, one))
        for name, (rule, labels) in mine.items()
        if name not in yours
        or not _is_like(labels, yours[name][1])
        or (growing and mine is one and not set(labels or ()) <= set(yours[name][1] or ()))
    ]


def told(rules: Iterable[str]) -> str:
    """The rules as a text for messages."""
    return "; ".join(rule.removeprefix(EQUALITY) for rule in rules)


def _by_name(rules: Iterable[str]) -> Mapping[str, tuple[str, list[str] | None]]:
    found: dict[str, tuple[str, list[str] | None]] = {}
    for rule in rules:
        name, bracket, labels = rule.partition(" [")
        is_enum = rule.startswith("enum ") and bool(bracket)
        found[name if is_enum else rule] = (rule, _read(labels) if is_enum else None)
    return found


def _read(labels: str) -> list[str] | None:
    try:
        return [str(one) for one in json.loads(f"[{labels}")]
    except (ValueError, TypeError):
        return None


def _is_like(labels: Sequence[str] | None, others: Sequence[str] | None) -> bool:
    if labels is None or others is None:
        return labels is others
    return [one for one in labels if one in others] == [one for one in others if one in labels]
