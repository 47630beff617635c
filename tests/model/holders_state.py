"""The state of the model of an index that is unique over shards (docs/architecture-shards.md#unique-over-shards).

A shard's state is what is committed there; the user's state holds what is in flight. Each statement of the index server
is one step: only its own transaction sees its changes until it ends, and locks are named by their keys. The other model
(`apart_state.py`) covers how outboxes are shipped over a network that loses answers: here one shipper serves a feed,
and may die.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

Ident = tuple[str, int]
# The key that is no key: rows with it are beside each other. "" is: no row.
NULL = "null"
# The transaction of an intent that a poll leaves behind. It ended long ago.
ENDED = -1


class Variant(Enum):
    """The protocol, or a mistake in it that the exploration must find."""

    CORRECT = "the protocol as it is"
    ONE_STATEMENT = "a poll deletes holders in the statement that locks them"
    NO_KEY_SHARE = "a put reads a holder without a lock"
    SETTLE_FIRST = "a poll looks for entries and intents before it has deleted its own"
    NO_INTENT_LEFT = "a poll skips a locked holder, and leaves no intent"
    INTENTS_UNSEEN = "a poll deletes holders that have intents and no entry"
    ENTRIES_UNSEEN = "a poll deletes holders that have entries of other rows"
    HOLDER_BY_KEY = "a poll deletes the holder of a key, whosever shard it is"
    REFUSED_AT_ONCE = "a put doesn't look whether the key is about to leave"
    HANDED_OVER = "a put takes over a holder that intents name"
    PUT_AFTER_COMMIT = "the put isn't committed before its transaction is"
    PUTS_ALONE = "keys that a transaction leaves aren't put"
    NO_LOCAL_INDEX = "a shard has no unique index of its own"
    NULL_HELD = "rows with a NULL in the key have a holder"
    # Variants about filling.
    TRIGGER_WITHOUT_DRAIN = "the trigger is made beside puts in flight"
    FILL_BESIDE_POLLS = "a batch reads without the feeds' locks"
    FILL_ENTRIES_ALONE = "holders are filled from entries and not from intents"
    SWITCH_WITHOUT_LOCK = "enforcement begins beside puts in flight"
    MODE_AS_ROW = "the mode is a row, and puts see it by their snapshots"
    PUT_UNCONTESTED = "a put that meets another holder while filling says nothing"
    POLL_UNCONTESTED = "a poll that meets another holder while filling says nothing"
    HOLDER_UNCHANGED = "a contested key that is one shard's keeps its holder"
    LISTED_EARLY = "entries in two shards are listed while intents name them"
    POLL_FILLS = "a poll inserts the holder of an entry that has none"
    # Variants about lost commits.
    REFUSES_ON = "puts refuse on when enforcement has ended"
    DOUBT_FORGOTTEN = "a doubt that came and went before anybody looked ends nothing"
    LOST_PUT_UNDRAINED = "filling again doesn't wait for whoever announced to an index server that lost it"
    FILLED_ON_TOP = "holders are filled again beside those that were left"


@dataclass(frozen=True)
class Bounds:
    """How much is explored.

    users: shard and number of statements of each user transaction. rows: the shards at the beginning, primary key and
    key. values: what keys may become. repeatable: puts have one snapshot, as those of `postgres_fdw`. midway: a
    transaction may announce, and write on (SET CONSTRAINTS). swaps: a statement may swap the keys of two rows. limit:
    outbox rows of a poll. enforced: from the beginning. fills: how often filling begins. deaths: of shippers and
    of those who fill. aborts: transactions may roll back, whose puts may be committed later. lossy: the shard that may
    lose commits, once; -2: the index server; -1: none.
    """

    users: tuple[tuple[int, int], ...]
    rows: tuple[tuple[Ident, ...], ...] = ((("a", 1),), ())
    primary_keys: tuple[int, ...] = (1,)
    values: tuple[str, ...] = ("a", "")
    repeatable: bool = False
    midway: bool = False
    swaps: bool = False
    limit: int = 9
    enforced: bool = True
    fills: int = 0
    deaths: int = 0
    aborts: bool = True
    lossy: int = -1


class Intent(NamedTuple):
    shard: int
    ident: Ident
    user: int


class Snapshot(NamedTuple):
    """The snapshot of a put that has one. real: a ghost, the committed rows at its moment, shard and key."""

    holders: tuple[tuple[str, int], ...]
    intents: tuple[Intent, ...]
    mode: str
    real: tuple[tuple[int, str], ...]


class Put(NamedTuple):
    """A transaction of the index server. todo: what isn't put yet; doing: what the first of it is at."""

    snapshot: Snapshot | None
    locked: bool  # It has the lock of the table of intents.
    mode: str
    todo: tuple[Ident, ...]
    doing: str
    intents: tuple[Ident, ...]
    holders: tuple[str, ...]  # Inserted.
    shared: tuple[str, ...]  # Locked FOR KEY SHARE.
    contested: tuple[str, ...]


class User(NamedTuple):
    """phase: new, open, putting, put (committed on the index server), zombie (only the put is left), over."""

    phase: str
    left: int
    changes: tuple[tuple[int, str], ...]
    touched: tuple[Ident, ...]
    put: Put | None


class Shard(NamedTuple):
    """rows: committed. outbox: committed, in the order of versions. lost: commits that were applied."""

    rows: tuple[Ident, ...]
    outbox: tuple[Ident, ...]
    lost: bool


class Poll(NamedTuple):
    """phase: idle, looked, answered, locked. acked: what the next one clears away."""

    phase: str
    acked: tuple[Ident, ...]
    named: tuple[Intent, ...]
    rows: tuple[tuple[Ident, bool], ...]
    running: tuple[int, ...]
    shipped: tuple[Ident, ...]
    locked: tuple[str, ...]
    skipped: tuple[str, ...]
    old: tuple[Intent, ...]  # Intents as of the statement that locks (ONE_STATEMENT).
    losable: bool  # Its tick is in none of the states that the shard may come back to.
    repaired: bool


class Index(NamedTuple):
    """Committed, but for the holders: key and shard of each, and the user whose put has it in flight, or ENDED."""

    entries: tuple[tuple[int, Ident], ...]
    intents: tuple[Intent, ...]
    holders: tuple[tuple[str, int, int], ...]
    contested: tuple[str, ...]
    mode: str  # off, filling, enforced, refusing (REFUSES_ON)
    promised: bool
    doubt: tuple[str, ...]  # For each feed: "", doubtful or repairing.
    doubted: bool  # One was, since filling began.
    listed: tuple[str, ...]


class State(NamedTuple):
    """filled: keys that a batch was committed of. batch: a key, and the shards that it was found in."""

    shards: tuple[Shard, ...]
    users: tuple[User, ...]
    homes: tuple[int, ...]  # The users' shards.
    index: Index
    polls: tuple[Poll, ...]
    filled: tuple[str, ...]
    batch: tuple[str, tuple[int, ...]] | None
    fills: int
    deaths: int
    saved: Shard | Index | None
    savable: bool
    unsure: tuple[int, ...]  # Users whose put the index server may have lost.
    wrong: str


IDLE = Poll("idle", (), (), (), (), (), (), (), (), False, False)


def initial(bounds: Bounds) -> State:
    entries = tuple((n, ident) for n, rows in enumerate(bounds.rows) for ident in sorted(rows))
    held = tuple(sorted((ident[0], n, ENDED) for n, ident in entries if ident[0] != NULL))
    on = bounds.enforced
    index = Index(
        entries, (), held if on else (), (), "enforced" if on else "off", on, ("",) * len(bounds.rows), False, ()
    )
    return State(
        shards=tuple(Shard(tuple(sorted(rows)), (), False) for rows in bounds.rows),
        users=tuple(User("new", left, (), (), None) for _, left in bounds.users),
        homes=tuple(shard for shard, _ in bounds.users),
        index=index,
        polls=(IDLE,) * len(bounds.rows),
        filled=(),
        batch=None,
        fills=0,
        deaths=0,
        saved=None,
        savable=bounds.lossy != -1,
        unsure=(),
        wrong="",
    )


def with_user(state: State, number: int, user: User) -> State:
    return state._replace(users=replaced(state.users, number, user))


def with_shard(state: State, number: int, shard: Shard) -> State:
    return state._replace(shards=replaced(state.shards, number, shard))


def with_poll(state: State, number: int, poll: Poll) -> State:
    return state._replace(polls=replaced(state.polls, number, poll))


def replaced(whole: tuple, place: int, one: object) -> tuple:  # type: ignore[type-arg]
    return (*whole[:place], one, *whole[place + 1 :])


def added(whole: tuple, *more: object) -> tuple:  # type: ignore[type-arg]
    """A set, as a sorted tuple."""
    return tuple(sorted({*whole, *more}))  # type: ignore[type-var]


def holder(index: Index, key: str) -> tuple[str, int, int] | None:
    """The holder of a key, committed or in flight, if it has one: a key has at most one."""
    return next((one for one in index.holders if one[0] == key), None)


def puts(state: State) -> list[Put]:
    """The puts that have the lock of the table of intents."""
    return [user.put for user in state.users if user.put is not None and user.put.locked]


def real(state: State) -> tuple[tuple[int, str], ...]:
    """The committed rows: shard and key."""
    return tuple(sorted({(n, key) for n, shard in enumerate(state.shards) for key, _ in shard.rows if key != NULL}))


def shards_of(index: Index, key: str, entries: bool = True, intents: bool = True) -> tuple[int, ...]:
    """Whose entries or intents have a key."""
    found = {n for n, ident in index.entries if ident[0] == key} if entries else set()
    return tuple(sorted(found | ({i.shard for i in index.intents if i.ident[0] == key} if intents else set())))
