"""A side that comes back as it was at any earlier moment, once: a shard, or the index server."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.holders_puts import put_over
from tests.model.holders_state import ENDED, IDLE, Bounds, Index, Shard, State, with_poll, with_shard, with_user

INDEX = -2  # Instead of a shard's number.


def steps(state: State, bounds: Bounds) -> Iterator[tuple[str, State]]:
    lossy = bounds.lossy
    name = "the index server" if lossy == INDEX else f"S{lossy + 1}"
    if state.savable and state.saved is None:
        side = _committed(state.index) if lossy == INDEX else state.shards[lossy]
        yield f"the last state of {name} that will be left", state._replace(saved=side)
    elif state.saved is not None:
        after = state._replace(saved=None, savable=False)
        if isinstance(state.saved, Index):
            after = _index_lost(after, state.saved)
        else:
            after = _shard_lost(after, lossy, state.saved)
        yield f"{name} loses its last commits", after


def _shard_lost(state: State, home: int, saved: Shard) -> State:
    """Its sessions end; what they had sent to the index server may still be committed."""
    for number, user in enumerate(state.users):
        if state.homes[number] != home or user.phase not in ("open", "putting", "put"):
            continue
        if user.put is not None and user.put.locked and not user.put.todo:
            state = with_user(state, number, user._replace(phase="zombie", changes=(), touched=()))
        else:
            state = put_over(state, number, "over", commits=False)
    poll = state.polls[home]._replace(acked=(), shipped=())
    return with_poll(with_shard(state, home, saved), home, poll)


def _index_lost(state: State, saved: Index) -> State:
    """The index server comes back with another history: nothing is promised, all feeds are doubtful, all polls, fills
    and puts at it have failed.

    unsure: users whose put was committed there and whose commit isn't in the shard yet: the put may be lost.
    """
    many = len(state.shards)
    for number, user in enumerate(state.users):
        if user.put is not None:
            state = put_over(state, number, "over", commits=False)
    unsure = tuple(number for number, user in enumerate(state.users) if user.phase == "put")
    index = saved._replace(promised=False, doubt=("doubtful",) * many, doubted=True)
    return state._replace(index=index, polls=(IDLE,) * many, batch=None, unsure=unsure)


def _committed(index: Index) -> Index:
    return index._replace(holders=tuple(h for h in index.holders if h[2] == ENDED))
