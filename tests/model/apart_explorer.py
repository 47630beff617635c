"""Every order of steps of an index apart from its source, breadth-first, and its invariants (A1 to A4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.model import apart_index, apart_shard
from tests.model.apart_state import Bounds, State, Variant, canonical, initial, outbox, projection


@dataclass
class Found:
    """The result of an exploration. reached: marks of states that it must have seen, so that it can't be empty."""

    states: int = 0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        lines = [f"{self.violation or 'nothing'} ({self.states} states)"]
        return "\n".join([*lines, *(f"{n:3}. {text}" for n, text in enumerate(self.trace, 1))])


def broken(state: State, bounds: Bounds) -> str:
    """The first invariant that a state violates; '' where none is."""
    if state.wrong:
        return state.wrong
    for number, shard in enumerate(state.shards):
        feed, index = state.index.feeds[number], state.index
        if index.copied[number] < len(bounds.primary_keys) or feed.doubt or shard.lost or index.lost:
            continue
        truth, pending = set(projection(shard)), outbox(shard)
        there = {ident for n, ident in index.entries if n == number}
        # The shard reports the entries that a TRUNCATE removed as a whole, not row by row.
        if shard.emptied <= feed.emptied:
            wrong = {ident for ident in truth ^ there if ident not in pending}
        else:
            wrong = {ident for ident in truth - there if ident not in pending}
        if wrong:
            name = (
                "A1: at rest it is not the projection"
                if not pending
                else "A2: an entry is wrong, and none will ship it"
            )
            return f"{name}: {sorted(wrong)}"
        if feed.fresh >= 0:
            pasts = [set(past) for past in shard.past[feed.fresh :]]
            if there - set.union(*pasts) or set.intersection(*pasts) - there:
                return "A3: a bounded read lies"
    return ""


def successors(state: State, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    yield from apart_shard.steps(state, bounds, variant)
    yield from apart_index.steps(state, bounds, variant)
    if variant is Variant.INTENT_AFTER_COMMIT:
        yield from apart_shard.late_intents(state, bounds)


def explore(bounds: Bounds, variant: Variant = Variant.CORRECT, most: int = 1 << 40) -> Found:
    """Sees every state, or all up to the first violation, which has the shortest trace."""
    found = Found()
    level = [canonical(initial(bounds))]
    seen = {level[0]: 0}
    cameby: list[tuple[int, str]] = [(-1, "")]
    while level:
        following = []
        for state in level:
            here = seen[state]
            for text, after in successors(state, bounds, variant):
                violation = broken(after, bounds)
                if violation:
                    found.violation, found.trace = violation, [*trace(cameby, here), text]
                    found.states = len(seen)
                    return found
                after = canonical(after)
                if after not in seen:
                    seen[after] = len(cameby)
                    cameby.append((here, text))
                    following.append(after)
                    _mark(found, state, after, text)
        if len(seen) > most:
            raise AssertionError(f"more than {most} states")
        level = following
    found.states = len(seen)
    return found


def _mark(found: Found, before: State, state: State, text: str) -> None:
    if any(feed.fresh > 0 for feed in state.index.feeds):
        found.reached.add("fresh")
    if "doubtful" in text:
        found.reached.add("doubtful")
    if any(a.doubt and not b.doubt for a, b in zip(before.index.feeds, state.index.feeds, strict=True)):
        found.reached.add("repaired")
    if any(a.unproved and not b.unproved for a, b in zip(before.index.feeds, state.index.feeds, strict=True)):
        found.reached.add("proved")
    if "fenced" in text:
        found.reached.add("fenced")
    if len(state.index.intents) < len(before.index.intents):
        found.reached.add("settled")
    if any(reader is not None and reader.over for reader in state.readers):
        found.reached.add("read")


def trace(cameby: list[tuple[int, str]], place: int) -> list[str]:
    texts: list[str] = []
    while place > 0:
        place, text = cameby[place]
        texts.append(text)
    return texts[::-1]
