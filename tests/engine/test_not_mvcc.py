"""DDL whose rows older snapshots don't see, beside transactions with such snapshots: "no such row" proves nothing."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import psycopg2.errors
import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.verify import comparing
from airflow_roir.engine.verify.job import UnitClaim
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.ground import KINDS, SLOTS, TWIN, Ground, Outcomes, compared, grounds_of
from tests.engine.isolation import (
    COMMIT,
    DEADLOCK,
    PATIENCE_S,
    READ_COMMITTED,
    REPEATABLE_READ,
    ROLLBACK,
    SERIALIZABLE,
    SERIALIZATION_FAILURE,
    Play,
    Schedule,
    Session,
    Transaction,
    Watcher,
    interleavings,
)
from tests.engine.menu import Rows
from tests.engine.stages import Stage
from tests.engine.steps import sql
from tests.engine.unique_ground import PARTITIONED, SOURCES, UniqueGround

pytestmark = pytest.mark.sample(1)

OLD = (REPEATABLE_READ, SERIALIZABLE)
GROUNDS = (*KINDS, *SOURCES)
REWRITES = {
    "type": "ALTER TABLE t ALTER note TYPE bigint",
    "volatile default": "ALTER TABLE t ADD COLUMN more float8 DEFAULT random()",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("mode", ["direct", "active"])
def test_a_key_of_a_row_that_was_rewritten_since(
    database: Database, dsn: str, mode: str, rewrite: str, isolation: str
) -> None:
    """Found: a snapshot older than a rewrite (`ALTER COLUMN … TYPE` of any column, a column with a random default, `SET
    LOGGED`, another access method), at `REPEATABLE READ` and `SERIALIZABLE`: a key that a row had came in twice, and
    the row lost its entry; with a `DEFERRABLE` primary key a row's entry went, in any index. It holds: 40001: the
    table's file tells.
    """
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int, note int)",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 100) i",
    )
    stage = Stage(database, mode, include="v", unique=True)
    with closing(steps.old_session(dsn, isolation)) as user:
        run_sql(dsn, REWRITES[rewrite])
        with pytest.raises(psycopg2.errors.SerializationFailure, match="rewritten"):
            sql(user, "INSERT INTO t (id, k) VALUES (205, '5')")
    stage.assert_exact("refused")


@pytest.mark.sample(1)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("mode", ["capture", "direct", "active"])
def test_a_deferrable_primary_key_of_a_row_that_was_rewritten_since(
    database: Database, dsn: str, mode: str, rewrite: str, isolation: str
) -> None:
    """Found: a snapshot older than a rewrite (`ALTER COLUMN … TYPE` of any column, a column with a random default, `SET
    LOGGED`, another access method), at `REPEATABLE READ` and `SERIALIZABLE`: a key that a row had came in twice, and
    the row lost its entry; with a `DEFERRABLE` primary key a row's entry went, in any index. It holds: 40001: the
    table's file tells.
    """
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, k text, v int, note int)",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 100) i",
    )
    stage = Stage(database, mode, include="v")
    with closing(steps.old_session(dsn, isolation)) as user:
        run_sql(dsn, REWRITES[rewrite])
        sql(user, "INSERT INTO t VALUES (5, '5', 5)")
        with pytest.raises(psycopg2.errors.SerializationFailure, match="rewritten"):
            sql(user, "DELETE FROM t WHERE id = 5")
    stage.assert_exact("refused")


def test_a_key_of_a_row_whose_partition_was_replaced_by_a_copy(database: Database, dsn: str) -> None:
    run_sql(dsn, *_table(partitioned=True))
    stage = Stage(database, "published", unique=True)
    with closing(steps.old_session(dsn)) as user:
        run_sql(
            dsn,
            "ALTER TABLE t DETACH PARTITION t0",
            "CREATE TABLE copy (LIKE t0 INCLUDING ALL); INSERT INTO copy TABLE t0",
            "ALTER TABLE t ATTACH PARTITION copy FOR VALUES WITH (MODULUS 3, REMAINDER 0)",
        )
        [(key,), *_] = sql(steps.session(dsn), "SELECT k FROM copy")
        with pytest.raises(psycopg2.errors.SerializationFailure, match="altered after"):
            sql(user, "INSERT INTO t (id, k) VALUES (1205, %s)", key)
    stage.assert_exact("refused")


@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
def test_rows_of_an_index_beside_a_rewrite_that_was_waited_for(database: Database, dsn: str, partitioned: bool) -> None:
    """roir.rows locks the rows' table after its statement has a snapshot: it fails rather than return nothing."""
    run_sql(dsn, *_table(partitioned))
    Stage(database, "published", include="v")
    by_key = "SELECT x.id FROM roir.rows(NULL::t, 'ix', '{\"k\": \"5\"}') x"
    by_entries = "SELECT x.id FROM roir.rows(NULL::t, ARRAY(SELECT i FROM ix i WHERE k = '5')) x"
    watcher = Watcher(dsn)
    for query in (by_key, by_entries):
        reader, other = Session(dsn), Session(dsn)
        # Parsing the query reads the row type, under a lock, before there is a snapshot.
        for session, statement in (
            (reader, f"PREPARE prepared AS {query}"),
            (reader, "EXECUTE prepared"),
            (other, "BEGIN"),
            (other, "ALTER TABLE t ALTER note TYPE int USING note + 1"),
        ):
            session.send(statement)
            while not session.ended(PATIENCE_S):
                pass
        reader.send("EXECUTE prepared")
        while not watcher.is_blocked(reader, [other]):
            assert not reader.ended()
        other.send("COMMIT")
        assert other.ended(PATIENCE_S)
        while not reader.ended(PATIENCE_S):
            pass
        assert reader.error == SERIALIZATION_FAILURE
        reader.send("EXECUTE prepared")
        while not reader.ended(PATIENCE_S):
            pass
        assert (reader.error, reader.cursor.fetchall()) == ("", [(5,)])
        reader.close()
        other.close()


def test_a_verification_whose_shared_snapshot_is_older_than_a_rewrite(database: Database, dsn: str) -> None:
    """All entries are gone, and that snapshot sees no row either: both sides are empty, and equal."""
    base = verifying.build_index(dsn, database, *_table(), include="v")
    run_sql(dsn, f"DELETE FROM {base}")
    run = verifying.begin(database)
    one = verifying.worker(database, run)
    with one.connection:
        one.sums.snapshot.share(one.verify_job.verification_id)
        run_sql(dsn, "ALTER TABLE t ALTER note TYPE bigint")
        while isinstance(claim := one.claim(), UnitClaim):
            one.unit(claim)
        one.close()
    comparing.finish(database, run)
    verifying.to_check(database, run)
    verifying.go_through(database, run)
    assert len(verifying.found(dsn)) == 100


def _table(partitioned: bool = False) -> tuple[str, ...]:
    leaves = "; ".join(f"CREATE TABLE t{i} PARTITION OF t FOR VALUES WITH (MODULUS 3, REMAINDER {i})" for i in range(3))
    by, leaves = ("PARTITION BY HASH (id)", leaves) if partitioned else ("", "")
    return (
        f"CREATE TABLE t (id int PRIMARY KEY, k text, v int, note int) {by}; {leaves}",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 100) i",
    )


# -- a third transaction's rewrites among the statements of interleaved transactions


_PERSISTENCE = "ALTER TABLE {leaf} SET UNLOGGED; ALTER TABLE {leaf} SET LOGGED"
_AWAY = "ALTER TABLE {t} DETACH PARTITION {t}_1; "
_BACK = "; ALTER TABLE {t} ATTACH PARTITION {t}_1 FOR VALUES IN (1)"
_COPY = (
    "ALTER TABLE {t}_1 RENAME TO old; CREATE TABLE {t}_1 (LIKE old INCLUDING ALL EXCLUDING IDENTITY); "
    "INSERT INTO {t}_1 (id, part, k, v, note) SELECT id, part, k, v, note FROM old; DROP TABLE old; "
    "ALTER INDEX {t}_1_pkey1 RENAME TO {t}_1_pkey"
)
# {leaf}: one of the partitions, or the table itself.
OF_A_TABLE = {
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
# A leaf's rows vanish for older snapshots. On the twin all rows do, or none: outcomes aren't compared.
OF_A_LEAF = {
    "unlogged and logged": _PERSISTENCE,
    "another access method": "ALTER TABLE {leaf} SET ACCESS METHOD heap_too; ALTER TABLE {leaf} SET ACCESS METHOD heap",
}
EXCHANGES = {
    "detach and attach": f"{_AWAY}SELECT{_BACK}",
    "detach, rewrite, attach": f"{_AWAY}ALTER TABLE {{t}}_1 SET UNLOGGED; ALTER TABLE {{t}}_1 SET LOGGED{_BACK}",
    "attach a copy": f"{_AWAY}{_COPY}{_BACK}",
}


def rewrites_of(kind: str) -> list[str]:
    """The statements that can alter a source, for one kind of ground."""
    return [*OF_A_TABLE, *OF_A_LEAF, *(EXCHANGES if kind == PARTITIONED else ())]


@dataclass(frozen=True)
class Rewritten(Rows):
    """Rows whose table is also rewritten."""

    rows: Rows
    ground: Ground

    def sql(self, name: str, who: int, position: int) -> str:
        text = OF_A_TABLE.get(name) or OF_A_LEAF.get(name) or EXCHANGES.get(name)
        if text is None:
            return self.rows.sql(name, who, position)
        table = self.table.rpartition(".")[2].strip('"')
        apart = table != TWIN and self.ground.kind == PARTITIONED
        if table == TWIN and name in EXCHANGES:
            text = "LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE"
        fill = self.ground.fill(self.table, SLOTS + 1).partition(";")[2]
        return text.format(t=table, leaf=f"{table}_1" if apart else table, fill=fill)


class Rewriting(Ground):
    """A ground whose tables can be rewritten: they have the columns that are altered."""

    modes = ("capture", "direct", "active")

    def __init__(self, dsn: str, kind: str) -> None:
        super().__init__(dsn, kind)
        self.run("CREATE ACCESS METHOD heap_too TYPE TABLE HANDLER heap_tableam_handler")
        for table in (TWIN, *(stage.job.source.sql for stage in self.stages.values())):
            self.run(f"ALTER TABLE {table} ADD COLUMN note int DEFAULT 0")

    def rows(self, table: str, slot: int) -> Rows:
        return Rewritten(table, slot, super().rows(table, slot), self)

    def close(self) -> None:
        """Closes the sessions. Builds aren't finished, because their sources were altered."""
        for session in self.sessions:
            session.close()
        self.connection.close()
        self.watcher.connection.close()

    def _unexpected(self, play: Play, twin: Outcomes) -> list[str]:
        if TOO_MANY_COLUMNS in {one.error for outcomes in (play.outcomes, twin) for one in outcomes.values()}:
            # Each dropped column counts: too many schedules have altered this table, but not the other one.
            return []
        done = {name for one in play.schedule.transactions for name in one.statements}
        if self.kind == PARTITIONED and done & {*OF_A_LEAF, *EXCHANGES, "cluster"}:
            errors = {one.error for one in play.outcomes.values()}
            strange = errors - {"", SERIALIZATION_FAILURE, DEADLOCK, "23505"}
            return [f"strange errors {sorted(strange)}: {compared(play, twin)}"] if strange else []
        return super()._unexpected(play, twin)


class UniqueRewriting(Rewriting, UniqueGround):
    """Rewrites below a unique index."""

    modes = ("direct", "active")


LEVELS = (READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE)
EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))

Grounds = Callable[[str], Ground]


@pytest.fixture(scope="module")
def grounds(server: str) -> Iterator[Grounds]:
    """The ground of a kind of primary key, or of a unique index's source, in a database of its own."""

    def make(dsn: str, kind: str) -> Ground:
        return (UniqueRewriting if kind in SOURCES else Rewriting)(dsn, kind)

    with grounds_of(server, "rewriting", make) as ground:
        yield ground


def drawn(chance: random.Random, ground: Ground) -> Schedule:
    """A transaction with a snapshot, a rewrite, and then its statements, with or without a third transaction."""
    statements, rewrites = ground.choices(), rewrites_of(ground.kind)
    ours = Transaction(chance.choice(LEVELS), tuple(chance.choices(statements, k=chance.randint(1, 3))))
    theirs = Transaction(READ_COMMITTED, (chance.choice(rewrites),), chance.choice((COMMIT, COMMIT, COMMIT, ROLLBACK)))
    some = [ours, theirs]
    if chance.random() < 0.3:
        mixed = chance.choices([*statements, *rewrites], k=chance.randint(1, 2))
        some.append(Transaction(chance.choice(LEVELS), tuple(mixed)))
    turns = [who for who, one in enumerate(some) for _ in one.turns]
    if chance.random() < 0.5:
        chance.shuffle(turns)
    else:
        turns = [0, *[who for who in turns[1:] if who], *[0] * (len(ours.turns) - 1)]
    return Schedule(tuple(some), tuple(turns))


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("kind", GROUNDS)
def test_a_sample_of_rewrites_beside_transactions(grounds: Grounds, kind: str) -> None:
    """Found: the same where a partition was replaced by a copy of itself. It holds: 40001: the table's file tells."""
    ground, chance = grounds(kind), random.Random(SEED)
    ground.sweep([drawn(chance, ground) for _ in range(EXAMPLES or 96)])
    ground.settled(SEED)


ALL = [(kind, rewrite) for kind in GROUNDS for rewrite in rewrites_of(kind)]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "rewrite"), ALL)
def test_each_rewrite_beside_each_statement(grounds: Grounds, kind: str, rewrite: str, level: str) -> None:
    """Plays them in all interleavings."""
    ground = grounds(kind)
    for statement in ground.choices():
        both = (Transaction(level, (statement,)), Transaction(READ_COMMITTED, (rewrite,)))
        ground.sweep(Schedule(both, turns) for turns in interleavings(both))
    ground.settled(SEED)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("rewrite", ["retype", "unlogged and logged"])
@pytest.mark.parametrize("kind", GROUNDS)
def test_a_rewrite_before_two_statements(grounds: Grounds, kind: str, rewrite: str) -> None:
    """The snapshot is older than the rewrite."""
    ground, theirs = grounds(kind), Transaction(READ_COMMITTED, (rewrite,))
    ground.sweep(
        Schedule((Transaction(REPEATABLE_READ, two), theirs), (0, 1, 1, 0, 0, 0))
        for two in itertools.product(ground.choices(), repeat=2)
    )
    ground.settled(SEED)
