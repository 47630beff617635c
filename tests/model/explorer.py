"""Breadth-first over every state within the bounds, so that the first violation found has the shortest trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.model import engine, invariants, writers
from tests.model.state import Bounds, State, Variant, canonical, initial


@dataclass
class Exploration:
    """The result of an exploration. violation: '' if none was found; trace: the steps that lead to it.

    reached: states by their generations' statuses. refused, duplicates, deadlocks: steps that end in 40001, in the
    capture's 23505, or end a deadlock. paused: steps in which duplicates keep the build from going on.
    complete: every state within the bounds was seen.
    """

    states: int = 0
    steps: int = 0
    depth: int = 0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    duplicates: int = 0
    deadlocks: int = 0
    paused: int = 0
    complete: bool = True

    def __str__(self) -> str:
        head = f"{self.states} states, {self.steps} steps, depth {self.depth}"
        if not self.violation:
            return head
        return "\n".join([f"{self.violation} ({head})", *(f"{n:3}. {text}" for n, text in enumerate(self.trace, 1))])


def successors(state: State, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    """The steps that may follow, each with the state after it."""
    yield from engine.steps(state, bounds, variant)
    yield from writers.steps(state, bounds, variant)


def explore(bounds: Bounds, variant: Variant = Variant.CORRECT, most_states: int = 1 << 40) -> Exploration:
    """Sees every state, or stops at the first violation or after `most_states` states."""
    result = Exploration()
    first = canonical(initial(bounds))
    seen = {first: 0}
    cameby: list[tuple[int, str]] = [(-1, "")]
    level = [first]
    while level:
        following = []
        for state in level:
            here = seen[state]
            for text, after in successors(state, bounds, variant):
                result.steps += 1
                result.refused += text.endswith("40001")
                result.duplicates += text.endswith("23505")
                result.paused += text.startswith(("no seal", "no switch"))
                result.deadlocks += text.endswith("deadlock")
                violation = invariants.broken(state, after, bounds) or _stuck(after, bounds, variant)
                if violation:
                    result.violation = violation
                    result.trace = [*_trace(cameby, here), text]
                    result.states = len(seen)
                    return result
                after = canonical(after)
                if after not in seen:
                    seen[after] = len(cameby)
                    cameby.append((here, text))
                    following.append(after)
                    result.reached[",".join(g.status for g in after.generations)] += 1
            if len(seen) > most_states:
                result.complete = False
                result.states = len(seen)
                return result
        level = following
        result.depth += bool(level)
    result.states = len(seen)
    return result


def _stuck(state: State, bounds: Bounds, variant: Variant) -> str:
    """I6: the capture adds no conflict between writers, and no deadlock with a fold step."""
    waiting = writers.waits(state, bounds, variant)
    for me, held in waiting.items():
        # Two rows can hold one DEFERRABLE key for a while, so that their entries meet before they do.
        if not writers.is_writer(held):
            continue
        if bounds.unique and not writers.would_wait(state, me, held):
            return "I6: a writer waits for another one where a native unique index wouldn't"
        if not bounds.unique and bounds.key == "plain":
            return "I6: a writer waits for another one at an entry, and not at the source"
    if not waiting and not bounds.unique:
        return ""
    folds = engine.fold_waits(state, bounds, variant)
    everybody = {**waiting, **folds, **writers.waits(state, bounds, variant, at_source=True)} if folds else {}
    for me in folds:
        here, met = me, {me}
        while (here := everybody.get(here, 0)) and here not in met:
            met.add(here)
        if here == me:
            return "I6: a fold step and whom it waits for wait for each other"
    return ""


def _trace(cameby: list[tuple[int, str]], place: int) -> list[str]:
    texts: list[str] = []
    while place > 0:
        place, text = cameby[place]
        texts.append(text)
    return texts[::-1]
