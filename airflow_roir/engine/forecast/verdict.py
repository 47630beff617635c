"""Whether an index will pay for look-ups of its key in general, by the catalogs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.quantity import counted

YES, NO, PERHAPS = "yes", "no", "perhaps"
# Measured for five rows (benchmarks/results/partitions.md): with 10 partitions a look-up takes 0.09 ms by a local index
# and 0.03 ms by the view.
FEW = 10
# The same: whole rows by a local index and by roir.rows take 0.09 and 0.55 ms with 10 partitions, 0.81 and 0.51 ms with
# 100. Nothing was measured in between.
MANY = 100

PARTITION_KEYS = """
SELECT DISTINCT a.attname::text AS name
  FROM pg_partitioned_table p
  JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = ANY (p.partattrs) AND a.attnum > 0
 WHERE p.partrelid = ANY (%(relations)s::oid[]) ORDER BY 1
"""


@dataclass(frozen=True)
class Verdict:
    """Whether an index pays, and why."""

    pays: str
    why: str

    def __str__(self) -> str:
        return f"{self.pays}: {self.why}"


def partition_key(connection: Connection, relations: Sequence[int]) -> tuple[str, ...]:
    """The columns that a table is partitioned by, on all levels. relations: the table and its partitions."""
    return tuple(execute(connection, PARTITION_KEYS, {"relations": list(relations)}).scalars())


def in_general(
    partitions: int, by: tuple[str, ...], key: Sequence[str], first: str, unique: bool, includes: bool
) -> Verdict:
    """The verdict by the number of partitions, the partition key, and the index's key. includes: further columns.

    key: names of columns, and texts of expressions. first: its first one for people.
    """
    return Verdict(*_in_general(partitions, by, tuple(key), first, unique, includes))


def _in_general(
    partitions: int, by: tuple[str, ...], key: tuple[str, ...], first: str, unique: bool, includes: bool
) -> tuple[str, str]:
    own = "CREATE UNIQUE INDEX CONCURRENTLY" if unique else "CREATE INDEX CONCURRENTLY"
    columns = ", ".join(by)
    if not by:
        return NO, f"the table has no partitions, so an index of PostgreSQL's own finds rows as fast: {own}"
    if unique and not set(by) <= set(key):
        return YES, f"PostgreSQL's own UNIQUE would need the partition key ({columns}) in its key"
    if unique and (partitions <= FEW or by == key[:1]):
        return NO, f"the key contains the partition key ({columns}), so PostgreSQL's own UNIQUE can enforce it"
    if unique:
        return PERHAPS, (
            f"the key contains the partition key ({columns}), so PostgreSQL's own UNIQUE can enforce it: the index "
            f"pays only for queries by {first} alone. roir plan --query says whether yours is one"
        )
    if by == key[:1]:
        return NO, (
            f"the key begins with the partition key ({first}), so a look-up opens few partitions already: an "
            "index of PostgreSQL's own on the table does"
        )
    if partitions <= FEW:
        return NO, (
            f"the table has {counted(partitions, 'partition')}: with 10 a look-up by a local index on each took "
            "0.09 ms, and 0.03 ms by a roir index"
        )
    if key[0] in by:
        return PERHAPS, (
            f"{first} is a part of the partition key ({columns}): roir plan --query counts the partitions of yours"
        )
    if partitions < MANY:
        have = "the key, the primary key and the included columns" if includes else "the key and the primary key"
        return PERHAPS, (
            f"with {counted(partitions, 'partition')} it pays for queries that need only {have}. Whole rows "
            f"come faster by a local index with {FEW}, by roir.rows with {MANY}: roir plan --run-query times yours"
        )
    return YES, f"a query by {first} alone opens {counted(partitions, 'partition')}, and the index none"
