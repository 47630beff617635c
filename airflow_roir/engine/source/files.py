"""The files of relations, and their cut into stretches of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

FILES = """
SELECT c.oid::bigint AS relation, pg_relation_filenode(c.oid)::bigint AS filenode,
       pg_relation_size(c.oid) / current_setting('block_size')::int AS blocks, am.amname = 'heap' AS heap
  FROM pg_class c LEFT JOIN pg_am am ON am.oid = c.relam WHERE c.oid = ANY (%(relations)s::oid[]) ORDER BY c.oid
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
