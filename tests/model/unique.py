"""Entries of a unique generation: how its base holds them, which are live, and which of them are duplicates.

Its base is keyed by the key alone, the value begins with the primary key: `("a", "1x")` is the entry `(("a", 1), "x")`.
Its delta is as any other's.
"""

from __future__ import annotations

from tests.model import mvcc
from tests.model.state import Generation, State

Ident = tuple[str, int]
Groups = dict[str, set[int]]


def stored(ident: Ident, included: str, unique: bool) -> tuple[object, str]:
    """How a base holds an entry: ident and value of its row."""
    return (ident[0], f"{ident[1]}{included}") if unique else (ident, included)


def entries(generation: Generation, unique: bool) -> list[tuple[Ident, str]]:
    """The committed entries of a base, duplicates too."""
    rows = mvcc.committed(generation.base)
    return [((key, int(value[0])), value[1:]) for key, value in rows] if unique else rows


def live(generation: Generation, leave_touched: bool = False) -> list[Ident]:
    """Base entries that the delta does not touch, and the delta's regular ones. leave_touched: a mistake."""
    delta = dict(mvcc.committed(generation.delta))
    base = [ident for ident, _ in entries(generation, unique=True) if leave_touched or ident not in delta]
    return base + [ident for ident, value in delta.items() if value.startswith("regular") and ident not in base]


def groups(idents: list[Ident], keys: set[str] | None = None) -> Groups:
    """The rows of each key that has more than one. keys: looks at these only."""
    found: Groups = {}
    for key, pk in idents:
        if keys is None or key in keys:
            found.setdefault(key, set()).add(pk)
    return {key: pks for key, pks in found.items() if len(pks) > 1}


def rows(state: State) -> list[Ident]:
    """The committed source's projection."""
    return [(value[0], pk) for pk, value in mvcc.committed(state.source)]


def invented(state: State, found: Groups) -> str:
    """A group that the committed source doesn't have, or ''."""
    real = groups(rows(state))
    for key, pks in found.items():
        if not pks <= real.get(key, set()):
            return f"U2: {key} is recorded as a duplicate of {sorted(pks)}, and it is none"
    return ""


def new_since_the_look(generation: Generation) -> set[Ident]:
    """Regular rows of the delta that were written since the last look that was recorded."""
    looked = generation.looked or ()
    rows = mvcc.committed(generation.delta)
    return {ident for ident, value in rows if value.startswith("regular") and ident not in looked}
