"""Fills the holders of an index that has keys already, and decides keys that two shards may have
(docs/architecture-shards.md#unique-over-shards).

`enforce.py` decides when these statements run: each function is a part of its caller's transaction.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.locks.locks import Attempts, Drain
from airflow_roir.engine.source import catalog
from airflow_roir.engine.unique import duplicates, shared_keys
from airflow_roir.shards.announce import intents
from airflow_roir.shards.announce.intents import Shape
from airflow_roir.shards.unique.holders import contested, same, table, whole

# No poll may remove or bring rows while a batch is looked at.
HOLD_POLLS = "SELECT FROM roir.feed WHERE generation_id = %(generation)s ORDER BY id FOR SHARE"
# In the order of the index, so that two transactions that put the same keys lock them in the same order.
FROM_INTENTS = """
INSERT INTO {holder} ({key}, {shard}) SELECT DISTINCT {key}, {shard} FROM {intent} i WHERE {whole_i} ORDER BY {key}
    ON CONFLICT ({key}) DO NOTHING
"""
OF_INTENTS = """
INSERT INTO {contested} ({key}) SELECT DISTINCT {i_key} FROM {intent} i
 WHERE {whole_i} AND NOT EXISTS (SELECT FROM {holder} h WHERE {same_h_i})
"""
FROM_ENTRIES = """
INSERT INTO {holder} ({key}, {shard})
SELECT DISTINCT {key}, {shard} FROM {segment} b WHERE b.ctid >= %(first)s::tid AND b.ctid < %(last)s::tid AND {whole_b}
 ORDER BY {key} ON CONFLICT ({key}) DO NOTHING
"""
# A statement of its own, which sees holders that were put meanwhile.
OF_ENTRIES = """
INSERT INTO {contested} ({key})
SELECT DISTINCT {key} FROM {segment} b
 WHERE b.ctid >= %(first)s::tid AND b.ctid < %(last)s::tid AND {whole_b}
   AND NOT EXISTS (SELECT FROM {holder} h WHERE {same_h_b})
"""
# For each contested key: the number of shards with entries or intents, and of those with an entry that no intent names,
# which is a committed row.
SORTED = """
k AS MATERIALIZED (SELECT DISTINCT {key} FROM {contested}),
seen AS MATERIALIZED (
    SELECT {k_key}, s.shard, s.settled FROM k CROSS JOIN LATERAL (
        SELECT b.{shard} AS shard, NOT EXISTS (SELECT FROM {intent} i WHERE {identity_i_b}) AS settled
          FROM {base} b WHERE {key_b_k}
        UNION ALL SELECT i.{shard}, false FROM {intent} i WHERE {key_i_k}) s),
sorted AS MATERIALIZED (
    SELECT {key}, count(DISTINCT shard) AS shards, count(DISTINCT shard) FILTER (WHERE settled) AS rows,
           min(shard) AS shard
      FROM seen GROUP BY {key})
"""
ONE_SHARD = """
WITH {sorted} INSERT INTO {holder} ({key}, {shard}) SELECT {key}, shard FROM sorted WHERE shards = 1 ORDER BY {key}
    ON CONFLICT ({key}) DO UPDATE SET {shard} = EXCLUDED.{shard}
"""
DONE = """
WITH {sorted} DELETE FROM {contested} c WHERE NOT EXISTS (SELECT FROM sorted s WHERE s.shards > 1 AND {key_s_c})
"""
IN_TWO = "WITH {sorted} SELECT b.* FROM sorted s JOIN {base} b ON {key_b_s} WHERE s.rows > 1"
LOCATED = """
UPDATE roir.duplicate SET partition = primary_key ->> %(position)s
 WHERE operation_id = %(operation)s AND partition IS NULL
"""
BY_INDEX = "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"


def hold_polls(connection: Connection, generation_id: int) -> None:
    """Keeps polls from changing entries and intents until the transaction ends. To be called first in it."""
    execute(connection, HOLD_POLLS, {"generation": generation_id})


def of_intents(connection: Connection, generation_id: int) -> None:
    """Puts the holders of all intents. Marks a key that another shard has as contested."""
    names = _names(connection, generation_id)
    execute(connection, FROM_INTENTS.format(**names))
    execute(connection, OF_INTENTS.format(**names))


def of_entries(connection: Connection, generation_id: int, relation: int, first: int, last: int) -> None:
    """Puts the holders of the entries in some blocks of a segment; contested keys as in `of_intents`.

    relation: the segment's oid. first, last: its blocks, without the last one.
    """
    segment = catalog.name_of(connection, relation).sql
    names = _names(connection, generation_id) | {"segment": f"ONLY {segment}"}
    values = {"first": f"({first},0)", "last": f"({last},0)"}
    # Otherwise each batch would read all holders.
    execute(connection, BY_INDEX)
    execute(connection, FROM_ENTRIES.format(**names), values)
    execute(connection, OF_ENTRIES.format(**names), values)


def sort(connection: Connection, generation_id: int) -> int:
    """Gives contested keys that only one shard has now their holder; returns the number of the others."""
    execute(connection, BY_INDEX)
    names = _names(connection, generation_id)
    execute(connection, ONE_SHARD.format(**names))
    execute(connection, DONE.format(**names))
    return int(execute(connection, f"SELECT count(*) FROM {contested(generation_id)}").scalar_one())


def are_shared(connection: Connection, generation_id: int) -> bool:
    """True if committed rows of two shards share a key."""
    execute(connection, BY_INDEX)
    in_two = IN_TWO.format(**_names(connection, generation_id))
    return bool(execute(connection, f"SELECT EXISTS ({in_two})").scalar_one())


def list_shared(connection: Connection, generation_id: int, source_oid: int, operation_id: int) -> tuple[int, int]:
    """Writes down the rows of different shards that share a key, as duplicates of that operation, with their shards.

    Replaces earlier ones. Returns the numbers of keys and rows.
    """
    execute(connection, BY_INDEX)
    in_two, shape = IN_TWO.format(**_names(connection, generation_id)), _shape(connection, generation_id)
    source = catalog.read_source_by_oid(connection, source_oid, check=False)
    members = shared_keys.sharing(source, shape.entry, f"({in_two})")
    execute(connection, duplicates.RENEW.format(members=members), {"operation": operation_id})
    position = source.primary_key.index(shape.entry.columns[shape.shard].source)
    execute(connection, LOCATED, {"operation": operation_id, "position": position})
    return duplicates.groups(connection, operation_id)


def attempts(database: Database, generation_id: int, name: str, patience_s: float) -> Attempts:
    """The attempts of a transaction that puts holders beside writers. name: the name of the lock in messages.

    It gives way to writers soon: otherwise a deadlock with one would last until the server detects it.
    """
    return Attempts(database, name, _relations(database, generation_id), database.limits.attempt_ms, patience_s)


def drain(database: Database, generation_id: int, patience_s: float) -> Drain:
    """The drain of a transaction during which no other session puts a holder."""
    name, wait = intents.table(generation_id), database.limits.attempt_ms
    return Drain(database, name, _relations(database, generation_id), wait, patience_s)


def _relations(database: Database, generation_id: int) -> list[int]:
    # That of the intents first, which is locked by its name; an autovacuum of the others is in the way, too.
    names = [intents.table(generation_id), table(generation_id), contested(generation_id)]
    query = "SELECT to_regclass(n.name)::oid::bigint FROM unnest(%(names)s) WITH ORDINALITY n (name, i) ORDER BY n.i"
    with database.transaction() as connection:
        return list(execute(connection, query, {"names": names}).scalars())


def _shape(connection: Connection, generation_id: int) -> Shape:
    shape = intents.shape_of(connection, generation_id)
    return Shape(physical.followed(connection, generation_id, shape.entry), shape.shard)


def _names(connection: Connection, generation_id: int) -> dict[str, str]:
    """The names and conditions that the statements above contain."""
    shape = _shape(connection, generation_id)
    entry = shape.entry
    key, both = list(entry.key_positions), [*entry.key_positions, shape.shard]

    def listed(prefix: str = "") -> str:
        return ", ".join(entry.physical(key, prefix=prefix))

    names = {
        "key": listed(),
        "i_key": listed("i."),
        "k_key": listed("k."),
        "shard": shape.column,
        "base": physical.base(generation_id),
        "holder": table(generation_id),
        "contested": contested(generation_id),
        "intent": intents.table(generation_id),
        "whole_i": whole(entry, "i."),
        "whole_b": whole(entry, "b."),
        "same_h_i": same(entry, both, "h.", "i."),
        "same_h_b": same(entry, both, "h.", "b."),
        "identity_i_b": same(entry, list(entry.identity_positions), "i.", "b."),
        **{f"key_{a}_{b}": same(entry, key, f"{a}.", f"{b}.") for a, b in ("bk", "ik", "sc", "bs")},
    }
    return names | {"sorted": SORTED.format(**names)}
