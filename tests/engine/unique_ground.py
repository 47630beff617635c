"""A stage whose index is unique, and a twin without partitions that has PostgreSQL's own constraint."""

from __future__ import annotations

from airflow_roir.engine.database import execute
from tests.engine.ground import SLOTS, TWIN, Ground, Outcomes, by_slot, compared
from tests.engine.isolation import DEADLOCK, LEVELS, READ_COMMITTED, SERIALIZATION_FAILURE, Play
from tests.engine.menu import FREE, INSERTS, KEYS, MOVES, WIDTH, KeyRows, Rows
from tests.engine.stages import Stage

PLAIN, PARTITIONED = "plain", "partitioned"
SOURCES = (PLAIN, PARTITIONED)


class UniqueGround(Ground):
    """A ground with a unique index. kind: whether its source has partitions."""

    modes = ("direct", "active")
    definition = {"unique": True}
    sizes = (2, 2, 2, 2, 3)
    levels = (LEVELS[:1], LEVELS)

    def rows(self, table: str, slot: int) -> Rows:
        return KeyRows(table, slot)

    def choices(self) -> list[str]:
        return [*KEYS]

    def fill(self, table: str, slots: int = SLOTS) -> str:
        return (
            f"DELETE FROM {table}; INSERT INTO {table} SELECT s * 10 + r, r - 1, s * {WIDTH} + r - 1, r "
            f"FROM generate_series(0, {slots - 1}) s, generate_series(1, 2) r"
        )

    def create(self, table: str, kind: str = "") -> str:
        columns = "(id int, part int, k int, v int, PRIMARY KEY (id, part))"
        if (kind or self.kind) == PLAIN:
            return f"CREATE TABLE {table} {columns}"
        leaves = "; ".join(f"CREATE TABLE {table}_{p} PARTITION OF {table} FOR VALUES IN ({p})" for p in range(3))
        return f"CREATE TABLE {table} {columns} PARTITION BY LIST (part); {leaves}"

    def twin(self) -> str:
        """SQL for the twin: no partitions, and the server's own constraint."""
        return f"{self.create(TWIN, PLAIN)}; ALTER TABLE {TWIN} ADD UNIQUE (k) DEFERRABLE"

    def touch(self, table: str, slots: int) -> list[str]:
        """Moves some keys to other rows, changes others, and brings them back."""
        return [
            f"UPDATE {table} SET v = v + 10 WHERE id / 10 % 3 = 0",
            f"UPDATE {table} SET k = id / 10 * {WIDTH} + 2 - id % 10 WHERE id / 10 % 4 = 1",
            f"UPDATE {table} SET k = id / 10 * {WIDTH} + id % 10 - 1 WHERE id / 10 % 4 = 1",
            f"INSERT INTO {table} SELECT s * 10 + 3, 0, s * {WIDTH} + {FREE}, 0 "
            f"FROM generate_series(0, {slots - 1}, 2) s",
            f"DELETE FROM {table} WHERE id % 10 = 3",
        ]

    def refill(self, mode: str) -> None:
        """Restores rows and entries. The slot decides which entries are in base, delta or both, and which are stale."""
        stage = self.stages[mode]
        job, base, delta = stage.job, stage.base, stage.delta
        table = job.source.sql
        projection = f"SELECT {', '.join(column.of('s') for column in job.entry.columns)} FROM {table} s"
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
                # Stale entries: keys that the slot's other row, or a row that isn't there, had before.
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
        self.cursor.execute(self.duplicates(stage.job.source.sql))
        for key, ids in self.cursor.fetchall():
            found.setdefault(ids[0] // 10, []).append(f"key {key} of rows {ids}")
        return found

    def duplicates(self, table: str) -> str:
        """SQL for the keys that several rows share, with the rows' ids."""
        return f"SELECT k, array_agg(id) FROM {table} GROUP BY k HAVING count(*) > 1"

    def _differences(self, stage: Stage) -> str:
        """As `stages.differences`, if all is scanned and ids may be there twice."""
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
        values = ", ".join(column.of("s") for column in entry.columns)
        source = f"SELECT {values} FROM {stage.job.source.sql} s WHERE {entry.satisfied('s')}"
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
        if DEADLOCK in theirs:  # milliseconds decide which transaction it ends
            return []
        if self._met_a_move(play):
            return []
        transactions = play.schedule.transactions
        if {one.isolation for one in transactions} == {READ_COMMITTED}:
            if len(transactions) > 2:  # the order in which two waiters wake isn't defined
                strange = mine - theirs - {"23505"}
                return [f"strange errors {sorted(strange)}: {compared(play, twin)}"] if strange else []
            return [f"not as on the twin: {compared(play, twin)}"]
        if DEADLOCK in mine:
            return [f"a deadlock: {compared(play, twin)}"]
        return super()._unexpected(play, twin)

    def _met_a_move(self, play: Play) -> bool:
        """True if a turn met a row that has moved to another partition: PostgreSQL itself refuses to write to it."""
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


class PartialUniqueGround(UniqueGround):
    """A ground whose unique index has an expression as key, and a condition that every other write makes false."""

    definition = {"unique": True, "keys": "k + 0 AS key", "where": "v % 2 = 0"}

    def fill(self, table: str, slots: int = SLOTS) -> str:
        return super().fill(table, slots).replace(", r FROM", ", r * 2 FROM")

    def twin(self) -> str:
        """SQL for the twin: the server's own constraint, of a column that is NULL for the other rows."""
        key = "key int GENERATED ALWAYS AS (CASE WHEN v % 2 = 0 THEN k END) STORED"
        return f"{self.create(TWIN, PLAIN)}; ALTER TABLE {TWIN} ADD {key}, ADD UNIQUE (key) DEFERRABLE"

    def duplicates(self, table: str) -> str:
        return f"SELECT k, array_agg(id) FROM {table} WHERE v % 2 = 0 GROUP BY k HAVING count(*) > 1"
