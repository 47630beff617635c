"""Applies a poll's findings to the generation, in one transaction of its server (docs/architecture-shards.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.errors import Fenced
from airflow_roir.shards.capture import evidence
from airflow_roir.shards.ship.feeds import POLLS, Claim, Route
from airflow_roir.shards.ship.poll import Acknowledged, Poll
from airflow_roir.shards.unique import holders

HELD = """
SELECT l.token, l.owner, l.tick, l.step, l.emptied, l.strict_from, l.doubtful_at, l.removed_at, g.status,
       CASE WHEN l.strict_from IS NOT NULL AND l.strict_start IS DISTINCT FROM pg_postmaster_start_time()
            THEN pg_postmaster_start_time() END AS unproved
  FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id WHERE l.id = %(feed)s FOR UPDATE OF l
"""
APPLIED = """
UPDATE roir.feed SET step = step + %(steps)s, tick = greatest(tick, %(tick)s), emptied = %(emptied)s,
       shipped = shipped + %(rows)s, heartbeat_at = clock_timestamp(), pending = %(pending)s, pending_bytes = %(bytes)s,
       fresh_at = coalesce(%(fresh)s, fresh_at),
       oldest_at = CASE WHEN %(pending)s > 0 THEN coalesce(%(fresh)s, fresh_at, captured_at) END,
       evidence = coalesce(%(evidence)s::jsonb, evidence)
 WHERE id = %(feed)s AND token = %(token)s
RETURNING step, clock_timestamp() AS now
"""
# tick: the shard's, which counts from now on, so that the feed can continue; step likewise. doubtful_at: the latest
# loss, since a verification that began before it says nothing about that loss.
DOUBT = """
UPDATE roir.feed SET doubtful_at = clock_timestamp(), doubt = %(doubt)s,
       tick = CASE WHEN %(lost)s THEN %(tick)s ELSE tick END, step = greatest(step, %(step)s),
       emptied = CASE WHEN %(lost)s THEN least(emptied, %(emptied)s) ELSE emptied END,
       evidence = coalesce(%(evidence)s::jsonb, evidence)
 WHERE id = %(feed)s AND token = %(token)s
RETURNING tick, step, emptied
"""
# Run by each poll that finds writes unannounced, until announcing begins again.
UNANNOUNCED = """
UPDATE roir.feed SET strict_from = NULL, strict_history = NULL WHERE id = %(feed)s AND strict_from IS NOT NULL
"""
# All transactions that had announced to an older copy of the server have ended since its start: their writes are in the
# shard. Once a pass that begins now has ended, they are here, too.
PROVED = """
UPDATE roir.feed SET strict_start = pg_postmaster_start_time(), strict_from = clock_timestamp(),
       fresh_at = CASE WHEN fresh_at <= clock_timestamp() THEN fresh_at END
 WHERE id = %(feed)s AND strict_from IS NOT NULL
"""
EVIDENCE = "SELECT evidence FROM roir.feed WHERE id = %(feed)s"
# By index, whatever the statistics say; for an emptied shard all is read anyway.
BY_INDEX = "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"

Settle = Callable[[Connection, Poll], object]


@dataclass(frozen=True)
class Applied:
    """The result of applying a poll. done: to be acknowledged in the shard. now: the index server's clock, before the
    next poll.

    doubt: the loss that was found, if it is new. again: something was lost, so nothing was applied: poll again.
    overtaken: the shard knows a token that this server has lost; claim the feed with a greater one.
    """

    done: Acknowledged | None
    now: datetime | None
    rows: int = 0
    doubt: str | None = None
    again: bool = False
    overtaken: int | None = None


def apply(
    connection: Connection,
    route: Route,
    claim: Claim,
    poll: Poll,
    fresh: datetime | None = None,
    settle: Settle | None = None,
) -> Applied:
    """Writes the entries that have a row and deletes those that have none, if the claim still holds the feed. In the
    caller's transaction.

    fresh: the beginning of the pass that this poll ends, by this server's clock. settle: removes the intents that the
    poll has answered. Raises Fenced: then nothing was changed.
    """
    held = check(connection, route, claim)
    if poll.before >= poll.tick:
        # No claim has a greater token here, so this server has lost one.
        return Applied(None, None, again=True, overtaken=poll.before // POLLS)
    lost = poll.before < held.tick
    kept = None
    if poll.evidence is not None:
        kept = execute(connection, EVIDENCE, {"feed": route.feed.id}).scalar()
    _hear(connection, route, claim, poll, held, kept)
    if (why := _why(route, poll, held, kept)) is not None:
        _doubt(connection, route, claim, poll, why, lost, new=held.doubtful_at is None)
        if lost:
            _follow_holders(connection, route, claim)
            return Applied(None, None, doubt=why, again=True)
    if poll.ticked and poll.tick <= held.tick:
        raise Fenced(f"{route.name}: a later poll was applied; {claim.owner} has changed nothing")
    if held.unproved is not None:
        _prove(connection, route, claim, poll, held.unproved)
    if poll.emptied > held.emptied:
        _empty(connection, route)
    if poll.rows:
        execute(connection, BY_INDEX)
        _delete(connection, route, poll.gone)
        _put(connection, route, poll.there)
    if settle is not None and poll.ticked:
        settle(connection, poll)
    _follow_holders(connection, route, claim, poll, poll.emptied > held.emptied)
    row = execute(
        connection,
        APPLIED,
        {
            "feed": route.feed.id,
            "token": claim.token,
            "steps": int(poll.ticked),
            "tick": poll.tick if poll.ticked else 0,
            "emptied": max(poll.emptied, held.emptied),
            "rows": len(poll.versions),
            # An applied row isn't pending, though it is in the outbox until the next poll.
            "pending": max(0, poll.pending - len(poll.versions)),
            "bytes": poll.bytes if poll.pending > len(poll.versions) else 0,
            "fresh": fresh,
            "evidence": _json(poll),
        },
    ).one()
    done = Acknowledged(poll.tick, row.step, poll.versions) if poll.ticked else None
    return Applied(done, row.now, poll.rows, why if held.doubtful_at is None else None)


def check(connection: Connection, route: Route, claim: Claim) -> Row[Any]:
    """Locks a feed's row. Raises Fenced unless the claim holds it, and the generation is there."""
    held = execute(connection, HELD, {"feed": route.feed.id}).one()
    if (held.token, held.owner) != (claim.token, claim.owner):
        raise Fenced(f"{route.name}: {held.owner or 'no shipper'} has it now; {claim.owner} has changed nothing")
    if held.removed_at is not None or held.status == "dropped":
        raise Fenced(f"{route.name}: generation {route.feed.generation_id} is dropped; nothing is shipped to it")
    return held


def distrust(connection: Connection, route: Route, claim: Claim, problem: str) -> None:
    """Records that a capture may miss writes, if no poll can find that out. Raises Fenced."""
    held = check(connection, route, claim)
    values: dict[str, Any] = {"feed": route.feed.id, "token": claim.token, "evidence": None}
    values |= {"lost": False, "tick": 0, "step": 0, "emptied": 0}
    why = _missing(route, problem)
    execute(connection, DOUBT, values | {"doubt": why})
    _follow_holders(connection, route, claim)
    if held.doubtful_at is None:
        operations.record_event(connection, route.index_id, None, claim.owner, "doubt", why)


def advance(claim: Claim, poll: Poll) -> None:
    """Updates the claim for the next poll, after the commit."""
    if poll.ticked:
        claim.known = poll.tick
        claim.emptied = max(claim.emptied, poll.emptied)
    if poll.evidence is not None:
        claim.evidence = poll.evidence_hash


def _hear(
    connection: Connection, route: Route, claim: Claim, poll: Poll, held: Row[Any], kept: dict[str, Any] | None
) -> None:
    """Ends strict reads until `roir announce` has run again, unless all writes were announced."""
    why = poll.unannounced
    if why is None and evidence.is_readable(poll.evidence):
        why = evidence.silence(kept, poll.evidence)
    if why is not None and held.strict_from is not None:
        execute(connection, UNANNOUNCED, {"feed": route.feed.id})
        said = f"shard {quote(route.feed.shard.name)}: {why}"
        operations.record_event(connection, route.index_id, None, claim.owner, "not announced", said)


def _why(route: Route, poll: Poll, held: Row[Any], kept: dict[str, Any] | None) -> str | None:
    shard = f"shard {quote(route.feed.shard.name)}"
    if poll.before < held.tick:
        return (
            f"{shard} has lost its last commits, by a failover to a replica, a crash or a restore: it knows less than "
            "was applied here"
        )
    if poll.step > held.step:
        return (
            f"this server has lost its last commits, by a failover to a replica or a restore: {shard} has cleared away "
            f"what step {poll.step} applied, and here step {held.step} was the last one"
        )
    problem = poll.problem
    if problem is None and poll.evidence is not None and not evidence.is_readable(poll.evidence):
        problem = "what it tells of its capture can't be read"
    elif problem is None and poll.evidence is not None:
        problem = evidence.change(kept, poll.evidence)
    return None if problem is None else _missing(route, problem)


def _prove(connection: Connection, route: Route, claim: Claim, poll: Poll, start: datetime) -> None:
    """Proves, after a start of this server, that all transactions that announced before it have ended in the shard, as
    strict reads need.

    They have ids below one that a poll has drawn since; a snapshot's end doesn't show which ids were assigned.
    """
    if claim.start != start:
        claim.start, claim.horizon = start, 0
    elif claim.horizon and int(poll.snapshot.split(":", 1)[0]) >= claim.horizon:
        execute(connection, PROVED, {"feed": route.feed.id})
    elif not claim.horizon and poll.xid is not None:
        claim.horizon = int(poll.xid)


def _missing(route: Route, problem: str) -> str:
    return f"shard {quote(route.feed.shard.name)}: {problem}, so that writes may be missing here"


def _doubt(connection: Connection, route: Route, claim: Claim, poll: Poll, why: str, lost: bool, new: bool) -> None:
    row = execute(
        connection,
        DOUBT,
        {
            "feed": route.feed.id,
            "token": claim.token,
            "doubt": why,
            "lost": lost,
            "tick": poll.before,
            "step": poll.step,
            "emptied": poll.emptied,
            "evidence": _json(poll),
        },
    ).one()
    if lost:
        claim.known, claim.step, claim.emptied = row.tick, row.step, row.emptied
    if new:
        operations.record_event(connection, route.index_id, None, claim.owner, "doubt", why)


def _json(poll: Poll) -> str | None:
    return json.dumps(poll.evidence) if evidence.is_readable(poll.evidence) else None


def _follow_holders(
    connection: Connection, route: Route, claim: Claim, poll: Poll | None = None, emptied: bool = False
) -> None:
    if not route.unique:
        return
    there, gone = ((), ()) if poll is None else (poll.there, poll.gone)
    name = route.feed.shard.name
    shard, problem = f"shard {quote(name)}", None
    if poll is not None and poll.unguarded is not None:
        problem = f"{shard}: {poll.unguarded}"
    elif emptied:
        problem = f"{shard} was truncated, which can't be announced"
    holders.follow(connection, route.feed.generation_id, claim.owner, name, there, gone, problem)


def _empty(connection: Connection, route: Route) -> None:
    """Deletes all entries of a shard, whose table was truncated."""
    column = f"b.c{route.column + 1}"
    gone = f"DELETE FROM {physical.base(route.feed.generation_id)} b WHERE {column} = %(shard)s"
    execute(connection, gone, {"shard": route.feed.shard.name})


def _given(route: Route) -> str:
    """SQL for the entries that a shard sends, with the shard's own name in each."""
    base = physical.base(route.feed.generation_id)
    columns = ", ".join(
        f"%(shard)s::text AS {name}" if i == route.column else f"(g.entry).{name}"
        for i, name in enumerate(route.entry.physical())
    )
    return (
        f"given AS MATERIALIZED (SELECT e::{base} AS entry FROM unnest(%(entries)s::text[]) e), "
        f"d AS MATERIALIZED (SELECT {columns} FROM given g)"
    )


def _put(connection: Connection, route: Route, entries: tuple[str, ...]) -> None:
    if not entries:
        return
    entry, base = route.entry, physical.base(route.feed.generation_id)
    columns, identity = ", ".join(entry.physical()), ", ".join(entry.physical(entry.identity_positions))
    for table, where, upsert in _targets(route):
        execute(
            connection,
            # In the order of the index, so that two feeds of one shard lock alike; a named entry may be there twice.
            f"WITH {_given(route)} INSERT INTO {table or base} ({columns}) "
            f"SELECT DISTINCT ON ({identity}) {columns} FROM d WHERE {where} ORDER BY {identity} {upsert}",
            {"entries": list(entries), "shard": route.feed.shard.name},
        )


def _targets(route: Route) -> list[tuple[str | None, str, str]]:
    """The targets of entries, with the condition and the conflict target of each: a unique index has a table of its own
    for keys with a NULL."""
    entry = route.entry
    if not entry.enforced:
        return [(None, "true", entry.on_conflict())]
    apart = " OR ".join(f"d.c{i + 1} IS NULL" for i in entry.apart_positions) or "false"
    rest = physical.segment(route.feed.generation_id, physical.DEFAULT_SEGMENT)
    return [(None, f"NOT ({apart})", entry.on_conflict(by_key=True)), (rest, apart, entry.on_conflict())]


def _delete(connection: Connection, route: Route, entries: tuple[str, ...]) -> None:
    """Deletes entries, by a statement for each pattern of NULLs: only such a condition uses the index."""
    if not entries:
        return
    entry, base = route.entry, physical.base(route.feed.generation_id)
    given = _given(route)
    pattern = entry.null_pattern(entry.identity_positions, "d.")
    values = {"entries": list(entries), "shard": route.feed.shard.name}
    patterns = ["0" * entry.identity]
    if entry.nullable_positions:
        patterns = list(execute(connection, f"WITH {given} SELECT DISTINCT {pattern} FROM d", values).scalars())
    for nulls in patterns:
        same = entry.equal("b.", "d.", {i: nulls[i] == "1" for i in entry.identity_positions})
        held = f" WHERE {pattern} = '{nulls}'" if entry.nullable_positions else ""
        execute(connection, f"WITH {given} DELETE FROM {base} b USING (SELECT * FROM d{held}) d WHERE {same}", values)


def has_columns_of(entry: Entry, here: Entry, column: int) -> bool:
    """True if an outbox has the same columns as the generation, without the one that names the shard."""
    ours = [one.source for i, one in enumerate(entry.columns) if i != column]
    return ours == [one.source for one in here.columns] and entry.identity == here.identity + 1
