"""The invariants of docs/architecture.md#invariants, as predicates of the model's states and steps."""

from __future__ import annotations

from tests.model import mvcc, unique
from tests.model.state import Bounds, Generation, State


def broken(before: State | None, state: State, bounds: Bounds) -> str:
    """The first invariant that this state, or the step that led to it, violates; '' where none is."""
    if state.wrong:
        return state.wrong
    rows = mvcc.committed(state.source)
    if len(rows) > len({pk for pk, _ in rows}):
        return "the model itself: two committed rows with one primary key"
    source = {(value[0], pk): value[1:] for pk, value in rows}
    for number, generation in enumerate(state.generations):
        name = f"g{number + 1}"
        if generation.status == "dropped":
            continue
        if before is not None and number < len(before.generations):
            old = before.generations[number]
            if old.mode != "capture" and not _rows(generation) <= _rows(old):
                return f"I5: the delta of {name} grew after the switch"
        enforced = bounds.unique and generation.mode != "capture"
        if enforced and (twice := unique.groups(unique.rows(state))):
            was = before.generations[number : number + 1] if before else ()
            switched = bool(was) and was[0].mode == "capture"
            return f"{'U3: a duplicate escaped the switch of' if switched else 'U1: a duplicate under'} {name}: {twice}"
        entries = unique.entries(generation, bounds.unique)
        if len(entries) > len({ident for ident, _ in entries}):
            return f"I4: an entry was copied twice into {name}"
        if generation.status in ("active", "retired"):
            if dict(entries) != source:
                return f"I1: {name} is not the projection of the source"
            continue
        overlay = dict(entries)
        for ident, value in mvcc.committed(generation.delta):
            if value == "ghost":
                continue
            if value == "antimatter":
                overlay.pop(ident, None)
            else:
                overlay[ident] = value.removeprefix("regular")
            if overlay.get(ident) != source.get(ident):
                return f"I3: the delta of {name} holds what is not true of the source"
        if generation.done and overlay != source:
            return f"I3: the base of {name}, overridden by its delta, is not the projection of the source"
    return ""


def _rows(generation: Generation) -> set[object]:
    """The entries with a committed row in the delta."""
    return {v[0] for v in generation.delta if v[3] == mvcc.NEVER or v[3] < 0}
