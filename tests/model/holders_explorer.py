"""Every order of steps of an index that is unique over shards, breadth-first, and its invariants (H1 to H6)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import holders_losses, holders_polls, holders_puts
from tests.model.apart_explorer import Found, trace
from tests.model.holders_state import ENDED, NULL, Bounds, State, Variant, initial, real


def broken(state: State) -> str:
    """The first invariant that a state violates; '' where none is."""
    if state.wrong:
        return state.wrong
    index = state.index
    held = {(shard, key) for key, shard, by in index.holders if by == ENDED}
    # From a loss to the first contact nothing is promised.
    if index.promised and not any(shard.lost for shard in state.shards):
        keys = [key for shard in state.shards for key, _ in shard.rows if key != NULL]
        if len(set(keys)) < len(keys):
            return "H1: two committed rows have one key"
        if set(real(state)) - held:
            return f"H1: a committed row has no holder: {set(real(state)) - held}"
    if index.mode in ("filling", "enforced"):
        kept = {(n, ident[0]) for n, ident in index.entries} | {(i.shard, i.ident[0]) for i in index.intents}
        if held - kept:
            return f"H3: a holder has neither entry nor intent: {held - kept}"
    return ""


def at_rest(state: State, bounds: Bounds) -> bool:
    """True if no user writes any more, all is shipped, and filling has ended."""
    quiet = all(user.phase in ("new", "over") for user in state.users) and not state.index.intents
    filled = state.index.mode == "enforced" or (state.index.mode == "off" and state.fills == bounds.fills)
    return quiet and filled and not any(shard.outbox or shard.lost for shard in state.shards)


def successors(state: State, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    yield from holders_puts.steps(state, bounds, variant)
    yield from holders_polls.steps(state, bounds, variant)
    yield from holders_losses.steps(state, bounds)


def explore(bounds: Bounds, variant: Variant = Variant.CORRECT, most: int = 1 << 40) -> Found:
    """Sees every state, or all up to the first violation, which has the shortest trace.

    From each state, rest must be within reach: otherwise a transaction waits for ever (H4).
    """
    found = Found()
    level = [initial(bounds)]
    seen = {level[0]: 0}
    cameby: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]
    resting = [0] if at_rest(level[0], bounds) else []
    while level:
        following = []
        for state in level:
            here = seen[state]
            for text, after in successors(state, bounds, variant):
                violation = broken(after)
                if violation:
                    found.violation, found.trace = violation, [*trace(cameby, here), text]
                    found.states = len(seen)
                    return found
                found.reached |= _marks(state, after, text)
                place = seen.get(after)
                if place is None:
                    place = seen[after] = len(cameby)
                    cameby.append((here, text))
                    before.append([])
                    following.append(after)
                    if at_rest(after, bounds):
                        resting.append(place)
                before[place].append(here)
        if len(seen) > most:
            raise AssertionError(f"more than {most} states")
        level = following
    found.states = len(seen)
    restless = _first_restless(before, resting)
    if restless is not None:
        found.violation, found.trace = "H4: it never comes to rest", trace(cameby, restless)
    return found


def _first_restless(before: list[list[int]], resting: list[int]) -> int | None:
    """The first state that no state at rest can be reached from."""
    reaches = set(resting)
    while resting:
        for place in before[resting.pop()]:
            if place not in reaches:
                reaches.add(place)
                resting.append(place)
    return next((place for place in range(len(before)) if place not in reaches), None)


def _marks(before: State, state: State, text: str) -> set[str]:
    marks = {
        word for word in ("23505", "40001", "gives up", "contested", "lose", "S1's", "refused for") if word in text
    }
    held = {h[0] for h in before.index.holders if h[2] == ENDED} - {h[0] for h in state.index.holders}
    if held and state.index.mode == before.index.mode:
        marks.add("freed")
    if any(i.user == ENDED for i in state.index.intents):
        marks.add("left")
    if state.fills and state.index.mode == "enforced":
        marks.add("enforced")
    return marks
