"""The model's state, and its canonical form: two states that no transaction can tell apart are one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from tests.model.mvcc import DELETED, LOCKED, NEVER, UPDATED, Table, Version

NO_SNAPSHOT = -1

# The new keys that one statement gives to several rows, as `UPDATE … SET k = k + 1` does.
MAPS = {"swap": {"a": "b", "b": "a"}, "shift": {"a": "b", "b": "c"}}


class Variant(Enum):
    """The algorithm, or a mistake in it that the exploration must find."""

    CORRECT = "the algorithm as it is"
    NO_DRAIN_AT_PREPARE = "prepare installs the capture without waiting for the writers in flight"
    NO_DRAIN_AT_SWITCH = "the switch renders direct mode without waiting for the writers in flight"
    PUBLISH_LEAVES_HELD_ROWS = "publish neither drains nor looks at what is left in the delta"
    NO_ISOLATION_CHECKS = "old snapshots are not refused: neither by the mode's row nor by a removal's probe"
    NO_MODE_ROW = "a removal's probe alone tells an old snapshot"
    NO_PROBE = "a removal that finds nothing doesn't probe; the mode's row alone tells an old snapshot"
    WATERMARK_BEFORE_ROWS = "the watermark is committed before the rows, in a transaction of its own"
    NO_COMPARE_AND_SET = "a batch commits its watermark whoever holds the range"
    FOLD_WITHOUT_LOCKS = "the fold applies what it has read, without FOR UPDATE SKIP LOCKED or a second look"
    ANTIMATTER_DROPPED_AT_INSERT = "an insert takes its entry's antimatter away instead of writing a regular row"
    BASE_WINS = "the fold leaves a base entry as it is where the delta has a newer one"
    DIRECT_MODE_IGNORES_DELTA = "in direct mode a write doesn't take its entry out of the delta"
    REBUILD_FORGETS_ACTIVE = "a rebuild's capture maintains the new generation only"
    MOVED_KEYS_QUICKLY = "rows that swap their primary keys take the quick path"
    ANY_VERSION_ANSWERS = "a careful visit takes any version of the row that its snapshot shows, and locks none"
    LOCK_ANY_VERSION = "a careful visit takes any version of the row that is this entry's, and locks it FOR SHARE"
    OWN_HIDES_OTHERS = "a version of its own answers even where it isn't this entry's and another's row is there"
    KEY_SHARE = "a careful visit locks others' version FOR KEY SHARE"
    NO_LOCK = "a careful visit locks nothing"
    NO_LOCK_BUT_REFUSAL = "a careful visit locks nothing, but gets 40001 where its old snapshot isn't true any more"
    LOCK_ON_PLAIN_KEYS = "a careful visit asks for others' versions where the primary key isn't DEFERRABLE"
    OWN_HIDES_OTHERS_ON_PLAIN_KEYS = "the same, but only where it has none of its own"
    LOOK_ONCE = "a careful visit doesn't look again after it has taken an entry out"
    CAPTURE_MODE_TAKES_OLD_SNAPSHOTS = "with a DEFERRABLE key capture mode takes snapshots older than prepare"
    TRUNCATE_BETWEEN_READ_AND_WRITE = "a batch reads the source in one transaction and writes the base in another"
    # Variants about several operations that share one scan.
    CARRY_WITHOUT_COMPARE = "a batch copies for another operation without a lock on its range or a compare-and-set"
    CARRY_INTO_OLD_SNAPSHOT = "a batch reads first, and then takes the operations that it copies for"
    CARRY_ABORTED = "a batch copies for an operation that is being aborted"
    CARRY_OR_FAIL = "a batch isn't done again without an operation whose tables are gone"
    # Variants about a unique generation.
    STALE_COPY_REPORTED = "a base copy that the delta touches counts as a duplicate"
    SEAL_LEAVES_TOUCHED = "the seal leaves what the delta touches in the segment"
    ANTIMATTER_HIDES_PAIR = "antimatter hides a key's other entries from the look, and not its own alone"
    NO_LAST_LOOK = "the switch trusts the look that was taken without the lock"
    ONLY_AGAINST_BASE = "the look compares the delta's rows with the base, and not with each other"
    RECORDED_FORGOTTEN = "a later look sees what is new, and not the groups that were recorded"
    LOOKED_AT_FLIGHT = "rows of transactions in flight count as looked at"
    REMOVAL_BY_KEY = "a removal deletes the entry of its key, whosever it is"
    BASE_BEFORE_DELTA = "a put looks at the base, and then at the delta"
    OTHERS_IN_DELTA_IGNORED = "a put doesn't look at the delta's other rows of its key"
    NO_QUESTION = "a put refuses whatever entry holds its key, and asks no source"
    ASK_WITHOUT_LOCK = "a put asks the source without FOR SHARE"
    ASK_KEY_SHARE = "a put asks the source FOR KEY SHARE"
    ASK_WITHOUT_LOCK_IN_OLD_SNAPSHOT = "a put asks without FOR SHARE in REPEATABLE READ alone"
    ASK_ONCE = "a put doesn't ask again after it took an entry over"
    ANTIMATTER_IS_STALE = "a put takes over, unasked, an entry that has antimatter in the delta"
    FOLD_WAITS_AT_BASE = "a fold step waits for an entry that a writer or another step has, of whatever primary key"
    FOLD_KEEPS_HOLDER = "the fold leaves another's entry of the same key as it is"


@dataclass(frozen=True)
class Bounds:
    """How much is explored.

    users: the isolation level ("RC" or "RR") and number of statements of each user transaction. rows: the source at the
    beginning, by primary key: the first letter is the key, the rest what is included. claims, takeovers: how often a
    range is claimed, and a run taken over. workers, folds: how many of them are open at one time. operations, aborts:
    how many of each. built: an index exists and is active, so that the first operation is a rebuild. key: the primary
    key is checked at once ("plain"), or it is DEFERRABLE and checked at the statement's end ("immediate") or at the
    commit ("deferred"). upserts: statements may insert or update. moves: they may give a row another's primary key, one
    that is gone or, with a DEFERRABLE key, not yet. swaps: they may swap two rows' keys. nested: they may insert a row
    that a trigger deletes at once. twins: how many rows with one DEFERRABLE primary key a transaction may insert. fine:
    every SQL statement, also each of the capture function, takes its snapshot in one step and acts in another;
    otherwise a user's statement runs until it ends or waits. unique: the generations are. maps: one statement changes
    the keys of several rows, by MAPS. switched: the operation has just switched to direct mode. held: primary keys
    whose entries are in its delta and not in its base. stale: entries of its base whose antimatter is in its delta.
    together: how many operations, each of an index of its own, may build at the same time, with one cut.
    """

    users: tuple[tuple[str, int], ...]
    rows: tuple[tuple[int, str], ...] = ((1, "a0"),)
    primary_keys: tuple[int, ...] = (1, 2)
    values: tuple[str, ...] = ("a0", "b0")
    claims: int = 1
    takeovers: int = 0
    workers: int = 1
    folds: int = 1
    operations: int = 1
    aborts: int = 0
    built: bool = False
    key: str = "plain"
    upserts: bool = False
    moves: bool = False
    swaps: bool = False
    nested: bool = False
    twins: int = 1
    truncates: int = 0
    fine: bool = False
    unique: bool = False
    maps: tuple[str, ...] = ()
    switched: bool = False
    held: tuple[int, ...] = ()
    stale: tuple[tuple[str, int], ...] = ()
    together: int = 1


class User(NamedTuple):
    """One transaction of a user. chosen: a statement whose snapshot is taken; ops: what its capture has still to do.

    checks: primary keys that are looked at when it commits.
    """

    begun: bool = False
    ended: bool = False
    left: int = 0
    snapshot: int = NO_SNAPSHOT  # the transaction's, under REPEATABLE READ
    writes: bool = False  # it holds ROW EXCLUSIVE on the source
    chosen: tuple[Any, ...] = ()
    ops: tuple[tuple[Any, ...], ...] = ()
    statement: int = NO_SNAPSHOT  # the snapshot of the statement that is at work
    checks: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()  # under a unique generation: of all rows that it has written, before and after


class Worker(NamedTuple):
    """A build worker with a claim. step: at rest, the batch's end chosen, rows copied.

    carried: the other generations that the batch is for.
    """

    generation: int
    epoch: int
    token: int
    watermark: int
    step: str = "rest"
    last: int = 0
    done: bool = False
    rows: tuple[tuple[Any, str], ...] = ()  # only where they are not in the base yet (a variant)
    carried: tuple[int, ...] = ()


class Fold(NamedTuple):
    """A fold step in flight. rows: the delta rows that it took."""

    generation: int
    rows: tuple[tuple[Any, str], ...]
    applied: bool = False


class Generation(NamedTuple):
    """status: building, active, retired, aborting, dropped. mode: capture, direct, active.

    Only if it is unique: looked, the delta's rows that the last look saw, unless written since; recorded, the keys of
    the groups that were found last.
    """

    status: str
    mode: str
    mode_at: int  # the commit that rendered the mode
    watermark: int = 0
    done: bool = False
    token: int = 0
    sealed: bool = False
    base: Table = ()
    delta: Table = ()
    looked: tuple[Any, ...] | None = None
    recorded: tuple[str, ...] = ()


DROPPED = Generation("dropped", "none", 0)


class Left(NamedTuple):
    """The part of the bounds that is left."""

    claims: int
    takeovers: int
    operations: int
    aborts: int
    truncates: int


class State(NamedTuple):
    """All of it. wrong: a statement of a user's failed in a way that no user's may."""

    now: int
    source: Table
    generations: tuple[Generation, ...]
    users: tuple[User, ...]
    workers: tuple[Worker | None, ...]
    folds: tuple[Fold | None, ...]
    epoch: int
    left: Left
    wrong: str = ""


def initial(bounds: Bounds) -> State:
    """The world before the first operation, or, where an index is built, before the rebuild."""
    generations: tuple[Generation, ...] = ()
    if bounds.built or bounds.switched:
        entries = [((v[0], pk), v[1:]) for pk, v in bounds.rows]
        based = [entry for entry in entries if entry[0][1] not in bounds.held] + [
            (ident, "0") for ident in bounds.stale
        ]
        base = _table((ident[0], f"{ident[1]}{v}") if bounds.unique else (ident, v) for ident, v in based)
        delta = _table(
            [(ident, "regular" + v) for ident, v in entries if ident[1] in bounds.held]
            + [(ident, "antimatter") for ident in bounds.stale]
        )
        status, mode = ("active", "active") if bounds.built else ("building", "direct")
        generations = (Generation(status, mode, 0, done=True, sealed=True, base=base, delta=delta),)
    return State(
        now=0,
        source=_table(bounds.rows),
        generations=generations,
        users=tuple(User(left=statements) for _, statements in bounds.users),
        workers=(None,) * bounds.workers,
        folds=(None,) * bounds.folds,
        epoch=0,
        left=Left(bounds.claims, bounds.takeovers, bounds.operations, bounds.aborts, bounds.truncates),
    )


def _table(rows: Iterable[tuple[Any, Any]]) -> Table:
    return tuple(sorted((ident, value, 0, NEVER, DELETED) for ident, value in rows))


def canonical(state: State) -> State:
    """Renumbers the commits, so that only what some open snapshot can tell apart differs; forgets dead versions."""
    held = set()
    for user in state.users:
        held.add(user.snapshot)
        held.add(user.statement)
    held.discard(NO_SNAPSHOT)
    order = tuple(sorted(held))

    def rank(number: int) -> int:
        return bisect_left(order, number)

    users = state.users
    if order and order != tuple(range(len(order))):
        users = tuple(
            user._replace(
                snapshot=rank(user.snapshot) if user.snapshot >= 0 else NO_SNAPSHOT,
                statement=rank(user.statement) if user.statement >= 0 else NO_SNAPSHOT,
            )
            for user in users
        )
    return state._replace(
        now=rank(state.now),
        source=_canonical_table(state.source, order),
        generations=tuple(
            generation._replace(
                mode_at=rank(generation.mode_at),
                base=_canonical_table(generation.base, order),
                delta=_canonical_table(generation.delta, order),
            )
            for generation in state.generations
        ),
        users=users,
    )


@lru_cache(maxsize=200_000)
def _canonical_table(table: Table, order: tuple[int, ...]) -> Table:
    kept: list[Version] = list(table)
    for version in table:
        _, _, created, ended, _ = version
        # No snapshot was taken between its beginning and its end.
        if 0 <= ended < NEVER and created >= 0 and not (created < ended and _any_between(order, created, ended)):
            kept.remove(version)
            # A row that follows an update chain must learn here how it goes on.
            for place, before in enumerate(kept):
                if before[0] == version[0] and before[3] == created and before[4] == UPDATED:
                    kept[place] = (*before[:4], version[4])
                    if version[4] == UPDATED:
                        kept[place] = (*before[:3], ended, UPDATED)
    return tuple(
        sorted(
            (
                ident,
                value,
                bisect_left(order, created) if created >= 0 else created,
                bisect_left(order, ended) if 0 <= ended < NEVER else ended,
                how,
            )
            for ident, value, created, ended, how in kept
        )
    )


def _any_between(order: tuple[int, ...], created: int, ended: int) -> bool:
    return any(created <= snapshot < ended for snapshot in order)


__all__ = ["DROPPED", "LOCKED", "Bounds", "Fold", "Generation", "Left", "State", "User", "Variant", "Worker"]
