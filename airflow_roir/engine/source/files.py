"""The files of relations, their cut into stretches of blocks, and how much a source has in its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.engine.source.source import Source

FILES = """
SELECT c.oid::bigint AS relation, pg_relation_filenode(c.oid)::bigint AS filenode,
       pg_relation_size(c.oid) / current_setting('block_size')::int AS blocks, am.amname = 'heap' AS heap
  FROM pg_class c LEFT JOIN pg_am am ON am.oid = c.relam WHERE c.oid = ANY (%(relations)s::oid[]) ORDER BY c.oid
"""
SIZE = """
WITH leaf AS (
    SELECT c.oid, c.reltuples, c.relpages, pg_relation_size(c.oid) AS bytes
      FROM pg_class c
     WHERE c.oid IN (SELECT relation FROM roir.partition_tree(%(oid)s)
                     UNION ALL SELECT %(oid)s::oid) AND c.relkind = 'r')
SELECT coalesce(sum(bytes), 0)::bigint AS bytes,
       CASE WHEN bool_and(relpages > 0 OR bytes = 0)
            -- As the planner does: the density of the last ANALYZE, times the pages there are now.
            THEN coalesce(sum(CASE WHEN relpages > 0
                                   THEN reltuples / relpages * bytes / current_setting('block_size')::int
                                   ELSE 0 END), 0)::bigint END AS rows
  FROM leaf
"""


@dataclass(frozen=True)
class File:
    """A relation's present file. heap: true if it is a heap."""

    relation: int
    filenode: int
    blocks: int
    heap: bool


def files_of(connection: Connection, relations: Sequence[int]) -> list[File]:
    """The files of relations by oid. Waits behind an ALTER or TRUNCATE."""
    rows = execute(connection, FILES, {"relations": list(relations)})
    return [File(row.relation, row.filenode, row.blocks, row.heap) for row in rows]


def cut(files: Iterable[File], step: int) -> Iterator[tuple[File, int, int]]:
    """Stretches of `step` blocks, as (file, first block, block after the last). At least one for each file."""
    for file in files:
        for first in range(0, max(file.blocks, 1), step):
            yield file, first, min(first + step, file.blocks)


@dataclass(frozen=True)
class SourceSize:
    """The size of a source. bytes: of all leaves' heaps; rows: the planner's estimate, or None if there is none."""

    bytes: int
    rows: int | None


def size_of(connection: Connection, source: Source) -> SourceSize:
    """Measure a source. Takes an ACCESS SHARE lock on its leaves, so it waits behind an ALTER or TRUNCATE."""
    size = execute(connection, SIZE, {"oid": source.oid}).one()
    return SourceSize(size.bytes, None if size.rows is None or size.rows < 0 else size.rows)
