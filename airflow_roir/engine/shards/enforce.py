"""Begins to enforce a unique index over shards: looks its keys over, then lets holders refuse
(docs/architecture.md#unique-over-shards).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, select

from airflow_roir.definition import argument, parse_name
from airflow_roir.engine import catalog, duplicates, operations, tables
from airflow_roir.engine import generation as physical
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.duplicate_report import NEWEST
from airflow_roir.engine.files import cut, files_of, segments_of
from airflow_roir.engine.locks import Attempts, Drain
from airflow_roir.engine.shards import holders, intents, unique
from airflow_roir.engine.shards.announce import PATIENCE_S, strict_problem
from airflow_roir.engine.shards.announce_functions import SERVER
from airflow_roir.engine.shards.holders import contested, same, table, whole
from airflow_roir.engine.shards.intents import Shape
from airflow_roir.engine.shards.shipping import Shipper
from airflow_roir.errors import DuplicatesFound, LockNotAcquired, NotStrict, RoirError
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.quantity import shared

Report = Callable[[str], None]

# Blocks of entries that are looked over while no shard is shipped: some tenths of a second.
BLOCKS = 256
EVERY_S = 0.2
# For what a replaced generation lacks.
RETIRED_PATIENCE_S = 10.0
# Two at once would each begin with no holder.
HOLD = "SELECT pg_try_advisory_lock(hashtext('roir unique'), %(generation)s::int)"
LET_GO = "SELECT pg_advisory_unlock(hashtext('roir unique'), %(generation)s::int)"
# What a visit takes away, or brings, must be as it is while a batch is looked at.
HOLD_VISITS = "SELECT FROM roir.lane WHERE generation_id = %(generation)s ORDER BY id FOR SHARE"
LIVE = """
SELECT g.id, g.status FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.id = %(index)s AND g.status IN ('active', 'retired') AND g.unique_mode IS NOT NULL
   AND i.announced_by = %(server)s
 ORDER BY g.status, g.id DESC
"""
TO_KEEP = """
SELECT roir.unique_problem(x.id) IS NULL AS enforced
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
  LEFT JOIN roir.generation x ON x.index_id = i.id AND x.status = 'active'
 WHERE g.id = %(generation)s AND g.unique_mode IS NOT NULL AND i.announced_by = %(server)s
"""
NAME = """
SELECT format('%%I.%%I', i.schema_name, i.name) AS name, i.id, i.source_oid, g.status
  FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %(generation)s
"""
# What no shipping ends: of lanes so many are in doubt, and so many are not announced now.
UNFIT = """
SELECT count(*) FILTER (WHERE doubtful_at IS NOT NULL) AS doubtful,
       count(*) FILTER (WHERE strict_from IS NULL OR strict_history IS DISTINCT FROM roir.server_history()) AS silent
  FROM roir.lane WHERE generation_id = %(generation)s AND removed_at IS NULL
"""
# In the order of the index: two that put the same keys meet in it alike.
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
# A statement of its own: it sees what was put meanwhile.
OF_ENTRIES = """
INSERT INTO {contested} ({key})
SELECT DISTINCT {key} FROM {segment} b
 WHERE b.ctid >= %(first)s::tid AND b.ctid < %(last)s::tid AND {whole_b}
   AND NOT EXISTS (SELECT FROM {holder} h WHERE {same_h_b})
"""
# Of each contested key the shards that have entries or intents, and those that have an entry which no intent names: a
# committed row.
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


def enforce_index(database: Database, index: str, report: Report = lambda line: None) -> bool:
    """Enforce a unique index over shards whose writes are announced; False if it isn't one.

    It is safe to call again, and begins from the start. Raises DuplicatesFound (roir duplicates lists them), NotStrict
    (not yet, and why), LockNotAcquired; whatever it raises, nothing is refused. What keeps a replaced generation
    from it is only reported.
    """
    with database.transaction() as connection:
        row = operations.find_index(connection, parse_name(index, "index"))
        live = execute(connection, LIVE, {"index": row.id, "server": SERVER}).all()
    for one in live:
        if one.status == GenerationStatus.ACTIVE.value:
            Enforcing(database, one.id, report).run()
            continue
        try:
            Enforcing(database, one.id, report, RETIRED_PATIENCE_S, lists=False).run()
        except (DuplicatesFound, NotStrict, LockNotAcquired) as error:
            # A shard that only this generation is over may be gone for good.
            report(f"generation {one.id}, which a revert would show, isn't enforced: {error}")
    return bool(live)


def keep_on(database: Database, generation_id: int, report: Report = lambda line: None) -> None:
    """Before a rebuild is published: enforce it as the generation that it replaces. Raises as `enforce_index`.

    If that one isn't enforced, what can't be is only told.
    """
    with database.transaction() as connection:
        row = execute(connection, TO_KEEP, {"generation": generation_id, "server": SERVER}).first()
    if row is None:
        return
    try:
        Enforcing(database, generation_id, report).run()
    except (DuplicatesFound, NotStrict, LockNotAcquired) as error:
        if row.enforced:
            raise
        report(f"not enforced: {error}")


@dataclass
class Enforcing:
    """Begins it for one generation, step by step. lists: duplicates, for who heals them. why: why it can't."""

    database: Database
    generation_id: int
    report: Report = lambda line: None
    patience_s: float = PATIENCE_S
    lists: bool = True
    why: str | None = None

    def run(self) -> None:
        """All of it. Raises as `enforce_index`."""
        with self._alone():
            with self.database.transaction() as connection:
                if holders.mode(connection, self.generation_id) == holders.REFUSE:
                    if unique.problem(connection, self.generation_id) is None:
                        return
                    holders.end(connection, self.generation_id, None, operations.default_actor())
            shipper = Shipper(
                self.database, self.report, every_s=EVERY_S, generation_id=self.generation_id, shares=False
            )
            try:
                with shipper.running():
                    self.await_announced()
                    self.begin()
                    self.fill()
                    self.await_switch()
            except BaseException as error:
                self._give_up(error)
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self.database.autocommit() as connection:
            if not execute(connection, HOLD, {"generation": self.generation_id}).scalar_one():
                raise LockNotAcquired(f"index {self._name()}: another process looks its keys over. Try again")
            try:
                yield
            finally:
                if not connection.invalidated:
                    execute(connection, LET_GO, {"generation": self.generation_id})

    def await_announced(self) -> None:
        """Until all that was committed before writers announced has come. Raises NotStrict."""
        until = time.monotonic() + self.patience_s
        while True:
            with self.database.transaction() as connection:
                problem = strict_problem(connection, self.generation_id)
                unfit = execute(connection, UNFIT, {"generation": self.generation_id}).one()
            if problem is None:
                return
            if unfit.doubtful:
                problem += f". roir verify {argument(self._name())} --repair ends that"
            if unfit.doubtful or unfit.silent or time.monotonic() > until:
                raise NotStrict(f"index {self._name()} isn't enforced yet: {problem}. Then, again: {self._again()}")
            time.sleep(EVERY_S)

    def begin(self) -> None:
        """Holders count from now on; those of intents are there."""

        def body(connection: Connection, lock: Callable[[], None]) -> None:
            self._hold_visits(connection)
            lock()
            if not holders.begin(connection, self.generation_id):
                raise NotStrict(self._ended())
            names = self._names(connection)
            execute(connection, FROM_INTENTS.format(**names))
            execute(connection, OF_INTENTS.format(**names))

        self._drain().run(body, self.report)

    def fill(self) -> None:
        """Holders of all entries. Entries that come meanwhile have one, or are marked."""
        with self.database.transaction() as connection:
            before = files_of(connection, segments_of(connection, self.generation_id))
        for file, first, last in cut(before, BLOCKS):
            self.fill_blocks(file.relation, first, last)
        with self.database.transaction() as connection:
            after = files_of(connection, segments_of(connection, self.generation_id))
            if [(file.relation, file.filenode) for file in before] != [(one.relation, one.filenode) for one in after]:
                raise NotStrict(f"index {self._name()}: its tables were rewritten meanwhile. Again: {self._again()}")

    def fill_blocks(self, relation: int, first: int, last: int) -> None:
        """Holders of some blocks of a segment."""

        def body(connection: Connection) -> None:
            self._hold_visits(connection)
            self._check(connection)
            name = catalog.name_of(connection, relation).sql
            names = self._names(connection) | {"segment": f"ONLY {name}"}
            values = {"first": f"({first},0)", "last": f"({last},0)"}
            # Else each batch would read all holders there are.
            execute(connection, BY_INDEX)
            execute(connection, FROM_ENTRIES.format(**names), values)
            execute(connection, OF_ENTRIES.format(**names), values)

        # It gives way to writers: two that wait for each other's keys would else be found only later.
        self._attempts().run(body, self.report)

    def await_switch(self) -> None:
        """Until no key is contested; then holders refuse. Raises DuplicatesFound, NotStrict."""
        until = time.monotonic() + self.patience_s
        while True:
            self.list_duplicates()
            left = self.switch()
            if not left:
                return
            if time.monotonic() > until:
                raise NotStrict(
                    f"index {self._name()} isn't enforced yet: transactions are open that may change keys of two "
                    f"shards. When they have ended, again: {self._again()}"
                )
            time.sleep(EVERY_S)

    def list_duplicates(self) -> None:
        """Write down which keys are in two shards. Raises DuplicatesFound if there are some."""
        with self.database.transaction() as connection:
            self._hold_visits(connection)
            self._check(connection)
            execute(connection, BY_INDEX)
            row = execute(connection, NAME, {"generation": self.generation_id}).one()
            operation = execute(connection, NEWEST, {"index": row.id}).scalar()
            if operation is None:
                return
            names, shape = self._names(connection), self._shape(connection)
            if not self.lists:
                found = execute(connection, f"SELECT EXISTS ({IN_TWO.format(**names)})").scalar_one()
                if found:
                    raise DuplicatesFound(f"index {row.name}: its shards share keys")
                return
            source = catalog.read_source_by_oid(connection, row.source_oid, check=False)
            members = duplicates.sharing(source, shape.entry, f"({IN_TWO.format(**names)})")
            execute(connection, duplicates.RENEW.format(members=members), {"operation": operation})
            position = source.primary_key.index(shape.entry.columns[shape.shard].source)
            execute(connection, LOCATED, {"operation": operation, "position": position})
            keys, rows = duplicates.groups(connection, operation)
        if keys:
            self.why = f"in several shards {shared(keys, rows)} (roir duplicates {argument(row.name)})"
            raise DuplicatesFound(
                f"index {row.name}: in several shards {shared(keys, rows)} of the unique index, so it isn't enforced. "
                f"roir duplicates {argument(row.name)} lists them; change or delete rows until each key is left once, "
                f"then: {self._again()}"
            )

    def switch(self) -> int:
        """Let holders refuse, unless a key is contested; how many are."""

        def body(connection: Connection, lock: Callable[[], None]) -> int:
            self._hold_visits(connection)
            lock()
            self._check(connection)
            execute(connection, BY_INDEX)
            names = self._names(connection)
            execute(connection, ONE_SHARD.format(**names))
            execute(connection, DONE.format(**names))
            left = int(execute(connection, f"SELECT count(*) FROM {contested(self.generation_id)}").scalar_one())
            if not left:
                if not holders.refuse(connection, self.generation_id):
                    raise NotStrict(self._ended())
                index = execute(connection, NAME, {"generation": self.generation_id}).one().id
                operations.record_event(connection, index, None, operations.default_actor(), "unique", "enforced")
            return left

        return self._drain().run(body, self.report)

    def _give_up(self, error: BaseException) -> None:
        why = self.why or (type(error).__name__ if not isinstance(error, RoirError) else str(error))
        with self.database.transaction() as connection:
            holders.end(connection, self.generation_id, why, operations.default_actor())

    def _hold_visits(self, connection: Connection) -> None:
        execute(connection, HOLD_VISITS, {"generation": self.generation_id})

    def _check(self, connection: Connection) -> None:
        """Raise NotStrict if a visit has found meanwhile that keys can't be enforced."""
        if holders.mode(connection, self.generation_id) != holders.COUNT:
            lost = select(tables.generation.c.unique_lost).where(tables.generation.c.id == self.generation_id)
            why = connection.execute(lost).scalar_one()
            raise NotStrict(self._ended() if why is None else f"index {self._name()} isn't enforced: {why}")
        problem = strict_problem(connection, self.generation_id)
        if problem is not None:
            raise NotStrict(f"index {self._name()} isn't enforced: {problem}. Then, again: {self._again()}")

    def _ended(self) -> str:
        return (
            f"index {self._name()}: generation {self.generation_id} isn't enforced. That was ended meanwhile, or its "
            "operation is over, so that its keys aren't shipped any more"
        )

    def _name(self) -> str:
        with self.database.transaction() as connection:
            return str(execute(connection, NAME, {"generation": self.generation_id}).one().name)

    def _again(self) -> str:
        with self.database.transaction() as connection:
            row = execute(connection, NAME, {"generation": self.generation_id}).one()
        name = argument(row.name)
        # It is a rebuild that stops, to go on from here.
        return f"roir resume {name}" if row.status == "building" else f"roir announce {name} --by server"

    def _shape(self, connection: Connection) -> Shape:
        shape = intents.shape_of(connection, self.generation_id)
        return Shape(physical.followed(connection, self.generation_id, shape.entry), shape.shard)

    def _relations(self) -> list[int]:
        # That of the intents first, which is locked by its name; an autovacuum of the others is in the way, too.
        names = [intents.table(self.generation_id), table(self.generation_id), contested(self.generation_id)]
        query = (
            "SELECT to_regclass(n.name)::oid::bigint FROM unnest(%(names)s) WITH ORDINALITY n (name, i) ORDER BY n.i"
        )
        with self.database.transaction() as connection:
            return list(execute(connection, query, {"names": names}).scalars())

    def _attempts(self) -> Attempts:
        name = f"the intents of index {self._name()}"
        return Attempts(self.database, name, self._relations(), self.database.limits.attempt_ms, self.patience_s)

    def _drain(self) -> Drain:
        name, wait = intents.table(self.generation_id), self.database.limits.attempt_ms
        return Drain(self.database, name, self._relations(), wait, self.patience_s)

    def _names(self, connection: Connection) -> dict[str, str]:
        shape = self._shape(connection)
        entry = shape.entry
        key, both = list(entry.key_positions), [*entry.key_positions, shape.shard]

        def listed(prefix: str = "") -> str:
            return ", ".join(entry.physical(key, prefix=prefix))

        names = {
            "key": listed(),
            "i_key": listed("i."),
            "k_key": listed("k."),
            "shard": shape.column,
            "base": physical.base(self.generation_id),
            "holder": table(self.generation_id),
            "contested": contested(self.generation_id),
            "intent": intents.table(self.generation_id),
            "whole_i": whole(entry, "i."),
            "whole_b": whole(entry, "b."),
            "same_h_i": same(entry, both, "h.", "i."),
            "same_h_b": same(entry, both, "h.", "b."),
            "identity_i_b": same(entry, list(entry.identity_positions), "i.", "b."),
            **{f"key_{a}_{b}": same(entry, key, f"{a}.", f"{b}.") for a, b in ("bk", "ik", "sc", "bs")},
        }
        return names | {"sorted": SORTED.format(**names)}
