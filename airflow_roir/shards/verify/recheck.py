"""Looks at single entries on both sides, so that each difference is a real one (docs/architecture-shards.md).

No snapshot spans both sides. So an entry is only compared if the shard's outbox doesn't name it: then all changes of
the entry have been applied. And nothing else may have been applied during the look: at most one poll, which left the
entry as it was; or none at all, under the lock of the feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.verify import damage, differences
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import Feed
from airflow_roir.shards.ship import poll
from airflow_roir.shards.verify.sums import whole

# The texts of an identity, in the order of the index server's entries, with the shard's name.
Identity = tuple[str | None, ...]

# A look under the feed's lock stops its shipping, for this long at most.
LOCKED_MS = 5_000


class Verdict(str, Enum):
    """The result of a look at an entry. undecided: it is on its way. busy: too much was shipped during the look."""

    EQUAL = "equal"
    MISSING = "missing"
    EXTRA = "extra"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    BUSY = "busy"


@dataclass(frozen=True)
class Seen:
    """An entry on both sides. ours, theirs: all columns in the shard and on the index server; None: not there."""

    identity: Identity
    verdict: Verdict
    ours: list[str | None] | None
    theirs: list[str | None] | None


@dataclass(frozen=True)
class Sides:
    """The form of an entry on both sides. position: of the column with the shard's name, on the index server."""

    generation_id: int
    entry: Entry
    position: int
    feed: Feed
    # None: the table was dropped, with the view of it.
    theirs: Entry | None

    def here(self, identity: Identity) -> list[str | None]:
        """An identity in the shard's form, without the shard's name."""
        return [value for i, value in enumerate(identity) if i != self.position]

    def there(self, values: Sequence[str | None]) -> list[str | None]:
        """The columns of a shard's entry, or an identity, in the index server's form, with the shard's name."""
        return [*values[: self.position], self.feed.shard.name, *values[self.position :]]


ON_INDEX = """
SELECT s.n, l.step, l.emptied, e.present IS TRUE AS present, e.texts, e.whole
  FROM roir.feed l CROSS JOIN ({identities}) s LEFT JOIN LATERAL ({found}) e ON true WHERE l.id = %(feed)s
"""
IN_SHARD = """
SELECT s.n, o.emptied, o.leaves = roir_shard.leaves(o.source) AS leaves, w.present IS TRUE AS touched,
       e.present IS TRUE AS present, e.texts, e.whole
  FROM roir_shard.outbox o CROSS JOIN ({identities}) s
  LEFT JOIN LATERAL ({found}) e ON true LEFT JOIN LATERAL ({touched}) w ON true
 WHERE o.name = %(outbox)s
"""


def look(index: Connection, shard: Connection | None, sides: Sides, wanted: Sequence[Identity]) -> list[Seen]:
    """Looks at entries; no transaction is open in either session before and after. shard: None if its table is gone."""
    if sides.theirs is None or shard is None:
        # A table that was dropped has no rows.
        with index.begin():
            there = on_index(index, sides, wanted)
        return [_of_none(one, row) for one, row in zip(wanted, there, strict=True)]
    with index.begin():
        before = on_index(index, sides, wanted)
    ours = _in_shard(shard, sides, wanted)
    if all(_is_equal(mine, yours) for mine, yours in zip(ours, before, strict=True)):
        return [_seen(one, mine, then, settled=True) for one, mine, then in zip(wanted, ours, before, strict=True)]
    with index.begin():
        after = on_index(index, sides, wanted)
    quiet = bool(after) and after[0].step - before[0].step <= 1
    return [
        _seen(one, mine, now, settled=quiet and now.whole == then.whole)
        for one, mine, then, now in zip(wanted, ours, before, after, strict=True)
    ]


def look_locked(index: Connection, shard: Connection, sides: Sides, wanted: Sequence[Identity]) -> list[Seen]:
    """As `look`, under a lock that stops shipping: for a few entries of a feed that is never quiet."""
    with index.begin():
        execute(index, f"SET LOCAL lock_timeout = {limits_of(index).table_lock_ms}")
        execute(index, "SELECT FROM roir.feed WHERE id = %(feed)s FOR UPDATE", {"feed": sides.feed.id})
        there = on_index(index, sides, wanted)
        ours = _in_shard(shard, sides, wanted, LOCKED_MS)
    return [_seen(one, mine, now, settled=True) for one, mine, now in zip(wanted, ours, there, strict=True)]


def on_index(connection: Connection, sides: Sides, wanted: Sequence[Identity]) -> list[Row[Any]]:
    """The index server's entries of these identities."""
    base = physical.base(sides.generation_id)
    execute(connection, damage.BY_INDEX)
    values: dict[str, Any] = {"feed": sides.feed.id}
    query = ON_INDEX.format(
        identities=identities(sides.entry, wanted, values),
        found=_found(sides.entry, base, _without(sides.entry, sides.position)),
    )
    return _in_order(connection, query, values)


def _in_shard(
    connection: Connection, sides: Sides, wanted: Sequence[Identity], timeout_ms: int | None = None
) -> list[Row[Any]]:
    theirs = sides.theirs
    assert theirs is not None
    values: dict[str, Any] = {"outbox": sides.feed.outbox}
    query = IN_SHARD.format(
        identities=identities(theirs, [tuple(sides.here(one)) for one in wanted], values),
        found=_found(theirs, outbox.view(sides.feed.outbox), theirs.physical(prefix="b.")),
        touched=by_identity(theirs, outbox.table(sides.feed.outbox), "true AS present"),
    )
    with connection.begin():
        if timeout_ms is not None:
            execute(connection, f"SET LOCAL statement_timeout = {timeout_ms}")
        execute(connection, damage.BY_INDEX)
        poll.own(connection, sides.feed.outbox)
        return _in_order(connection, query, values)


def _in_order(connection: Connection, query: str, values: dict[str, Any]) -> list[Row[Any]]:
    return sorted(execute(connection, query, values).all(), key=lambda row: int(row.n))


def _is_equal(mine: Row[Any], yours: Row[Any]) -> bool:
    return bool(mine.whole == yours.whole)


def _seen(identity: Identity, mine: Row[Any], yours: Row[Any], settled: bool) -> Seen:
    if _is_equal(mine, yours):
        verdict = Verdict.EQUAL
    elif mine.touched or not mine.leaves or yours.emptied < mine.emptied:
        verdict = Verdict.UNDECIDED
    elif not settled:
        verdict = Verdict.BUSY
    elif not yours.present:
        verdict = Verdict.MISSING
    else:
        verdict = Verdict.DIFFERENT if mine.present else Verdict.EXTRA
    return Seen(identity, verdict, mine.texts, yours.texts)


def _of_none(identity: Identity, yours: Row[Any]) -> Seen:
    return Seen(identity, Verdict.EXTRA if yours.present else Verdict.EQUAL, None, yours.texts)


def identities(entry: Entry, wanted: Sequence[Identity], values: dict[str, Any]) -> str:
    """A SELECT of identities as `n` and their columns; puts the values to bind into `values`."""
    columns = []
    for i in entry.identity_positions:
        column = entry.columns[i]
        values[f"i{i}"] = [one[i] for one in wanted]
        # The cast from text to regclass takes names only.
        part = f"q.t{i}::oid" if column.oid_alias else f"q.t{i}"
        columns.append(
            f"({part}::{column.cast})" + (f" COLLATE {column.collation}" if column.collation else "") + f" AS c{i + 1}"
        )
    bound = ", ".join(f"%(i{i})s::text[]" for i in entry.identity_positions)
    named = ", ".join(f"t{i}" for i in entry.identity_positions)
    # OFFSET: it is evaluated once, not in each lookup.
    return f"SELECT q.n, {', '.join(columns)} FROM unnest({bound}) WITH ORDINALITY q ({named}, n) OFFSET 0"


def _without(entry: Entry, position: int) -> list[str]:
    return [name for i, name in enumerate(entry.physical(prefix="b.")) if i != position]


def _found(entry: Entry, table: str, digested: Sequence[str]) -> str:
    """A SELECT of the entry of the outer row `s`: its texts, and a digest of the whole without the shard's name."""
    chosen = [
        column for column, name in zip(entry.columns, entry.physical(prefix="b."), strict=True) if name in digested
    ]
    # Renumbered, since `whole` names columns by their places.
    inner = ", ".join(f"{name} AS c{i + 1}" for i, name in enumerate(digested))
    of_whole = whole(replace(entry, columns=tuple(chosen)), "w.")
    texts = differences.texts(entry, "b.")
    select = f"true AS present, {texts} AS texts, (SELECT {of_whole} FROM (SELECT {inner}) w) AS whole"
    return by_identity(entry, table, select)


def by_identity(entry: Entry, table: str, select: str) -> str:
    """A SELECT, by index, of the rows of `b` with the identity of the outer row `s`."""
    nullable = entry.nullable_positions[: differences.MOST_NULLABLE]
    arms = []
    for pattern in product((False, True), repeat=len(nullable)):
        nulls = dict(zip(nullable, pattern, strict=True))
        of_this = [is_null(f"s.c{i + 1}") for i, null in nulls.items() if null]
        arms.append(f"SELECT {select} FROM {table} b WHERE {' AND '.join([entry.equal('b.', 's.', nulls), *of_this])}")
    return " UNION ALL ".join(arms) + " LIMIT 1"
