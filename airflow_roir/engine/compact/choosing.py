"""Chooses the segments of a published index that are worth a compaction: asks the database, then `choice.py`.

Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import parse_name
from airflow_roir.engine.compact import cost_model
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.choice import Choice, pick
from airflow_roir.engine.compact.cost_model import Known, Terms
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.engine.compact.segments import segments
from airflow_roir.engine.compact.unit import FEW_KEYS
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.relation_size import relation_sizes
from airflow_roir.errors import NotFound

SERVER = "SELECT clock_timestamp() AS now, current_setting('block_size')::int AS page"
# Completed builds of this index, not limited and little throttled. With fewer rows most of the time is constant.
EARLIER = """
SELECT o.rows_estimate AS rows, s.worked * o.parallelism AS seconds
  FROM roir.operation o
 CROSS JOIN LATERAL (SELECT coalesce((o.phase_seconds ->> 'build')::float8, 0)
                          + coalesce((o.phase_seconds ->> 'seal')::float8, 0) AS worked) s
 WHERE o.index_id = %(index)s AND o.kind IN ('create', 'rebuild') AND o.status = 'completed'
   AND roir.slowed_by(o) = '{}' AND o.rows_estimate >= %(telling)s AND s.worked > 0
   AND (SELECT coalesce(sum(l.seconds), 0) FROM roir.throttle_time l WHERE l.operation_id = o.id) <= 0.1 * s.worked
 ORDER BY o.id DESC LIMIT %(most)s
"""
# Segments in which a recent compaction found too few keys for a split. Ordinals are never used again.
UNSPLIT = """
SELECT DISTINCT u.segments[1] FROM roir.compaction_unit u JOIN roir.operation o ON o.id = u.operation_id
 WHERE u.generation_id = %(generation)s AND u.status = 'left' AND u.note = %(note)s
   AND o.started_at > clock_timestamp() - make_interval(days => %(days)s)
"""
# After this many days other keys may have come.
UNSPLIT_DAYS = 30
TELLING_ROWS = 50_000
MOST_EARLIER = 3


def choose(
    database: Database,
    index: str,
    budget: Budget | None = None,
    exact: bool = False,
    *,
    segment_bytes: int | None = None,
    horizon_days: float = cost_model.HORIZON_DAYS,
) -> Choice:
    """The segments of an index's active generation that are worth a compaction, within the budget; without one, all.

    exact: measure the segments by pgstattuple, which reads all entries; else they are estimated. segment_bytes: the
    size that segments should have; None: that of their siblings. horizon_days: for how long savings count. Waits for no
    lock. The segments may change before the choice is carried out. Raises NotFound, InvalidInput,
    SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        check_schema(connection)
        found = operations.find_index(connection, parse_name(index, "index"))
        generation_id = int(operations.active_generation(connection, found).id)
        seen = segments(connection, generation_id, exact)
        server = execute(connection, SERVER).one()
        terms = Terms(
            now=server.now,
            horizon_days=horizon_days,
            segment_bytes=segment_bytes,
            page=server.page,
            source_bytes=_source_bytes(connection, found),
            unsplit=_unsplit(connection, generation_id),
        )
        earlier = execute(connection, EARLIER, {"index": found.id, "telling": TELLING_ROWS, "most": MOST_EARLIER}).all()
    rate = _rate(earlier, seen, terms)
    return pick(seen, terms if rate is None else terms.at(rate), budget)


def _unsplit(connection: Connection, generation_id: int) -> frozenset[int]:
    values = {"generation": generation_id, "note": FEW_KEYS, "days": UNSPLIT_DAYS}
    return frozenset(execute(connection, UNSPLIT, values).scalars())


def _source_bytes(connection: Connection, index: Row[Any]) -> int | None:
    """The bytes that a rebuild reads; None if the source is in shards, or gone."""
    if index.shard_column is not None:
        return None
    try:
        source = catalog.read_source_by_oid(connection, index.source_oid)
    except NotFound:
        return None
    return sum(one.own for one in relation_sizes(connection, source.leaves).values())


def _rate(earlier: Sequence[Row[Any]], seen: Sequence[Segment], terms: Terms) -> float | None:
    """The bytes that one worker handles in a second, by earlier builds of this index; None without such builds.

    Builds read source rows instead of entries. If these rows are wider, the rate is too low: the safe side.
    """
    known = [one for one in (Known.of(segment, terms.now) for segment in seen) if one is not None]
    rows = sum(one.rows for one in known)
    if not rows or not earlier:
        return None
    of_a_row = (sum(one.heap_needed for one in known) + sum(cost_model.rebuild_bytes(known))) / rows
    return median(of_a_row * float(one.rows) / float(one.seconds) for one in earlier)
