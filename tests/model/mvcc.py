"""PostgreSQL's row versions, snapshots and row locks, as little of them as the algorithm rests on.

A version is a tuple `(ident, value, created, ended, how)`. `created` and `ended` are the number of a commit, or the
mark of the transaction that isn't over (negative), or NEVER. `how` says what ended it: a DELETE, an UPDATE (a newer
version follows), or nothing but a row lock. A table is a sorted tuple of versions. A snapshot is the number of the
last commit that it sees.
"""

from __future__ import annotations

from typing import Any

NEVER = 1 << 20
DELETED, UPDATED, LOCKED = 0, 1, 2

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
    return how == LOCKED or ended == NEVER or (ended != me and not 0 <= ended <= snapshot)


def rows(table: Table, snapshot: int, me: int) -> dict[Any, Any]:
    """What a snapshot shows: values by ident."""
    return {version[0]: version[1] for version in table if visible(version, snapshot, me)}


def committed(table: Table) -> list[tuple[Any, Any]]:
    """What a new snapshot would show, duplicates too."""
    return [(v[0], v[1]) for v in table if v[2] >= 0 and (v[3] == NEVER or v[3] < 0)]


def delete(table: Table, ident: Any, snapshot: int, me: int, repeatable: bool) -> tuple[Table, int]:
    """DELETE … WHERE ident. Returns the table and the number of rows. Raises Wait, SerializationFailure."""
    table, found = _reach(table, ident, snapshot, me, repeatable)
    for version in found:
        table = _end(table, version, me)
    return table, len(found)


def change(
    table: Table, ident: Any, value: Any, snapshot: int, me: int, repeatable: bool
) -> tuple[Table, list[Version]]:
    """UPDATE … SET value WHERE ident. Returns the table and the versions that it replaced. Raises as `delete`."""
    table, found = _reach(table, ident, snapshot, me, repeatable)
    for version in found:
        table = _replace(table, version, value, me)
    return table, found


def put(table: Table, ident: Any, value: Any, snapshot: int, me: int, repeatable: bool) -> Table:
    """INSERT … ON CONFLICT DO UPDATE. Raises Wait, and SerializationFailure where the row it meets is invisible."""
    met = _conflict(table, ident, me)
    if met is None:
        return _sorted([*table, (ident, value, me, NEVER, DELETED)])
    if repeatable and not visible(met, snapshot, me):
        raise SerializationFailure
    return _replace(table, met, value, me)


def insert(table: Table, ident: Any, value: Any, me: int, unique: bool = True) -> Table:
    """INSERT. Raises Wait and UniqueViolation where there is a unique index."""
    if unique and _conflict(table, ident, me, past_locks=True) is not None:
        raise UniqueViolation
    return _sorted([*table, (ident, value, me, NEVER, DELETED)])


def lock_unlocked(table: Table, ident: Any, me: int) -> tuple[Table, Any]:
    """SELECT … FOR UPDATE SKIP LOCKED of one row by a fresh statement: the table and the row's value, or None."""
    for version in table:
        if version[0] == ident and version[2] >= 0 and version[3] == NEVER:
            return _swap(table, version, (*version[:3], me, LOCKED)), version[1]
    return table, None


def commit(table: Table, me: int, number: int) -> Table:
    """End transaction `me`: what it wrote gets the commit's number, what it locked is free."""
    if not any(v[2] == me or v[3] == me for v in table):
        return table
    return _sorted(
        [
            (v[0], v[1], number if v[2] == me else v[2], *_ending(v, me, number))
            for v in table
            if not (v[2] == me and v[3] == me and v[4] != LOCKED)
        ]
    )


def rollback(table: Table, me: int) -> Table:
    """End transaction `me` without a trace."""
    if not any(v[2] == me or v[3] == me for v in table):
        return table
    return _sorted([(*v[:3], NEVER, DELETED) if v[3] == me else v for v in table if v[2] != me])


def touched(table: Table, me: int) -> bool:
    """True where transaction `me` wrote or locked something, so that it holds a lock on the table."""
    return any(v[2] == me or v[3] == me for v in table)


def in_use(table: Table) -> bool:
    """True where any open transaction did."""
    return any(v[2] < 0 or v[3] < 0 for v in table)


def _reach(table: Table, ident: Any, snapshot: int, me: int, repeatable: bool) -> tuple[Table, list[Version]]:
    """The versions that an UPDATE or DELETE gets hold of: what its snapshot shows, or what became of that."""
    found = []
    for version in table:
        if version[0] != ident or not visible(version, snapshot, me):
            continue
        now: Version | None = version
        while now is not None and now[3] not in (NEVER, me):
            if now[3] < 0:
                raise Wait(now[3])
            if repeatable:
                raise SerializationFailure
            # READ COMMITTED follows an updated row to its newest version; a deleted one is gone, whatever came after.
            follower = [v for v in table if v[0] == ident and v[2] == now[3]] if now[4] == UPDATED else []
            now = follower[0] if follower else None
        if now is not None and (now[3] == NEVER or now[4] == LOCKED):
            found.append(now)
    return table, found


def _conflict(table: Table, ident: Any, me: int, past_locks: bool = False) -> Version | None:
    """What a unique index holds against an insert, whoever sees it. past_locks: a row that is only locked is there."""
    for version in table:
        ident_, _, created, ended, how = version
        if ident_ != ident or (ended == me and how != LOCKED) or (0 <= ended < NEVER):
            continue
        if created < 0 and created != me:
            raise Wait(created)
        if ended < 0 and ended != me and not (past_locks and how == LOCKED):
            raise Wait(ended)
        return version
    return None


def _end(table: Table, version: Version, me: int) -> Table:
    if version[2] != me:
        return _swap(table, version, (*version[:3], me, DELETED))
    # Its own version: nobody else ever saw it, so that what came before was deleted. It stays to the transaction's
    # end, since a unique index lets nobody else insert the same until then; one of them is enough for that.
    ident = version[0]
    trace = (ident, "", me, me, DELETED)
    kept = [(*v[:4], DELETED) if v[0] == ident and v[3] == me else v for v in table if v not in (version, trace)]
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
        return version[3], version[4]
    return (NEVER, DELETED) if version[4] == LOCKED else (number, version[4])


def _sorted(versions: list[Version]) -> Table:
    return tuple(sorted(versions))
