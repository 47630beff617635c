"""Finds and records rows that share a key of a unique index under construction, and notes which are healed.

A duplicate is a group of *live* entries of one key in one snapshot: those of the base that the delta doesn't touch, and
the delta's regular ones. Nothing else is evidence (docs/architecture.md#uniqueness).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import read_control
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import entry as entries
from airflow_roir.engine.generation import physical, visibility
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.unique import shared_keys, whereabouts
from airflow_roir.errors import DuplicatesFound, LockNotAcquired, SourceChanged
from airflow_roir.quantity import shared

# For how many rows one call of `locate` finds the partitions.
LOCATED = 10_000
WITH_MEMBERS = "WITH member AS MATERIALIZED ({members})"
WRITTEN = """
INSERT INTO roir.duplicate AS d (operation_id, shared_key, key, primary_key, phase)
SELECT %(operation)s, m.shared_key, m.key, m.primary_key, o.phase FROM member m, roir.operation o
 WHERE o.id = %(operation)s
    ON CONFLICT (operation_id, key, primary_key) WHERE healed_at IS NULL
    DO UPDATE SET shared_key = excluded.shared_key WHERE d.shared_key <> excluded.shared_key
"""
# A recorded row that isn't among these members is healed. Members come in groups of two or more.
HEALED = """
UPDATE roir.duplicate d SET healed_at = clock_timestamp()
 WHERE d.operation_id = %(operation)s AND d.healed_at IS NULL
   AND NOT EXISTS (SELECT FROM member m WHERE m.key = d.key AND m.primary_key = d.primary_key)
"""
WRITE = WITH_MEMBERS + WRITTEN
# A known group may have other members by now, or the same again: a row may have come after its segment was sealed.
RENEW = f"{WITH_MEMBERS}, written AS ({WRITTEN}) {HEALED}"
UNHEALED = """
SELECT count(DISTINCT key_hash) AS groups, count(*) AS rows FROM roir.duplicate
 WHERE operation_id = %(operation)s AND healed_at IS NULL
"""
# All transactions before this one have ended, and this statement sees their writes.
SEEN = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"
LOOKED = "UPDATE roir.generation SET looked_xid = %(xid)s WHERE id = %(generation)s"
# The mark of the last look, to compare a row's xmin with; NULL if there is none, or it is too old.
MARK = """
SELECT CASE WHEN g.looked_xid::xid8 <= pg_snapshot_xmax(pg_current_snapshot())
             AND pg_snapshot_xmax(pg_current_snapshot())::text::numeric - g.looked_xid::numeric < 1000000000
            THEN (g.looked_xid::numeric %% 4294967296)::text END
  FROM roir.generation g WHERE g.id = %(generation)s
"""
# The keys of the delta's rows {since} that mark, by patterns of NULLs: only a condition for one pattern uses an index.
PATTERNS = "SELECT DISTINCT {pattern_of} FROM {delta} d WHERE d.{regular} AND {since}"
CANDIDATES = "SELECT DISTINCT {key} FROM {delta} d WHERE d.{regular} AND {since} AND {pattern_of} = '{pattern}'"


def look_and_refuse(database: Database, job: Job) -> None:
    """`look` in a transaction of its own, then `refuse`."""
    if not job.entry.enforced:
        return
    gather_statistics(database)
    with database.transaction() as connection:
        read_control(connection, job.run)
        found = look(connection, job)
    if found:
        refuse(database, job)


def gather_statistics(database: Database) -> None:
    """Tell the planner how many duplicates are recorded: without this, a second look at 20,000 takes minutes."""
    with suppress(DBAPIError), database.transaction() as connection:
        execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).table_lock_ms}")
        execute(connection, "ANALYZE roir.duplicate")


def look(connection: Connection, job: Job) -> int:
    """Look at rows that were written since the last look, and again at the known groups.

    Returns how many groups there are. Under the drain lock, 0 says that no two live entries share a key.
    """
    if not job.entry.enforced:
        return 0
    values = {"operation": job.run.operation_id, "generation": job.generation_id}
    seen = execute(connection, SEEN).scalar_one()
    mark = execute(connection, MARK, values).scalar_one()
    shown = visibility.shown(connection, job.source, job.generation_id)
    delta = physical.delta(job.generation_id)
    since = "true" if mark is None else f"age(d.xmin) <= age('{int(mark)}'::xid)"
    _scan_once(connection, job)
    pattern_of, key = shared_keys.pattern_of(job.entry), shared_keys.key_of(job.entry, "d.")
    parts = {"delta": delta, "regular": shared_keys.REGULAR, "since": since, "pattern_of": pattern_of, "key": key}
    for pattern in execute(connection, PATTERNS.format(**parts)).scalars().all():
        if any(pattern[i] == "1" for i in job.entry.apart_positions):
            continue
        candidates = CANDIDATES.format(**parts, pattern=pattern)
        execute(connection, WRITE.format(members=shared_keys.members_of(job, candidates, pattern, shown)), values)
    _heal(connection, job, values, shown)
    # Hidden entries may be shown again without a write: the next look must see them, so the mark stays.
    if shown is None:
        execute(connection, LOOKED, {"xid": seen, **values})
    return groups(connection, job.run.operation_id)[0]


def record_segment(connection: Connection, job: Job, ordinal: int) -> None:
    """Write down the groups among a segment's entries.

    Marks no group as healed: its other row may be in the delta by now, older than the mark of the last look.
    """
    members = shared_keys.in_segment(job, ordinal, visibility.shown(connection, job.source, job.generation_id))
    execute(connection, WRITE.format(members=members), {"operation": job.run.operation_id})


def record_hashes(
    connection: Connection,
    job: Job,
    ordinal: int,
    key_hash: str,
    hashes: Sequence[int],
    blocks: Sequence[int],
    span: int,
) -> int:
    """Write down the groups among a segment's entries whose keys have one of these hashes.

    Returns how many rows are new. key_hash: SQL for the hash of an entry `x`. The segment has no index yet, so only
    some blocks are read: `span` blocks from each of `blocks` on.
    """
    members = shared_keys.by_hash(job, ordinal, key_hash, visibility.shown(connection, job.source, job.generation_id))
    values = {"operation": job.run.operation_id, "hashes": list(hashes), "most": LOCATED}
    values |= {"blocks": list(blocks), "span": span}
    # Read the delta's rows of a key by its index, though the planner lacks statistics of these tables.
    execute(connection, "SET LOCAL enable_mergejoin = off; SET LOCAL enable_hashjoin = off")
    execute(connection, "SET LOCAL enable_nestloop = on; SET LOCAL enable_tidscan = on")
    return execute(connection, WRITE.format(members=members), values).rowcount


def heal_known(connection: Connection, job: Job) -> int:
    """Note which known groups are healed, by a scan of segments that have no index yet. Returns how many aren't."""
    shown = visibility.shown(connection, job.source, job.generation_id)
    _scan_once(connection, job)
    _heal(connection, job, {"operation": job.run.operation_id}, shown)
    return groups(connection, job.run.operation_id)[0]


def refuse(database: Database, job: Job) -> None:
    """Raise DuplicatesFound with the number of keys and rows, unless all are healed. Locates the rows first."""
    # If the table is locked, or was renamed just now, the keys alone are reported.
    with suppress(DBAPIError, LockNotAcquired, SourceChanged), database.transaction() as connection:
        locate(connection, job.source, job.run.operation_id)
    with database.transaction() as connection:
        keys, rows = groups(connection, job.run.operation_id)
    if keys:
        index = argument(job.run.index)
        raise DuplicatesFound(
            f"index {job.run.index}: {shared(keys, rows)} of the unique index. roir duplicates {index} "
            f"lists them; change or delete rows until no two share a key, then: roir resume {index}"
        )


def locate(connection: Connection, source: Source, operation_id: int) -> None:
    """Find the partitions of recorded rows, for the first 10,000 rows without one."""
    rows = execute(
        connection,
        "SELECT id, primary_key FROM roir.duplicate WHERE operation_id = %(operation)s AND healed_at IS NULL "
        "AND partition IS NULL ORDER BY id LIMIT %(most)s",
        {"operation": operation_id, "most": LOCATED},
    ).all()
    if not rows:
        return
    parts = whereabouts.partitions_of(connection, source, [tuple(row.primary_key) for row in rows])
    found = [(row.id, parts[tuple(row.primary_key)]) for row in rows if tuple(row.primary_key) in parts]
    execute(
        connection,
        "UPDATE roir.duplicate d SET partition = v.part "
        "FROM unnest(%(ids)s::bigint[], %(parts)s::text[]) v (id, part) WHERE d.id = v.id",
        {"ids": [id_ for id_, _ in found], "parts": [part for _, part in found]},
    )


def _scan_once(connection: Connection, job: Job) -> None:
    """Makes statements of this transaction scan a segment without an index once, not once for each key.

    The planner has no statistics of the delta, and expects a single key.
    """
    execute(
        connection,
        "SELECT set_config('enable_nestloop', 'off', true) WHERE EXISTS "
        "(SELECT FROM roir.segment WHERE generation_id = %(generation)s AND status = 'loading')",
        {"generation": job.generation_id},
    )


def _heal(connection: Connection, job: Job, values: dict[str, Any], shown: str | None) -> None:
    """Updates the known groups: the rows that share a key now, and those that no longer do."""
    known = (
        execute(
            connection,
            "SELECT DISTINCT key FROM roir.duplicate WHERE operation_id = %(operation)s AND healed_at IS NULL",
            values,
        )
        .scalars()
        .all()
    )
    if not known:
        return
    entry = job.entry
    candidates, bound = _known(connection, job, known)
    found = [
        shared_keys.members_of(
            job, f"SELECT * FROM ({candidates}) d WHERE {shared_keys.pattern_of(entry)} = '{pattern}'", pattern, shown
        )
        for pattern in sorted({"".join("1" if value is None else "0" for value in key) for key in known})
    ]
    members = " UNION ALL ".join(f"({one})" for one in found)
    execute(connection, RENEW.format(members=members), {**values, **bound})


def _known(connection: Connection, job: Job, keys: Sequence[list[str | None]]) -> tuple[str, dict[str, Any]]:
    """A SELECT of the distinct recorded keys. It runs as the owner: to read them from text runs a domain's checks."""
    entry = job.entry
    types = list(execute(connection, entries.COLUMN_TYPES, {"base": physical.base(job.generation_id)}).scalars())
    read = entries.recorded_identity(entry, "d", types)
    item, bound = owner.relation(
        connection,
        job.source,
        f"SELECT {', '.join(f'{read[i]} AS c{i + 1}' for i in entry.key_positions)} "
        "FROM jsonb_to_recordset(%(known)s::jsonb) AS d (key jsonb, primary_key jsonb)",
        ", ".join(f"c{i + 1} {types[i]}" for i in entry.key_positions),
        {"known": json.dumps([{"key": key} for key in keys])},
    )
    collated = ((f"c{i + 1}", entry.columns[i].collation) for i in entry.key_positions)
    columns = ", ".join(f"r.{name} COLLATE {by} AS {name}" if by else f"r.{name}" for name, by in collated)
    return f"SELECT DISTINCT {columns} FROM {item}", bound


def groups(connection: Connection, operation_id: int) -> tuple[int, int]:
    """The number of keys that rows share and that aren't healed, and the number of these rows."""
    row = execute(connection, UNHEALED, {"operation": operation_id}).one()
    return int(row.groups), int(row.rows)
