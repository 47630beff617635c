"""Keeps holders on the index server: for each key of an index that is unique over shards, the shard that may have it.

A holder comes with the first intent that names its key, and goes once the index server has neither an entry nor an
intent of that key in that shard (docs/architecture-shards.md#unique-over-shards).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.definition import DATA_SCHEMA, QualifiedName
from airflow_roir.engine.capture.plpgsql import function, indent, literal
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.schema import rights
from airflow_roir.shards.announce import intents
from airflow_roir.shards.announce.intents import Shape
from airflow_roir.shards.capture.outbox import BY_INDEX
from airflow_roir.shards.ship import feeds

# The modes of a put. OFF: does nothing. COUNT: puts its holder, and marks a key that another shard has. REFUSE: puts
# its holder, and is refused if another shard has the key.
OFF, COUNT, REFUSE = "off", "count", "refuse"
# The id in the intent that a poll leaves behind if it couldn't look: no transaction has it, and it ended long ago.
ENDED_XID = "2"

# Without the reason that makes reads wait after a restart: a restart loses no key.
STILL = "SELECT roir.strict_problem(%(id)s, false)"
MODE = "SELECT unique_mode FROM roir.generation WHERE id = %(id)s"
# Compare-and-set: if several polls notice the same problem, one of them ends it, and the others wait for that one.
ENDED = """
UPDATE roir.generation g SET unique_mode = 'off', unique_from = NULL, unique_history = NULL, unique_lost = %(why)s
  FROM roir.index i
 WHERE g.id = %(id)s AND g.unique_mode <> 'off' AND i.id = g.index_id
RETURNING g.index_id
"""
# Only for a generation that is shipped: otherwise no key would ever become free. Compare-and-set: if an abort, a
# failure or a drop has ended it meanwhile, that stays.
SET = f"""
UPDATE roir.generation g SET unique_mode = %(mode)s, unique_lost = NULL,
       unique_from = CASE WHEN %(refuses)s THEN clock_timestamp() END,
       unique_history = CASE WHEN %(refuses)s THEN roir.server_history() END
 WHERE g.id = %(id)s AND g.unique_mode = ANY (%(expected)s) AND {feeds.LIVE}
"""
NAME = """
SELECT i.id, i.schema_name, i.name FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %(id)s
"""
LOCK = """
WITH {given}, k AS MATERIALIZED (SELECT DISTINCT {columns} FROM d WHERE {whole})
SELECT h.ctid::text FROM {holder} h JOIN k ON {same_h_k} FOR UPDATE OF h SKIP LOCKED
"""
RELEASE = """
DELETE FROM {holder} h
 WHERE h.ctid = ANY (%(locked)s::tid[])
   AND NOT EXISTS (SELECT FROM {base} b WHERE {same_b_h}) AND NOT EXISTS (SELECT FROM {intent} i WHERE {same_i_h})
"""
FREE = "SELECT h.ctid::text FROM {holder} h WHERE h.ctid = ANY (%(spots)s::tid[]) FOR UPDATE OF h SKIP LOCKED"
# One intent is enough for each holder.
LEAVE = """
WITH {given}
INSERT INTO {intent} ({identity}, xid)
SELECT DISTINCT ON ({columns}) {identity}, '{ended}' FROM d
 WHERE {whole} AND EXISTS (SELECT FROM {holder} h WHERE {same_h_d} AND h.ctid <> ALL (%(locked)s::tid[]))
   AND NOT EXISTS (SELECT FROM {intent} i WHERE {same_i_d})
"""
MARK = """
WITH {given}
INSERT INTO {contested} ({key}) SELECT DISTINCT {key} FROM d
 WHERE {whole} AND NOT EXISTS (SELECT FROM {holder} h WHERE {same_h_d})
"""


def table(generation_id: int) -> str:
    """The holders: keys, unique, each with the name of its shard."""
    return f"{DATA_SCHEMA}.g{generation_id}_holder"


def contested(generation_id: int) -> str:
    """The keys that were found in two shards; one key may be there several times."""
    return f"{DATA_SCHEMA}.g{generation_id}_contested"


def create(connection: Connection, generation_id: int) -> None:
    """Creates the tables of a generation's holders, after that of its intents. No write is refused yet."""
    shape = intents.shape_of(connection, generation_id)
    entry = shape.entry
    key = ", ".join(entry.physical(entry.key_positions))
    columns = entry.definitions_of([*entry.key_positions, shape.shard])
    # To lock a holder is an update of its row.
    execute(
        connection,
        f"CREATE TABLE {table(generation_id)} ({columns}) "
        "WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.05)",
    )
    execute(connection, f"CREATE UNIQUE INDEX ON {table(generation_id)} ({key})")
    execute(connection, f"CREATE TABLE {contested(generation_id)} ({entry.definitions_of(entry.key_positions)})")
    rights.take_back(connection, [table(generation_id), contested(generation_id)])
    begun = "UPDATE roir.generation SET unique_mode = 'off' WHERE id = %(id)s AND unique_mode IS NULL"
    execute(connection, begun, {"id": generation_id})
    _replace(connection, generation_id, OFF)
    execute(
        connection,
        f"CREATE TRIGGER roir_put BEFORE INSERT ON {intents.table(generation_id)} FOR EACH ROW "
        f"WHEN (NEW.xid <> '{ENDED_XID}') EXECUTE FUNCTION {_function(generation_id)}()",
    )
    # ALWAYS: it fires under every session_replication_role.
    execute(connection, f"ALTER TABLE {intents.table(generation_id)} ENABLE ALWAYS TRIGGER roir_put")


def drop(connection: Connection, generation_id: int) -> None:
    """Drops the holders, if there are any; call it after the drop of the intents."""
    execute(connection, f"DROP TABLE IF EXISTS {table(generation_id)}, {contested(generation_id)}")
    execute(connection, f"DROP FUNCTION IF EXISTS {_function(generation_id)}()")


def mode(connection: Connection, generation_id: int) -> str | None:
    """The mode of puts now; None if the generation isn't unique over shards. Call it under the lock of a feed's row."""
    found: str | None = execute(connection, MODE, {"id": generation_id}).scalar_one()
    return found


def begin(connection: Connection, generation_id: int) -> bool:
    """Turns on the mode COUNT, without holders yet. Call it under the lock that waits for the puts in flight.

    False, without a change, if the generation isn't shipped any more.
    """
    if not _set_mode(connection, generation_id, COUNT, OFF, COUNT):
        return False
    execute(connection, f"TRUNCATE {table(generation_id)}, {contested(generation_id)}")
    return True


def refuse(connection: Connection, generation_id: int) -> bool:
    """Turns on the mode REFUSE. Call it under the lock that waits for the puts in flight.

    The mode is in the function's text: a put that waits for this lock has its snapshot already, and would read an older
    row of the mode. False, without a change, if it was ended meanwhile, or the generation isn't shipped any more.
    """
    return _set_mode(connection, generation_id, REFUSE, COUNT)


def end(connection: Connection, generation_id: int, why: str | None, actor: str) -> None:
    """Turns on the mode OFF: otherwise rows of one key in two shards could be neither changed nor deleted."""
    found = execute(connection, ENDED, {"id": generation_id, "why": why}).first()
    if found is not None:
        _replace(connection, generation_id, OFF)
        said = "not enforced" if why is None else f"not enforced: {why}"
        operations.record_event(connection, found.index_id, None, actor, "unique", said)


def follow(
    connection: Connection,
    generation_id: int,
    actor: str,
    shard: str | None = None,
    there: Sequence[str] = (),
    gone: Sequence[str] = (),
    problem: str | None = None,
) -> None:
    """Updates the holders in a transaction that has written entries and removed intents, under the lock of their feed's
    row.

    shard: the owner of these entries, whatever they say; None: the shards that the entries name, which aren't shipped
    any more. there, gone: entries as texts, that were brought and that were taken away. problem: why keys may be in two
    shards from now on; if None, this looks for a problem.
    """
    now = mode(connection, generation_id)
    if now in (None, OFF):
        return
    problem = problem or execute(connection, STILL, {"id": generation_id}).scalar_one()
    if problem is None and (there or gone):
        shape = intents.shape_of(connection, generation_id)
        shape = Shape(physical.followed(connection, generation_id, shape.entry), shape.shard)
        if gone:
            _settle(connection, generation_id, shape, shard, gone)
        # The transaction of a row has put its holder before. A row without a holder was lost, and came back.
        if there and _mark(connection, generation_id, shape, shard, there) and now == REFUSE:
            problem = "a row has come back whose key was free meanwhile, so that two shards may have it"
    if problem is not None:
        end(connection, generation_id, problem, actor)


def release(connection: Connection, generation_id: int, spots: Sequence[str]) -> None:
    """Removes holders, by their places, that have neither an entry nor an intent; leaves those that a put has
    locked."""
    names = _names(generation_id, intents.shape_of(connection, generation_id))
    found = execute(connection, FREE.format(**names), {"spots": list(spots)}).scalars()
    # A statement of its own, as in `_settle`.
    execute(connection, RELEASE.format(**names), {"locked": list(found)})


def _settle(connection: Connection, generation_id: int, shape: Shape, shard: str | None, gone: Sequence[str]) -> None:
    values: dict[str, object] = {"entries": list(gone), "shard": shard}
    names = _names(generation_id, shape, shard)
    values["locked"] = list(execute(connection, LOCK.format(**names), values).scalars())
    # A statement of its own: it sees the intents of all transactions that had locked these holders before.
    execute(connection, RELEASE.format(**names), values)
    # No poll would look at such an intent. The next verification finds a holder that is left.
    if shard is not None:
        execute(connection, LEAVE.format(**names), values)


def _mark(connection: Connection, generation_id: int, shape: Shape, shard: str | None, there: Sequence[str]) -> int:
    values = {"entries": list(there), "shard": shard}
    return execute(connection, MARK.format(**_names(generation_id, shape, shard)), values).rowcount


def _names(generation_id: int, shape: Shape, shard: str | None = None) -> dict[str, str]:
    entry, base = shape.entry, physical.base(generation_id)
    positions = [*entry.key_positions, shape.shard]
    identity = entry.physical(entry.identity_positions)
    taken = ", ".join(
        f"%(shard)s::text AS {name}" if shard is not None and name == shape.column else f"(g.entry).{name}"
        for name in identity
    )
    given = (
        f"given AS MATERIALIZED (SELECT e::{base} AS entry FROM unnest(%(entries)s::text[]) e), "
        f"d AS MATERIALIZED (SELECT {taken} FROM given g)"
    )
    pairs = ("h_k", "b_h", "i_h", "h_d", "i_d")
    return {
        "given": given,
        "columns": ", ".join(f"d.{name}" for name in entry.physical(positions)),
        "key": ", ".join(entry.physical(entry.key_positions)),
        "identity": ", ".join(identity),
        "whole": whole(entry, "d."),
        "base": base,
        "holder": table(generation_id),
        "contested": contested(generation_id),
        "intent": intents.table(generation_id),
        "ended": ENDED_XID,
        **{f"same_{pair}": same(entry, positions, *(f"{one}." for one in pair.split("_"))) for pair in pairs},
    }


def whole(entry: Entry, prefix: str) -> str:
    """A condition in SQL: no column of a key is NULL."""
    return " AND ".join(f"NOT {is_null(name)}" for name in entry.physical(entry.key_positions, prefix=prefix))


def same(entry: Entry, positions: Sequence[int], left: str, right: str) -> str:
    """A condition in SQL: two relations have equal values at these positions, none NULL. left, right: `alias.`
    prefixes."""
    return " AND ".join(entry.same_column(i, f"{left}c{i + 1}", f"{right}c{i + 1}", False) for i in positions)


def _set_mode(connection: Connection, generation_id: int, now: str, *expected: str) -> bool:
    values = {"id": generation_id, "mode": now, "refuses": now == REFUSE, "expected": list(expected)}
    # The row first: a transaction that ends it waits for that, and replaces the function afterwards.
    changed = execute(connection, SET, values).rowcount
    if changed:
        _replace(connection, generation_id, now)
    return bool(changed)


def _replace(connection: Connection, generation_id: int, now: str) -> None:
    name = _function(generation_id)
    shape = intents.shape_of(connection, generation_id)
    execute(connection, function(name, _put(connection, generation_id, shape, now), BY_INDEX))
    rights.take_back(connection, (), [f"{name}()"])


def _function(generation_id: int) -> str:
    return f"{DATA_SCHEMA}.g{generation_id}_put"


def _put(connection: Connection, generation_id: int, shape: Shape, now: str) -> str:
    """The function that runs before each intent is written. Intents of a key with a NULL have no holder."""
    if now == OFF:
        return "BEGIN\n  RETURN NEW;\nEND"
    entry, shard = shape.entry, shape.column
    key = ", ".join(entry.physical(entry.key_positions))
    values = ", ".join(entry.physical(entry.key_positions, prefix="NEW."))
    here = same(entry, entry.key_positions, "h.", "NEW.")
    lines = [
        "DECLARE",
        "  holder text;",
        "BEGIN",
        f"  WHILE {whole(entry, 'NEW.')} LOOP",
        f"    INSERT INTO {table(generation_id)} ({key}, {shard}) VALUES ({values}, NEW.{shard})",
        f"      ON CONFLICT ({key}) DO NOTHING;",
        "    EXIT WHEN FOUND;",
        # A poll that deletes it then waits for us.
        f"    SELECT h.{shard} INTO holder FROM {table(generation_id)} h WHERE {here} FOR KEY SHARE;",
        "    CONTINUE WHEN NOT FOUND;",
        f"    EXIT WHEN holder = NEW.{shard};",
        *indent(
            [f"INSERT INTO {contested(generation_id)} ({key}) VALUES ({values});", "EXIT;"]
            if now == COUNT
            else _refused(connection, generation_id, shape),
            2,
        ),
        "  END LOOP;",
        "  RETURN NEW;",
        "END",
    ]
    return "\n".join(lines)


def _refused(connection: Connection, generation_id: int, shape: Shape) -> list[str]:
    entry = shape.entry
    index = execute(connection, NAME, {"id": generation_id}).one().name
    there = same(entry, entry.key_positions, "i.", "NEW.")
    names = ", ".join(str(QualifiedName(None, column.source)) for column in entry.columns[: entry.key])
    leaving = f"could not serialize access: a key of {index} may be about to leave shard "
    texts = ", ".join(f"concat({name})" for name in entry.physical(entry.key_positions, prefix="NEW."))
    return [
        f"IF EXISTS (SELECT FROM {intents.table(generation_id)} i WHERE {there} AND i.{shape.column} = holder) THEN",
        "  RAISE serialization_failure USING",
        f"    MESSAGE = concat({literal(leaving)}, quote_ident(holder)),",
        "    HINT = 'Retry the transaction.';",
        "END IF;",
        "RAISE unique_violation USING",
        f"  MESSAGE = {literal(violated(index))},",
        f"  DETAIL = concat({literal(f'Key ({names})=(')}, concat_ws(', ', {texts}),",
        "                  format(') already exists in shard %I.', holder));",
    ]


def violated(index: str) -> str:
    """PostgreSQL's own message for a duplicate."""
    return f'duplicate key value violates unique constraint "{index}"'
