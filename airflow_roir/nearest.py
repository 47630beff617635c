"""Finds the name that a user probably meant by a name that doesn't exist, for the refusals of names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from airflow_roir.definition import QualifiedName


def nearest(wanted: str, names: Iterable[str]) -> str | None:
    """The name that is the same in other case, else the most similar one; None if none is similar.

    Similar is what difflib calls close: its ratio is at least 0.6.
    """
    by_lower = {name.lower(): name for name in sorted(names, reverse=True)}
    found = difflib.get_close_matches(wanted.lower(), by_lower, 1)
    return by_lower[found[0]] if found else None


def nearest_qualified(
    wanted: QualifiedName, names: Iterable[QualifiedName], schemas: Sequence[str]
) -> QualifiedName | None:
    """As `nearest`, for names with schemas: a name that differs in case alone, or in its schema alone, goes first.

    schemas: those in which `wanted` is looked up; of names that are equally near, theirs go first.
    """
    known = list(names)
    name = nearest(wanted.name, (one.name for one in known))
    if name is None:
        return None
    alike = [one for one in known if one.name.lower() == name.lower()]
    here = [one for one in alike if one.schema in schemas]
    schema = nearest(schemas[0] if schemas else "", (str(one.schema) for one in here or alike))
    return min(here or alike, key=lambda one: (one.schema != schema, one.name != wanted.name, str(one)))


def meant(name: object) -> str:
    """The end of a refusal: the name that the user probably meant; nothing for None."""
    return "" if name is None else f". Did you mean {name}?"


def meant_of(wanted: str, names: Iterable[str]) -> str:
    """`meant` of the nearest of identifiers, quoted if SQL needs it."""
    found = nearest(wanted, names)
    return meant(None if found is None else QualifiedName(None, found))
