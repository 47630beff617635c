"""Follows partitions that come and go in a shard, and generated columns that get another expression: no trigger
captures such rows, so the shipper touches their entries.

Entries of a leaf that is gone are deleted by its bounds (`bounds.py`), whose columns are in the primary key. If only
the shard can evaluate the bounds, it touches these entries instead. Then the rows that are within these bounds now are
touched, and all rows of a leaf that came. Touches come after the deletion, so nothing is lost, wherever a shipper dies:
a change that isn't recorded as followed is followed again (docs/architecture-shards.md).
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import as_it_is, execute, sqlstate
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source import catalog
from airflow_roir.engine.verify import differences
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy.bounds import Unreadable, within
from airflow_roir.shards.shard import SHARD_SCHEMA
from airflow_roir.shards.ship import poll
from airflow_roir.shards.ship.apply import check
from airflow_roir.shards.ship.feeds import Claim, Route
from airflow_roir.shards.unique import holders
from airflow_roir.shards.verify.recheck import identities

SEEN = f"""
SELECT o.source::bigint AS source, o.leaves AS known, o.bounds, n.leaves AS now,
       {SHARD_SCHEMA}.bounds(o.source) AS bounds_now
  FROM {SHARD_SCHEMA}.outbox o CROSS JOIN LATERAL (SELECT {SHARD_SCHEMA}.leaves(o.source) AS leaves) n
 WHERE o.name = %(name)s
"""
# Only if no leaf came or went since the look; otherwise all is done once more. step: of the deletion; by it the shard
# notices if the index server loses the deletion.
FOLLOWED = f"""
UPDATE {SHARD_SCHEMA}.outbox o SET leaves = %(now)s::jsonb, bounds = %(bounds)s::jsonb, step = greatest(step, %(step)s)
 WHERE o.name = %(name)s AND {SHARD_SCHEMA}.leaves(o.source) = %(now)s::jsonb
"""
STEP = "UPDATE roir.feed SET step = step + 1 WHERE id = %(feed)s RETURNING step"
# The identities of a shard's entries, as texts; AT_ONCE are fetched at a time.
LISTED = "DECLARE roir_entries NO SCROLL CURSOR FOR SELECT {texts} FROM {base} b WHERE b.c{column} = %(shard)s"
AT_ONCE = 2_000
# The types of the shard's columns, domains too: a hash is that of the very type.
TYPES = f"""
SELECT a.attnum, format_type(a.atttypid, a.atttypmod) AS type FROM pg_attribute a
 WHERE a.attrelid = (SELECT source FROM {SHARD_SCHEMA}.outbox WHERE name = %(name)s) AND a.attnum > 0
"""
# The classes of errors for a bound that isn't a value of this server's type: data exceptions, missing functions.
NO_VALUE = ("22", "42")


def follow(index: Connection, there: Connection, route: Route, claim: Claim, here: Entry) -> int:
    """Follows leaves that came and went; returns the number of deleted entries. Polls do the rest.

    there: in the shard, in autocommit. Raises Fenced.
    """
    name = route.feed.outbox
    seen = execute(there, SEEN, {"name": name}).one()
    gone = [leaf for leaf, link in seen.known.items() if seen.now.get(leaf) != link]
    # A table without partitions is its own only part, and all its rows are within its bounds.
    came = [leaf for leaf, link in seen.now.items() if seen.known.get(leaf) != link and int(leaf) != seen.source]
    bounds = [seen.bounds[leaf] for leaf in gone if seen.bounds.get(leaf)]
    deleted, asked = 0, []
    with index.begin():
        check(index, route, claim)
        for one in bounds:
            count = _delete(index, route, here, one["levels"])
            deleted += count or 0
            if count is None:
                asked.append(f"({one['condition']})")
        step = execute(index, STEP, {"feed": route.feed.id}).scalar_one()
        if gone and route.unique:
            why = f"rows of shard {quote(route.feed.shard.name)} got other values without a write to be announced"
            holders.end(index, route.feed.generation_id, why, claim.owner)
        if any(leaf in seen.now for leaf in gone):
            # The rows of a new leaf exist, but their entries don't until they are shipped.
            execute(index, "UPDATE roir.feed SET fresh_at = NULL WHERE id = %(feed)s", {"feed": route.feed.id})
    if asked:
        _touch_within(index, there, route, here, " OR ".join(asked))
    source = catalog.name_of(there, seen.source).sql
    columns = ", ".join(f"s.{quote(column.source)}" for column in here.columns[: here.identity])
    statements = []
    for leaf in came:
        statements.append(_watch(there, name, int(leaf)))
        statements.append(
            outbox.touch(name, here, f"SELECT {columns} FROM ONLY {catalog.name_of(there, int(leaf)).sql} s")
        )
    for one in bounds:
        statements.append(outbox.touch(name, here, f"SELECT {columns} FROM {source} s WHERE {one['condition']}"))
    # No row was written, so there is none that a writer has announced.
    values: dict[str, Any] = {
        "name": name,
        "mark": f"{SHARD_SCHEMA}.{name}",
        "now": json.dumps(seen.now),
        "bounds": json.dumps(seen.bounds_now),
        "step": step,
    }
    execute(there, poll.owning(name) + ";\n".join([outbox.NOTHING, *map(as_it_is, statements), FOLLOWED]), values)
    return deleted


def _delete(index: Connection, route: Route, here: Entry, levels: object) -> int | None:
    """Deletes the entries within bounds; None if only the shard can find these."""
    base = physical.base(route.feed.generation_id)
    values: dict[str, Any] = {"shard": route.feed.shard.name}
    try:
        condition = within(route.entry, here, levels, "b", values)
        with index.begin_nested():
            statement = f"DELETE FROM {base} b WHERE b.c{route.column + 1} = %(shard)s AND {condition}"
            return execute(index, statement, values).rowcount
    except Unreadable:
        return None
    except DBAPIError as error:
        if sqlstate(error)[:2] not in NO_VALUE:
            raise
        return None


def _touch_within(index: Connection, there: Connection, route: Route, here: Entry, condition: str) -> None:
    """Touches the shard's entries that meet a condition of the shard, in its order: polls delete those without a row.

    An entry that is touched in vain only costs a look.
    """
    positions = [i for i in route.entry.identity_positions if i != route.column]
    texts = differences.texts(route.entry, "b.", positions)
    base = physical.base(route.feed.generation_id)
    columns = ", ".join(f"s.{name}" for name in here.physical(here.identity_positions))
    # The condition uses the names of the source's columns.
    types = {row.attnum: row.type for row in execute(there, TYPES, {"name": route.feed.outbox})}
    row = ", ".join(
        f"s.c{i + 1}::{types[one.attnum]}{f' COLLATE {one.collation}' if one.collation else ''} AS {quote(one.source)}"
        for i, one in enumerate(here.columns[: here.identity])
    )
    with index.begin():
        listed = LISTED.format(texts=texts, base=base, column=route.column + 1)
        execute(index, listed, {"shard": route.feed.shard.name})
        while found := execute(index, f"FETCH {AT_ONCE} FROM roir_entries").scalars().all():
            values: dict[str, Any] = {"name": route.feed.outbox, "mark": f"{SHARD_SCHEMA}.{route.feed.outbox}"}
            some = identities(here, found, values)
            rows = (
                f"SELECT DISTINCT ON ({columns}) {columns} FROM ({some}) s "
                f"WHERE EXISTS (SELECT FROM (SELECT {row}) q WHERE {as_it_is(condition)}) ORDER BY {columns}"
            )
            touched = outbox.touch(route.feed.outbox, here, rows)
            execute(there, poll.owning(route.feed.outbox) + f"{outbox.NOTHING};\n{touched}", values)


def _watch(there: Connection, name: str, leaf: int) -> str:
    """SQL that creates the trigger of TRUNCATE of a leaf, which the server doesn't clone. A leaf that was detached has
    kept it."""
    relation, trigger = catalog.name_of(there, leaf).sql, f"{outbox.trigger(name)}_t"
    return (
        f"DROP TRIGGER IF EXISTS {trigger} ON {relation};\nCREATE TRIGGER {trigger} BEFORE TRUNCATE ON {relation} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {outbox.emptied_function(name)}();\n"
        f"ALTER TABLE {relation} ENABLE ALWAYS TRIGGER {trigger}"
    )
