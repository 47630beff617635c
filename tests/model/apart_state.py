"""The state of the model of an index that is apart from its source (docs/architecture-shards.md).

A shard's tables hold PostgreSQL's row versions (`mvcc.py`). Committed versions have the number 0, since all statements
are READ COMMITTED and begin again after a wait. Each transaction of the index server is one step: it locks its feed. A
shard's `past` is a ghost variable: the projection of its source after each commit, by which readers are judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tests.model.mvcc import DELETED, NEVER, Table

Ident = tuple[str, int]
Projection = tuple[Ident, ...]
NO_TICK = (0, 0)


class Variant(Enum):
    """The protocol, or a mistake in it that the exploration must find."""

    CORRECT = "the protocol as it is"
    ACK_BEFORE_APPLY = "a poll deletes the outbox rows that it reads"
    ACK_WITHOUT_VERSION = "a poll deletes what was shipped by its identity"
    NOTHING_CHECKED = "whoever comes applies: neither token nor tick are checked, in the shard or on the index server"
    TOKEN_UNCHECKED = "the index server checks the tick alone"
    APPLIED_TICK_UNCHECKED = "the index server checks the token alone"
    OLD_SNAPSHOT = "a poll takes its snapshot first and the tick later; tokens are not checked"
    SNAPSHOT_BEFORE_CLAIM = "a shipper claims the feed, and ships what it has read before"
    FRESH_FROM_END = "the freshness of a pass is the time of its end"
    PASS_BY_IDENTITY = "a pass goes through the outbox by identity"
    PASS_ENDS_EARLY = "a pass ends with the poll that has as many rows as it may have"
    SHIP_BEFORE_COPIES = "what is touched is shipped while the build still copies"
    CAPTURE_AFTER_COPY = "the first rows are copied before the capture is installed"
    CAPTURE_WITHOUT_DRAIN = "the capture is installed beside writers in flight"
    EMPTIED_LAST = "a TRUNCATE's entries are deleted after the poll's rows were written"
    EMPTIED_FORGOTTEN = "a TRUNCATE deletes nothing on the index server"
    # Variants about lost commits.
    TICK_ON_INDEX_ALONE = "only the index server compares ticks, after the shard has counted"
    TICK_WITHOUT_TOKEN = "a tick doesn't hold the token, and the shard asks nobody for it"
    STEP_OVERWRITTEN = "a poll writes the step into the shard, whatever is there"
    SAME_TOKEN_TWICE = "a shipper's first poll doesn't ask whether its token is new to the shard"
    # Variants about strict reads.
    INTENT_AFTER_COMMIT = "the intents are put on the index server after the commit"
    INTENTS_BY_GUESS = "a transaction announces what it has read before it wrote"
    SETTLE_WITHOUT_SNAPSHOT = "a poll takes away all intents of what it has seen"
    BEYOND_THE_END_ANY = "intents beyond the snapshot's end go that came after it was taken"
    TWO_STATEMENTS = "a reader takes the entries first and the intents in another snapshot"
    NAMED_UNTRUE = "what is named is settled, and its truth isn't applied"
    # Variants about an older copy of the index server.
    START_UNNOTICED = "an older copy of the index server answers as soon as it is started"
    PROVED_BY_A_PASS = "after a start one pass is waited for, and nobody who announced before"
    HORIZON_OF_BEFORE = "a start learns of earlier announcements from a poll that may be older than the start"


@dataclass(frozen=True)
class Bounds:
    """How much is explored.

    users: shard and number of statements of each user transaction. rows: the sources at the beginning. limit: rows of
    a poll. shippers: how many there are. claims: how often a feed is claimed, all together. unanswered: how many
    answers are lost, of polls and of applications. saves: which sides may lose their last commits, of "shard",
    "index" and "copy", an index server that doesn't see by its history that it is an older one. truncates: how many.
    built: the copies are there. strict: writers announce. readers: strict reads. keys: what a reader looks for. asks:
    which shards, "every" one or only those that are "named". repairs: verifications. aborts: transactions may roll
    back.
    """

    users: tuple[tuple[int, int], ...]
    rows: tuple[tuple[tuple[int, str], ...], ...] = (((1, "a"),),)
    primary_keys: tuple[int, ...] = (1,)
    values: tuple[str, ...] = ("a", "b")
    limit: int = 2
    shippers: int = 1
    claims: int = 1
    unanswered: int = 0
    saves: tuple[str, ...] = ()
    truncates: int = 0
    built: bool = True
    strict: bool = False
    readers: int = 0
    keys: str = "a"
    asks: str = "named"
    repairs: int = 0
    aborts: bool = True


class Shard(NamedTuple):
    """source: by primary key, its value is the key. outbox: by identity, its value is the version."""

    source: Table
    outbox: Table
    version: int
    xid: int
    tick: tuple[int, int]
    step: int
    emptied: int
    captured: bool
    past: tuple[Projection, ...]
    lost: bool  # It lost commits, and nothing that it said since has reached the index server.


class User(NamedTuple):
    """left: statements. xid: 0 before it has written. guess: what it read before."""

    left: int
    xid: int
    announced: bool
    over: bool
    guess: Projection


class Intent(NamedTuple):
    shard: int
    ident: Ident
    xid: int
    number: int


class Feed(NamedTuple):
    """fresh: the length of the shard's past when the pass began; -1: never. repaired: the same of a repair.

    unproved: the server was started since, and may lack announcements; strict: since that past it doesn't.
    """

    token: int
    owner: int
    tick: tuple[int, int]
    step: int
    emptied: int
    fresh: int
    doubt: bool
    repaired: int
    unproved: bool = False
    strict: int = -1


class Index(NamedTuple):
    entries: tuple[tuple[int, Ident], ...]
    intents: tuple[Intent, ...]
    number: int
    feeds: tuple[Feed, ...]
    copied: tuple[int, ...]  # How many primary keys of each shard are copied.
    lost: bool


class Answer(NamedTuple):
    """The answer of a poll. rows: version ("" if only named), identity, whether it is in the source."""

    rows: tuple[tuple[str, Ident, bool], ...]
    tick: tuple[int, int]
    end: int  # The first transaction that the snapshot doesn't know.
    running: tuple[int, ...]
    emptied: int
    last: bool
    refused: str
    step: int
    after_loss: bool


class Shipper(NamedTuple):
    """began: the past's length at the pass's begin, -1 between passes.

    noticed: that the index server was started. horizon: all who announced before have lower transactions; 0: not known.
    """

    shard: int
    token: int
    owner: int
    first: bool
    tick: tuple[int, int]
    step: int
    acked: tuple[tuple[str, Ident], ...]
    cursor: tuple[str, Ident]
    began: int
    named: tuple[Intent, ...]
    answer: Answer | None
    early: Answer | None
    noticed: bool = False
    horizon: int = 0


class Reader(NamedTuple):
    """started: the pasts' lengths. seen: entries, intents and ticks, of one snapshot."""

    started: tuple[int, ...]
    entries: tuple[tuple[int, Ident], ...] | None
    intents: tuple[Intent, ...] | None
    ticks: tuple[tuple[int, int], ...]
    over: bool


class State(NamedTuple):
    shards: tuple[Shard, ...]
    users: tuple[User, ...]
    index: Index
    shippers: tuple[Shipper | None, ...]
    readers: tuple[Reader | None, ...]
    copying: tuple[int, int, Projection] | None  # Shard, primary key, what was read.
    # As of a moment: a side that may come back as it was.
    saved: tuple[tuple[str, int, Shard | Index | None], ...]
    owners: int
    unanswered: int
    truncates: int
    repairs: int
    repairing: tuple[tuple[int, Ident], ...] | None
    wrong: str


START = ("", ("", 0))


def initial(bounds: Bounds) -> State:
    shards = []
    for rows in bounds.rows:
        source = tuple(sorted((pk, key, 0, NEVER, DELETED) for pk, key in rows))
        past = (tuple(sorted((key, pk) for pk, key in rows)),)
        shards.append(Shard(source, (), 0, 1, NO_TICK, 0, 0, bounds.built, past, False))
    many = len(shards)
    entries = [(n, ident) for n, shard in enumerate(shards) for ident in shard.past[0]] if bounds.built else []
    feed = Feed(0, 0, NO_TICK, 0, 0, -1, False, -1)
    copied = (len(bounds.primary_keys) if bounds.built else 0,) * many
    index = Index(tuple(sorted(entries)), (), 1, (feed,) * many, copied, False)
    return State(
        tuple(shards),
        tuple(User(left, 0, False, False, ()) for _, left in bounds.users),
        index,
        (None,) * bounds.shippers,
        (None,) * bounds.readers,
        None,
        (),
        0,
        0,
        0,
        0,
        None,
        "",
    )


def projection(shard: Shard) -> Projection:
    """The projection of the committed source."""
    return tuple(sorted((v[1], v[0]) for v in shard.source if v[2] == 0 and v[3] != 0))


def outbox(shard: Shard) -> dict[Ident, str]:
    """The committed outbox: versions by identity."""
    return {v[0]: v[1] for v in shard.outbox if v[2] == 0 and v[3] != 0}


def pruned(table: Table) -> Table:
    """The table without versions that no statement will see again."""
    return tuple(v for v in table if v[3] != 0)


def with_shard(state: State, number: int, **changes: object) -> State:
    shards = list(state.shards)
    shards[number] = shards[number]._replace(**changes)  # type: ignore[arg-type]
    return state._replace(shards=tuple(shards))


def with_feed(index: Index, number: int, **changes: object) -> Index:
    feeds = list(index.feeds)
    feeds[number] = feeds[number]._replace(**changes)  # type: ignore[arg-type]
    return index._replace(feeds=tuple(feeds))


def replaced(whole: tuple, place: int, one: object) -> tuple:  # type: ignore[type-arg]
    return (*whole[:place], one, *whole[place + 1 :])


def canonical(state: State) -> State:
    """Returns one state for all states that no step can tell apart: versions, ticks and steps count by their order
    alone.

    Forgets the past that no reader will ask for, and what a transaction that is over had read.
    """
    for number in range(len(state.shards)):
        state = _renumbered(state, number)
    users = tuple(
        user._replace(left=0, xid=0, announced=False) if user.over and not user.guess else user for user in state.users
    )
    return state._replace(users=users)


def _renumbered(state: State, number: int) -> State:
    indexes = [state.index, *(side for _, _, side in state.saved if isinstance(side, Index))]
    shards = [state.shards[number]]
    shards += [side for _, of, side in state.saved if isinstance(side, Shard) and of == number]
    shippers = [s for s in state.shippers if s is not None and s.shard == number]
    readers = [r for r in state.readers if r is not None and not r.over]
    answers = [a for s in shippers for a in (s.answer, s.early) if a is not None]
    feeds = [index.feeds[number] for index in indexes]

    named = {v[1] for shard in shards for v in shard.outbox}
    named |= {f"{n:03}" for shard in shards for n in (shard.version, shard.emptied)}
    named |= {f"{feed.emptied:03}" for feed in feeds}
    named |= {version for s in shippers for version, _ in (*s.acked, s.cursor)}
    named |= {row[0] for a in answers for row in a.rows} | {f"{a.emptied:03}" for a in answers}
    versions = {old: f"{n:03}" for n, old in enumerate(sorted({"000", *(named - {""})}))} | {"": ""}
    numbers = {int(old): int(new) for old, new in versions.items() if old}

    ticks = _by_order([(0, 0), *(s.tick for s in shards), *(s.tick for s in shippers), *(feed.tick for feed in feeds),
                       *(a.tick for a in answers), *(r.ticks[number] for r in readers)])  # fmt: skip
    steps = _by_order(
        [(0, 0), *((0, n) for side in (shards, shippers, feeds, answers) for n in (s.step for s in side))]
    )

    marks = [len(state.shards[number].past)]
    marks += [mark for feed in feeds for mark in (feed.fresh, feed.repaired, feed.strict) if mark >= 0]
    marks += [s.began for s in shippers if s.began >= 0] + [r.started[number] for r in readers]
    cut = max(min(marks) - 1, 0)

    def answer(one: Answer | None) -> Answer | None:
        if one is None:
            return None
        rows = tuple((versions[version], ident, is_there) for version, ident, is_there in one.rows)
        return one._replace(rows=rows, tick=ticks[one.tick], step=steps[0, one.step][1], emptied=numbers[one.emptied])

    def shard(one: Shard, now: bool) -> Shard:
        return one._replace(
            outbox=tuple(sorted((v[0], versions[v[1]], *v[2:]) for v in one.outbox)),
            version=numbers[one.version],
            emptied=numbers[one.emptied],
            tick=ticks[one.tick],
            step=steps[0, one.step][1],
            past=one.past[cut:] if now else one.past,
        )

    def index(one: Index) -> Index:
        feed = one.feeds[number]
        return with_feed(
            one,
            number,
            tick=ticks[feed.tick],
            step=steps[0, feed.step][1],
            emptied=numbers[feed.emptied],
            fresh=max(feed.fresh - cut, -1) if feed.fresh >= 0 else -1,
            repaired=max(feed.repaired - cut, -1) if feed.repaired >= 0 else -1,
            strict=max(feed.strict - cut, -1) if feed.strict >= 0 else -1,
        )

    def shipper(one: Shipper | None) -> Shipper | None:
        if one is None or one.shard != number:
            return one
        return one._replace(
            tick=ticks[one.tick],
            step=steps[0, one.step][1],
            acked=tuple((versions[version], ident) for version, ident in one.acked),
            cursor=(versions[one.cursor[0]], one.cursor[1]),
            began=one.began - cut if one.began >= 0 else -1,
            answer=answer(one.answer),
            early=answer(one.early),
        )

    def reader(one: Reader | None) -> Reader | None:
        if one is None or one.over:
            return one
        return one._replace(
            started=replaced(one.started, number, one.started[number] - cut),
            ticks=replaced(one.ticks, number, ticks[one.ticks[number]]),
        )

    def saved(kind: str, of: int, side: Shard | Index | None) -> tuple[str, int, Shard | Index | None]:
        if isinstance(side, Index):
            return kind, of, index(side)
        return kind, of, shard(side, False) if side is not None and of == number else side

    return state._replace(
        shards=replaced(state.shards, number, shard(state.shards[number], True)),
        index=index(state.index),
        shippers=tuple(shipper(one) for one in state.shippers),
        readers=tuple(reader(one) for one in state.readers),
        saved=tuple(saved(*one) for one in state.saved),
    )


def _by_order(pairs: list[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Each number by its rank among those with the same first part."""
    ranks: dict[tuple[int, int], tuple[int, int]] = {}
    for first in {pair[0] for pair in pairs}:
        for rank, second in enumerate(sorted({0, *(pair[1] for pair in pairs if pair[0] == first)})):
            ranks[first, second] = (first, rank)
    return ranks
