"""A unique index over its life: scans, aborts, kills, reverts, restores, and the messages if it can't be enforced."""

from __future__ import annotations

import random
from contextlib import closing, suppress

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.engine import abort, clean_up, drop, install, revert
from airflow_roir.engine.compact.bloat import bloat_of
from airflow_roir.engine.compact.segments import segments
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import DuplicatesFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import Killed, killed
from tests.engine.stages import PHASES, Stage
from tests.engine.steps import sql
from tests.engine.test_partitions import one
from tests.engine.test_restore import Restore, restore
from tests.engine.test_unique import PARTITIONED, PLAIN, ROWS, duplicates

pytestmark = pytest.mark.sample(1)
__all__ = ["restore"]

REFUSED = "INSERT INTO t VALUES (900, 1, 33, 0)"


def assert_enforced(dsn: str) -> None:
    with pytest.raises(psycopg2.errors.UniqueViolation):
        run_sql(dsn, REFUSED)


@pytest.mark.parametrize("scan", ["key", "block", "index"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_scan_under_writers(database: Database, dsn: str, scan: str, seed: int) -> None:
    """Keys are exchanged and handed on while ranges are copied. No committed pair ever exists."""
    run_sql(dsn, *PLAIN, ROWS.format("t"))
    chance = random.Random(seed)
    if scan == "index":
        steps.make_index(database, keys="k", include="v", unique=True)
    definition = {"table": None, "keys": None} if scan == "index" else {"keys": "k", "include": "v", "unique": True}
    _, run = steps.begin(database, scan=scan, ranges=3, segments=4, batch_rows=5, **definition)
    with closing(steps.session(dsn)) as user:

        def write() -> None:
            a, b = chance.sample(range(1, 61), 2)
            for statement in (
                f"UPDATE t SET k = {a} + {b} - k WHERE k IN ({a}, {b})",
                f"DELETE FROM t WHERE k = {a}",
                f"INSERT INTO t SELECT max(id) + 1, 0, {a}, 0 FROM t",
                f"UPDATE t SET v = v + 1 WHERE k = {b}",
            ):
                sql(user, statement)
            user.commit()

        steps.build_by_chance(database, run, chance, write)
        write()
        steps.seal_all(database, run)
        write()
        steps.fold_all(database, run)
        write()
        steps.publish_all(database, run)
        write()
    steps.assert_exact(database)
    assert duplicates(database) == []
    assert_enforced(dsn)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "published"])
def test_an_abort_leaves_nothing(database: Database, dsn: str, phase: str) -> None:
    """An abort of a rebuild leaves only the generation that is enforced."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    Stage(database, phase, keys="k", include="v", segments=4, unique=True).connection.close()
    abort.abort(database, "ix", "test")
    if phase.startswith("rebuild"):
        assert_enforced(dsn)
    else:
        run_sql(dsn, REFUSED)
        assert one(database, "SELECT count(*) FROM pg_class WHERE relname ~ '^g[0-9]'") == 0


def with_duplicates(database: Database, dsn: str) -> None:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"), "UPDATE t SET k = 1 WHERE id IN (5, 10)")


@pytest.mark.sample(0)
@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_driver_that_dies_at_any_statement(database: Database, dsn: str, at: int) -> None:
    """In a seal with duplicates, in both looks and in the switch: the next run finds all duplicates, and continues."""
    with_duplicates(database, dsn)
    run = steps.built(database, unique=True, ranges=2, segments=3)
    run_sql(dsn, "INSERT INTO t VALUES (101, 1, 100, 0), (102, 2, 100, 0)")

    def go_on() -> None:
        run = start_run(database, "ix", "test", take_over=True)
        steps.seal_all(database, run)
        steps.fold_all(database, run)

    with suppress(Killed, DuplicatesFound), killed(database.engine, at):
        go_on()
    with pytest.raises(DuplicatesFound, match="5 rows share 2 keys"):
        go_on()
    assert len(duplicates(database)) == 5
    run_sql(dsn, "UPDATE t SET k = 1000 + id WHERE id IN (5, 10, 101)")
    with suppress(Killed, DuplicatesFound), killed(database.engine, at * 3):
        go_on()
    if status(database)[0].phase in ("build", "seal", "fold"):
        run = start_run(database, "ix", "test", take_over=True)
        if status(database)[0].phase == "seal":
            steps.seal_all(database, run)
        steps.fold_all(database, run)
    steps.publish_all(database, start_run(database, "ix", "test", take_over=True))
    assert duplicates(database) == []
    steps.assert_exact(database)
    assert_enforced(dsn)


@pytest.mark.by_hand("sweeps")
def test_an_abort_while_it_waits_for_the_healing(database: Database, dsn: str) -> None:
    with_duplicates(database, dsn)
    run = steps.built(database, unique=True, segments=3)
    with pytest.raises(DuplicatesFound):
        steps.seal_all(database, run)
    abort.abort(database, "ix", "test")
    assert len(duplicates(database)) == 3
    run_sql(dsn, "UPDATE t SET k = id")
    steps.make_index(database, unique=True)
    steps.assert_exact(database)
    drop.drop_index(database, "ix", "test")
    clean_up.clean_up(database)
    assert one(database, "SELECT count(*) FROM roir.duplicate") == 3
    run_sql(dsn, "UPDATE roir.index SET dropped_at = dropped_at - interval '8 days'")
    clean_up.clean_up(database)
    assert one(database, "SELECT count(*) FROM roir.duplicate") == 0


@pytest.mark.by_hand("sweeps")
def test_both_generations_enforce_until_the_older_one_is_dropped(database: Database, dsn: str) -> None:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    steps.make_index(database, unique=True)
    steps.make_index(database, table=None, keys=None, revert_window_s=60)
    for _ in range(2):
        assert_enforced(dsn)
        run_sql(dsn, "UPDATE t SET k = k + 1", "UPDATE t SET k = 62 - k")
        steps.assert_exact(database)
        revert.revert(database, "ix", "test")
    steps.assert_exact(database)
    assert_enforced(dsn)


@pytest.mark.parametrize("phase", ["built", "sealed", "mid-fold", "published", "rebuild"])
@pytest.mark.parametrize("what", ["t", "t1"])
def test_a_truncate_frees_keys(database: Database, dsn: str, phase: str, what: str) -> None:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    stage = Stage(database, phase, keys="k", include="v", segments=4, unique=True)
    run_sql(dsn, "UPDATE t SET v = 0 WHERE id % 5 = 0", f"TRUNCATE {what}")
    run_sql(dsn, "INSERT INTO t SELECT 400 + i, 0, i, 0 FROM generate_series(1, 60, 4) i")
    stage.finish()
    with pytest.raises(psycopg2.errors.UniqueViolation):
        run_sql(dsn, "INSERT INTO t VALUES (900, 1, 5, 0)")


def test_changes_that_are_replicated_are_refused_too(database: Database, dsn: str) -> None:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    steps.make_index(database, unique=True)
    with pytest.raises(psycopg2.errors.UniqueViolation):
        run_sql(dsn, "SET session_replication_role = replica; INSERT INTO t VALUES (900, 1, 33, 0)")


@pytest.mark.by_hand("sweeps")
def test_a_restored_database_enforces_at_once(database: Database, dsn: str, request: pytest.FixtureRequest) -> None:
    """In it tables have other oids, and transactions other numbers."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    steps.make_index(database, unique=True)
    Stage(database, "sealed", index="other", keys="k", segments=2, unique=True).connection.close()
    run_sql(dsn, "UPDATE roir.generation SET looked_xid = '3' WHERE id = 2")
    dump_and_restore: Restore = request.getfixturevalue("restore")
    restored = dump_and_restore()
    for _ in range(2):
        with pytest.raises(psycopg2.errors.UniqueViolation) as refused:
            run_sql(restored.dsn, REFUSED)
        assert refused.value.diag.table_name == "t"
        assert refused.value.diag.message_detail == "Key (k)=(33) already exists."
        run_sql(restored.dsn, "UPDATE t SET k = k + 1", "UPDATE t SET k = k - 1")
        install.init(restored)
    assert one(restored, "SELECT looked_xid FROM roir.generation WHERE id = 2") is None
    steps.assert_exact(restored)


@pytest.mark.by_hand("sweeps")
def test_what_does_not_enforce_any_more_is_told(database: Database, dsn: str) -> None:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    steps.make_index(database, unique=True)
    clean_up.clean_up(database)
    assert status(database)[0].warnings == ()
    run_sql(dsn, "DROP INDEX roir_data.g1_s000_pair")
    (warning,) = status(database)[0].warnings
    assert "lost its index of keys with NULLs" in warning
    run_sql(dsn, "DROP INDEX roir_data.g1_key", "CREATE UNIQUE INDEX ON roir_data.g1 (c1, c2, c3)")
    (warning,) = status(database)[0].warnings
    assert "has lost its unique index, so writes to its table fail" in warning


@pytest.mark.by_hand("sweeps")
def test_its_bloat_counts_no_segment_twice(database: Database, dsn: str) -> None:
    run_sql(dsn, *PLAIN, "INSERT INTO t SELECT i, 0, nullif(i, i / 2 * 2), 0 FROM generate_series(1, 4000) i")
    steps.make_index(database, "iu", unique=True)
    steps.make_index(database, "ip")
    run_sql(dsn, "ANALYZE")
    found = {}
    with database.transaction() as connection:
        for generation in (1, 2):
            found[generation] = bloat_of(segments(connection, generation), 0)
    assert found[1].rows == found[2].rows == 4000
    assert found[1].win_bytes == 0
