"""A stage whose index is unique, and a twin without partitions that has PostgreSQL's own constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg2

from airflow_roir.engine.database import Database, execute
from tests.engine.ground import SLOTS, TWIN, Count, Failure, Ground, Outcomes, by_slot, compared
from tests.engine.isolation import DEADLOCK, READ_COMMITTED, SERIALIZATION_FAILURE, Play, Session, Watcher
from tests.engine.menu import Rows
from tests.engine.stages import Stage

PLAIN, PARTITIONED = "plain", "partitioned"
SOURCES = (PLAIN, PARTITIONED)
# A slot's keys: those of its rows a and b, and one that no row has.
FREE = 2
WIDTH = 1000

_INSERT = "INSERT INTO {t} VALUES "
_UPSERT = " ON CONFLICT (id, part) DO UPDATE SET k = excluded.k, v = excluded.v"
# Rows a (part 0, key k0) and b (part 1, key k1) are there; c and d aren't, and no row has key k2.
MENU = {
    "insert c with a's key": _INSERT + "({c}, 0, {k0}, {v})",
    "insert c with b's key": _INSERT + "({c}, 0, {k1}, {v})",
    "insert c with k2": _INSERT + "({c}, 0, {k2}, {v})",
    "insert d with k2": _INSERT + "({d}, 1, {k2}, {v})",
    "insert d with a's key": _INSERT + "({d}, 1, {k0}, {v})",
    "insert c and d": _INSERT + "({c}, 0, {k2}, {v}), ({d}, 1, {k0}, {v})",
    "insert c with k2, or nothing": _INSERT + "({c}, 0, {k2}, {v}) ON CONFLICT (id, part) DO NOTHING",
    "insert c with a's key, or catch": (
        "DO $$ BEGIN INSERT INTO {t} VALUES ({c}, 0, {k0}, {v}); EXCEPTION WHEN unique_violation THEN "
        "INSERT INTO {t} VALUES ({c}, 0, {k2}, {v}); END $$"
    ),
    "upsert c with a's key": _INSERT + "({c}, 0, {k0}, {v})" + _UPSERT,
    "upsert a with b's key": _INSERT + "({a}, 0, {k1}, {v})" + _UPSERT,
    "upsert a with k2": _INSERT + "({a}, 0, {k2}, {v})" + _UPSERT,
    "merge c with k2": (
        "MERGE INTO {t} USING (VALUES ({c})) n (id) ON {t}.id = n.id WHEN MATCHED THEN UPDATE SET k = {k2} "
        "WHEN NOT MATCHED THEN INSERT VALUES (n.id, 0, {k2}, {v})"
    ),
    "a takes k2": "UPDATE {t} SET k = {k2} WHERE id = {a}",
    "b takes k2": "UPDATE {t} SET k = {k2} WHERE id = {b}",
    "a takes b's key": "UPDATE {t} SET k = {k1} WHERE id = {a}",
    "b takes a's key": "UPDATE {t} SET k = {k0} WHERE id = {b}",
    "a takes its key back": "UPDATE {t} SET k = {k0} WHERE id = {a}",
    "swap keys": "UPDATE {t} SET k = {k0} + {k1} - k WHERE id IN ({a}, {b})",
    "shift keys": "UPDATE {t} SET k = k + 1 WHERE id IN ({a}, {b})",
    "touch a": "UPDATE {t} SET v = {v} WHERE id = {a}",
    "touch b": "UPDATE {t} SET v = {v} WHERE id = {b}",
    "touch both": "UPDATE {t} SET v = {v} WHERE id IN ({a}, {b})",
    "delete a": "DELETE FROM {t} WHERE id = {a}",
    "delete b": "DELETE FROM {t} WHERE id = {b}",
    "delete c": "DELETE FROM {t} WHERE id = {c}",
    "delete a's key": "DELETE FROM {t} WHERE k = {k0}",
    "delete k2": "DELETE FROM {t} WHERE k = {k2}",
    "move a": "UPDATE {t} SET part = 2 WHERE id = {a}",
    "move a and b": "UPDATE {t} SET part = 2 WHERE id IN ({a}, {b})",
    "move b, with a's key": "UPDATE {t} SET part = 2, k = {k0} WHERE id = {b}",
    "a becomes c": "UPDATE {t} SET id = {c} WHERE id = {a}",
    "a becomes c, with k2": "UPDATE {t} SET id = {c}, k = {k2} WHERE id = {a}",
    "c instead of a": "DELETE FROM {t} WHERE id = {a}; INSERT INTO {t} VALUES ({c}, 0, {k0}, {v})",
    "c instead of a, at once": (
        "WITH gone AS (DELETE FROM {t} WHERE id = {a} RETURNING k) INSERT INTO {t} SELECT {c}, 0, k, {v} FROM gone"
    ),
    "a takes k2 in vain": "SAVEPOINT s; UPDATE {t} SET k = {k2} WHERE id = {a}; ROLLBACK TO s",
    "delete a in vain": "SAVEPOINT s; DELETE FROM {t} WHERE id = {a}; ROLLBACK TO s",
}
MOVES = frozenset(name for name in MENU if name.startswith("move"))
# They find their rows by a primary key; others may have moved such a row, which PostgreSQL refuses with 40001.
INSERTS = frozenset(name for name in MENU if name.startswith("insert"))


@dataclass(frozen=True)
class UniqueRows(Rows):
    """The rows of one slot of a table."""

    def sql(self, name: str, who: int, position: int) -> str:
        ids = {letter: self.slot * 10 + row for letter, row in zip("abcd", (1, 2, 3, 4), strict=True)}
        keys = {f"k{i}": self.slot * WIDTH + i for i in range(3)}
        return MENU[name].format(t=self.table, v=100 * (who + 1) + position, **ids, **keys)


def create(table: str, source: str) -> str:
    """SQL for a source; the twin is a plain one with a constraint."""
    columns = "(id int, part int, k int, v int, PRIMARY KEY (id, part))"
    if source == PARTITIONED:
        leaves = "; ".join(f"CREATE TABLE {table}_{p} PARTITION OF {table} FOR VALUES IN ({p})" for p in range(3))
        return f"CREATE TABLE {table} {columns} PARTITION BY LIST (part); {leaves}"
    return f"CREATE TABLE {table} {columns}"


class UniqueGround(Ground):
    """A database with the twin, and a stage for each mode. source: whether it has partitions."""

    def __init__(self, dsn: str, source: str, modes: Sequence[str]) -> None:
        self.dsn, self.kind = dsn, source
        self.database = Database(dsn, "roir tests")
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        self.watcher = Watcher(dsn)
        self.sessions = [Session(dsn) for _ in range(3)]
        self.run(f"{create(TWIN, PLAIN)}; ALTER TABLE {TWIN} ADD UNIQUE (k) DEFERRABLE; {self.fill(TWIN)}")
        self.stages: dict[str, Stage] = {}
        for mode in modes:
            table = "t_" + mode.replace(" ", "_").replace("-", "_")
            self.run(f"{create(table, source)}; {self.fill(table)}; ANALYZE {table}")
            self.stages[mode] = Stage(self.database, mode, index=f"ix_{table}", table=table, include="v", unique=True)
        self.fillings = 0
        self.count = Count()

    def rows(self, table: str, slot: int) -> Rows:
        return UniqueRows(table, slot)

    def fill(self, table: str, slots: int = SLOTS) -> str:
        return (
            f"DELETE FROM {table}; INSERT INTO {table} SELECT s * 10 + r, r - 1, s * {WIDTH} + r - 1, r "
            f"FROM generate_series(0, {slots - 1}) s, generate_series(1, 2) r"
        )

    definition = {"unique": True}

    def create(self, table: str) -> str:
        return create(table, self.kind)

    def touch(self, table: str, slots: int) -> list[str]:
        """Some keys change rows, others are changed and come back."""
        return [
            f"UPDATE {table} SET v = v + 10 WHERE id / 10 % 3 = 0",
            f"UPDATE {table} SET k = id / 10 * {WIDTH} + 2 - id % 10 WHERE id / 10 % 4 = 1",
            f"UPDATE {table} SET k = id / 10 * {WIDTH} + id % 10 - 1 WHERE id / 10 % 4 = 1",
            f"INSERT INTO {table} SELECT s * 10 + 3, 0, s * {WIDTH} + {FREE}, 0 "
            f"FROM generate_series(0, {slots - 1}, 2) s",
            f"DELETE FROM {table} WHERE id % 10 = 3",
        ]

    def refill(self, mode: str) -> None:
        """Which entries are in the base, the delta or both, and which are stale, goes by the slot."""
        stage = self.stages[mode]
        job, base, delta = stage.job, stage.base, stage.delta
        table = job.source.sql
        projection = f"SELECT {', '.join(job.entry.source_columns('s'))} FROM {table} s"
        statements = [self.fill(table), f"DELETE FROM {base}", f"DELETE FROM {delta}"]
        if stage.phase == "published":
            statements.append(f"INSERT INTO {base} {projection}")
        else:
            layout = "(s.id / 10 + s.id) % 4"
            slots = f"generate_series(0, {SLOTS - 1}) i"
            statements += [
                f"INSERT INTO {base} {projection} WHERE {layout} IN (0, 2)",
                f"UPDATE {base} x SET c4 = NULL FROM {table} s WHERE s.id = x.c2 AND {layout} = 2",
                f"INSERT INTO {delta} SELECT *, 'regular' FROM ({projection} WHERE {layout} > 0) x",
                # What the other row of the slot, or one that isn't there, had before.
                "CREATE TEMP TABLE stale AS SELECT s.k, o.id, o.part FROM "
                f"{table} s JOIN {table} o ON o.id / 10 = s.id / 10 AND o.id <> s.id WHERE {layout} = 3 "
                "AND s.id % 2 = 0 "
                f"UNION ALL SELECT s.k, s.id / 10 * 10 + 3, 0 FROM {table} s WHERE {layout} = 3 AND s.id % 2 = 1 "
                f"UNION ALL SELECT i * {WIDTH} + {FREE}, i * 10 + 1 + i / 5 % 4, (ARRAY[0, 1, 0, 1])[1 + i / 5 % 4] "
                f"FROM {slots} WHERE i % 5 > 0",
                f"INSERT INTO {base} (c1, c2, c3) SELECT * FROM stale WHERE id / 10 % 5 <> 1 OR k % {WIDTH} <> {FREE}",
                f"INSERT INTO {delta} (c1, c2, c3, state) SELECT *, 'antimatter' FROM stale",
                "DROP TABLE stale",
            ]
        self.run("; ".join(statements))

    def wrong(self, mode: str) -> dict[int, list[str]]:
        """The entries that are missing or too many, and the keys that several rows share, by slot."""
        stage = self.stages[mode]
        with stage.connection.begin():
            found = by_slot(execute(stage.connection, self._differences(stage)).all())
        self.cursor.execute(f"SELECT k, array_agg(id) FROM {stage.job.source.sql} GROUP BY k HAVING count(*) > 1")
        for key, ids in self.cursor.fetchall():
            found.setdefault(ids[0] // 10, []).append(f"key {key} of rows {ids}")
        return found

    def _differences(self, stage: Stage) -> str:
        """As `stages.differences`, where all is scanned and ids may be there twice."""
        entry = stage.job.entry
        columns = ", ".join(entry.physical())
        ours = f"SELECT {columns} FROM {stage.base}"
        if stage.phase != "published":
            untouched = (
                f"NOT EXISTS (SELECT FROM {stage.delta} d WHERE d.state <> 'ghost' AND {entry.equal('b.', 'd.')})"
            )
            ours = (
                f"SELECT {', '.join(entry.physical(prefix='b.'))} FROM {stage.base} b WHERE {untouched} "
                f"UNION ALL SELECT {columns} FROM {stage.delta} WHERE state = 'regular'"
            )
        source = f"SELECT {', '.join(entry.source_columns('s'))} FROM {stage.job.source.sql} s"
        ours, source = (f"SELECT o::text FROM ({side}) o" for side in (ours, source))
        return (
            f"WITH ours AS ({ours}), source AS ({source}) SELECT 'extra' AS what, x.* FROM (TABLE ours EXCEPT ALL "
            "TABLE source) x UNION ALL SELECT 'missing', x.* FROM (TABLE source EXCEPT ALL TABLE ours) x"
        )

    def _unexpected(self, play: Play, twin: Outcomes) -> list[str]:
        """Errors and waits that the twin doesn't have."""
        if play.outcomes == twin:
            return []
        mine = {one.error for one in play.outcomes.values()}
        theirs = {one.error for one in twin.values()}
        if DEADLOCK in theirs:  # who is ended by it goes by milliseconds
            return []
        if self._met_a_move(play):
            return []
        transactions = play.schedule.transactions
        if {one.isolation for one in transactions} == {READ_COMMITTED}:
            if len(transactions) > 2:  # who of two is woken first isn't said
                strange = mine - theirs - {"23505"}
                return [f"strange errors {sorted(strange)}: {compared(play, twin)}"] if strange else []
            return [f"not as on the twin: {compared(play, twin)}"]
        if DEADLOCK in mine:
            return [f"a deadlock: {compared(play, twin)}"]
        return super()._unexpected(play, twin)

    def _met_a_move(self, play: Play) -> bool:
        """PostgreSQL itself refuses to write to a row that has moved to another partition meanwhile."""
        return self.kind == PARTITIONED and any(
            one.error == SERIALIZATION_FAILURE
            and play.schedule.transactions[who].turns[turn] not in INSERTS
            and any(
                MOVES & {*other.statements}
                for other in play.schedule.transactions
                if other is not play.schedule.transactions[who]
            )
            for (who, turn), one in play.outcomes.items()
        )


__all__ = ["Failure", "UniqueGround"]
