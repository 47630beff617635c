"""Cuts the source into ranges and the base into segments, from one sample of its blocks (docs/architecture.md#scan)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.catalog import identity_columns
from airflow_roir.engine.source.files import SourceSize, size_of
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvariantViolated
from airflow_roir.options import BuildOptions

Bound = tuple[str, ...]

# Small enough that the others are idle only briefly while a slow worker finishes, big enough that the odd short batch
# at a range's end doesn't matter.
ROWS_PER_RANGE = 200_000
MOST_RANGES = 1_024
# A segment's index is built in one transaction: half a million entries keep that near a second (I7).
ROWS_PER_SEGMENT = 500_000
# A worker can't rest within a segment. Under a throttle, a fifth of a second without a rest is enough.
ROWS_PER_SEGMENT_THROTTLED = 100_000
MOST_SEGMENTS = 64


@dataclass(frozen=True)
class Piece:
    """A piece of one leaf of the source (by oid), half-open in scan-key order; None is unbounded.

    With a filenode, a piece of that file: the bounds are block numbers. shard_id: the server; None: this one.
    """

    relation: int
    lower: Bound | None
    upper: Bound | None
    filenode: int | None = None
    shard_id: int | None = None


@dataclass(frozen=True)
class Plan:
    """The cut of an operation into ranges and segments.

    rows: the source's estimated rows; source_bytes: the size of its heap. pieces: the future ranges. segment_bounds:
    the inner bounds of the segments; `partition`: the number of leading identity columns by which they are cut, as many
    as a bound has, or more in a unique index. sampled: the estimated rows of the sample; sample_seconds: how long the
    cut took.
    """

    rows: int
    source_bytes: int
    pieces: tuple[Piece, ...]
    segment_bounds: tuple[Bound, ...]
    partition: int
    sampled: int = 0
    sample_seconds: float = 0.0

    @property
    def ranges(self) -> int:
        """Number of ranges: at least one for each leaf of the source."""
        return len(self.pieces)

    @property
    def segments(self) -> int:
        """Number of segments, besides the default one for NULL keys."""
        return len(self.segment_bounds) + 1


def make_plan(connection: Connection, source: Source, definition: IndexDefinition, options: BuildOptions) -> Plan:
    """Sample the source and cut it. Reads only; takes no lock but ACCESS SHARE, for a second or so."""
    size = size_of(connection, source)
    sample, share = _sample_clause(connection, source, size)
    rows = size.rows
    if rows is None:
        rows = _count(connection, source, sample, share)
    ranges = options.ranges or min(MOST_RANGES, max(options.parallelism * 4, rows // ROWS_PER_RANGE))
    segments = segments_for(options, rows)
    begun = time.monotonic()
    pieces = _pieces(connection, source, sample, ranges)
    partition, segment_bounds = cut_segments(connection, source, definition, sample, segments)
    took = time.monotonic() - begun
    return Plan(rows, size.bytes, tuple(pieces), tuple(segment_bounds), partition, round(rows * share), took)


def segments_for(options: BuildOptions, rows: int) -> int:
    """How many segments a base is cut into. rows: those of the source."""
    per_segment = ROWS_PER_SEGMENT_THROTTLED if options.throttle not in (None, "", "off") else ROWS_PER_SEGMENT
    return options.segments or min(MOST_SEGMENTS, max(options.parallelism, rows // per_segment))


def cut_source(connection: Connection, source: Source, rows_per_piece: Callable[[int], int]) -> tuple[int, list[Piece]]:
    """The source's estimated rows, and pieces of about `rows_per_piece` rows, at least one for each leaf.

    rows_per_piece: computes that from the estimate, which comes from the sample if the table was never analyzed.
    """
    size = size_of(connection, source)
    sample, share = _sample_clause(connection, source, size)
    rows = size.rows
    if rows is None:
        rows = _count(connection, source, sample, share)
    return rows, _pieces(connection, source, sample, max(1, rows // rows_per_piece(rows)))


def sample_of(connection: Connection, source: Source) -> str:
    """SQL for the clause that takes the plan's sample of a source; '' if the sample is the whole source."""
    return _sample_clause(connection, source, size_of(connection, source))[0]


def _count(connection: Connection, source: Source, sample: str, share: float) -> int:
    query = f"SELECT count(*) FROM {source.sql} {sample}"
    counted = owner.rows(connection, source, query, "rows bigint").scalar_one()
    return round(int(counted) / share)


def _pieces(connection: Connection, source: Source, sample: str, ranges: int) -> list[Piece]:
    bounds = _range_bounds(connection, source, sample, ranges)
    return [
        Piece(leaf, lower, upper) for leaf in source.leaves for lower, upper in pairwise([None, *bounds[leaf], None])
    ]


def _sample_clause(connection: Connection, source: Source, size: SourceSize) -> tuple[str, float]:
    block = int(execute(connection, "SELECT current_setting('block_size')").scalar_one())
    blocks = size.bytes / block
    wanted = limits_of(connection)
    share = max(
        wanted.sample_blocks / blocks if blocks else 1.0,
        wanted.sample_rows / size.rows if size.rows else wanted.sample_blocks * 4 / blocks if blocks else 1.0,
    )
    if share >= 0.5:
        return "", 1.0
    # A seed would choose the same block numbers in every leaf, and none at all in many small leaves.
    seed = "" if source.partitioned else " REPEATABLE (1)"
    return f"TABLESAMPLE SYSTEM ({share * 100:.6f}){seed}", share


def _range_bounds(connection: Connection, source: Source, sample: str, ranges: int) -> dict[int, list[Bound]]:
    """The inner bounds of each leaf's ranges, as many as its share of the sample; one query for all leaves."""
    bounds: dict[int, list[Bound]] = defaultdict(list)
    if ranges <= len(source.leaves):
        return bounds
    key = ", ".join(f"s.{quote(name)}" for name in source.primary_key)
    # By position, since a column may be called anything, `n` too.
    texts = ", ".join(f"{source.columns[name].text('s')} AS k{i}" for i, name in enumerate(source.primary_key))
    rows = owner.rows(
        connection,
        source,
        f"""
        SELECT leaf, {", ".join(f"k{i}" for i in range(len(source.primary_key)))}
          FROM (SELECT *, greatest(1, round(total * %(ranges)s::numeric / everything)) AS pieces
                  FROM (SELECT {texts}, s.tableoid::bigint AS leaf,
                               row_number() OVER (PARTITION BY s.tableoid ORDER BY {key}) - 1 AS n,
                               count(*) OVER (PARTITION BY s.tableoid) AS total, count(*) OVER () AS everything
                          FROM {source.sql} s {sample}) numbered) shared
         WHERE n > 0 AND trunc(n * pieces / total) > trunc((n - 1) * pieces / total)
         ORDER BY leaf, n""",
        ", ".join(["leaf bigint", *(f"k{i} text" for i in range(len(source.primary_key)))]),
        {"ranges": ranges},
    )
    for row in rows:
        bounds[row.leaf].append(tuple(row)[1:])
    return bounds


def cut_segments(
    connection: Connection, source: Source, definition: IndexDefinition, sample: str, segments: int
) -> tuple[int, list[Bound]]:
    """The length of the shortest prefix of the identity that cuts the sample evenly, and its bounds.

    A frequent key value can't be split by the key alone, but by more columns, at the latest by the primary key. But
    each additional nullable column sends its NULLs to the default segment, so the most even cut wins.
    """
    identity = identity_columns(source, definition)
    # In a unique index equal keys must meet in one segment, and a NULL in any column of the key leads to the default.
    most = len(definition.key) if definition.unique_here else len(identity)
    apart = definition.unique_here and not definition.nulls_not_distinct
    if segments == 1 or owner.runs_checks(connection, source, identity):
        # Our role reads the bounds of segments from text, which would run the domains' checks.
        return most if apart else 1, []
    best: tuple[float, int, list[Bound]] | None = None
    for length in range(1, most + 1):
        names = identity[:length]
        # Qualified: otherwise ORDER BY would sort the texts, which have the columns' names.
        values_of = [source.columns[name].of("s") for name in names]
        columns = ", ".join(values_of)
        where = "" if source.condition is None else f"WHERE {source.condition.of('s')}"
        texts = ", ".join(source.columns[name].text("s") for name in names)
        rows = owner.rows(
            connection,
            source,
            f"SELECT {texts}, count(*), {' AND '.join(f'{value} IS DISTINCT FROM NULL' for value in values_of)} "
            f"FROM {source.sql} s {sample} {where} GROUP BY {columns} ORDER BY {columns}",
            ", ".join([*(f"k{i} text" for i in range(length)), "rows bigint", "complete boolean"]),
        ).all()
        counted = [(tuple(row)[:length], int(row[length]), bool(row[length + 1])) for row in rows]
        values = [(value, count) for value, count, complete in counted if complete]
        nulls = sum(count for _, count, complete in counted if not complete)
        bounds, largest = cut(values, segments)
        total = sum(count for _, count in values) + nulls
        share = max(largest, nulls) / total if total else 0.0
        if best is None or share < best[0] * 0.9:
            best = (share, length, bounds)
        if share <= 1.5 / segments:
            break
    assert best is not None
    return most if apart else best[1], best[2]


def cut(values: Sequence[tuple[Bound, int]], pieces: int) -> tuple[list[Bound], int]:
    """Cut sorted `(value, count)` pairs into at most `pieces` runs of about equal counts.

    Returns the first value of each run but the first, and the count of the largest run.
    """
    total = sum(count for _, count in values)
    bounds: list[Bound] = []
    seen = run = largest = 0
    for value, count in values:
        if run and seen * pieces >= total * (len(bounds) + 1):
            bounds.append(value)
            largest, run = max(largest, run), 0
        seen += count
        run += count
    return bounds, max(largest, run)


@dataclass(frozen=True)
class KeyRange:
    """The ordinal of a segment, and its half-open bounds; None is unbounded.

    The bounds are texts, which have no order; but each range begins where another one ends.
    """

    ordinal: int
    lower: Bound | None
    upper: Bound | None


def in_key_order(pieces: Iterable[KeyRange]) -> tuple[KeyRange, ...]:
    """The segments in the order of keys. Ordinals have no order: a compaction gives new segments new ones.

    Raises InvariantViolated if they don't cover all keys without a gap.
    """
    by_lower = {piece.lower: piece for piece in pieces}
    count = len(by_lower)
    found: list[KeyRange] = []
    at: Bound | None = None
    while at in by_lower:
        piece = by_lower.pop(at)
        found.append(piece)
        at = piece.upper
        if at is None:
            break
    if len(found) != count or (found and found[-1].upper is not None):
        raise InvariantViolated(
            f"segments {sorted(piece.ordinal for piece in by_lower.values())} don't join up with the others"
        )
    return tuple(found)
