"""Cuts a verification into units: pieces of the source by primary key, of the index by blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.database import execute, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import cut_source
from airflow_roir.engine.generation.physical import segments_of
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.files import File, cut, files_of, size_of
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.verify.snapshot import LONGEST_S
from airflow_roir.options import VerifyOptions

# Blocks of a unit of the index: mostly a whole segment, which is read by a plain scan.
BLOCKS_PER_SEGMENT_UNIT = 8_192
# The most units of one side, about: each of them stores a sum for each bucket.
MOST_UNITS = 256
# The units of one side if only a part is verified: small, so that the part can be chosen finely.
UNITS_OF_PARTS = 1_000
# A single wrong row makes this many be compared one by one. More rows in a bucket mean fewer sums to store.
ROWS_PER_BUCKET = 256
FEWEST_BUCKETS, MOST_BUCKETS = 64, 65_536
# A shorter verification tells of its start, not of its pace.
MEASURED_S = 10.0
# The server may be busier than when the pace was measured, so a part of the snapshot's time stays free.
SURE_SHARE = 0.8


def plan(
    connection: Connection,
    index_id: int,
    operation_id: int,
    generation_id: int,
    source: Source,
    options: VerifyOptions,
    mode: str,
    with_delta: bool,
) -> tuple[int, int]:
    """Writes a verification and its units down; returns its id and the source's estimated rows.

    with_delta: the generation isn't published yet. If a verification is one of several slices, it takes over the units
    that earlier slices left.
    """
    size = size_of(connection, source)
    rows = size.rows or 0
    if not options.is_partial and 0 < rows <= most_of_snapshot(connection, index_id) * options.parallelism:
        units = _heap_units(connection, source)
    else:
        rows, units = _source_units(connection, source, fine=options.in_parts)
    verification_id = write_down(connection, index_id, operation_id, generation_id, options, mode, rows)
    walking = 0
    if options.slices is not None:
        walking = walk_on(connection, verification_id, index_id, generation_id)
    if not walking:
        units += entry_units(connection, generation_id, options.in_parts, with_delta)
        if options.sample is not None:
            units = random.sample(units, max(1, math.ceil(len(units) * options.sample / 100)))
        if not options.is_partial:
            units += [_whole("reach", relation) for relation in segments_of(connection, generation_id)]
        if options.amcheck:
            units += [_whole("tree", relation) for relation in segments_of(connection, generation_id)]
        write_units(connection, verification_id, "check" if options.is_partial else "total", units)
        walking = len(units)
    if options.slices is not None:
        set_quota(connection, verification_id, walking, options.slices)
    return verification_id, rows


PACE = """
SELECT v.rows / m.seconds / o.parallelism AS pace
  FROM roir.verification v JOIN roir.operation o ON o.id = v.operation_id
 CROSS JOIN LATERAL (SELECT CASE WHEN o.kind = 'verify' THEN (o.phase_seconds ->> 'sum')::float8
                                 ELSE extract(epoch FROM v.finished_at - v.started_at)::float8 END AS seconds) m
 WHERE v.complete AND v.rows > 0 AND m.seconds >= %(least)s
 ORDER BY v.index_id = %(index)s DESC, v.id DESC LIMIT 1
"""


def most_of_snapshot(connection: Connection, index_id: int) -> float:
    """The most rows that a worker reads well within the time that a snapshot is shared.

    By the last whole verification of the index, else of another one; without one, by a constant. A table with more rows
    would be read by blocks in several snapshots, whose sums say nothing, and then once more by ranges.
    """
    measured = execute(connection, PACE, {"index": index_id, "least": MEASURED_S}).scalar()
    most = limits_of(connection).snapshot_rows
    return most if measured is None else min(most, measured * LONGEST_S * SURE_SHARE)


WRITE_DOWN = """
INSERT INTO roir.verification (index_id, operation_id, generation_id, mode, options, buckets)
VALUES (%(index)s, %(operation)s, %(generation)s, %(mode)s, %(options)s, %(buckets)s)
RETURNING id
"""
WRITE_UNITS = """
INSERT INTO roir.verification_unit (verification_id, stage, ordinal, side, relation, lower, upper, feed_id)
SELECT %(verification)s, %(stage)s, u.ordinal, u.side, u.relation, u.lower, u.upper, u.feed_id
  FROM jsonb_to_recordset(%(units)s)
       AS u (ordinal int, side text, relation bigint, lower jsonb, upper jsonb, feed_id bigint)
"""


def write_down(
    connection: Connection,
    index_id: int,
    operation_id: int,
    generation_id: int,
    options: VerifyOptions,
    mode: str,
    rows: int,
) -> int:
    """Writes a verification down, with as many buckets as this many rows need; returns its id."""
    buckets = 1 << max(rows // ROWS_PER_BUCKET, 1).bit_length()
    values = {
        "index": index_id,
        "operation": operation_id,
        "generation": generation_id,
        "mode": mode,
        "options": to_json(options.fixed()),
        "buckets": min(max(buckets, FEWEST_BUCKETS), MOST_BUCKETS),
    }
    return int(execute(connection, WRITE_DOWN, values).scalar_one())


def set_quota(connection: Connection, verification_id: int, walking: int, slices: int) -> None:
    """Sets how many units this slice compares. walking: the units of all slices together."""
    values = {"verification": verification_id, "quota": math.ceil(walking / slices)}
    execute(connection, "UPDATE roir.verification SET quota = %(quota)s WHERE id = %(verification)s", values)


class Units:
    """The units of a verification, at the end of a stage."""

    def __init__(self, connection: Connection, index_id: int, verification: Row[Any]) -> None:
        self.connection = connection
        self.index_id = index_id
        self.verification = verification

    def summed(self, differ: list[int]) -> list[int]:
        """The buckets that differ after stage `sum` and that were summed on both sides."""
        return differ

    def again(self, old: str, new: str, differ: Sequence[int]) -> None:
        """Writes the units of the next stage: those of the old one again. differ: the buckets that differ in that."""
        source = catalog.source_of_index(self.connection, self.index_id)
        next_units(self.connection, self.verification.id, source, old, new)

    def plan_last(self) -> bool:
        """Plans the unit that explains the discrepancies after stage `check`; True if one is needed."""
        source = catalog.source_of_index(self.connection, self.index_id)
        return plan_whole(self.connection, self.verification.id, source)


def next_units(connection: Connection, verification_id: int, source: Source, old: str, new: str) -> None:
    """Writes the units of the next stage: those of the old one, but cut by primary key instead of the heap's blocks."""
    values = {"id": verification_id, "old": old, "new": new}
    execute(connection, NEXT_UNITS, values)
    if execute(connection, HAS_HEAP, values).scalar_one():
        _, units = _source_units(connection, source)
        write_units(connection, verification_id, new, units, first=1_000_000)
    if new == "check":
        # Also by blocks: a row that the primary key's index doesn't lead to is in none of its ranges.
        write_units(connection, verification_id, new, _heap_units(connection, source), first=2_000_000)


WHOLE_IS_DUE = """
SELECT EXISTS (SELECT FROM roir.discrepancy WHERE verification_id = %(id)s AND kind IN ('missing', 'extra'))
       OR EXISTS (SELECT FROM roir.verification_unit WHERE verification_id = %(id)s AND stage = 'sum')
          AND (SELECT count(DISTINCT snapshot) FROM roir.verification_unit
                WHERE verification_id = %(id)s AND stage = 'total') = 1
"""


def plan_whole(connection: Connection, verification_id: int, source: Source) -> bool:
    """Plans a last unit, which uses no index, after stage `check`; True if one is needed.

    It explains missing and extra entries, and totals of one snapshot that differed. Totals from several snapshots
    differ after any write: they need no explanation, and to read a big table in one snapshot would hold back the vacuum
    of the whole database (I7).
    """
    due = bool(execute(connection, WHOLE_IS_DUE, {"id": verification_id}).scalar_one())
    if due:
        write_units(connection, verification_id, "whole", [_whole("both", source.oid)], first=3_000_000)
    return due


def _source_units(connection: Connection, source: Source, fine: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """The source's estimated rows, and its leaves cut by primary key."""

    def rows_per_unit(rows: int) -> int:
        per_unit = max(limits_of(connection).unit_rows, rows // MOST_UNITS)
        return max(1, min(per_unit, rows // UNITS_OF_PARTS)) if fine else per_unit

    # Locked, so that its owner stays the same.
    catalog.hold(connection, source)
    rows, pieces = cut_source(connection, source, rows_per_unit)
    units = [
        {"side": "source", "relation": piece.relation, "lower": piece.lower, "upper": piece.upper} for piece in pieces
    ]
    return rows, units


def _heap_units(connection: Connection, source: Source) -> list[dict[str, Any]]:
    """The leaves, cut by blocks. Their sums need one snapshot, in which no row moves."""
    blocks = limits_of(connection).unit_blocks
    return [{"side": "heap", **piece} for piece in _blocks(files_of(connection, source.leaves), blocks)]


# The units of the old stage, except B-tree checks and heap blocks.
NEXT_UNITS = """
INSERT INTO roir.verification_unit (verification_id, stage, ordinal, side, relation, lower, upper)
SELECT verification_id, %(new)s, ordinal, side, relation, lower, upper FROM roir.verification_unit
 WHERE verification_id = %(id)s AND stage = %(old)s AND side NOT IN ('tree', 'heap', 'reach')
"""
HAS_HEAP = """
SELECT EXISTS (SELECT FROM roir.verification_unit WHERE verification_id = %(id)s AND stage = %(old)s AND side = 'heap')
"""


def entry_units(
    connection: Connection, generation_id: int, fine: bool, with_delta: bool = False
) -> Iterator[dict[str, Any]]:
    """The segments, cut by blocks. An entry moves only if a write has just set it right."""
    segments = files_of(connection, segments_of(connection, generation_id))
    total = sum(segment.blocks for segment in segments)
    step = max(1, total // UNITS_OF_PARTS) if fine else max(BLOCKS_PER_SEGMENT_UNIT, total // MOST_UNITS)
    yield from ({"side": "entry", **piece} for piece in _blocks(segments, step))
    if with_delta:
        name = {"name": physical.delta(generation_id)}
        yield _whole("delta", execute(connection, "SELECT to_regclass(%(name)s)::oid::bigint", name).scalar_one())


def _whole(side: str, relation: int) -> dict[str, Any]:
    return {"side": side, "relation": relation, "lower": None, "upper": None}


def _blocks(files: Iterable[File], step: int) -> Iterator[dict[str, Any]]:
    """Pieces of `step` blocks. The last piece of each relation has no upper bound, as the relation may grow."""
    for file, first, end in cut(files, step):
        yield {"relation": file.relation, "lower": [first], "upper": [end] if end < file.blocks else None}


def write_units(
    connection: Connection, verification_id: int, stage: str, units: list[dict[str, Any]], first: int = 0
) -> None:
    """Writes units of one stage, for workers to claim. first: the first ordinal."""
    listed = [{"ordinal": n, **unit} for n, unit in enumerate(units, first)]
    execute(connection, WRITE_UNITS, {"verification": verification_id, "stage": stage, "units": to_json(listed)})


# Takes over the units that earlier slices of the same generation left.
LEFT_OVER = """
UPDATE roir.verification_unit u SET verification_id = %(to)s, claim_epoch = NULL, claim_worker = NULL
  FROM roir.verification v
 WHERE v.id = u.verification_id AND v.index_id = %(index)s AND v.generation_id = %(generation)s
   AND v.finished_at IS NOT NULL AND v.options ->> 'slices' IS NOT NULL AND NOT u.done
"""


def walk_on(connection: Connection, verification_id: int, index_id: int, generation_id: int) -> int:
    """Takes over the units that earlier slices left; returns how many units all slices have, 0 if none are left."""
    values = {"to": verification_id, "index": index_id, "generation": generation_id}
    execute(connection, LEFT_OVER, values)
    # Ordinals count the units of all slices, and the unit with the highest one is done last.
    of_walk = "SELECT coalesce(max(ordinal) + 1, 0) FROM roir.verification_unit WHERE verification_id = %(id)s"
    return int(execute(connection, of_walk, {"id": verification_id}).scalar_one())
