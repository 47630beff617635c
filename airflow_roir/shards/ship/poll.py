"""A poll: some rows of an outbox and the truth about each, in one snapshot of a shard (docs/architecture-shards.md).

One message of the simple protocol, outside of any transaction block: the server itself ends the transaction before it
answers. So a shipper that is cut off, killed or stopped in between holds no lock there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.shards.announce import intents
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import SHARD_SCHEMA
from airflow_roir.shards.ship.feeds import Claim, Route

# Up to this many rows of the outbox are counted; above it the statistics are used.
COUNTED = 10_000
# For how long a poll waits behind a TRUNCATE or an ALTER of the table, in ms.
LOCK_MS = 5_000
# Each poll is planned, without useful statistics of the outbox. synchronous_commit: a crash must not undo a poll,
# which would put the feed in doubt for nothing.
SETTINGS = f"""
SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET synchronous_commit = on;
SET lock_timeout = {LOCK_MS}
"""
# Checks the owner under this lock, before the statement that reads is planned: planning can run the owner's code.
OWN = """
LOCK TABLE {view} IN ACCESS SHARE MODE;
SELECT {schema}.check_owners(%(name)s);
"""
# The row of the outbox first: another shipper's poll waits for it, and then finds the rows gone and this step. The
# table even before that (`OWN`), as a TRUNCATE does. A row that a writer touches now is left: it is shipped again
# anyway.
ACKNOWLEDGE = """
UPDATE {schema}.outbox SET step = greatest(step, %(step)s) WHERE name = %(name)s AND tick = %(mine)s;
DELETE FROM {table} t WHERE t.ctid = ANY (ARRAY(
    SELECT x.ctid FROM {table} x WHERE x.version = ANY (%(acked)s::bigint[]) FOR UPDATE SKIP LOCKED))
   AND EXISTS (SELECT FROM {schema}.outbox o WHERE o.name = %(name)s AND o.tick = %(mine)s);
"""
# The questions to the catalogs are in a CTE of their own; otherwise they would run for each row.
POLL = """
WITH header AS MATERIALIZED (
    SELECT o.*, o.tick >= %(known)s AND o.tick < %(tick)s AS fits, {schema}.capture_problem(o.name) AS problem,
           {schema}.announcing_problem(o.name) AS unannounced,
           {schema}.evidence(o.name) AS evidence,
           CASE WHEN o.is_unique THEN {schema}.unique_problem(o.name) END AS unguarded,
           {schema}.leaves(o.source) IS DISTINCT FROM o.leaves AND NOT {schema}.is_restored(o.name) AS moved
      FROM {schema}.outbox o WHERE o.name = %(name)s),
picked AS MATERIALIZED (
    SELECT t.version, {touched} FROM {table} t
     WHERE t.version > %(after)s AND (SELECT h.fits FROM header h)
     ORDER BY t.version LIMIT %(limit)s),
asked AS MATERIALIZED (
    SELECT * FROM picked
    UNION ALL
    SELECT NULL, {named_values} FROM ROWS FROM ({named_lists}) AS n ({named_names})
     WHERE %(names)s > 0 AND (SELECT h.fits FROM header h)),
looked AS MATERIALIZED (
    SELECT a.version, s.is_there, CASE WHEN s.is_there THEN ROW({there})::text ELSE ROW({gone})::text END AS entry,
           CASE WHEN %(texts)s THEN ARRAY[{identity}] END AS identity
      FROM asked a LEFT JOIN LATERAL (SELECT true AS is_there, v.* FROM {view} v WHERE {same} LIMIT 1) s ON true),
ticked AS (
    UPDATE {schema}.outbox o SET tick = %(tick)s
     WHERE o.name = %(name)s AND o.tick >= %(known)s AND o.tick < %(tick)s
       AND (EXISTS (SELECT FROM asked) OR o.emptied > %(emptied)s OR %(drawing)s)
    RETURNING o.step),
size AS MATERIALIZED (
    SELECT x.rows AS counted,
           CASE WHEN x.rows > {counted} THEN pg_stat_get_live_tuples('{table}'::regclass) END AS about,
           CASE WHEN x.rows > 0 THEN pg_relation_size('{table}'::regclass) ELSE 0 END AS bytes
      FROM (SELECT count(*) AS rows FROM (SELECT FROM {table} WHERE version > 0 LIMIT {counted} + 1) y) x)
SELECT h.tick AS tick_before, coalesce(t.step, h.step) AS step, h.emptied, t.step IS NOT NULL AS ticked,
       pg_current_snapshot()::text AS snapshot, CASE WHEN t.step IS NOT NULL THEN pg_current_xact_id()::text END AS xid,
       CASE WHEN md5(h.evidence::text) IS DISTINCT FROM %(evidence)s THEN h.evidence END AS evidence,
       md5(h.evidence::text) AS evidence_hash,
       h.problem, h.unannounced, h.unguarded, h.moved, c.counted, c.about, c.bytes,
       l.version, l.is_there, l.entry, l.identity
  FROM header h
 CROSS JOIN size c
  LEFT JOIN ticked t ON true
  LEFT JOIN looked l ON true
 ORDER BY l.version
"""


@dataclass(frozen=True)
class Poll:
    """The findings of a poll, in one snapshot.

    there, gone: entries with a row, and those without, as text in the index server's order of columns. versions: of the
    outbox rows among them. identities: their texts, in the shard's order, if asked for. last: the version after which
    the next poll continues; ended: there were no more rows. tick: this poll's, if it found something; before: the
    shard's tick before it; step: the index server's step that the shard knows. problem: why the capture may miss
    writes. unannounced: why writers may commit without an announcement. unguarded: why two of the shard's rows may
    share a key of a unique index. evidence: of the capture, if it isn't the one that the claim knows. moved: the
    partitions aren't those that are captured. pending, bytes: the rows in the outbox and their size, about. fits: no
    other shipper has polled since, and nothing that the index server knows of was lost.
    """

    tick: int
    ticked: bool
    before: int
    step: int
    emptied: int
    snapshot: str
    xid: str | None
    problem: str | None
    unannounced: str | None
    unguarded: str | None
    evidence: Mapping[str, Any] | None
    evidence_hash: str | None
    moved: bool
    pending: int
    bytes: int
    versions: tuple[int, ...]
    there: tuple[str, ...]
    gone: tuple[str, ...]
    identities: tuple[tuple[str | None, ...], ...]
    last: int
    ended: bool

    @property
    def rows(self) -> int:
        """The number of entries that were looked at."""
        return len(self.there) + len(self.gone)


@dataclass(frozen=True)
class Acknowledged:
    """The rows that were applied: their versions, which may go from the outbox, their poll's tick, and the step that
    applied them."""

    tick: int
    step: int
    versions: tuple[int, ...]


def begin(connection: Connection) -> None:
    """Makes the settings of a shipper's session in a shard, which is in autocommit."""
    execute(connection, SETTINGS)


def acknowledge(connection: Connection, route: Route, done: Acknowledged) -> None:
    """Deletes the rows that were applied and not touched since, and records the step. A no-op if another shipper has
    polled since: then that one has seen them.
    """
    values = {"name": route.feed.outbox, "mine": done.tick, "step": done.step, "acked": list(done.versions)}
    execute(connection, _acknowledging(route), values)


def read(
    connection: Connection,
    route: Route,
    here: Entry,
    claim: Claim,
    after: int,
    limit: int,
    named: Sequence[Sequence[str | None]] = (),
    texts: bool = False,
    done: Acknowledged | None = None,
) -> Poll | None:
    """Looks at up to `limit` rows of versions greater than `after`, and at the named entries.

    connection: in the shard, in autocommit. here: the entry as the outbox has it. named: identities as text, in the
    shard's order; texts: return the texts of all identities looked at. done: to be acknowledged with the same message.
    None if the outbox is gone.
    """
    name, tick = route.feed.outbox, claim.next_tick()
    values: dict[str, object] = {
        "name": name,
        "shard": route.feed.shard.name,
        "known": claim.known,
        "tick": tick,
        "emptied": claim.emptied,
        "evidence": claim.evidence,
        # An idle poll has no transaction id.
        "drawing": claim.start is not None and not claim.horizon,
        "after": after,
        "limit": limit,
        "names": len(named),
        "texts": texts,
    }
    for i in here.identity_positions:
        values[f"n{i}"] = [one[i] for one in named]
    text = _polling(route, here)
    if done is None:
        text = owning(name) + text
    else:
        text = _acknowledging(route) + text
        values |= {"mine": done.tick, "step": done.step, "acked": list(done.versions)}
    rows = execute(connection, text, values).all()
    if not rows:
        return None
    head = rows[0]
    looked = [row for row in rows if row.entry is not None] if head.ticked else []
    fits = claim.known <= head.tick_before < tick
    versions = tuple(row.version for row in looked if row.version is not None)
    return Poll(
        tick=tick,
        ticked=head.ticked,
        before=head.tick_before,
        step=head.step,
        emptied=head.emptied,
        snapshot=head.snapshot,
        xid=head.xid,
        problem=head.problem,
        unannounced=head.unannounced,
        unguarded=head.unguarded,
        evidence=head.evidence,
        evidence_hash=head.evidence_hash,
        moved=head.moved,
        pending=head.counted if head.about is None else max(head.counted, head.about),
        bytes=head.bytes,
        versions=versions,
        there=tuple(row.entry for row in looked if row.is_there),
        gone=tuple(row.entry for row in looked if not row.is_there),
        identities=tuple(tuple(row.identity) for row in looked) if texts else (),
        last=versions[-1] if versions else after,
        ended=fits and len(versions) < limit and len(looked) == sum(row.entry is not None for row in rows),
    )


def own(connection: Connection, name: str) -> None:
    """Locks an outbox's table against a change of its owner, for this transaction. An error if that changed before."""
    execute(connection, owning(name), {"name": name})


def owning(name: str) -> str:
    """SQL that does the same as `own`, to be sent before other statements; with `name` to bind."""
    return OWN.format(schema=SHARD_SCHEMA, view=outbox.view(name))


def _acknowledging(route: Route) -> str:
    return owning(route.feed.outbox) + ACKNOWLEDGE.format(schema=SHARD_SCHEMA, table=outbox.table(route.feed.outbox))


def _polling(route: Route, here: Entry) -> str:
    name, identity = route.feed.outbox, here.identity_positions
    columns = here.physical(identity)
    # The index server's column i is the shard's i-th, without the one that names the shard.
    there, gone = here.physical(prefix="s."), here.physical(identity, prefix="a.")
    gone += ["NULL"] * (len(there) - len(gone))
    for order in (there, gone):
        order.insert(route.column, "%(shard)s::text")
    return POLL.format(
        schema=SHARD_SCHEMA,
        table=outbox.table(name),
        view=outbox.view(name),
        counted=COUNTED,
        touched=", ".join(f"t.{column}" for column in columns),
        named_values=", ".join(_typed(here, i) for i in identity),
        named_lists=", ".join(f"unnest(%(n{i})s::text[])" for i in identity),
        named_names=", ".join(columns),
        same=here.equal("v.", "a."),
        there=", ".join(there),
        gone=", ".join(gone),
        identity=", ".join(intents.text(here.columns[i], f"a.c{i + 1}") for i in identity),
    )


def _typed(here: Entry, position: int) -> str:
    """SQL for a column of a named identity, with the type that the outbox has."""
    column = here.columns[position]
    return f"n.c{position + 1}::{column.type}" + (f" COLLATE {column.collation}" if column.collation else "")
