"""The steps of the index server: polls that settle, filling the holders, switching on and off, contact after a
loss."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.holders_puts import IN_THE_SHARD
from tests.model.holders_state import (
    ENDED,
    IDLE,
    NULL,
    Bounds,
    Intent,
    Poll,
    Shard,
    State,
    Variant,
    added,
    holder,
    puts,
    real,
    replaced,
    shards_of,
    with_poll,
    with_shard,
)

Steps = Iterator[tuple[str, State]]


def steps(state: State, bounds: Bounds, variant: Variant) -> Steps:
    for number, poll in enumerate(state.polls):
        for text, after in _poll(state, number, poll, bounds, variant):
            yield f"a poll of S{number + 1} {text}", after
        if state.deaths < bounds.deaths and poll != IDLE:
            dead = with_poll(state, number, IDLE)
            yield f"the shipper of S{number + 1} dies", dead._replace(deaths=state.deaths + 1)
        # A verification, and a pass that began when all writers had begun to announce.
        sure = not any(state.homes[n] == number and state.users[n].phase == "put" for n in state.unsure)
        if state.index.doubt[number] == "doubtful" and (sure or variant is Variant.LOST_PUT_UNDRAINED):
            yield f"S{number + 1} is repaired", _repaired(state, number)
    yield from _modes(state, bounds, variant)


def _poll(state: State, number: int, poll: Poll, bounds: Bounds, variant: Variant) -> Steps:
    shard, index = state.shards[number], state.index
    mine = tuple(i for i in index.intents if i.shard == number)
    if poll.phase == "idle":
        if shard.outbox or poll.acked or mine or shard.lost or index.doubt[number] == "repairing":
            yield "looks at the intents", with_poll(state, number, poll._replace(phase="looked", named=mine))
    elif poll.phase == "looked":
        if shard.lost:
            doubt = replaced(index.doubt, number, "doubtful")
            told = with_shard(state, number, shard._replace(lost=False))
            told = told._replace(index=index._replace(doubt=doubt, promised=False, doubted=True))
            yield "finds that commits are lost", with_poll(told, number, IDLE)
        else:
            yield "reads the shard", _read(state, number, poll, bounds)
    elif poll.phase == "answered":
        if state.batch is None or variant is Variant.FILL_BESIDE_POLLS:
            yield "locks its feed and holders", with_poll(state, number, _locked(state, number, poll, variant))
    else:
        yield "commits", _applied(state, number, poll, variant)


def _read(state: State, number: int, poll: Poll, bounds: Bounds) -> State:
    shard = state.shards[number]
    running = tuple(n for n, user in enumerate(state.users) if state.homes[n] == number and user.phase in IN_THE_SHARD)
    touched = {ident for n in running for ident in state.users[n].touched}
    outbox = tuple(i for i in shard.outbox if i not in poll.acked or i in touched)
    shipped = outbox[: bounds.limit]
    idents = sorted({*shipped, *(i.ident for i in poll.named)})
    answered = poll._replace(
        phase="answered",
        acked=(),
        rows=tuple((ident, ident in shard.rows) for ident in idents),
        running=running,
        shipped=shipped,
        losable=bool(idents) and state.saved is not None and number == bounds.lossy,
        repaired=state.index.doubt[number] == "repairing" and shipped == outbox,
    )
    return with_poll(with_shard(state, number, shard._replace(outbox=outbox)), number, answered)


def _locked(state: State, number: int, poll: Poll, variant: Variant) -> Poll:
    """FOR UPDATE SKIP LOCKED, of the holders of what is gone."""
    poll = poll._replace(phase="locked")
    if variant is Variant.ONE_STATEMENT:
        return poll._replace(old=state.index.intents)
    locked, skipped = _lockable(state, number, poll, variant)
    return poll._replace(locked=locked, skipped=skipped)


def _lockable(state: State, number: int, poll: Poll, variant: Variant) -> tuple[tuple[str, ...], tuple[str, ...]]:
    taken = {key for put in puts(state) for key in put.shared} | {key for v in state.polls for key in v.locked}
    gone = {ident[0] for ident, there in poll.rows if not there}
    held = [
        key
        for key, shard, by in state.index.holders
        if key in gone and by == ENDED and (shard == number or variant is Variant.HOLDER_BY_KEY)
    ]
    return tuple(key for key in held if key not in taken), tuple(key for key in held if key in taken)


def _applied(state: State, number: int, poll: Poll, variant: Variant) -> State:
    """The rest of the transaction, as one step: no other transaction waits for only a part of it."""
    index = state.index
    settled = {i for i in poll.named if i.user not in poll.running}
    entries = {e for e in index.entries if e[0] != number or (e[1], False) not in poll.rows}
    entries |= {(number, ident) for ident, there in poll.rows if there}
    now = index._replace(entries=tuple(sorted(entries)), intents=tuple(i for i in index.intents if i not in settled))
    locked, skipped = poll.locked, poll.skipped
    seen = now
    if variant is Variant.ONE_STATEMENT:
        locked, skipped = _lockable(state, number, poll, variant)
        seen = now._replace(intents=tuple(i for i in poll.old if i not in settled))
    elif variant is Variant.SETTLE_FIRST:
        seen = index
    entries_count, intents_count = variant is not Variant.ENTRIES_UNSEEN, variant is not Variant.INTENTS_UNSEEN
    freed = {key for key in locked if number not in shards_of(seen, key, entries_count, intents_count)}
    if index.mode == "off":
        freed, skipped = set(), ()
    if variant is not Variant.NO_INTENT_LEFT:
        left = [Intent(number, ident, ENDED) for ident, there in poll.rows if ident[0] in skipped and not there]
        now = now._replace(intents=added(now.intents, *left))
    state = without_holders(state._replace(index=now), freed)
    if index.mode == "filling":
        state = _met(state, number, poll, variant)
    if poll.losable:
        # The shard comes back, or has come back, as it was before this poll's tick.
        if isinstance(state.saved, Shard):
            state = state._replace(saved=state.saved._replace(lost=True))
        else:
            state = with_shard(state, number, state.shards[number]._replace(lost=True))
    if poll.repaired and state.index.doubt[number] == "repairing":
        index = state.index._replace(doubt=replaced(state.index.doubt, number, ""))
        if variant is Variant.DOUBT_FORGOTTEN and not any(index.doubt):
            index = index._replace(doubted=False, promised=index.mode == "enforced")
        state = state._replace(index=index)
    return with_poll(state, number, IDLE._replace(acked=poll.shipped))


def _met(state: State, number: int, poll: Poll, variant: Variant) -> State:
    """While filling: entries whose key is another shard's."""
    index = state.index
    for ident, there in poll.rows:
        found = holder(index, ident[0])
        if not there or ident[0] == NULL:
            continue
        if variant is Variant.POLL_FILLS and found is None:
            index = index._replace(holders=added(index.holders, (ident[0], number, ENDED)))
        elif variant is Variant.POLL_FILLS and found is not None and found[2] != ENDED:
            return state._replace(wrong="H6: a poll waits for a put")
        elif found is not None and found[1:] != (number, ENDED) and variant is not Variant.POLL_UNCONTESTED:
            contested = added(index.contested, ident[0]) if found[2] == ENDED else index.contested
            index = index._replace(contested=contested)
    return state._replace(index=index)


def without_holders(state: State, keys: set[str]) -> State:
    """The state without these keys' holders. A put whose snapshot shows one would get 40001 when it locks it, so its
    snapshot no longer shows it."""
    users = []
    for user in state.users:
        if user.put is not None and user.put.snapshot is not None:
            held = tuple(h for h in user.put.snapshot.holders if h[0] not in keys)
            user = user._replace(put=user.put._replace(snapshot=user.put.snapshot._replace(holders=held)))
        users.append(user)
    index = state.index._replace(holders=tuple(h for h in state.index.holders if h[0] not in keys))
    return state._replace(users=tuple(users), index=index)


def _repaired(state: State, number: int) -> State:
    """The verification touches what differs in the shard, in a transaction of its own."""
    shard = state.shards[number]
    there = {ident for n, ident in state.index.entries if n == number}
    differ = sorted(there ^ set(shard.rows))
    outbox = (*(i for i in shard.outbox if i not in differ), *differ)
    doubt = replaced(state.index.doubt, number, "repairing")
    poll = state.polls[number]._replace(acked=(), shipped=(), repaired=False)
    state = with_poll(with_shard(state, number, shard._replace(outbox=outbox)), number, poll)
    return state._replace(index=state.index._replace(doubt=doubt))


def _modes(state: State, bounds: Bounds, variant: Variant) -> Steps:
    index = state.index
    in_flight = bool(puts(state))
    polled = any(poll.phase == "locked" for poll in state.polls)
    keys = sorted({*bounds.values, *(key for rows in bounds.rows for key, _ in rows)} - {"", NULL})
    if index.doubted and index.mode in ("filling", "enforced") and not in_flight and not polled:
        off = "refusing" if variant is Variant.REFUSES_ON else "off"
        ended = index._replace(mode=off, promised=False)
        yield "enforcement ends", state._replace(index=ended, filled=(), batch=None)
    drained = (not in_flight or variant is Variant.TRIGGER_WITHOUT_DRAIN) and not polled
    may_begin = index.mode in ("off", "refusing") and state.fills < bounds.fills and not any(index.doubt)
    if may_begin and drained:
        begun = state if variant is Variant.FILLED_ON_TOP else without_holders(state, set(keys))
        begun = begun._replace(index=begun.index._replace(mode="filling", contested=(), listed=(), doubted=False))
        yield "filling begins", begun._replace(filled=(), batch=None, fills=state.fills + 1)
    if index.mode != "filling":
        return
    if state.batch is None:
        for key in keys:
            if key not in state.filled and (not polled or variant is Variant.FILL_BESIDE_POLLS):
                found = shards_of(index, key, intents=variant is not Variant.FILL_ENTRIES_ALONE)
                yield f"a batch finds {key} in {len(found)} shards", state._replace(batch=(key, found))
                break
    else:
        yield from _filled(state, *state.batch)
        if state.deaths < bounds.deaths:
            yield "who fills dies", state._replace(batch=None, deaths=state.deaths + 1)
    free = (not in_flight and not polled) or variant is Variant.SWITCH_WITHOUT_LOCK
    if state.batch is None and len(state.filled) == len(keys) and free and not index.doubted:
        yield from _switch(state, variant)


def _filled(state: State, key: str, shards: tuple[int, ...]) -> Steps:
    index = state.index
    found = holder(index, key)
    if shards and found is not None and found[2] != ENDED:
        return  # It waits for a put.
    if shards and found is None:
        found = (key, shards[0], ENDED)
        index = index._replace(holders=added(index.holders, found))
    if found is not None and set(shards) - {found[1]}:
        index = index._replace(contested=added(index.contested, key))
    yield "the batch is committed", state._replace(index=index, filled=(*state.filled, key), batch=None)


def _switch(state: State, variant: Variant) -> Steps:
    index = state.index
    listed = []
    for key in index.contested:
        shards, named = shards_of(index, key), shards_of(index, key, entries=False)
        if len(shards) < 2:
            continue
        if named and variant is not Variant.LISTED_EARLY:
            return  # Another pass.
        if len(shards_of(index, key, intents=False)) < 2:
            return
        listed.append(key)
    if listed:
        wrong = [key for key in listed if len({n for n, k in real(state) if k == key}) < 2]
        lost = any(shard.lost for shard in state.shards)
        off = state._replace(index=index._replace(mode="off", listed=tuple(listed)))
        false = f"H4: {wrong} are listed, and are none" if wrong and not lost else ""
        yield f"enforcement is refused for {listed}", off._replace(wrong=false)
        return
    after = state
    if variant is not Variant.HOLDER_UNCHANGED:
        after = without_holders(state, set(index.contested))
        held = [(key, shard, ENDED) for key in index.contested for shard in shards_of(index, key)]
        after = after._replace(index=after.index._replace(holders=added(after.index.holders, *held)))
    done = after.index._replace(mode="enforced", promised=True, contested=())
    yield "enforcement begins", after._replace(index=done)
