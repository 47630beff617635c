"""Chooses how a build reads its rows, if `--scan` is `auto`, and cuts files into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.definition import Scan, quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.cut import Piece, Plan, sample_of
from airflow_roir.engine.generation.physical import segments_of
from airflow_roir.engine.health import in_passing
from airflow_roir.engine.scan import sharing
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.files import File, cut, files_of
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, SourceChanged
from airflow_roir.options import AUTO, BuildOptions

# Below this correlation of key order and block order, batches by key read most blocks several times.
MOST_CORRELATION = 0.9
# Reading the index in place of its source is worth it if the index has at most this share of the source's blocks.
NARROWER = 0.7

# The correlation of key order and block order, for each leaf, weighted by the sampled rows.
CORRELATION = """
SELECT sum(n * abs(c)) / sum(n) FROM (
    SELECT count(*) AS n, corr(rank, block) AS c
      FROM (SELECT s.tableoid AS leaf, (s.ctid::text::point)[0] AS block,
                   row_number() OVER (PARTITION BY s.tableoid ORDER BY {key}) AS rank
              FROM {source} s {sample}) numbered
     GROUP BY leaf) leaves
 WHERE c IS NOT NULL
"""

ACTIVE = "SELECT id FROM roir.generation WHERE index_id = %(index)s AND status = 'active'"
NAME = "SELECT schema_name, name FROM roir.index WHERE id = %(index)s"
DIFFERS = """
SELECT EXISTS (SELECT FROM roir.discrepancy d JOIN roir.verification v ON v.id = d.verification_id
                -- Also of a later generation: a verification of a copy finds the copied differences.
                WHERE v.index_id = %(index)s AND v.generation_id >= %(generation)s AND d.outcome IS NULL)
"""


@dataclass(frozen=True)
class Choice:
    """How to scan, and why. relations: the oids of those whose files are cut into pieces; none for a scan by key."""

    scan: Scan
    why: str
    relations: tuple[int, ...] = ()


def pieces(
    connection: Connection, source: Source, choice: Choice, leaves: Sequence[int], index_id: int | None, wanted: int
) -> list[Piece]:
    """The files' present blocks, in about `wanted` pieces. leaves: those of the source.

    Raises SourceChanged if the index to read shows another generation by now.
    """
    if choice.scan is Scan.INDEX and _segments(connection, source, index_id)[0] != choice.relations:
        name = operations.index_name(execute(connection, NAME, {"index": index_id}).one())
        raise SourceChanged(
            f"index {name}: it was reverted while its rebuild was planned; nothing was changed. Start again"
        )
    relations = choice.relations if choice.scan is Scan.INDEX else leaves
    return _cut_evenly(files_of(connection, relations), wanted)


def choose(connection: Connection, source: Source, options: BuildOptions, plan: Plan, index_id: int | None) -> Choice:
    """How to scan. index_id: that of the index to rebuild. Raises InvalidInput if the options can't be met."""
    if options.scan == Scan.KEY:
        return Choice(Scan.KEY, "as wanted")
    if options.scan == Scan.INDEX:
        segments, doubt = _trusted(connection, source, index_id)
        if doubt:
            raise InvalidInput(f"scan is index, but {doubt}; use key, block or auto")
        return Choice(Scan.INDEX, "as wanted", segments)
    files = files_of(connection, source.leaves)
    heap = all(file.heap for file in files)
    if options.scan == Scan.BLOCK:
        if not heap:
            raise InvalidInput(f"scan is block, but {source.name} isn't stored as a heap; use key or auto")
        return Choice(Scan.BLOCK, "as wanted", source.leaves)
    if plan.source_bytes < limits_of(connection).small_source_bytes:
        return Choice(Scan.KEY, "the table is small")
    under_way = sharing.scan_under_way(connection, source)
    # Only if the build is verified: otherwise it could copy faults of the index unnoticed.
    if options.scan == AUTO and options.verify in ("after", "both"):
        segments, doubt = _trusted(connection, source, index_id)
        share = sum(file.blocks for file in files_of(connection, segments)) / max(1, sum(f.blocks for f in files))
        if not doubt and share <= NARROWER:
            return Choice(Scan.INDEX, f"the index has {share:.0%} of the table's blocks", segments)
    if under_way is not None and (heap or under_way[0] is Scan.KEY):
        scan, index = under_way
        return Choice(scan, f"as {index} is being built", source.leaves if scan.by_blocks else ())
    order = correlation(connection, source)
    if heap and order < MOST_CORRELATION:
        return Choice(Scan.BLOCK, f"rows lie in another order than their keys (correlation {order:.2f})", source.leaves)
    return Choice(Scan.KEY, f"rows lie in the order of their keys (correlation {order:.2f})")


def _segments(connection: Connection, source: Source, index_id: int | None) -> tuple[tuple[int, ...], str]:
    """The segments of the generation that readers see; or the reason why they can't be read instead of the source."""
    active = None if index_id is None else execute(connection, ACTIVE, {"index": index_id}).scalar()
    if active is None:
        return (), "there is no index to rebuild yet"
    if source.partitioned:
        # Entries of a partition that left stay in the segments for a while; only the view hides them.
        return (), "a partitioned table's index may hold entries that its view hides"
    return segments_of(connection, active), ""


def _trusted(connection: Connection, source: Source, index_id: int | None) -> tuple[tuple[int, ...], str]:
    """As `_segments`, also with the reason why the segments shouldn't be read."""
    segments, why_not = _segments(connection, source, index_id)
    if index_id is not None and not why_not:
        why_not = _doubt(connection, index_id)
    return segments, why_not


def _doubt(connection: Connection, index_id: int) -> str:
    """The reason not to copy from the index that is rebuilt; '' if there is none.

    The build would copy its faults, and notice them only at the end.
    """
    active = execute(connection, ACTIVE, {"index": index_id}).scalar_one()
    if execute(connection, DIFFERS, {"index": index_id, "generation": active}).scalar_one():
        return "a verification found differences in it"
    newest = operations.newest_operation(connection, index_id)
    if newest is None:
        return ""
    # Without waiting: another session may lock the view for long.
    name = operations.index_name(execute(connection, NAME, {"index": index_id}).one())
    return "; ".join(in_passing.warnings_of_many(connection, {index_id: (newest.id, str(name))})[index_id])


def correlation(connection: Connection, source: Source) -> float:
    """The correlation of primary key order and block order, from 0 (none) to 1, by a sample."""
    key = ", ".join(f"s.{quote(name)}" for name in source.primary_key)
    query = CORRELATION.format(key=key, source=source.sql, sample=sample_of(connection, source))
    found = owner.rows(connection, source, query, "correlation float8").scalar()
    return 1.0 if found is None else float(found)


def _cut_evenly(files: Sequence[File], pieces: int) -> list[Piece]:
    """About `pieces` pieces of the files, of equal blocks, at least one for each file."""
    # A partitioned table may have no partition yet.
    step = max(1, -(-sum(file.blocks for file in files) // max(1, pieces)))
    return [Piece(file.relation, (str(first),), (str(end),), file.filenode) for file, first, end in cut(files, step)]
