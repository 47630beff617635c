"""The steps within a shard that need no shipper: writers, the capture, TRUNCATE, copies, lost commits."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import mvcc
from tests.model.apart_state import (
    Bounds,
    Ident,
    Index,
    Intent,
    Shard,
    State,
    User,
    Variant,
    projection,
    pruned,
    replaced,
    with_shard,
)
from tests.model.mvcc import NEVER, Wait


def steps(state: State, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    for number, user in enumerate(state.users):
        if not user.over:
            yield from _user(state, number, user, bounds, variant)
    yield from _truncate(state, bounds)
    yield from _build(state, bounds, variant)
    yield from _loss(state, bounds, variant)


def touch(shard: Shard, ident: Ident, me: int) -> Shard:
    """The capture: this identity is to be looked at. Raises Wait."""
    version = shard.version + 1
    return shard._replace(outbox=mvcc.put(shard.outbox, ident, f"{version:03}", 0, me, False), version=version)


def running(state: State, number: int, bounds: Bounds) -> tuple[int, ...]:
    """The transactions that haven't ended, in a shard."""
    return tuple(
        user.xid
        for user, (shard, _) in zip(state.users, bounds.users, strict=True)
        if shard == number and user.xid and not user.over
    )


def _user(state: State, number: int, user: User, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    home, me = bounds.users[number][0], -1 - number
    shard, name = state.shards[home], f"T{number + 1} in S{home + 1}"
    guesses = variant is Variant.INTENTS_BY_GUESS
    if guesses and not user.xid and not user.guess:
        looked = user._replace(guess=projection(shard))
        yield f"{name} reads", state._replace(users=replaced(state.users, number, looked))
        return
    if user.left and not user.announced:
        for pk in bounds.primary_keys:
            for value in (*bounds.values, ""):
                written = _write(shard, pk, value, me)
                if written is None:
                    continue
                after, old = written
                xid = user.xid or shard.xid
                changed = user._replace(left=user.left - 1, xid=xid)
                if not user.xid:
                    after = after._replace(xid=xid + 1)
                what = f"{old or 'nothing'} → {value or 'nothing'}"
                yield (f"{name}: row {pk}: {what}", _with(state, home, after, number, changed))
    if not user.xid:
        return
    if bounds.strict and not user.announced and variant is not Variant.INTENT_AFTER_COMMIT:
        announced = _announced(state, home, me, user, variant)
        after_it = announced._replace(users=replaced(state.users, number, user._replace(announced=True)))
        yield f"{name} announces", after_it
    else:
        done = shard._replace(
            source=pruned(mvcc.commit(shard.source, me, 0)), outbox=pruned(mvcc.commit(shard.outbox, me, 0))
        )
        done = done._replace(past=(*shard.past, projection(done)))
        after_it = _with(state, home, done, number, user._replace(over=True))
        if bounds.strict and variant is Variant.INTENT_AFTER_COMMIT:
            # Its intents are on their way while all sessions see the commit: the same user, once more.
            own = [v[0] for v in shard.outbox if v[2] == me]
            late = user._replace(announced=True, over=True, guess=tuple(own))
            after_it = after_it._replace(users=replaced(after_it.users, number, late))
        yield f"{name} commits", after_it
    if bounds.aborts:
        undone = shard._replace(source=mvcc.rollback(shard.source, me), outbox=mvcc.rollback(shard.outbox, me))
        yield f"{name} rolls back", _with(state, home, undone, number, user._replace(over=True))


def _with(state: State, home: int, shard: Shard, number: int, user: User) -> State:
    return state._replace(shards=replaced(state.shards, home, shard), users=replaced(state.users, number, user))


def _write(shard: Shard, pk: int, value: str, me: int) -> tuple[Shard, str] | None:
    """One statement and its capture; None if it would wait or change nothing."""
    seen = [v for v in shard.source if v[0] == pk and mvcc.visible(v, 0, me)]
    old = seen[0][1] if seen else ""
    if old == value:
        return None
    try:
        if value:
            source, _ = mvcc.upsert(shard.source, pk, value, 0, me, False)
        else:
            source, _ = mvcc.delete(shard.source, pk, 0, me, False)
        after = shard._replace(source=source)
        if shard.captured:
            for key in filter(None, (old, value)):
                after = touch(after, (key, pk), me)
    except Wait:
        return None
    return after, old


def _announced(state: State, home: int, me: int, user: User, variant: Variant) -> State:
    shard, index = state.shards[home], state.index
    idents = [v[0] for v in shard.outbox if v[2] == me and v[3] == NEVER]
    if variant is Variant.INTENTS_BY_GUESS:
        pks = {pk for _, pk in idents}
        new = [(v[1], v[0]) for v in shard.source if v[2] == me and v[3] == NEVER]
        idents = sorted({*(ident for ident in user.guess if ident[1] in pks), *new})
    added = [Intent(home, ident, user.xid, index.number + n) for n, ident in enumerate(sorted(idents))]
    index = index._replace(intents=tuple(sorted([*index.intents, *added])), number=index.number + len(added))
    return state._replace(index=index)


def late_intents(state: State, bounds: Bounds) -> Iterator[tuple[str, State]]:
    """INTENT_AFTER_COMMIT: they arrive."""
    for number, user in enumerate(state.users):
        if user.over and user.announced and user.guess:
            home, index = bounds.users[number][0], state.index
            added = [Intent(home, ident, user.xid, index.number + n) for n, ident in enumerate(sorted(user.guess))]
            index = index._replace(intents=tuple(sorted([*index.intents, *added])), number=index.number + len(added))
            users = replaced(state.users, number, user._replace(guess=()))
            yield f"T{number + 1} announces, late", state._replace(index=index, users=users)


def _truncate(state: State, bounds: Bounds) -> Iterator[tuple[str, State]]:
    if state.truncates >= bounds.truncates:
        return
    for number, shard in enumerate(state.shards):
        if not shard.captured or not shard.source or running(state, number, bounds):
            continue
        after = with_shard(
            state,
            number,
            source=(),
            version=shard.version + 1,
            emptied=shard.version + 1,
            xid=shard.xid + 1,
            past=(*shard.past, ()),
        )
        yield f"TRUNCATE in S{number + 1}", after._replace(truncates=state.truncates + 1)


def _build(state: State, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    index = state.index
    for number, shard in enumerate(state.shards):
        copied = index.copied[number]
        if not shard.captured:
            early = variant is Variant.CAPTURE_AFTER_COPY and (copied == 0 or state.copying is not None)
            if not early and (variant is Variant.CAPTURE_WITHOUT_DRAIN or not running(state, number, bounds)):
                yield f"the capture is installed in S{number + 1}", with_shard(state, number, captured=True)
            if not early:
                continue
        if copied < len(bounds.primary_keys) and state.copying is None:
            pk = bounds.primary_keys[copied]
            found = tuple(ident for ident in projection(shard) if ident[1] == pk)
            yield f"a batch reads row {pk} of S{number + 1}", state._replace(copying=(number, pk, found))
    if state.copying is not None:
        number, pk, found = state.copying
        entries = {*index.entries, *((number, ident) for ident in found)}
        copied_now = replaced(index.copied, number, index.copied[number] + 1)
        yield (
            f"the batch writes row {pk} of S{number + 1}",
            state._replace(index=index._replace(entries=tuple(sorted(entries)), copied=copied_now), copying=None),
        )
        yield "the worker dies", state._replace(copying=None)


def _loss(state: State, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    """At any moment, saves a side's state (a replica stops replaying, a backup is taken); later puts it in that side's
    place."""
    saved = {kind.removeprefix("lost ") for kind, *_ in state.saved}
    for kind in bounds.saves:
        if kind in saved:
            continue
        sides: list[Shard | Index] = [state.index] if kind in ("index", "copy") else list(state.shards)
        for number, side in enumerate(sides):
            if isinstance(side, Shard):
                side = side._replace(
                    source=_committed_alone(side.source), outbox=_committed_alone(side.outbox), past=(projection(side),)
                )
            yield (
                f"the last state of {kind} {number + 1} that will be left",
                state._replace(saved=(*state.saved, (kind, number, side))),
            )
    for place, (kind, number, side) in enumerate(state.saved):
        if kind.startswith("lost"):
            continue
        left = replaced(state.saved, place, (f"lost {kind}", 0, None))
        if isinstance(side, Index):
            if kind == "copy" and variant is not Variant.START_UNNOTICED:
                side = side._replace(feeds=tuple(feed._replace(unproved=True) for feed in side.feeds))
            yield (
                "the index server loses its last commits",
                state._replace(index=side._replace(lost=True), saved=left, copying=None, repairing=None),
            )
        else:
            now = state.shards[number]
            back = side._replace(past=(*now.past, side.past[-1]), lost=True)
            users = tuple(
                user._replace(over=True, xid=user.xid) if bounds.users[n][0] == number and user.xid else user
                for n, user in enumerate(state.users)
            )
            yield (
                f"S{number + 1} loses its last commits",
                state._replace(shards=replaced(state.shards, number, back), users=users, saved=left, repairing=None),
            )


def _committed_alone(table: mvcc.Table) -> mvcc.Table:
    """The table without versions in flight."""
    for me in {mark for v in table for mark in v[2:4] if mark < 0}:
        table = mvcc.rollback(table, me)
    return table
