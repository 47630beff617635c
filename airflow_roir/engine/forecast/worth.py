"""Whether an index will pay: for look-ups of its key in general, and for one query of the user.

The bounds are those of docs/reading.md, as `make bench` measured them. If look-ups were timed here, their times decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.forecast import query as queries
from airflow_roir.engine.forecast.conditions import WHOLE_ROW
from airflow_roir.engine.forecast.look_up import LookUp, look_ups
from airflow_roir.engine.forecast.query import Asked
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.errors import InvalidInput
from airflow_roir.quantity import counted

YES, NO, PERHAPS = "yes", "no", "perhaps"
# With so few partitions a look-up by a local index takes a tenth of a millisecond.
FEW = 10
# From about here on roir.rows reads whole rows faster than a local index.
SOME_TENS = 60
# roir.rows plans each row apart: for more rows a join or the table itself is faster. The planner's estimate counts at
# least one row for each partition that it opens.
MANY_ROWS = 1_000

PARTITION_KEYS = """
SELECT DISTINCT a.attname::text AS name
  FROM pg_partitioned_table p
  JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = ANY (p.partattrs) AND a.attnum > 0
 WHERE p.partrelid = ANY (%(relations)s::oid[]) ORDER BY 1
"""
# The other indexes of the table that readers see.
OTHERS = """
SELECT i.schema_name, i.name, g.entry FROM roir.index i JOIN roir.generation g ON g.index_id = i.id
 WHERE g.status = 'active' AND i.dropped_at IS NULL AND i.source_oid = %(source)s
   AND i.id IS DISTINCT FROM %(index)s ORDER BY i.schema_name, i.name
"""


@dataclass(frozen=True)
class OfQuery:
    """The use of the index for one query. serves: it finds the rows; covers: its view has all columns.

    lacks: the columns that the view lacks; other: a published roir index that serves and covers the query.
    """

    asked: Asked
    serves: bool
    covers: bool
    lacks: tuple[str, ...]
    other: str | None
    look_ups: tuple[LookUp, ...]


@dataclass(frozen=True)
class Worth:
    """Whether the index will pay, and why. partitions: those that have rows; 0 if the table has none.

    partition_key: the columns that the table is partitioned by, on all levels. query: None if none was given.
    """

    pays: str
    why: str
    partitions: int
    partition_key: tuple[str, ...]
    query: OfQuery | None = None

    def __str__(self) -> str:
        return f"{self.pays}: {self.why}"

    def lines(self) -> dict[str, list[str]]:
        """Texts for the user, by topic."""
        found = {"will it pay": [str(self)]}
        if self.query is not None:
            found["query"] = list(_of_query(self.query, self.partitions))
            if self.query.look_ups:
                found["a look-up"] = [str(one) for one in self.query.look_ups]
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"worth": asdict(self)}


def of_index(connection: Connection, dry: DryRun) -> Worth | None:
    """The worth for look-ups in general, by the catalogs alone. None over shards, whose tables it doesn't know."""
    if dry.survey is not None:
        return None
    source, definition = dry.source, dry.definition
    partitions = len(source.leaves) if source.partitioned else 0
    rows = execute(connection, PARTITION_KEYS, {"relations": list(source.relations)})
    by = tuple(row.name for row in rows) if source.partitioned else ()
    pays, why = _in_general(partitions, by, definition.key, definition.unique, dry.entry)
    return Worth(pays, why, partitions, by)


def _in_general(
    partitions: int, by: tuple[str, ...], key: tuple[str, ...], unique: bool, entry: Entry
) -> tuple[str, str]:
    own = "CREATE UNIQUE INDEX CONCURRENTLY" if unique else "CREATE INDEX CONCURRENTLY"
    if not by:
        return NO, f"the table has no partitions, so an index of PostgreSQL's own finds rows as fast: {own}"
    if unique and set(by) <= set(key):
        return NO, f"the key contains the partition key ({_list(by)}), so PostgreSQL's own UNIQUE can enforce it"
    if unique:
        return YES, f"PostgreSQL's own UNIQUE would need the partition key ({_list(by)}) in its key"
    if key[0] in by:
        return NO, (
            f"the key begins with the partition key ({quote(key[0])}), so a look-up opens few partitions already: an "
            "index of PostgreSQL's own on the table does"
        )
    if partitions <= FEW:
        return NO, f"the table has {counted(partitions, 'partition')}: a local index on each finds rows about as fast"
    have = "the key, the primary key and the included columns" if len(entry.included_positions) else (
        "the key and the primary key"
    )  # fmt: skip
    if partitions < SOME_TENS:
        return PERHAPS, (
            f"with {counted(partitions, 'partition')} it pays for queries that need only {have}; for whole rows a "
            "local index is faster. --query says which yours is"
        )
    return YES, f"a query by {quote(key[0])} alone opens {counted(partitions, 'partition')}, and the index none"


def of_query(database: Database, dry: DryRun, worth: Worth | None, query: str, run: bool) -> Worth:
    """The worth for one query, as the caller. run: run the query, and time look-ups; all of it read only.

    Raises InvalidInput unless it is one SELECT that the server can plan.
    """
    if worth is None:
        raise InvalidInput("the table is in shards, where the query isn't planned: leave --query out")
    asked = queries.ask(database, dry.source, query, run)
    with database.transaction() as connection:
        other = _other(connection, dry, asked)
    lacks = _lacking(asked, dry.entry)
    serves = _serves(asked, dry.definition.key[0])
    costs = tuple(look_ups(database, dry, asked, serves, not lacks)) if run else ()
    found = OfQuery(asked, serves, not lacks, lacks, other, costs)
    pays, why = _for_query(worth, found, dry)
    return Worth(pays, why, worth.partitions, worth.partition_key, found)


def _serves(asked: Asked, first: str) -> bool:
    return first in asked.usable or asked.by_order == first


def _lacking(asked: Asked, entry: Entry) -> tuple[str, ...]:
    have = {column.source for column in entry.columns}
    return tuple(column for column in asked.columns if column not in have)


def _other(connection: Connection, dry: DryRun, asked: Asked) -> str | None:
    for row in execute(connection, OTHERS, {"source": dry.source.oid, "index": dry.index_id}):
        entry = Entry.from_json(row.entry)
        if _serves(asked, entry.columns[0].source) and not _lacking(asked, entry):
            return str(QualifiedName(row.schema_name, row.name))
    return None


def _for_query(worth: Worth, found: OfQuery, dry: DryRun) -> tuple[str, str]:
    asked, first = found.asked, quote(dry.definition.key[0])
    if not asked.opened:
        return NO, (
            f"as far as the planner shows, the query doesn't read {dry.source.name}: it may be inside a function, or "
            "no row can meet its conditions"
        )
    if not worth.partition_key:
        return NO, worth.why
    if not found.serves:
        return NO, f"the query has no condition on {first} that an index could use: its key must begin with another"
    if asked.opened <= min(FEW, worth.partitions - 1):
        return NO, (
            f"the query opens {counted(asked.opened, 'partition')} of {worth.partitions:,} already, since its "
            f"conditions name the partition key ({_list(worth.partition_key)})"
        )
    if found.other is not None:
        return NO, f"the index {found.other} serves this query already: query its view"
    if worth.partitions <= FEW:
        return NO, worth.why
    best = _best(found)
    if best is not None:
        return best
    if found.covers:
        return YES, f"the view answers it and opens no partition; the table opens {asked.opened:,}"
    what = "whole rows" if WHOLE_ROW in found.lacks else f"columns that the index lacks ({_list(found.lacks)})"
    if asked.opened < SOME_TENS:
        more = "" if WHOLE_ROW in found.lacks else "; it pays with these in --include"
        return NO, f"the query needs {what}, and for those a local index in {asked.opened:,} partitions is faster{more}"
    if asked.rows - asked.opened > MANY_ROWS:
        return PERHAPS, (
            f"the query needs {what} of about {counted(asked.rows, 'row')}, and roir.rows reads each row apart: join "
            "the view and the table, or include the columns"
        )
    return YES, f"roir.rows opens only the partitions of the rows that it finds; the table opens {asked.opened:,}"


def _best(found: OfQuery) -> tuple[str, str] | None:
    """The answer by the times, if both were found."""
    times = {one.way: one.ms for one in found.look_ups if one.ms is not None}
    ways = ["view"] if found.covers else ["roir.rows"]
    if "table" not in times or ways[0] not in times:
        return None
    [way] = ways
    pays = YES if times[way] < times["table"] else NO
    return (
        pays,
        f"the query takes {times['table']:,.2f} ms by the table, and about {times[way]:,.2f} ms by {_named(way)}",
    )


def _named(way: str) -> str:
    return "the view" if way == "view" else way


def _of_query(found: OfQuery, partitions: int) -> Iterator[str]:
    asked = found.asked
    if not asked.opened:
        yield "the plan reads nothing of the table"
        return
    by = f"by {_list(asked.local)}" if asked.local else "by no index"
    whole = f", {asked.whole:,} of them whole" if asked.whole else ""
    of = f"{asked.opened:,} of {counted(partitions, 'partition')}{whole}" if partitions else "the table"
    yield f"now opens {of}, {by}; planning takes {asked.planning_ms:,.2f} ms"
    yield f"needs {_list(asked.columns) or 'no columns'}" + (
        "" if found.covers else f"; the index lacks {_list(found.lacks)}"
    )
    yield "the planned index serves it" if found.serves else "the planned index doesn't serve it"
    if found.other is not None:
        yield f"index {found.other} serves it already"


def _list(names: tuple[str, ...]) -> str:
    return ", ".join("whole rows" if name == WHOLE_ROW else name for name in names)
