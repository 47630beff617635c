"""Copies a unit's segments into the new ones, stretch by stretch of blocks; then each gets its index.

No write goes unseen: the list of touched identities has each entry that was written after the capture, and the list is
applied later. So a stretch may copy an outdated entry, miss one, or meet one twice: touched wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.compact.unit import UNITS, UnitClaim
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import Database, execute, has_vanished, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.locks.table_lock import is_number
from airflow_roir.engine.seal import SORT_MEMORY_KB

COPIED = """watermark = %(watermark)s::jsonb, rows = p.rows + %(rows)s, blocks_done = p.blocks_done + %(blocks)s,
       status = %(status)s"""
STOOD = "p.status = 'copying' AND p.watermark = %(stood)s::jsonb"
# The current name of a segment.
NAME = "SELECT %(oid)s::oid::regclass::text"
# Without their sizes: to read these needs a lock, and so waits for a session that locks a segment exclusively.
FILENODES = """
SELECT c.oid::bigint AS oid, pg_relation_filenode(c.oid)::bigint AS filenode
  FROM pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
"""
UNINDEXED = """
SELECT n FROM unnest(%(names)s::text[]) WITH ORDINALITY x (n, i)
 WHERE NOT EXISTS (SELECT FROM pg_index k WHERE k.indrelid = to_regclass(n)::oid AND k.indisunique AND k.indisvalid)
 ORDER BY i LIMIT 1
"""

# Sets where this transaction creates its tables and indexes, if we may create there; NULL is the database's own.
IN_TABLESPACE = """
SELECT set_config('default_tablespace', coalesce((
         SELECT t.spcname FROM pg_tablespace t
          WHERE t.spcname = %(name)s AND has_tablespace_privilege(t.oid, 'CREATE')), ''), true)
"""
INDEX_TABLESPACE = """
SELECT t.spcname FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid JOIN pg_tablespace t ON t.oid = c.reltablespace
 WHERE x.indrelid = %(oid)s AND x.indisunique ORDER BY x.indexrelid LIMIT 1
"""
# Each partition needs its own copy of an index that a DBA created on the base; an attach would build it under its lock.
OTHER_INDEXES = """
SELECT pg_get_indexdef(x.indexrelid) FROM pg_index x
 WHERE x.indrelid = to_regclass(%(base)s) AND x.indexrelid IS DISTINCT FROM to_regclass(%(key)s)::oid
 ORDER BY x.indexrelid
"""
REWRITTEN = "a segment was emptied or rewritten meanwhile"


class Rewritten(Exception):
    """Why a unit begins again: a segment has another file now, is gone, or couldn't be swapped."""

    def __init__(self, note: str = REWRITTEN) -> None:
        super().__init__(note)


def check_files(connection: Connection, claim: UnitClaim) -> None:
    """Raises Rewritten if a segment isn't in the captured file any more: after a TRUNCATE, VACUUM FULL or CLUSTER."""
    oids = [oid for oid, _, _ in claim.files]
    now = {row.oid: row.filenode for row in execute(connection, FILENODES, {"oids": oids})}
    if any(now.get(oid) != filenode for oid, filenode, _ in claim.files):
        raise Rewritten


def names_of(connection: Connection, claim: UnitClaim) -> list[str]:
    """The current names of the unit's segments, in the order of their oids. Raises Rewritten.

    Lock several of them in this order: a TRUNCATE of the source, which truncates their base, does the same.
    """
    check_files(connection, claim)
    return [_name(connection, oid) for oid in sorted(oid for oid, _, _ in claim.files)]


def _name(connection: Connection, oid: int) -> str:
    name: str = execute(connection, NAME, {"oid": oid}).scalar_one()
    if is_number(name):
        raise Rewritten
    return name


def hold(connection: Connection, names: Sequence[str], timeout_ms: int) -> None:
    """Keeps a unit's segments in their files until the transaction ends: a TRUNCATE waits for us, and we for it.

    If the transaction has one snapshot, call this first: after a TRUNCATE that commits between snapshot and lock, the
    snapshot sees no entries. Raises Rewritten.
    """
    execute(connection, f"SET LOCAL lock_timeout = {timeout_ms}")
    try:
        execute(connection, f"LOCK TABLE {', '.join(names)} IN ACCESS SHARE MODE")
    except DBAPIError as error:
        if not has_vanished(error):
            raise
        raise Rewritten from error


def copy(connection: Connection, job: Job, worker: int, claim: UnitClaim, blocks: int, timeout_ms: int) -> int:
    """Copies the next stretch, in the caller's transaction; returns how many rows it had.

    timeout_ms: for the segment's lock. Raises Rewritten, Fenced.
    """
    place, first = claim.watermark
    oid, _, end = claim.files[place]
    until = min(first + blocks, end)
    columns = ", ".join(job.entry.physical())
    check_files(connection, claim)
    name = _name(connection, oid)
    hold(connection, [name], timeout_ms)
    check_files(connection, claim)
    rows = execute(
        connection,
        f"INSERT INTO {claim.beside} ({columns}) SELECT {columns} FROM ONLY {name} "
        "WHERE ctid >= %(first)s::tid AND ctid < %(until)s::tid",
        {"first": f"({first},0)", "until": f"({until},0)"},
    ).rowcount
    after = (place, until) if until < end else (place + 1, 0)
    values = {
        "watermark": to_json(list(after)),
        "stood": to_json(list(claim.watermark)),
        "rows": rows,
        "blocks": until - first,
        "status": "indexing" if after[0] == len(claim.files) else "copying",
    }
    UNITS.commit(connection, job.run, worker, claim, COPIED, values, STOOD, "false")
    return rows


def index(connection: Connection, job: Job, worker: int, claim: UnitClaim) -> str | None:
    """Gives the next new segment its index, in the caller's transaction; returns its name, None if all have one.

    Raises Rewritten, Fenced.
    """
    names = [claim.part(place) for place in range(len(claim.cuts) + 1)]
    found: str | None = execute(connection, UNINDEXED, {"names": names}).scalar()
    if found is None:
        return None
    execute(
        connection,
        # Our own workers are the requested parallelism.
        "SELECT set_config('max_parallel_maintenance_workers', '0', true), "
        "set_config('maintenance_work_mem', greatest(setting::int, %(kb)s)::text || 'kB', true) "
        "FROM pg_settings WHERE name = 'maintenance_work_mem'",
        {"kb": SORT_MEMORY_KB},
    )
    tablespace = execute(connection, INDEX_TABLESPACE, {"oid": claim.files[0][0]}).scalar()
    execute(connection, IN_TABLESPACE, {"name": tablespace})
    physical.remove_touched(connection, found, claim.touched, job.entry)
    physical.index_segment(connection, found, job.entry, claim.segments[0] == physical.DEFAULT_SEGMENT)
    for definition in execute(connection, OTHER_INDEXES, _of_base(claim)).scalars():
        kind, _, rest = definition.partition(f" ON ONLY {physical.base(claim.generation_id)} USING ")
        unique = "UNIQUE " if kind.startswith("CREATE UNIQUE ") else ""
        execute(connection, f"CREATE {unique}INDEX ON {found} USING {rest}")
    UNITS.commit(connection, job.run, worker, claim, "status = 'indexing'", {}, "p.status = 'indexing'", "false")
    return found


def vacuum(database: Database, connection: Connection, job: Job, worker: int, claim: UnitClaim) -> None:
    """Makes index-only scans work at once, and gives the planner its statistics. No index reader sees the tables yet.

    Raises Fenced.
    """
    with connection.begin():
        # Report this session's inserts before ANALYZE counts all entries; reported later, they would count twice.
        execute(connection, "SELECT pg_stat_force_next_flush()")
    with database.autocommit() as outside:
        execute(outside, f"SET lock_timeout = {database.limits.table_lock_ms}")
        for place in range(len(claim.cuts) + 1):
            execute(outside, f"VACUUM (ANALYZE) {claim.part(place)}")
    with connection.begin():
        UNITS.commit(connection, job.run, worker, claim, "status = 'folding'", {}, "p.status = 'indexing'", "false")


def _of_base(claim: UnitClaim) -> dict[str, str]:
    return {"base": physical.base(claim.generation_id), "key": physical.base_key(claim.generation_id)}
