"""The traffic between a shard and the index server: claims, passes, polls, applications, repairs, strict reads."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model import mvcc
from tests.model.apart_shard import running, touch
from tests.model.apart_state import (
    START,
    Answer,
    Bounds,
    Feed,
    Ident,
    Index,
    Intent,
    Reader,
    Shard,
    Shipper,
    State,
    Variant,
    outbox,
    projection,
    pruned,
    replaced,
    with_feed,
    with_shard,
)

# Variants that compare nothing anywhere.
LAX = (Variant.NOTHING_CHECKED, Variant.OLD_SNAPSHOT)
IN_THE_SHARD = (*LAX, Variant.TICK_ON_INDEX_ALONE, Variant.TICK_WITHOUT_TOKEN)


def steps(state: State, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    for place, shipper in enumerate(state.shippers):
        yield from _claim(state, place, shipper, bounds, variant)
        if shipper is not None:
            yield from _ship(state, place, shipper, bounds, variant)
    yield from _repair(state, bounds)
    for place, reader in enumerate(state.readers):
        yield from _read(state, place, reader, bounds, variant)


def _claim(
    state: State, place: int, shipper: Shipper | None, bounds: Bounds, variant: Variant
) -> Iterator[tuple[str, State]]:
    if state.owners >= bounds.claims or (shipper is not None and shipper.answer is not None):
        return
    for number, feed in enumerate(state.index.feeds):
        if state.index.copied[number] < len(bounds.primary_keys) and variant is not Variant.SHIP_BEFORE_COPIES:
            continue
        if not state.shards[number].captured:
            continue
        owner = state.owners + 1
        index = with_feed(state.index, number, token=feed.token + 1, owner=owner)
        early = None
        if variant is Variant.SNAPSHOT_BEFORE_CLAIM and shipper is not None:
            early = shipper.early
        new = Shipper(number, feed.token + 1, owner, True, feed.tick, feed.step, (), START, -1, (), None, early)
        after = state._replace(index=index, shippers=replaced(state.shippers, place, new), owners=owner)
        yield f"P{place + 1} claims the feed of S{number + 1}, token {feed.token + 1}", after


def _ship(state: State, place: int, shipper: Shipper, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    name, number = f"P{place + 1}", shipper.shard
    shard = state.shards[number]
    if shipper.answer is not None:
        yield from _apply(state, place, shipper, bounds, variant)
        return
    if shipper.began < 0:
        named = tuple(i for i in state.index.intents if i.shard == number)
        feed = state.index.feeds[number]
        if shipper.acked or outbox(shard) or named or feed.unproved or feed.fresh < len(shard.past) - 1:
            begun = shipper._replace(began=len(shard.past) - 1, named=named, cursor=START)
            yield f"{name} begins a pass", state._replace(shippers=replaced(state.shippers, place, begun))
        return
    if variant in (Variant.OLD_SNAPSHOT, Variant.SNAPSHOT_BEFORE_CLAIM) and shipper.early is None:
        early = shipper._replace(early=_look(state, shard, shipper, bounds, variant))
        yield f"{name} takes its snapshot", state._replace(shippers=replaced(state.shippers, place, early))
        if variant is Variant.OLD_SNAPSHOT:
            return
    answer, after = _poll(state, shard, shipper, bounds, variant)
    told = shipper._replace(answer=answer, first=False, acked=(), early=None)
    polled = state._replace(shards=replaced(state.shards, number, after))
    rows = ", ".join(f"{ident[0]}{ident[1]} {'is' if is_there else 'is not'}" for _, ident, is_there in answer.rows)
    what = answer.refused or f"tick {answer.tick}: {rows or 'nothing'}"
    yield f"{name} polls S{number + 1}, {what}", polled._replace(shippers=replaced(state.shippers, place, told))
    if state.unanswered < bounds.unanswered:
        # A shipper that gets no answer claims again; it may also continue if the shard doesn't object.
        lost = replaced(state.shippers, place, shipper._replace(first=False, early=None))
        yield (
            f"{name} polls S{number + 1}, {what}; the answer is lost",
            polled._replace(shippers=lost, unanswered=state.unanswered + 1),
        )


def _poll(state: State, shard: Shard, shipper: Shipper, bounds: Bounds, variant: Variant) -> tuple[Answer, Shard]:
    """One transaction of the shard. A refused poll changes nothing."""
    stored = shard.tick
    refused = ""
    if variant not in IN_THE_SHARD:
        if shipper.first and stored[0] >= shipper.token and variant is not Variant.SAME_TOKEN_TWICE:
            refused = "another has that token"
        elif not shipper.first and stored[0] != shipper.token and stored >= shipper.tick:
            refused = "another has the feed"
        elif stored < shipper.tick:
            refused = "the shard has lost commits"
    elif variant is Variant.TICK_WITHOUT_TOKEN and stored < shipper.tick:
        refused = "the shard has lost commits"
    if not refused and shard.step > shipper.step and variant not in (*LAX, Variant.STEP_OVERWRITTEN):
        refused = "the index server has lost commits"
    if refused:
        return Answer((), stored, 0, (), 0, False, refused, shard.step, shard.lost), shard
    after = _acknowledged(shard, shipper, variant)._replace(step=max(shard.step, shipper.step))
    if variant in (Variant.STEP_OVERWRITTEN, *LAX):
        after = after._replace(step=shipper.step)
    answer = shipper.early or _look(state, after, shipper, bounds, variant)
    tick = stored
    if variant is not Variant.TICK_WITHOUT_TOKEN and stored[0] < shipper.token:
        tick = (shipper.token, 0)
    if answer.rows:
        tick = (tick[0], tick[1] + 1)
    after = after._replace(tick=tick)
    if variant is Variant.ACK_BEFORE_APPLY:
        gone = tuple((version, ident) for version, ident, _ in answer.rows)
        after = _acknowledged(after, shipper._replace(acked=gone), variant)
    return answer._replace(tick=tick, step=after.step), after


def _acknowledged(shard: Shard, shipper: Shipper, variant: Variant) -> Shard:
    """The shard without the outbox rows that were shipped, except those that a transaction has touched since, or is
    touching."""
    kept = shard.outbox
    for version, ident in shipper.acked:
        rows = [v for v in kept if v[0] == ident and v[2] == 0 and v[3] == mvcc.NEVER]
        if any(v[2] < 0 for v in kept if v[0] == ident):
            continue
        kept = tuple(
            v for v in kept if v not in rows or (v[1] != version and variant is not Variant.ACK_WITHOUT_VERSION)
        )
    return shard._replace(outbox=kept)


def _look(state: State, shard: Shard, shipper: Shipper, bounds: Bounds, variant: Variant) -> Answer:
    """Rows and truth, in one snapshot."""
    truth = projection(shard)
    pending = sorted((version, ident) for ident, version in outbox(shard).items())
    if variant is Variant.PASS_BY_IDENTITY:
        ahead = sorted((row for row in pending if row[1] > shipper.cursor[1]), key=lambda row: row[1])
    else:
        ahead = [row for row in pending if row[0] > shipper.cursor[0]]
    taken = ahead[: bounds.limit]
    rows = [(version, ident, ident in truth) for version, ident in taken]
    idents = {ident for _, ident in taken}
    rows += [("", ident, ident in truth) for ident in sorted({i.ident for i in shipper.named} - idents)]
    last = len(ahead) < bounds.limit or variant is Variant.PASS_ENDS_EARLY
    open_ones = running(state, shipper.shard, bounds)
    return Answer(tuple(rows), shard.tick, shard.xid, open_ones, shard.emptied, last, "", shard.step, shard.lost)


def _apply(state: State, place: int, shipper: Shipper, bounds: Bounds, variant: Variant) -> Iterator[tuple[str, State]]:
    """One transaction of the index server, under the lock of the feed."""
    answer, number, name = shipper.answer, shipper.shard, f"P{place + 1}"
    assert answer is not None
    index, feed = state.index, state.index.feeds[number]
    gone = replaced(state.shippers, place, None)
    mine = (feed.token, feed.owner) == (shipper.token, shipper.owner)
    if not mine and variant not in (*LAX, Variant.TOKEN_UNCHECKED):
        yield f"{name} is fenced", state._replace(shippers=gone)
        return
    contact = state
    if answer.after_loss:
        contact = with_shard(state, number, lost=False)
    contact = contact._replace(index=index._replace(lost=False))
    doubt = answer.refused
    if not doubt and variant not in (*LAX, Variant.APPLIED_TICK_UNCHECKED):
        behind = answer.tick <= feed.tick if answer.rows else answer.tick < feed.tick
        if behind:
            doubt = "its tick is an old one"
    if not doubt and answer.step > feed.step and variant not in LAX:
        doubt = "the index server has lost commits"
    if doubt:
        # The next shipper that claims the feed compares with what the shard has then.
        doubtful = with_feed(
            contact.index, number, doubt=True, tick=answer.tick, step=max(feed.step, answer.step), fresh=-1,
            repaired=-1, token=max(feed.token, answer.tick[0]),
        )  # fmt: skip
        yield f"{name}: doubtful, for {doubt}", contact._replace(index=doubtful, shippers=gone)
        return
    index = _applied(contact.index, feed, number, shipper, answer, variant)
    feed, shipper = _proved(state, index.feeds[number], shipper, answer, variant)
    fresh = shipper.began
    if variant is Variant.FRESH_FROM_END:
        fresh = len(state.shards[number].past) - 1
    if answer.last:
        feed = feed._replace(fresh=max(fresh, feed.fresh))
        if feed.doubt and 0 <= feed.repaired <= fresh:
            feed = feed._replace(doubt=False, repaired=-1)
    step = feed.step + bool(answer.rows)
    feed = feed._replace(step=step, tick=max(feed.tick, answer.tick), emptied=max(feed.emptied, answer.emptied))
    index = index._replace(feeds=replaced(index.feeds, number, feed))
    shipped = tuple((version, ident) for version, ident, _ in answer.rows if version)
    cursor = (shipped[-1][0], shipped[-1][1]) if shipped else shipper.cursor
    went_on = shipper._replace(
        answer=None, tick=feed.tick, step=step, acked=shipped, cursor=cursor, named=(),
        began=-1 if answer.last else shipper.began,
    )  # fmt: skip
    after = contact._replace(index=index)
    yield f"{name} applies", after._replace(shippers=replaced(state.shippers, place, went_on))
    if state.unanswered < bounds.unanswered:
        yield (
            f"{name} applies, and isn't told",
            after._replace(shippers=gone, unanswered=state.unanswered + 1),
        )


def _proved(state: State, feed: Feed, shipper: Shipper, answer: Answer, variant: Variant) -> tuple[Feed, Shipper]:
    """After a start, proves the feed once all transactions that may have announced before have ended and their writes
    have come."""
    if not feed.unproved:
        return feed, shipper
    proved = feed._replace(unproved=False, strict=len(state.shards[shipper.shard].past) - 1)
    if variant is Variant.PROVED_BY_A_PASS:
        return proved, shipper
    if not shipper.noticed and variant is not Variant.HORIZON_OF_BEFORE:
        return feed, shipper._replace(noticed=True)
    if not shipper.horizon:
        return feed, shipper._replace(noticed=True, horizon=answer.end)
    if min((answer.end, *answer.running)) < shipper.horizon:
        return feed, shipper
    return proved, shipper


def _applied(index: Index, feed: Feed, number: int, shipper: Shipper, answer: Answer, variant: Variant) -> Index:
    entries = set(index.entries)
    empty = answer.emptied > feed.emptied and variant is not Variant.EMPTIED_FORGOTTEN
    if empty and variant is not Variant.EMPTIED_LAST:
        entries = {entry for entry in entries if entry[0] != number}
    for version, ident, is_there in answer.rows:
        if variant is Variant.NAMED_UNTRUE and not version:
            continue
        (entries.add if is_there else entries.discard)((number, ident))
    if empty and variant is Variant.EMPTIED_LAST:
        entries = {entry for entry in entries if entry[0] != number}
    idents = {ident for _, ident, _ in answer.rows}
    intents = tuple(i for i in index.intents if not _settled(i, number, idents, shipper.named, answer, variant))
    return index._replace(entries=tuple(sorted(entries)), intents=intents)


def _settled(
    intent: Intent, number: int, idents: set[Ident], named: tuple[Intent, ...], answer: Answer, variant: Variant
) -> bool:
    if intent.shard != number or intent.ident not in idents:
        return False
    if variant is Variant.SETTLE_WITHOUT_SNAPSHOT:
        return True
    if intent.xid < answer.end:
        return intent.xid not in answer.running
    if variant is Variant.BEYOND_THE_END_ANY:
        return True
    return intent in named


def _repair(state: State, bounds: Bounds) -> Iterator[tuple[str, State]]:
    """A verification of a doubtful feed: it looks at both sides, and touches whatever there is."""
    for number, feed in enumerate(state.index.feeds):
        if not feed.doubt or feed.repaired >= 0:
            continue
        if state.repairing is None:
            if state.repairs < bounds.repairs:
                seen = tuple(entry for entry in state.index.entries if entry[0] == number)
                yield (
                    f"a verification reads the entries of S{number + 1}",
                    state._replace(repairing=seen, repairs=state.repairs + 1),
                )
            continue
        shard = state.shards[number]
        try:
            for ident in sorted({*(ident for _, ident in state.repairing), *projection(shard)}):
                shard = touch(shard, ident, -100)
        except mvcc.Wait:
            continue
        shard = shard._replace(outbox=pruned(mvcc.commit(shard.outbox, -100, 0)))
        shard = shard._replace(past=(*shard.past, projection(shard)))
        index = with_feed(state.index, number, repaired=len(shard.past) - 1)
        yield (
            f"the verification touches what differs in S{number + 1}",
            state._replace(shards=replaced(state.shards, number, shard), index=index, repairing=None),
        )


def _read(
    state: State, place: int, reader: Reader | None, bounds: Bounds, variant: Variant
) -> Iterator[tuple[str, State]]:
    name, index = f"R{place + 1}", state.index
    if reader is None:
        if any(feed.doubt or feed.unproved or feed.fresh < feed.strict for feed in index.feeds):
            return
        intents = None if variant is Variant.TWO_STATEMENTS else index.intents
        started = tuple(len(shard.past) - 1 for shard in state.shards)
        new = Reader(started, index.entries, intents, tuple(feed.tick for feed in index.feeds), False)
        yield f"{name} reads entries and intents", state._replace(readers=replaced(state.readers, place, new))
        return
    if reader.over:
        return
    if reader.intents is None:
        seen = reader._replace(intents=index.intents)
        yield f"{name} reads the intents", state._replace(readers=replaced(state.readers, place, seen))
        return
    assert reader.entries is not None
    over = Reader((), None, None, (), True)
    after = state._replace(readers=replaced(state.readers, place, over))
    named = {(i.shard, i.ident[1]) for i in reader.intents if i.ident[0] in bounds.keys}
    asked = {number for number, _ in named} if bounds.asks == "named" else set(range(len(state.shards)))
    if any(state.shards[n].tick < reader.ticks[n] for n in asked):
        yield f"{name} is refused", after
        return
    unnamed = {i.ident for i in reader.intents}
    found = {
        (number, pk)
        for number, (key, pk) in reader.entries
        if key in bounds.keys and (key, pk) not in unnamed and (number, pk) not in named
    }
    for number, pk in named:
        found |= {(number, pk) for key, other in projection(state.shards[number]) if other == pk and key in bounds.keys}
    if bounds.asks == "every":
        found = {(n, pk) for n, pk in found if any(one[1] == pk and one[0] in bounds.keys for one in projection(
            state.shards[n]))}  # fmt: skip
    wrong = ""
    for number, shard in enumerate(state.shards):
        pasts = [{pk for key, pk in past if key in bounds.keys} for past in shard.past[reader.started[number] :]]
        here = {pk for n, pk in found if n == number}
        if set.intersection(*pasts) - here:
            wrong = "A4: a strict read missed a row that was there before and after it"
        elif here - set.union(*pasts):
            wrong = "A4: a strict read returned a row that was there neither before nor after it"
    yield f"{name} asks the shards, and finds {sorted(found)}", after._replace(wrong=wrong)
