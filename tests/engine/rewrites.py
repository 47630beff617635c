"""DDL that gives a table another file, as a third party's statement between those of interleaved transactions.

Most of it writes all rows anew, for which older snapshots see none. The twin gets the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.engine.ground import SLOTS, TWIN, Ground, Outcomes, compared
from tests.engine.isolation import DEADLOCK, SERIALIZATION_FAILURE, Play
from tests.engine.menu import Rows
from tests.engine.unique_ground import PARTITIONED, UniqueGround

_PERSISTENCE = "ALTER TABLE {leaf} SET UNLOGGED; ALTER TABLE {leaf} SET LOGGED"
_AWAY = "ALTER TABLE {t} DETACH PARTITION {t}_1; "
_BACK = "; ALTER TABLE {t} ATTACH PARTITION {t}_1 FOR VALUES IN (1)"
_COPY = (
    "ALTER TABLE {t}_1 RENAME TO old; CREATE TABLE {t}_1 (LIKE old INCLUDING ALL EXCLUDING IDENTITY); "
    "INSERT INTO {t}_1 (id, part, k, v, note) SELECT id, part, k, v, note FROM old; DROP TABLE old; "
    "ALTER INDEX {t}_1_pkey1 RENAME TO {t}_1_pkey"
)
# {leaf}: one of the partitions, or the table itself.
REWRITES = {
    "retype": "ALTER TABLE {t} ALTER note TYPE int USING note + 1",
    "add a random column": (
        "ALTER TABLE {t} DROP COLUMN IF EXISTS more; ALTER TABLE {t} ADD COLUMN more float8 DEFAULT random()"
    ),
    "add a generated column": (
        "ALTER TABLE {t} DROP COLUMN IF EXISTS twice; ALTER TABLE {t} ADD COLUMN twice int "
        "GENERATED ALWAYS AS (note * 2) STORED"
    ),
    "cluster": "CLUSTER {leaf} USING {leaf}_pkey",
    "truncate and fill": "TRUNCATE {t}; {fill}",
    "set a default": "ALTER TABLE {t} ALTER note SET DEFAULT 5",
}
TOO_MANY_COLUMNS = "54011"
# A leaf's rows vanish for older snapshots, while on the twin all do, or none: what each meets isn't compared.
OF_A_LEAF = {
    "unlogged and logged": _PERSISTENCE,
    "another access method": "ALTER TABLE {leaf} SET ACCESS METHOD heap_too; ALTER TABLE {leaf} SET ACCESS METHOD heap",
}
EXCHANGES = {
    "detach and attach": f"{_AWAY}SELECT{_BACK}",
    "detach, rewrite, attach": f"{_AWAY}ALTER TABLE {{t}}_1 SET UNLOGGED; ALTER TABLE {{t}}_1 SET LOGGED{_BACK}",
    "attach a copy": f"{_AWAY}{_COPY}{_BACK}",
}


def names(kind: str) -> list[str]:
    """What can be done to a source, of one kind of ground."""
    return [*REWRITES, *OF_A_LEAF, *(EXCHANGES if kind == PARTITIONED else ())]


@dataclass(frozen=True)
class Rewritten(Rows):
    """Rows whose table is also rewritten."""

    rows: Rows
    ground: Ground

    def sql(self, name: str, who: int, position: int) -> str:
        text = REWRITES.get(name) or OF_A_LEAF.get(name) or EXCHANGES.get(name)
        if text is None:
            return self.rows.sql(name, who, position)
        table = self.table.rpartition(".")[2].strip('"')
        apart = table != TWIN and self.ground.kind == PARTITIONED
        if table == TWIN and name in EXCHANGES:
            text = "LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE"
        fill = self.ground.fill(self.table, SLOTS + 1).partition(";")[2]
        return text.format(t=table, leaf=f"{table}_1" if apart else table, fill=fill)


class _Rewriting(Ground):
    """A ground whose tables can be rewritten."""

    def prepare(self) -> None:
        """Give them what is altered."""
        self.run("CREATE ACCESS METHOD heap_too TYPE TABLE HANDLER heap_tableam_handler")
        for table in (TWIN, *(stage.job.source.sql for stage in self.stages.values())):
            self.run(f"ALTER TABLE {table} ADD COLUMN note int DEFAULT 0")

    def rows(self, table: str, slot: int) -> Rows:
        return Rewritten(table, slot, super().rows(table, slot), self)

    def close(self) -> None:
        """What is being built isn't finished: its source was altered."""
        for session in self.sessions:
            session.close()
        self.connection.close()
        self.watcher.connection.close()

    def _unexpected(self, play: Play, twin: Outcomes) -> list[str]:
        if TOO_MANY_COLUMNS in {one.error for outcomes in (play.outcomes, twin) for one in outcomes.values()}:
            # Each column that was dropped counts: this table has been altered by too many schedules, the other hasn't.
            return []
        done = {name for one in play.schedule.transactions for name in one.statements}
        if self.kind == PARTITIONED and done & {*OF_A_LEAF, *EXCHANGES, "cluster"}:
            errors = {one.error for one in play.outcomes.values()}
            strange = errors - {"", SERIALIZATION_FAILURE, DEADLOCK, "23505"}
            return [f"strange errors {sorted(strange)}: {compared(play, twin)}"] if strange else []
        return super()._unexpected(play, twin)


class RewritingGround(_Rewriting):
    """Of an index that isn't unique, by kinds of primary keys."""


class UniqueRewritingGround(_Rewriting, UniqueGround):
    """Of a unique index, with partitions and without."""
