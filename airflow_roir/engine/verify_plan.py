"""Cuts a verification into units: pieces of the source by primary key, of the index by blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, insert, update

from airflow_roir.definition import VerifyOptions
from airflow_roir.engine import generation as physical
from airflow_roir.engine import tables
from airflow_roir.engine.catalog import Source
from airflow_roir.engine.database import execute
from airflow_roir.engine.plan import Piece, cut_source

# A unit is one transaction; so many rows are read and summed in a tenth of a second.
ROWS_PER_UNIT = 200_000
BLOCKS_PER_UNIT = 4_096
# Of each side: every unit has its sums of every bucket.
MOST_UNITS = 256
# Of a verification in parts, so that a part can be chosen finely.
UNITS_OF_PARTS = 1_000
# Few enough rows to compare one by one where a single one differs, and few enough buckets to keep.
ROWS_PER_BUCKET = 256
FEWEST_BUCKETS, MOST_BUCKETS = 64, 65_536


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
    """Write a verification and its units down; returns its id and the source's estimated rows.

    with_delta: the generation isn't published yet. A walk in slices takes over what the last one left.
    """

    def rows_per_unit(rows: int) -> int:
        per_unit = max(ROWS_PER_UNIT, rows // MOST_UNITS)
        return max(1, min(per_unit, rows // UNITS_OF_PARTS)) if options.in_parts else per_unit

    rows, pieces = cut_source(connection, source, rows_per_unit)
    buckets = 1 << max(rows // ROWS_PER_BUCKET, 1).bit_length()
    verification = tables.verification
    verification_id = int(
        connection.execute(
            insert(verification)
            .values(
                index_id=index_id,
                operation_id=operation_id,
                generation_id=generation_id,
                mode=mode,
                options=options.as_dict(),
                buckets=min(max(buckets, FEWEST_BUCKETS), MOST_BUCKETS),
            )
            .returning(verification.c.id)
        ).scalar_one()
    )
    walking = 0
    if options.slices is not None:
        walking = _walk_on(connection, verification_id, index_id, generation_id)
    if not walking:
        units = _units(connection, generation_id, pieces, options, with_delta)
        write_units(connection, verification_id, "check" if options.is_partial else "total", units)
        walking = len(units)
    if options.slices is not None:
        connection.execute(
            update(verification)
            .where(verification.c.id == verification_id)
            .values(quota=math.ceil(walking / options.slices))
        )
    return verification_id, rows


def _units(
    connection: Connection, generation_id: int, pieces: list[Piece], options: VerifyOptions, with_delta: bool
) -> list[dict[str, Any]]:
    units: list[dict[str, Any]] = [
        {"side": "source", "relation": piece.relation, "lower": piece.lower, "upper": piece.upper} for piece in pieces
    ]
    units += _entry_units(connection, generation_id, with_delta, options.in_parts)
    if options.sample is not None:
        units = random.sample(units, max(1, math.ceil(len(units) * options.sample / 100)))
    if options.amcheck:
        units += [unit | {"side": "tree"} for unit in _segments(connection, generation_id)]
    return units


SEGMENTS = """
SELECT relation::bigint AS relation, pg_relation_size(relation) / current_setting('block_size')::int AS blocks
  FROM roir.partition_tree(to_regclass(%(base)s)) WHERE leaf ORDER BY relation
"""


def _segments(connection: Connection, generation_id: int) -> list[dict[str, Any]]:
    rows = execute(connection, SEGMENTS, {"base": physical.base(generation_id)})
    return [{"relation": row.relation, "lower": None, "upper": None} for row in rows]


def _entry_units(connection: Connection, generation_id: int, with_delta: bool, fine: bool) -> Iterator[dict[str, Any]]:
    """The segments, cut by blocks. An entry that moves meanwhile is one that a write has just made right."""
    segments = execute(connection, SEGMENTS, {"base": physical.base(generation_id)}).all()
    total = sum(row.blocks for row in segments)
    step = max(1, total // UNITS_OF_PARTS) if fine else max(BLOCKS_PER_UNIT, total // MOST_UNITS)
    for row in segments:
        starts = list(range(0, max(row.blocks, 1), step))
        for first, end in zip(starts, [*starts[1:], None], strict=True):
            upper = None if end is None else [end]
            yield {"side": "entry", "relation": row.relation, "lower": [first], "upper": upper}
    if with_delta:
        delta = execute(
            connection, "SELECT to_regclass(%(name)s)::oid::bigint", {"name": physical.delta(generation_id)}
        )
        yield {"side": "delta", "relation": delta.scalar_one(), "lower": None, "upper": None}


def write_units(connection: Connection, verification_id: int, stage: str, units: list[dict[str, Any]]) -> None:
    """Units of one stage, to be claimed."""
    rows = [{"verification_id": verification_id, "stage": stage, "ordinal": n, **unit} for n, unit in enumerate(units)]
    if rows:
        connection.execute(insert(tables.verification_unit), rows)


# What walks before this one left of the same generation.
LEFT_OVER = """
UPDATE roir.verification_unit u SET verification_id = %(to)s, claim_epoch = NULL, claim_worker = NULL
  FROM roir.verification v
 WHERE v.id = u.verification_id AND v.index_id = %(index)s AND v.generation_id = %(generation)s
   AND v.finished_at IS NOT NULL AND v.options ->> 'slices' IS NOT NULL AND NOT u.done
"""


def _walk_on(connection: Connection, verification_id: int, index_id: int, generation_id: int) -> int:
    """Take over the units that the walk has left; returns of how many it is, 0 where none are left: begin anew."""
    values = {"to": verification_id, "index": index_id, "generation": generation_id}
    execute(connection, LEFT_OVER, values)
    # Ordinals are the whole walk's, and the last unit is done last.
    of_walk = "SELECT coalesce(max(ordinal) + 1, 0) FROM roir.verification_unit WHERE verification_id = %(id)s"
    return int(execute(connection, of_walk, {"id": verification_id}).scalar_one())
