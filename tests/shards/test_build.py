"""A build over shards: rows of all of them, read by COPY, committed with their watermarks on the index server."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
from psycopg2 import errors
from sqlalchemy import Engine

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, prepare
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import Fenced, InvalidInput, SourceChanged
from airflow_roir.options import BuildOptions
from servers.shards import Shards
from tests.conftest import run_sql
from tests.engine import values
from tests.engine.interposed import Killed, killed
from tests.shards import apart
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(1)

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
ROWS = "INSERT INTO t SELECT i, (i % 7)::text, i * 10 + {number} FROM generate_series(1, 300) i"


def move_away(made: Shards, name: str) -> None:
    """No server answers under the shard's DSN from now on."""
    made.ask("UPDATE roir.shard SET dsn = 'host=127.0.0.1 port=1 dbname=gone connect_timeout=2' WHERE name = %s", name)


def bring_back(made: Shards, name: str) -> None:
    """Lets the shard answer again, without the rest of the wait after the failure."""
    made.ask("UPDATE roir.shard SET dsn = %s, away_until = NULL WHERE name = %s", made.dsns[name], name)


def step_all(worker: build.BuildWorker, between: Callable[[], object] = lambda: None) -> None:
    """All that it can claim."""
    while isinstance(claim := worker.claim(), build.Claim):
        held: build.Claim | None = claim
        while held is not None:
            between()
            outcome = worker.step(held)
            assert isinstance(outcome, Step)
            held = outcome.rest


def undone(made: Shards) -> dict[str, int]:
    """The shards' ranges that are left."""
    found = made.ask(
        "SELECT s.name, count(*) FROM roir.scan_range r JOIN roir.shard s ON s.id = r.shard_id "
        "WHERE NOT r.done GROUP BY 1"
    )
    return dict(found)


@pytest.mark.by_hand("sweeps")
def test_the_base_is_the_union_of_all_shards(shards: Make) -> None:
    made = apart.add_all(shards(3, TABLE, ROWS, "ANALYZE t"))
    prepared, run = apart.begin(made, parallelism=2)
    assert apart.build_all(made, run) == 900
    assert apart.assert_exact(made, prepared.generation_id) == 900
    # Dealt in turns, so that workers spread over the shards.
    dealt = made.ask("SELECT shard_id FROM roir.scan_range ORDER BY ordinal LIMIT 3")
    assert len(set(dealt)) == 3


ALL_TYPES = [
    *((name, literals, True) for name, literals in values.ORDERED.items()),
    *((name, literals, False) for name, literals in (values.ARRAYS | values.INCLUDED).items()),
]


@pytest.mark.parametrize(("kind", "literals", "ordered"), ALL_TYPES, ids=[name for name, _, _ in ALL_TYPES])
@pytest.mark.sample(1)
def test_values_of_every_type_arrive_as_they_are(shards: Make, kind: str, literals: list[str], ordered: bool) -> None:
    """The column is the key, and an included one: the server's own comparison finds the values equal, and their texts
    are."""
    made = shards(1, *values.SETUP)
    try:
        made.run(f"CREATE TABLE t (id int PRIMARY KEY, k {kind}, v int)")
        made.run(*(f"INSERT INTO t VALUES ({number}, {literal}, 1)" for number, literal in enumerate(literals)))
    except (errors.UndefinedObject, errors.FeatureNotSupported) as missing:
        # The embedded server has neither ICU nor XML.
        pytest.skip(str(missing))
    for statement in values.SETUP:
        made.ask(statement)
    if not ordered:
        made.run("INSERT INTO t VALUES (1000, NULL, 1)")
    apart.add_all(made)
    if kind.startswith(("reg", "aclitem")):
        with pytest.raises(Exception, match="oids of its own database"):
            apart.begin(made, keys="k" if ordered else "v", include="v" if ordered else "k")
        return
    if any("long " in literal or len(literal) > 2000 for literal in literals) and ordered:
        ordered = False
    prepared, run = apart.begin(made, keys="k" if ordered else "v", include="v" if ordered else "k", ranges=2)
    apart.build_all(made, run)
    apart.assert_exact(made, prepared.generation_id)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.by_hand("sweeps")
def test_writers_in_all_shards_between_all_batches(shards: Make, seed: int) -> None:
    """Two workers take turns by chance, and so do writers, who move rows between ranges, empty and fill a table."""
    chance = random.Random(seed)
    made = apart.add_all(shards(2, TABLE, ROWS))
    prepared, run = apart.begin(made, parallelism=2, ranges=8, batch_rows=20)
    statements = (
        "UPDATE t SET id = id + 1000 WHERE id IN (SELECT id FROM t ORDER BY md5(id::text || '{seed}') LIMIT 5)",
        "UPDATE t SET id = -id WHERE id BETWEEN {low} AND {low} + 9",
        "UPDATE t SET k = NULL WHERE id % 17 = {low} % 17",
        "UPDATE t SET v = v + 1 WHERE id % 5 = {low} % 5",
        "DELETE FROM t WHERE id % 23 = {low} % 23",
        "INSERT INTO t SELECT i, 'new', i FROM generate_series({low}, {low} + 30) i ON CONFLICT DO NOTHING",
        "TRUNCATE t",
    )

    def write() -> None:
        if chance.random() < 0.5:
            # A TRUNCATE now and then, not all the time.
            statement = chance.choice(statements if chance.random() < 0.3 else statements[:-1])
            made.run(
                statement.replace("{low}", str(chance.randrange(1, 290))).replace("{seed}", str(chance.random())),
                only=chance.choice(made.names),
            )

    with apart.worker(made, run, 0) as first, apart.worker(made, run, 1) as second:
        held: dict[int, build.Claim] = {}
        workers = (first, second)
        while True:
            write()
            number = chance.randrange(2)
            if number in held:
                outcome = workers[number].step(held.pop(number))
                assert isinstance(outcome, Step)
                if outcome.rest is not None:
                    held[number] = outcome.rest
            elif isinstance(claim := workers[number].claim(), build.Claim):
                held[number] = claim
            elif not held:
                break
    build.finish(made.database, run)
    apart.seal_all(made, run)
    write()
    apart.ship_all(made, prepared.generation_id)
    apart.assert_exact(made, prepared.generation_id)


@pytest.mark.by_hand("sweeps")
def test_a_shard_that_is_away_keeps_nobody_else_from_working(shards: Make) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    prepared, run = apart.begin(made)
    move_away(made, "s1")
    with apart.worker(made, run) as worker:
        step_all(worker)
    left = undone(made)
    assert left.keys() == {"s1"}
    [(problem,)] = made.ask("SELECT problem FROM roir.shard WHERE name = 's1'")
    assert "refused" in problem
    with made.database.transaction() as connection:
        # Nothing is free, and all of it is left: the run waits.
        now = build.PHASE.left(connection, run, [])
    assert (now.free, now.undone) == (0, left["s1"])
    bring_back(made, "s1")
    assert apart.build_all(made, run) == 300
    assert made.ask("SELECT count(*) FROM roir.shard WHERE problem IS NOT NULL") == [(0,)]
    apart.assert_exact(made, prepared.generation_id)


@pytest.mark.by_hand("sweeps")
def test_a_shard_that_goes_away_in_the_middle_of_a_batch(shards: Make) -> None:
    """Its session ends while rows are on their way: nothing of the batch stays, and the range is free again."""
    made = apart.add_all(shards(1, TABLE, "INSERT INTO t SELECT i, 'k', i FROM generate_series(1, 200000) i"))
    prepared, run = apart.begin(made, ranges=1)
    kill = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with apart.worker(made, run) as worker:
        claim = worker.claim()
        assert isinstance(claim, build.Claim)
        assert worker.shards is not None
        worker.shards.begin(claim)
        made.ask(kill, shard="s0")
        outcome = worker.step(claim)
    assert isinstance(outcome, Step)
    assert (outcome.rows, outcome.rest) == (0, None)
    assert sum(apart.entries(made, prepared.generation_id).values()) == 0
    assert made.ask("SELECT claim_epoch, watermark FROM roir.scan_range") == [(None, None)]
    bring_back(made, "s0")
    apart.build_all(made, run)
    apart.assert_exact(made, prepared.generation_id)


def test_a_shard_has_at_most_so_many_readers(shards: Make) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    _, run = apart.begin(made, parallelism=4, ranges=16, shard_parallelism=1)
    claimed = []
    for number in range(4):
        with apart.worker(made, run, number) as worker:
            claimed.append(worker.claim())
            # An earlier try of the same worker takes what it held.
            assert getattr(worker.claim(), "id", None) == getattr(claimed[-1], "id", None)
    assert [isinstance(one, build.Claim) for one in claimed] == [True, True, False, False]
    assert len({one.shard_id for one in claimed if isinstance(one, build.Claim)}) == 2
    with made.database.transaction() as connection:
        assert build.PHASE.left(connection, run, [0, 1]).free == 0


@pytest.mark.by_hand("sweeps")
def test_the_readers_of_a_shard_are_changed_while_they_read(shards: Make) -> None:
    """Fewer: who is one too many leaves at its next batch, and takes no range there. More: the rest is claimed."""
    made = apart.add_all(shards(2, TABLE, ROWS))
    prepared, run = apart.begin(made, parallelism=4, ranges=16, batch_rows=10)

    def readers() -> list[int]:
        held = "SELECT count(*)::int FROM roir.scan_range WHERE claim_epoch IS NOT NULL GROUP BY shard_id"
        return [count for (count,) in made.ask(held)]

    with ExitStack() as stack:
        workers = [stack.enter_context(apart.worker(made, run, number)) for number in range(4)]
        claims = [worker.claim() for worker in workers]
        assert readers() == [2, 2]
        requests.change_options(made.database, "public.ix", actor="test", shard_parallelism=1)
        left = []
        for worker, claim in zip(workers, claims, strict=True):
            assert isinstance(claim, build.Claim)
            outcome = worker.step(claim)
            assert isinstance(outcome, Step)
            if outcome.rest is None:
                left.append(worker)
                assert outcome.rows == 0
                assert worker.claim() == Stop("done")
        assert len(left) == 2
        assert readers() == [1, 1]
        requests.change_options(made.database, "public.ix", actor="test", shard_parallelism=0)
        assert all(isinstance(worker.claim(), build.Claim) for worker in left)
        assert readers() == [2, 2]
    again = start_run(made.database, "public.ix", "test", take_over=True)
    apart.build_all(made, again)
    apart.assert_exact(made, prepared.generation_id)


def test_the_readers_of_a_shard_are_for_an_index_over_shards(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text)")
    prepare.prepare(database, IndexDefinition.parse("public.ix", "t", "k"), BuildOptions(), "test")
    with pytest.raises(InvalidInput, match="shard_parallelism is for an index over shards"):
        requests.change_options(database, "public.ix", actor="test", shard_parallelism=2)


@pytest.mark.by_hand("sweeps")
def test_paused_resumed_and_fenced(shards: Make) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    prepared, run = apart.begin(made, ranges=2, batch_rows=100)
    with apart.worker(made, run) as worker:
        claim = worker.claim()
        assert isinstance(claim, build.Claim)
        first = worker.step(claim)
        assert isinstance(first, Step)
        requests.pause(made.database, "public.ix", "test")
        assert first.rest is not None
        assert worker.step(first.rest) == Stop("paused")
        requests.change_options(made.database, "public.ix", actor="test", parallelism=3)
        again = start_run(made.database, "public.ix", "test", take_over=True)
        # The run that was cut off can't change anything.
        with pytest.raises(Fenced):
            worker.step(first.rest)
    assert apart.build_all(made, again) == 600 - first.rows
    apart.assert_exact(made, prepared.generation_id)


@pytest.mark.parametrize("at", range(1, 40))
@pytest.mark.sample(1)
def test_killed_before_each_statement_of_batches(shards: Make, at: int) -> None:
    """On the index server or in the shard: rows and watermark are both there, or neither."""
    made = apart.add_all(shards(1, TABLE, ROWS))
    prepared, run = apart.begin(made, ranges=1, batch_rows=100)
    with apart.worker(made, run) as worker, suppress(Killed), killed(Engine, at):
        step_all(worker)
    rows = sum(apart.entries(made, prepared.generation_id).values())
    assert made.ask("SELECT sum(rows)::int FROM roir.scan_range") == [(rows,)]
    again = start_run(made.database, "public.ix", "test", take_over=True)
    apart.build_all(made, again)
    apart.assert_exact(made, prepared.generation_id)


ALTERED = {
    "a capture trigger that is disabled": "ALTER TABLE t DISABLE TRIGGER ALL",
    "another primary key": "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (v)",
    "a table that is gone": "DROP TABLE t CASCADE",
    "columns that exchange their names": "ALTER TABLE t RENAME k TO x; ALTER TABLE t RENAME v TO k; "
    "ALTER TABLE t RENAME x TO v",
    "a table that a crash empties": "ALTER TABLE t SET UNLOGGED",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("statement", ALTERED.values(), ids=ALTERED.keys())
def test_what_is_altered_in_a_shard_ends_the_build(shards: Make, statement: str) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    _, run = apart.begin(made)
    made.run(statement, only="s1")
    with apart.worker(made, run) as worker, pytest.raises(SourceChanged, match='shard "s1"'):
        step_all(worker)


@pytest.mark.sample(0)
def test_columns_that_are_renamed_are_followed(shards: Make) -> None:
    """A build finds columns by their numbers. Writes fail until the column has its name again."""
    table = "CREATE TABLE t (id int PRIMARY KEY, a text, b text)"
    made = apart.add_all(shards(1, table, "INSERT INTO t SELECT i, 'a' || i, 'b' || i FROM generate_series(1, 100) i"))
    prepared, run = apart.begin(made, keys="a", include="b", ranges=1, batch_rows=10)
    with apart.worker(made, run) as worker:
        claim = worker.claim()
        assert isinstance(claim, build.Claim)
        first = worker.step(claim)
        assert isinstance(first, Step)
        assert first.rest is not None
        made.run("ALTER TABLE t RENAME a TO x", "ALTER TABLE t RENAME b TO y")
        second = worker.step(first.rest)
        assert isinstance(second, Step)
        made.run("ALTER TABLE t RENAME TO other", "ALTER TABLE other RENAME id TO number")
        held = second.rest
        while held is not None:
            third = worker.step(held)
            assert isinstance(third, Step)
            held = third.rest
    step = "SELECT count(*) FROM roir.scan_range WHERE NOT done"
    if made.ask(step) != [(0,)]:
        made.ask("UPDATE roir.shard SET away_until = NULL")
        apart.build_all(made, run)
    apart.assert_exact(made, prepared.generation_id)


@pytest.mark.sample(0)
def test_a_shard_that_loses_what_was_copied_is_noticed(shards: Make) -> None:
    """As a failover to a replica does it: row and mark are gone together."""
    made = apart.add_all(shards(2, TABLE, ROWS))
    _, run = apart.begin(made, ranges=4, batch_rows=50)
    with apart.worker(made, run) as worker:
        step_all(worker)
    made.run(
        "UPDATE roir_shard.mark SET mark = mark - 1 WHERE piece = (SELECT min(piece) FROM roir_shard.mark)", only="s1"
    )
    with pytest.raises(SourceChanged, match='shard "s1" has lost its last commits'):
        build.finish(made.database, run)


def test_hostile_names(shards: Make) -> None:
    table = """CREATE SCHEMA "a %s.b"; CREATE TABLE "a %s.b"."t"";%(x)s" ("i d" int, "%s" text, "'; -- é" text,
               shard int, PRIMARY KEY ("i d", "'; -- é"))"""
    rows = """INSERT INTO "a %s.b"."t"";%(x)s"
              SELECT i, 'k\\N' || i, E'\\\\N\\t\\n' || i, i FROM generate_series(1, 50) i"""
    made = apart.add_all(shards(2, table, rows))
    prepared, run = apart.begin(
        made,
        table='"a %s.b"."t"";%(x)s"',
        keys='"%s"',
        include="shard",
        index='public."i%s""x"',
        shard_column='"sh%s"',
        ranges=4,
    )
    apart.build_all(made, run)
    assert apart.assert_exact(made, prepared.generation_id) == 100
