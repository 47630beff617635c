"""Shows the rows that share a key of a unique index, as `engine.unique.duplicates` has recorded them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import argument, parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.unique import duplicates, whereabouts
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.one_line import one_line
from airflow_roir.quantity import counted

# How many groups a task's XCom has, and how many a log lists, each with as many rows at most.
FIRST = 20
EXAMPLES = 5
# The most characters of a value that a log or a table shows.
LONGEST = 200
LINE = 2_000
# How many groups' ids, and how many rows, are read at a time: half of a table's rows may share one key.
PAGE = 100_000
ROWS = 5_000

OPERATION = """
SELECT o.id, o.status, o.phase, coalesce((o.options ->> 'census')::boolean, false) AS census,
       i.schema_name, i.name, i.source_oid, i.key_columns, i.is_unique, i.shard_table IS NOT NULL AS apart,
       n.nspname AS source_schema, c.relname AS source_name
  FROM roir.operation o
  JOIN roir.index i ON i.id = o.index_id
  LEFT JOIN pg_class c ON c.oid = i.source_oid::oid AND c.relkind IN ('r', 'p')
  LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE o.id = %(operation)s
"""
# Without verifications, which may be newer.
NEWEST = "SELECT max(id) FROM roir.operation WHERE index_id = %(index)s AND kind IN ('create', 'rebuild')"
LAST = "SELECT coalesce(max(id), 0) FROM roir.duplicate WHERE operation_id = %(operation)s"
# In the order in which they were found; a group has the id of its first row.
GROUPS = """
SELECT min(d.id) AS id, d.key_hash, count(*) AS size FROM roir.duplicate d
 WHERE d.operation_id = %(operation)s AND (%(healed)s OR d.healed_at IS NULL)
 GROUP BY d.key_hash HAVING min(d.id) > %(after)s
 ORDER BY min(d.id) LIMIT %(most)s
"""
MEMBERS = """
SELECT m.* FROM unnest(%(hashes)s) AS g (key_hash), LATERAL (
    SELECT * FROM roir.duplicate d
     WHERE d.operation_id = %(operation)s AND d.key_hash = g.key_hash AND d.id > %(after)s
       AND (%(healed)s OR d.healed_at IS NULL)
     ORDER BY d.id LIMIT %(each)s) m
 ORDER BY m.id
"""


@dataclass(frozen=True)
class Member:
    """A row that shares its key, by its primary key's texts. partition: None if the row is gone, or can't be read."""

    key: tuple[str | None, ...]
    primary_key: tuple[str | None, ...]
    partition: str | None
    phase: str
    found_at: datetime
    healed_at: datetime | None


@dataclass(frozen=True)
class Group:
    """Rows that share one key. id: higher for groups found later. count: of all its rows; `rows` may be only some."""

    id: int
    key: tuple[str | None, ...]
    count: int
    rows: tuple[Member, ...]


@dataclass(frozen=True)
class Duplicates:
    """The duplicates of one operation. key, primary_key: names of columns. groups, rows: counts of those not healed.

    source: None if the table was dropped; then the columns of its primary key have no names. apart: the rows are in
    shards, which their primary key and `partition` name.
    """

    index: str
    operation_id: int
    status: str
    unique: bool
    census: bool
    source: Source | None
    table: str | None
    key: tuple[str, ...]
    primary_key: tuple[str, ...]
    groups: int
    rows: int
    apart: bool = False

    def line(self, group: Group) -> str:
        """A group in one line, for logs."""
        names = [named(self.names(one), one.primary_key) for one in group.rows]
        where = [f" in {one.partition}" if one.partition else "" for one in group.rows]
        left = group.count - len(group.rows)
        more = f" and {counted(left, 'row')} more" if left else ""
        said = "; ".join(f"{name}{place}" for name, place in zip(names, where, strict=True))
        return one_line(f"duplicate {named(self.key, group.key)}: {said}{more}", LINE)

    def facts(self, group: Group) -> dict[str, Any]:
        """A group for JSON: values as texts, in the form that their types read."""
        return {
            "key": dict(zip(self.key, group.key, strict=True)),
            "rows": [
                {
                    "primary_key": self._primary_key(one),
                    "partition": one.partition,
                    "phase": one.phase,
                    "found_at": one.found_at.isoformat(),
                    "healed_at": None if one.healed_at is None else one.healed_at.isoformat(),
                }
                for one in group.rows
            ],
        }

    def _primary_key(self, member: Member) -> dict[str, str | None]:
        return dict(zip(self.names(member), member.primary_key, strict=True))

    def names(self, member: Member) -> Sequence[str]:
        """The names of a row's primary key columns; numbers if the table has another primary key since, or is gone."""
        fits = len(self.primary_key) == len(member.primary_key)
        return self.primary_key if fits else [str(n) for n in range(1, len(member.primary_key) + 1)]

    def summary(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The totals and the first groups, for JSON."""
        return {
            "index": self.index,
            "operation_id": self.operation_id,
            "groups": self.groups,
            "rows": self.rows,
            "first": [self.facts(group) for group in groups],
        }


def named(names: Sequence[str], values: Sequence[str | None]) -> str:
    """Names and values as in PostgreSQL's own messages, `(email, day)=(a@b, 1)`; long values are cut."""
    return f"({', '.join(names)})=({listing(values)})"


def listing(values: Sequence[str | None]) -> str:
    """Values for users, with commas."""
    return ", ".join(map(shown, values))


def shown(value: str | None) -> str:
    """A value for users, quoted if it could be mistaken for another one."""
    if value is None:
        return "NULL"
    cut = value if len(value) <= LONGEST else f"{value[:LONGEST]}…"
    return f"'{cut}'" if not value or value == "NULL" or value != value.strip() else cut


def of_index(connection: Connection, index: str) -> Duplicates:
    """The duplicates of the index with that name: of its newest build; or of the newest census, whose index is gone.

    Raises NotFound, InvalidInput (not unique), SchemaVersionMismatch.
    """
    check_schema(connection)
    name = parse_name(index, "index")
    try:
        row = operations.find_index(connection, name)
    except NotFound:
        census = operations.newest_census(connection, name)
        if census is None:
            raise
        return read(connection, census.id)
    newest = execute(connection, NEWEST, {"index": row.id}).scalar_one()
    if not row.is_unique:
        raise InvalidInput(f"index {operations.index_name(row)} is not unique, so roir lists no duplicates of it")
    if newest is None:
        raise NotFound(f"index {name} has no operation yet")
    return read(connection, int(newest))


def read(connection: Connection, operation_id: int) -> Duplicates:
    """The duplicates of an operation. Raises NotFound."""
    row: Row[Any] | None = execute(connection, OPERATION, {"operation": operation_id}).first()
    if row is None:
        raise operations.no_operation(connection, operation_id)
    source = None
    if row.source_name is not None:
        source = catalog.read_source_by_oid(connection, row.source_oid, check=False)
    groups, rows = duplicates.groups(connection, operation_id)
    return Duplicates(
        index=str(operations.index_name(row)),
        operation_id=operation_id,
        status=row.status,
        unique=row.is_unique,
        census=row.census,
        source=source,
        table=None if source is None else str(source.name),
        key=tuple(row.key_columns),
        primary_key=() if source is None else source.primary_key,
        groups=groups,
        rows=rows,
        apart=row.apart,
    )


def groups(
    connection: Connection,
    of: Duplicates,
    after: int = 0,
    limit: int | None = None,
    healed: bool = False,
    rows_each: int | None = None,
) -> Iterator[Group]:
    """The groups, in the order in which they were found. A large group comes in several pieces with the same id.

    after: the id of the last group that the caller has. healed: also those that are healed. rows_each: the most rows of
    each group, at most 5,000; then each group is one piece.
    """
    left = limit
    while left is None or left > 0:
        most = PAGE if left is None else min(PAGE, left)
        values = {"operation": of.operation_id, "after": after, "healed": healed, "most": most}
        found = execute(connection, GROUPS, values).all()
        for some in _together(found, rows_each or ROWS):
            yield from _pieces(connection, of, some, healed, rows_each)
        if len(found) < most:
            return
        after = found[-1].id
        left = None if left is None else left - most


def _together(found: Sequence[Row[Any]], most: int) -> Iterator[list[Row[Any]]]:
    """The groups, in lists to be read at once: of at most 5,000 rows, or of one larger group."""
    some: list[Row[Any]] = []
    rows = 0
    for group in found:
        if some and rows + min(group.size, most) > ROWS:
            yield some
            some, rows = [], 0
        some.append(group)
        rows += min(group.size, most)
    if some:
        yield some


def _pieces(
    connection: Connection, of: Duplicates, some: Sequence[Row[Any]], healed: bool, rows_each: int | None
) -> Iterator[Group]:
    values = {"operation": of.operation_id, "healed": healed, "each": rows_each or ROWS}
    members: dict[int, list[Row[Any]]] = {group.key_hash: [] for group in some}
    rows = execute(connection, MEMBERS, {**values, "hashes": list(members), "after": 0}).all()
    places = _places(connection, of, rows)
    for row in rows:
        members[row.key_hash].append(row)
    for group in some:
        read = members[group.key_hash]
        key = tuple(read[0].shared_key) if read else ()
        while read:
            yield Group(group.id, key, group.size, tuple(_member(row, places) for row in read))
            if rows_each is not None or len(read) < ROWS:
                break
            further = {**values, "hashes": [group.key_hash], "after": read[-1].id}
            read = list(execute(connection, MEMBERS, further))
            places = _places(connection, of, read)


def _places(connection: Connection, of: Duplicates, rows: Sequence[Row[Any]]) -> dict[tuple[str | None, ...], str]:
    """The partitions of rows for which none is recorded: a build records them when it pauses, and not of very many."""
    if of.source is None or of.apart:
        return {}
    lacking = (tuple(row.primary_key) for row in rows if row.partition is None)
    keys = dict.fromkeys(key for key in lacking if len(key) == len(of.primary_key))
    return whereabouts.look(connection, of.source, keys) if keys else {}


def _member(row: Row[Any], places: Mapping[tuple[str | None, ...], str]) -> Member:
    key = tuple(row.primary_key)
    return Member(tuple(row.key), key, row.partition or places.get(key), row.phase, row.found_at, row.healed_at)


def page(database: Database, operation_id: int, after: int, most: int = 50) -> dict[str, Any]:
    """Some groups, also healed ones, as short texts. `last`: there are no more. Raises NotFound."""
    with database.transaction() as connection:
        of = read(connection, operation_id)
        listed = list(groups(connection, of, after, most + 1, healed=True, rows_each=FIRST))
    return {
        "groups": [
            {
                "id": group.id,
                "key": listing(group.key),
                "count": group.count,
                "rows": [
                    {
                        "primary_key": listing(one.primary_key),
                        "partition": one.partition,
                        "found_at": one.found_at.isoformat(),
                        "healed_at": None if one.healed_at is None else one.healed_at.isoformat(),
                    }
                    for one in group.rows
                ],
            }
            for group in listed[:most]
        ],
        "last": len(listed) <= most,
    }


def first(database: Database, operation_id: int) -> tuple[Duplicates, list[Group]]:
    """The duplicates of an operation, and its first groups with their first rows. Raises NotFound."""
    with database.transaction() as connection:
        found = read(connection, operation_id)
        return found, list(groups(connection, found, limit=FIRST, rows_each=FIRST))


def first_lines(database: Database, operation_id: int, after: int = 0) -> list[str]:
    """A line for each of some groups, and one for how many more there are. after: as of `groups`."""
    with database.transaction() as connection:
        found = read(connection, operation_id)
        listed = list(groups(connection, found, after, EXAMPLES, rows_each=EXAMPLES))
    lines = [found.line(group) for group in listed]
    if listed and found.groups > len(listed):
        more = counted(found.groups - len(listed), "key")
        lines.append(f"… and {more} more: roir duplicates {argument(found.index)}")
    return lines


def last_id(database: Database, operation_id: int) -> int:
    """The id of the last row that is recorded for an operation, 0 if there is none: groups found later come after."""
    with database.transaction() as connection:
        return int(execute(connection, LAST, {"operation": operation_id}).scalar_one())
