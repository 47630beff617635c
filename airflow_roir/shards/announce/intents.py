"""Intents: on the index server, the entries that transactions of a shard may be changing (docs/architecture-shards.md).

Each was committed here before the transaction that it names commits in its shard. It goes once the truth of its entry
was applied, as of a snapshot in which that transaction had ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import DATA_SCHEMA, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.entry import Entry, EntryColumn, is_null
from airflow_roir.engine.schema import rights
from airflow_roir.shards.shard import Feed

# Younger intents are left: most of them are settled by the poll that brings their own rows.
OLD_S = 2.0

IDENTITY = tuple[str | None, ...]

# A rebuild gets the writers of the index's present generation.
WRITERS = f"""
SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END
  FROM roir.generation mine
  JOIN roir.generation g ON g.index_id = mine.index_id AND g.id < mine.id
  JOIN pg_class c ON c.oid = to_regclass(format('{DATA_SCHEMA}.g%%s_intent', g.id))
 CROSS JOIN LATERAL aclexplode(c.relacl) a
 WHERE mine.id = %(id)s AND a.privilege_type = 'INSERT' AND a.grantee <> c.relowner
"""
SHAPE = """
SELECT g.entry, i.shard_column FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.id = %(id)s
"""
HORIZON = "SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence(%(table)s, 'id')::regclass), 0)"
# Old intents are read from a random one on: those of transactions that are open for long must not hide the others.
FIRST = """
SELECT min(id) + floor(random() * (max(id) - min(id) + 1))::bigint FROM {table} i WHERE {old}
"""
OLD = "i.{shard} = %(shard)s AND i.at < clock_timestamp() - make_interval(secs => %(old)s)"
GONE_NAMED = """
DELETE FROM {table} WHERE id = ANY (%(ids)s::bigint[])
   AND (pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot) OR xid >= %(own)s::xid8)
"""
GONE = """
DELETE FROM {table} i
 USING (SELECT {values} FROM unnest({arrays}) v ({names})) v
 WHERE i.{shard} = %(shard)s AND {same}
   AND i.id <= %(horizon)s AND pg_visible_in_snapshot(i.xid, %(snapshot)s::pg_snapshot)
"""


@dataclass(frozen=True)
class Named:
    """An intent that the next poll must answer. identity: texts, in the order of the shard's entry."""

    id: int
    identity: IDENTITY
    xid: str


@dataclass(frozen=True)
class Look:
    """The old intents found before a poll. horizon: the poll settles no intent after this one.

    After a failover a shard assigns the same transaction ids again: so an older snapshot says nothing about a
    transaction that was announced later.
    """

    named: tuple[Named, ...] = ()
    horizon: int = 0


def table(generation_id: int) -> str:
    """The intents of a generation."""
    return f"{DATA_SCHEMA}.g{generation_id}_intent"


def create(connection: Connection, generation_id: int, entry: Entry) -> None:
    """Creates the table of a generation's intents, and the view by which readers see them.

    entry: the index server's, with the shard's column. The column `put`: whether the row exists after the transaction,
    if that is known. Roles that may write the intents of an earlier generation may write these, too.
    """
    name = table(generation_id)
    execute(
        connection,
        f"CREATE TABLE {name} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        f"{entry.definitions_of(entry.identity_positions)}, xid xid8 NOT NULL, put boolean, "
        "at timestamptz NOT NULL DEFAULT clock_timestamp()) "
        "WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)",
    )
    # Readers look up by the key, a poll that settles by the primary key.
    execute(connection, f"CREATE INDEX ON {name} ({', '.join(entry.physical(entry.key_positions))})")
    row = [f"c{i + 1}" for i in entry.identity_positions if entry.columns[i].primary_key]
    execute(connection, f"CREATE INDEX ON {name} ({', '.join(row)})")
    # Without statistics: a role that may name the view could read these by an operator of its own. And the rows change
    # all the time.
    for column in entry.physical(entry.identity_positions):
        execute(connection, f"ALTER TABLE {name} ALTER {column} SET STATISTICS 0")
    rights.take_back(connection, [name])
    for role in execute(connection, WRITERS, {"id": generation_id}).scalars().all():
        execute(connection, f"GRANT INSERT ON {name} TO {role}")
    _create_view(connection, generation_id, entry)


def drop(connection: Connection, generation_id: int) -> None:
    """Drops the table, if it exists."""
    found = execute(connection, "SELECT to_regclass(%(name)s)", {"name": table(generation_id)}).scalar()
    if found is not None:
        execute(connection, f"DROP VIEW IF EXISTS {readers_view(generation_id)}")
        execute(connection, f"DROP TABLE IF EXISTS {table(generation_id)}")


def look(connection: Connection, feed: Feed, limit: int, old_s: float = OLD_S) -> Look:
    """The intents of a feed that a poll must know. The transaction of this look must end before the poll begins.

    limit: the most old intents to name: their transactions have aborted, or have been open for long.
    """
    name = table(feed.generation_id)
    horizon = execute(connection, HORIZON, {"table": name}).scalar_one()
    if not horizon:
        return Look()
    shape = shape_of(connection, feed.generation_id)
    old = OLD.format(shard=shape.column)
    values: dict[str, Any] = {"shard": feed.shard.name, "old": old_s}
    first = execute(connection, FIRST.format(table=name, old=old), values).scalar()
    if first is None:
        return Look((), horizon)
    identity = ", ".join(text(shape.entry.columns[i], f"i.c{i + 1}") for i in shape.positions)
    found: list[Named] = []
    for side in (">=", "<"):
        rows = execute(
            connection,
            f"SELECT i.id, i.xid::text AS xid, ARRAY[{identity}]::text[] AS identity FROM {name} i "
            f"WHERE {old} AND i.id {side} %(first)s ORDER BY i.id LIMIT %(limit)s",
            values | {"first": first, "limit": limit - len(found)},
        )
        found += [Named(row.id, tuple(row.identity), row.xid) for row in rows]
    return Look(tuple(found), horizon)


def settle(
    connection: Connection,
    feed: Feed,
    polled: Sequence[IDENTITY],
    looked: Look,
    snapshot: str,
    own: str | int | None = None,
) -> int:
    """Deletes the intents that this transaction settles by the poll that it applies; returns their number.

    polled: the identities of the entries whose truth as of `snapshot` is applied, among them all of `looked.named`.
    own: the poll's own transaction id, which it drew after the look. An intent from before the look has a smaller id,
    unless its transaction belongs to a history that the shard has lost. A snapshot's end doesn't show that, since a
    transaction beyond it may be open.
    """
    if not looked.horizon:
        return 0
    name = table(feed.generation_id)
    gone = 0
    if looked.named:
        ids = [one.id for one in looked.named]
        # Without an own transaction id nothing counts as lost: the greatest possible id.
        ended = {"ids": ids, "snapshot": snapshot, "own": str(2**64 - 1 if own is None else own)}
        gone += execute(connection, GONE_NAMED.format(table=name), ended).rowcount
    shape = shape_of(connection, feed.generation_id)
    entry, positions = shape.entry, shape.positions
    for nulls, identities in _by_nulls(positions, polled):
        columns = [f"c{i + 1}" for i in positions]
        statement = GONE.format(
            table=name,
            values=", ".join(
                f"CAST(v.{column} AS {entry.columns[i].cast}) AS {column}"
                for column, i in zip(columns, positions, strict=True)
            ),
            arrays=", ".join(f"%({column})s::text[]" for column in columns),
            names=", ".join(columns),
            shard=shape.column,
            same=" AND ".join(
                entry.same_column(i, f"i.c{i + 1}", f"v.c{i + 1}", nulls.get(i, False)) for i in positions
            ),
        )
        arrays = {column: list(texts) for column, texts in zip(columns, zip(*identities, strict=True), strict=True)}
        values = {"shard": feed.shard.name, "horizon": looked.horizon, "snapshot": snapshot}
        gone += execute(connection, statement, arrays | values).rowcount
    return gone


@dataclass(frozen=True)
class Shape:
    """The columns of a generation's intents. entry: as on the index server; shard: the position of the shard's name."""

    entry: Entry
    shard: int

    @property
    def column(self) -> str:
        """The physical column that has the shard's name."""
        return f"c{self.shard + 1}"

    @property
    def positions(self) -> list[int]:
        """The identity's positions without that of the shard's name, in the shard's order."""
        return [i for i in self.entry.identity_positions if i != self.shard]


def shape_of(connection: Connection, generation_id: int) -> Shape:
    """The shape of a generation's intents."""
    row = execute(connection, SHAPE, {"id": generation_id}).one()
    entry = Entry.from_json(row.entry)
    return Shape(entry, [column.source for column in entry.columns].index(row.shard_column))


def _by_nulls(positions: Sequence[int], polled: Sequence[IDENTITY]) -> Iterator[tuple[dict[int, bool], list[IDENTITY]]]:
    """Groups identities by which of their columns are NULL: only conditions for one such pattern use an index."""
    patterns: defaultdict[tuple[bool, ...], list[IDENTITY]] = defaultdict(list)
    for identity in polled:
        patterns[tuple(value is None for value in identity)].append(identity)
    for pattern, identities in patterns.items():
        yield dict(zip(positions, pattern, strict=True)), identities


def text(column: EntryColumn, name: str) -> str:
    """SQL for a column's lossless text: a user-defined cast to text may lose something."""
    return text_of_own(name) if "." in column.cast else f"{name}::text"


def text_of_own(name: str) -> str:
    """SQL for the lossless text of a value of a user's own type, without a user-defined cast."""
    return f"CASE WHEN {is_null(name)} THEN NULL ELSE concat({name}) END"


def readers_view(generation_id: int) -> str:
    """The identities that intents name, under the names that the index's view gives them."""
    return f"{DATA_SCHEMA}.g{generation_id}_announced"


def _create_view(connection: Connection, generation_id: int, entry: Entry) -> None:
    """The view by which strict readers see the intents (docs/architecture-shards.md#reads).

    Each role that may read the index may read it: it checks that, and whether strict reads are possible, once per
    query.
    """
    row = next(i for i in entry.identity_positions if entry.columns[i].primary_key)
    columns = ", ".join(f"c{i + 1} AS {quote(entry.columns[i].source)}" for i in entry.identity_positions)
    execute(
        connection,
        f"CREATE VIEW {readers_view(generation_id)} AS SELECT {columns} "
        f"FROM {DATA_SCHEMA}.g{generation_id}_intent "
        # The intent by which `roir announce` tests the connection names no row. is_strict comes first, since another
        # generation may be published meanwhile.
        f"WHERE c{row + 1} IS NOT NULL "
        f"AND (SELECT CASE WHEN roir.is_strict({generation_id}) THEN roir.may_read({generation_id}) END)",
    )
    execute(connection, f"GRANT SELECT ON {readers_view(generation_id)} TO PUBLIC")
