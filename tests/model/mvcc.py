"""PostgreSQL's row versions, snapshots and row locks, as little of them as the algorithm rests on.

A version is a tuple `(ident, value, created, ended, how)`. `created` and `ended` are the number of a commit, or the
mark of the transaction that isn't over (negative), or NEVER. `how` says what ended it: a DELETE, an UPDATE (a newer
version follows), or nothing but a row lock, FOR UPDATE by one transaction or FOR SHARE by several, whose marks `ended`
holds as bits. A table is a sorted tuple of versions. A snapshot is the number of the last commit that it sees. It may
show several versions of one ident: its own transaction's, and one whose end it doesn't see.
"""

from __future__ import annotations

from typing import Any

NEVER = 1 << 20
DELETED, UPDATED, LOCKED, SHARED = 0, 1, 2, 3
_SHARED_BY = -1000  # less the bits of the transactions that hold the lock

Version = tuple[Any, Any, int, int, int]
Table = tuple[Version, ...]


class Wait(Exception):
    """Another transaction holds the row: the statement waits for its end. args[0]: that transaction's mark."""


class SerializationFailure(Exception):
    """SQLSTATE 40001."""


class UniqueViolation(Exception):
    """SQLSTATE 23505."""


def visible(version: Version, snapshot: int, me: int) -> bool:
    """Does a statement of transaction `me` with this snapshot see the version?"""
    _, _, created, ended, how = version
    if created != me and not 0 <= created <= snapshot:
        return False
    return how >= LOCKED or ended == NEVER or (ended != me and not 0 <= ended <= snapshot)


def rows(table: Table, snapshot: int, me: int) -> dict[Any, Any]:
    """The rows that a snapshot shows: values by ident."""
    return {version[0]: version[1] for version in table if visible(version, snapshot, me)}


def committed(table: Table) -> list[tuple[Any, Any]]:
    """The rows that a new snapshot would show, duplicates too."""
    return [(v[0], v[1]) for v in table if v[2] >= 0 and (v[3] == NEVER or v[3] < 0)]


def versions(table: Table, ident: Any, snapshot: int, me: int, own: bool | None = None) -> list[Version]:
    """The versions of one ident that a snapshot shows. own: only what `me` has written, or only what others have."""
    return [
        version
        for version in table
        if version[0] == ident and (own is None or own == (version[2] == me)) and visible(version, snapshot, me)
    ]


def delete(
    table: Table, ident: Any, snapshot: int, me: int, repeatable: bool, own: bool | None = None, key: str = ""
) -> tuple[Table, list[Version]]:
    """DELETE … WHERE ident. Returns the table and the versions that it ended. Raises Wait, SerializationFailure.

    key: only rows whose value begins with it, before and after they were waited for.
    """
    table, found = _reach(table, ident, snapshot, me, repeatable, own, key=key)
    for version in found:
        table = _end(table, version, me)
    return table, found


def change(
    table: Table,
    ident: Any,
    value: Any,
    snapshot: int,
    me: int,
    repeatable: bool,
    own: bool | None = None,
    key: str = "",
) -> tuple[Table, list[Version]]:
    """UPDATE … SET value WHERE ident. Returns the table and the versions that it replaced. Raises as `delete`.

    value: or a function of the row's value. key: as for `delete`.
    """
    table, found = _reach(table, ident, snapshot, me, repeatable, own, key=key)
    for version in found:
        table = _replace(table, version, value(version[1]) if callable(value) else value, me)
    return table, found


def put(table: Table, ident: Any, value: Any, snapshot: int, me: int, repeatable: bool) -> Table:
    """INSERT … ON CONFLICT DO UPDATE. Raises Wait, and SerializationFailure where the row it meets is invisible."""
    return upsert(table, ident, value, snapshot, me, repeatable)[0]


def upsert(
    table: Table, ident: Any, value: Any, snapshot: int, me: int, repeatable: bool
) -> tuple[Table, Version | None]:
    """As `put`. Returns the version that it met, too."""
    met = _conflict(table, ident, me)
    if met is None:
        return _sorted([*table, (ident, value, me, NEVER, DELETED)]), None
    if repeatable and not visible(met, snapshot, me):
        raise SerializationFailure
    return _replace(table, met, value, me), met


def insert_or_nothing(
    table: Table, ident: Any, value: Any, snapshot: int, me: int, repeatable: bool
) -> tuple[Table, Version | None]:
    """INSERT … ON CONFLICT DO NOTHING. Returns the version that it met, too. Raises as `put`."""
    met = _conflict(table, ident, me, past_locks=True)
    if met is None:
        return _sorted([*table, (ident, value, me, NEVER, DELETED)]), None
    if repeatable and not visible(met, snapshot, me):
        raise SerializationFailure
    return table, met


def insert(table: Table, ident: Any, value: Any, me: int, unique: bool = True) -> Table:
    """INSERT. Raises Wait and UniqueViolation where there is a unique index."""
    if unique and _conflict(table, ident, me, past_locks=True) is not None:
        raise UniqueViolation
    return _sorted([*table, (ident, value, me, NEVER, DELETED)])


def may_conflict(table: Table, ident: Any, me: int) -> bool:
    """Whether an INSERT meets another row of its DEFERRABLE key, dead or alive: then it is checked later."""
    return any(v[0] == ident and not (v[3] == me and v[4] < LOCKED) and not 0 <= v[3] < NEVER for v in table)


def own_rows(table: Table, ident: Any, me: int) -> list[Version]:
    """The versions of an ident that transaction `me` has written and not ended."""
    return [v for v in table if v[0] == ident and v[2] == me and (v[3] != me or v[4] >= LOCKED)]


def check(table: Table, ident: Any, me: int) -> None:
    """The later check of a DEFERRABLE key, where this transaction's row is still there. As `insert` raises."""
    mine = own_rows(table, ident, me)
    if not mine:
        return
    others = tuple(v for v in table if v[0] == ident and v[2] != me)
    if len(mine) > 1 or _conflict(others, ident, me, past_locks=True) is not None:
        raise UniqueViolation


def share(
    table: Table, ident: Any, snapshot: int, me: int, repeatable: bool, key: str = "", own: bool | None = False
) -> tuple[Table, list[Version]]:
    """SELECT … FOR SHARE, of others' rows or of all. Returns the table and what is found. Raises as `delete`.

    key: as for `delete`.
    """
    table, found = _reach(table, ident, snapshot, me, repeatable, own=own, exclusive=False, key=key)
    for version in found:
        table = _lock(table, version, me, exclusive=False)
    return table, found


def key_share(table: Table, ident: Any, snapshot: int, me: int, repeatable: bool) -> list[Version]:
    """SELECT … FOR KEY SHARE of others' rows: as `share`, but an update that leaves the key is no matter."""
    found = []
    for version in versions(table, ident, snapshot, me, own=False):
        ended, how = version[3:]
        if how == DELETED and ended != NEVER:
            if ended < 0:
                raise Wait(ended)
            if repeatable:
                raise SerializationFailure
        else:
            found.append(version)
    return found


def lock_unlocked(table: Table, ident: Any, me: int) -> tuple[Table, Any]:
    """SELECT … FOR UPDATE SKIP LOCKED of one row by a fresh statement: the table and the row's value, or None."""
    for version in table:
        if version[0] == ident and version[2] >= 0 and version[3] == NEVER:
            return _swap(table, version, (*version[:3], me, LOCKED)), version[1]
    return table, None


def commit(table: Table, me: int, number: int) -> Table:
    """Ends transaction `me`: its versions get the commit's number, and its locks are released."""
    if not touched(table, me):
        return table
    return _sorted(
        [
            (v[0], v[1], number if v[2] == me else v[2], *_ending(v, me, number))
            for v in table
            if not (v[2] == me and v[3] == me and v[4] < LOCKED)
        ]
    )


def rollback(table: Table, me: int) -> Table:
    """Ends transaction `me` without a trace."""
    if not touched(table, me):
        return table
    return _sorted([(*v[:3], *(_unshared(v, me) or ((NEVER, DELETED) if v[3] == me else v[3:]))) for v in table
                    if v[2] != me])  # fmt: skip


def touched(table: Table, me: int) -> bool:
    """True if transaction `me` wrote or locked something, so that it holds a lock on the table."""
    return any(v[2] == me or v[3] == me or _unshared(v, me) is not None for v in table)


def in_use(table: Table) -> bool:
    """True if any open transaction wrote or locked something in the table."""
    return any(v[2] < 0 or v[3] < 0 for v in table)


def _reach(
    table: Table,
    ident: Any,
    snapshot: int,
    me: int,
    repeatable: bool,
    own: bool | None = None,
    exclusive: bool = True,
    key: str = "",
) -> tuple[Table, list[Version]]:
    """The versions that a statement gets hold of: what its snapshot shows, or what became of that.

    READ COMMITTED locks a row's newest version before it looks at the condition again: one that no longer fulfils it
    stays locked, which the table that is returned shows.
    """
    found = []
    for version in versions(table, ident, snapshot, me, own):
        now: Version | None = version if version[1].startswith(key) else None
        followed = False
        while now is not None and now[3] not in (NEVER, me):
            if now[4] == SHARED and not exclusive:
                break
            if now[3] < 0:
                holder = _holder(now, me)
                if holder is None:
                    break
                raise Wait(holder)
            if repeatable:
                raise SerializationFailure
            # READ COMMITTED follows an updated row to its newest version; a deleted one is gone, whatever came after.
            follower = [v for v in table if v[0] == ident and v[2] == now[3]] if now[4] == UPDATED else []
            now = follower[0] if follower else None
            followed = True
        if now is not None and (now[3] == NEVER or now[4] >= LOCKED):
            if now[1].startswith(key):
                found.append(now)
            elif followed:
                table = _lock(table, now, me, exclusive)
    return table, found


def _lock(table: Table, version: Version, me: int, exclusive: bool) -> Table:
    """Locks a version: exclusively if no other transaction has locked it, else FOR SHARE if the others have only
    that."""
    if version[2] == me or (version[3] == me and version[4] == LOCKED):
        return table  # it is its own already
    if exclusive:
        return _swap(table, version, (*version[:3], me, LOCKED))
    bits = _SHARED_BY - version[3] if version[4] == SHARED else 0
    return _swap(table, version, (*version[:3], _SHARED_BY - (bits | _bit(me)), SHARED))


def _bit(me: int) -> int:
    return 1 << (-1 - me)


def _holder(version: Version, me: int) -> int | None:
    """Another transaction that has ended or locked the version and isn't over."""
    _, _, _, ended, how = version
    if how == SHARED:
        others = (_SHARED_BY - ended) & ~_bit(me) if me > -100 else _SHARED_BY - ended
        return -others.bit_length() if others else None
    return ended if ended < 0 and ended != me else None


def _unshared(version: Version, me: int) -> tuple[int, int] | None:
    """The version's `ended` and `how` once `me` has given up its share of the lock. None: `me` has no share."""
    _, _, _, ended, how = version
    if how != SHARED or me <= -100 or not (_SHARED_BY - ended) & _bit(me):
        return None
    others = (_SHARED_BY - ended) & ~_bit(me)
    return (_SHARED_BY - others, SHARED) if others else (NEVER, DELETED)


def _conflict(table: Table, ident: Any, me: int, past_locks: bool = False) -> Version | None:
    """The version that a unique index holds against an insert, visible or not. past_locks: a row that is only locked is
    there."""
    for version in table:
        ident_, _, created, ended, how = version
        if ident_ != ident or (ended == me and how < LOCKED) or (0 <= ended < NEVER):
            continue
        if created < 0 and created != me:
            raise Wait(created)
        holder = _holder(version, me)
        if holder is not None and not (past_locks and how >= LOCKED):
            raise Wait(holder)
        return version
    return None


def _end(table: Table, version: Version, me: int) -> Table:
    if version[2] != me:
        return _swap(table, version, (*version[:3], me, DELETED))
    # Its own version: no other transaction ever saw it, so the row that it replaced counts as deleted. It stays until
    # the transaction ends, since until then a unique index lets no other transaction insert the same; one of them is
    # enough for that.
    ident = version[0]
    trace = (ident, "", me, me, DELETED)
    kept = [(*v[:4], DELETED) if v[0] == ident and v[3] == me and v[4] < LOCKED else v for v in table if v != trace]
    kept.remove(version)
    return _sorted([*kept, trace])


def _replace(table: Table, version: Version, value: Any, me: int) -> Table:
    new = (version[0], value, me, NEVER, DELETED)
    if version[2] == me:
        return _swap(table, version, new)
    return _sorted([*_swap(table, version, (*version[:3], me, UPDATED)), new])


def _swap(table: Table, old: Version, new: Version) -> Table:
    listed = list(table)
    listed[listed.index(old)] = new
    return _sorted(listed)


def _ending(version: Version, me: int, number: int) -> tuple[int, int]:
    if version[3] != me:
        return _unshared(version, me) or (version[3], version[4])
    return (NEVER, DELETED) if version[4] == LOCKED else (number, version[4])


def _sorted(versions: list[Version]) -> Table:
    return tuple(sorted(versions))
