"""Faults of a published index while no operation runs: clean-up and status report them, and a rebuild repairs them."""

from __future__ import annotations

import psycopg2.errors
import pytest

from airflow_roir.definition import parse_name
from airflow_roir.engine import abort, clean_up, drop, lifecycle
from airflow_roir.engine.capture import installation
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.partitions import sync
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.source import catalog
from airflow_roir.errors import InvalidInput, SourceChanged
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_partitions import make

pytestmark = pytest.mark.sample(1)

PLAIN = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, i % 7, i FROM generate_series(1, 40) i",
)


def published(database: Database, dsn: str, partitioned: bool = True) -> None:
    make(dsn) if partitioned else run_sql(dsn, *PLAIN)
    steps.make_index(database, include="v")
    assert told(database) == []


def told(database: Database) -> list[str]:
    """The warnings of a clean-up, which the status shows too."""
    found = clean_up.clean_up(database).warnings
    (operation,) = status(database)
    assert list(operation.warnings) == found
    return found


def rebuild(database: Database) -> None:
    steps.make_index(database, table=None, keys=None)


def test_a_table_that_was_dropped_is_told_with_its_index(database: Database, dsn: str) -> None:
    """Seen to name no index, and to say nothing during the first build."""
    published(database, dsn, partitioned=False)
    run_sql(dsn, "DROP TABLE t CASCADE")
    assert told(database) == ["index public.ix: its table was dropped; drop the index, too: roir drop public.ix"]
    run_sql(dsn, "DROP VIEW IF EXISTS ix")
    drop.drop_index(database, "ix", "test")
    run_sql(dsn, *PLAIN)
    steps.begin(database)
    run_sql(dsn, "DROP TABLE t CASCADE")
    assert told(database) == ["index public.ix: its table was dropped. Abort its operation: roir abort public.ix"]
    abort.abort(database, "ix", "test")
    assert status(database) == []


@pytest.mark.parametrize(
    ("relation", "which", "state"),
    [
        ("t", 0, "DISABLE"),
        ("t1", 0, "DISABLE"),
        ("t1", 0, "ENABLE"),
        ("t1", 0, "ENABLE REPLICA"),
        ("t", 1, "DISABLE"),
        ("t1", 1, "ENABLE"),
    ],
)
def test_a_capture_trigger_that_does_not_fire_is_told(
    database: Database, dsn: str, relation: str, which: int, state: str
) -> None:
    published(database, dsn)
    trigger = steps.capture_triggers(dsn)[which]
    run_sql(dsn, f"ALTER TABLE {relation} {state} TRIGGER {trigger}")
    (warning,) = told(database)
    assert warning.startswith("index public.ix: ")
    remedy = f"ALTER TABLE public.{relation} ENABLE ALWAYS TRIGGER {trigger}"
    assert f"{trigger} on public.{relation} is " in warning
    assert remedy in warning
    assert told(database) == [warning], "a clean-up doesn't hide it"
    run_sql(dsn, remedy)
    (warning,) = told(database)
    assert "disabled or gone for a while, and may have missed writes" in warning
    assert "roir verify public.ix" in warning
    lifecycle.verify(database, "ix", VerifyOptions(), "test")
    assert told(database) == []


@pytest.mark.sample(0)
@pytest.mark.parametrize("filled", [False, True])
def test_the_remedy_for_a_partition_that_came_without_roir_helps(database: Database, dsn: str, filled: bool) -> None:
    """Found: after a plain `ATTACH` of a partition with rows status advised `roir clean-up`, which changed nothing. It
    holds: it names `roir sync-partitions`.
    """
    published(database, dsn)
    clean_up.clean_up(database)
    run_sql(
        dsn,
        "CREATE TABLE came (LIKE t INCLUDING ALL)",
        *(["INSERT INTO came SELECT 700 + i % 10, 7000 + i, 'k', i FROM generate_series(1, 20) i"] if filled else []),
        "ALTER TABLE t ATTACH PARTITION came FOR VALUES FROM (700) TO (710)",
    )
    with database.transaction() as connection:
        [warning] = faults.warnings(connection)
    assert "came without roir (public.came)" in warning
    assert warning.endswith("Run: roir sync-partitions public.t")
    sync.sync_partitions(database, "t", "test")
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    steps.assert_exact(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize("state", ["ENABLE", "DISABLE"])
def test_the_remedy_enables_all_triggers(database: Database, dsn: str, state: str) -> None:
    """Found: after `ENABLE TRIGGER ALL` the remedy named one of the triggers that it disarms. It holds: it names
    all.
    """
    published(database, dsn)
    run_sql(dsn, f"ALTER TABLE t {state} TRIGGER ALL")
    (warning,) = told(database)
    run_sql(dsn, warning.partition("Remedy: ")[2].partition("; then")[0])
    (warning,) = told(database)
    assert "disabled or gone for a while" in warning
    lifecycle.verify(database, "ix", VerifyOptions(), "test")
    assert told(database) == []


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", ["{0} ON t", "{1} ON t", "{1} ON t1"])
def test_a_capture_trigger_that_is_gone_is_told_until_a_rebuild(database: Database, dsn: str, name: str) -> None:
    published(database, dsn)
    rebuild(database)
    run_sql(
        dsn,
        f"DROP TRIGGER {name.format(*steps.capture_triggers(dsn))}",
        "UPDATE roir.generation SET drop_after = now() WHERE status = 'retired'",
    )
    (warning,) = told(database)
    assert "is missing" in warning
    assert "roir build public.ix" in warning
    assert told(database) == [warning], "the clean-up dropped a generation and left the triggers as they were"
    run_sql(dsn, "UPDATE t SET v = -1 WHERE d = 11", "TRUNCATE t1")
    rebuild(database)
    assert told(database) == []
    run_sql(dsn, "UPDATE t SET v = -2 WHERE d = 5", "INSERT INTO t VALUES (11, 900, 'new', 1)")
    steps.assert_exact(database)
    run_sql(dsn, "TRUNCATE t1")
    steps.assert_exact(database)
    run_sql(dsn, "TRUNCATE t")
    assert steps.assert_exact(database).rows == 0


@pytest.mark.sample(0)
@pytest.mark.parametrize("relation", ["t", "t1"])
def test_a_rebuild_enables_capture_triggers_again(database: Database, dsn: str, relation: str) -> None:
    published(database, dsn)
    run_sql(dsn, f"ALTER TABLE {relation} DISABLE TRIGGER ALL", "UPDATE t SET v = -1 WHERE d = 11")
    _, run = steps.begin(database, table=None, keys=None)
    run_sql(dsn, "UPDATE t SET v = -2 WHERE d = 12")
    steps.finish_all(database, run)
    run_sql(dsn, "UPDATE t SET v = -3 WHERE d = 13")
    steps.assert_exact(database)
    run_sql(dsn, "TRUNCATE t1")
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_build_that_missed_writes_is_not_forgotten_by_another_one(database: Database, dsn: str) -> None:
    """The begin of another build enables the capture again, and with that the first build's fingerprint would fit."""
    make(dsn)
    _, first = steps.begin(database)
    trigger = steps.capture_triggers(dsn)[0]
    run_sql(dsn, f"ALTER TABLE t1 DISABLE TRIGGER {trigger}", "UPDATE t SET k = 'lost' WHERE d = 11")
    with pytest.raises(SourceChanged, match=rf"{trigger} on public\.t1 is disabled.*roir abort public\.ix"):
        steps.begin(database, "other", keys="v")
    with pytest.raises(SourceChanged):
        steps.build_all(database, first)
    abort.abort(database, "ix", "test")
    steps.make_index(database, "other", keys="v")
    steps.assert_exact(database, "other")


@pytest.mark.sample(0)
def test_many_gaps_are_one_warning(database: Database, dsn: str) -> None:
    published(database, dsn)
    run_sql(dsn, "ALTER TABLE t DISABLE TRIGGER ALL")
    (warning,) = told(database)
    assert warning.count(" is disabled") == 3
    assert " and 2 more" in warning
    assert warning.count("ALTER TABLE") == 1, "one statement enables all, however many there are"
    run_sql(dsn, warning.partition("Remedy: ")[2].partition("; then roir")[0])
    assert "disabled or gone for a while" in told(database)[0]


def test_a_partition_that_is_not_taken_in_yet_is_told_and_taken_in(database: Database, dsn: str) -> None:
    published(database, dsn)
    run_sql(dsn, "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40)")
    (warning,) = status(database)[0].warnings
    assert "public.t3" in warning
    assert warning.endswith("Run: roir sync-partitions public.t")
    assert told(database) == []


def test_a_column_of_another_type_is_told_and_not_rebuilt(database: Database, dsn: str) -> None:
    """An integer in the entries holds 1.5 as 2, and the view's column can't become numeric."""
    published(database, dsn, partitioned=False)
    with pytest.raises(psycopg2.errors.FeatureNotSupported, match="used by a view"):
        run_sql(dsn, "ALTER TABLE t ALTER v TYPE numeric")
    run_sql(dsn, "DROP VIEW roir_data.g1_source", "ALTER TABLE t ALTER v TYPE numeric")
    (altered,) = told(database)
    assert "is numeric now and integer in its entries" in altered
    with pytest.raises(InvalidInput, match=r"numeric now.*roir drop public\.ix"):
        steps.begin(database, table=None, keys=None)
    drop.drop_index(database, "ix", "test")
    steps.make_index(database, include="v")
    steps.assert_exact(database)
    assert told(database) == []


def test_a_renamed_column_is_told_and_a_renamed_type_is_not(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE DOMAIN state AS mood")
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k mood, v state)", "INSERT INTO t VALUES (1, 'sad', 'ok')")
    steps.make_index(database, include="v")
    run_sql(dsn, "ALTER TYPE mood RENAME TO feeling")
    assert told(database) == []
    run_sql(dsn, "ALTER TABLE t RENAME v TO w")
    (warning,) = told(database)
    assert 'has no column "v" any more' in warning


def test_a_renamed_table_is_followed(database: Database, dsn: str) -> None:
    """Another table, or a view, may have the old name."""
    published(database, dsn, partitioned=False)
    run_sql(
        dsn,
        "ALTER TABLE t RENAME TO old",
        "CREATE TABLE t (LIKE old INCLUDING ALL)",
        "DELETE FROM old WHERE id = 1",
        "INSERT INTO t SELECT * FROM old",
        "DELETE FROM old WHERE id = 2",
    )
    steps.assert_exact(database)
    assert clean_up.clean_up(database).warnings == []
    run_sql(
        dsn,
        "DROP TABLE t CASCADE",
        "CREATE VIEW t AS SELECT * FROM old WHERE false",
        "DELETE FROM old WHERE id = 3",
        "UPDATE old SET id = 100 WHERE id = 4",
    )
    steps.assert_exact(database)
    assert clean_up.clean_up(database).warnings == []


def test_a_primary_key_that_becomes_deferrable_is_followed(database: Database, dsn: str) -> None:
    published(database, dsn, partitioned=False)
    run_sql(dsn, "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED")
    replaced, unseen = clean_up.clean_up(database).warnings
    assert "has been replaced" in replaced
    assert "was dropped and added again" in unseen
    user = steps.session(dsn)
    steps.sql(user, "UPDATE t SET id = 2, k = 'x' WHERE id = 1")
    steps.sql(user, "DELETE FROM t WHERE id = 2 AND k = 'x'")
    steps.sql(user, "UPDATE t SET id = 1 WHERE id = 2")
    user.commit()
    steps.assert_exact(database)


def test_another_primary_key_is_told(database: Database, dsn: str) -> None:
    published(database, dsn, partitioned=False)
    run_sql(dsn, "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, v)")
    found = clean_up.clean_up(database).warnings
    assert any("primary key of" in line and "roir drop public.ix" in line for line in found), found
    with pytest.raises(InvalidInput, match="is another one now"):
        steps.begin(database, table=None, keys=None)
    run_sql(dsn, "ALTER TABLE t DROP CONSTRAINT t_pkey")
    assert any("has no primary key" in line for line in clean_up.clean_up(database).warnings)


def test_the_capture_is_not_stale_in_any_mode(database: Database, dsn: str) -> None:
    published(database, dsn)

    def stale() -> bool:
        with database.transaction() as connection:
            return installation.is_stale(connection, catalog.read_source(connection, parse_name("t", "table")))

    assert not stale()
    _, run = steps.begin(database, table=None, keys=None)
    assert not stale()
    steps.switch_all(database, run)
    assert not stale()


def test_a_column_that_was_dropped_with_cascade_has_one_remedy(database: Database, dsn: str) -> None:
    """The server's own hint advises this, if no guard refuses it. A rebuild can't create the capture's view again."""
    steps.make_table(dsn)
    steps.make_index(database, include="v")
    run_sql(dsn, "SELECT roir.unguard()", "ALTER TABLE t DROP COLUMN k CASCADE")
    lines = status(database)[0].warnings
    assert any('has no column "k" any more' in line and line.endswith("roir drop public.ix") for line in lines)
    assert not any("roir build" in line for line in lines)
    drop.drop_index(database, "ix", "test")
    run_sql(dsn, "DELETE FROM t")
