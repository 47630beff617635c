"""Snapshots beside a step that brings or repairs entries of rows visible before: they see the whole index, or get
40001.

The rows that a plain ATTACH brings are in the table for every snapshot that sees them. Their entries are there only for
snapshots younger than `roir sync-partitions`. Seen to miss the entries, without an error, if the view isn't guarded
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg2.errors
import pytest
from sqlalchemy import event

from airflow_roir.engine import clean_up, revert
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.errors import LockNotAcquired
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.compacting import act
from tests.engine.steps import sql
from tests.engine.test_detach import published
from tests.engine.test_removed_entries import DIFFERENCE

pytestmark = pytest.mark.sample(1)

Step = Callable[[], object]
ROWS = "SELECT 30 + i % 10, i, 'n', i FROM generate_series(1, 50) i"
BOUNDS = "FOR VALUES FROM (30) TO (40)"
LOADED = ("CREATE TABLE n3 (LIKE t INCLUDING ALL)", f"INSERT INTO n3 {ROWS}")


def loaded(database: Database) -> None:
    run_sql(database.dsn, *LOADED)


def rebuilt(database: Database) -> None:
    """Makes a generation to revert to."""
    loaded(database)
    steps.make_index(database, table=None, keys=None)


def came(database: Database) -> Iterator[Step]:
    yield lambda: run_sql(database.dsn, f"ALTER TABLE t ATTACH PARTITION n3 {BOUNDS}")
    yield lambda: sync.sync_partitions(database, "t", "test")


def came_into_a_new_level(database: Database) -> Iterator[Step]:
    yield lambda: run_sql(
        database.dsn,
        f"CREATE TABLE m3 PARTITION OF t {BOUNDS} PARTITION BY LIST (d)",
        "ALTER TABLE m3 ATTACH PARTITION n3 DEFAULT",
    )
    yield lambda: sync.sync_partitions(database, "t", "test")


def was_out_for_a_while(database: Database) -> Iterator[Step]:
    yield lambda: run_sql(
        database.dsn,
        "ALTER TABLE t DETACH PARTITION t1",
        "UPDATE t1 SET k = 'changed' WHERE id % 3 = 0",
        "UPDATE t1 SET v = -1 WHERE id % 4 = 0",
        "INSERT INTO t1 VALUES (13, 9000, 'new', 1)",
    )
    yield lambda: run_sql(database.dsn, "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (10) TO (20)")
    yield lambda: sync.sync_partitions(database, "t", "test")


def came_before_a_sync_that_was_killed(database: Database) -> Iterator[Step]:
    """The kill comes after the last copy. A clean-up finds nothing missing, and takes the partition in."""
    yield lambda: run_sql(database.dsn, f"ALTER TABLE t ATTACH PARTITION n3 {BOUNDS}")
    yield lambda: killed(database)
    yield lambda: clean_up.clean_up(database)
    yield lambda: sync.sync_partitions(database, "t", "test")


def killed(database: Database) -> None:
    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "roir.release_table" in statement:
            raise KeyboardInterrupt

    event.listen(database.engine, "before_cursor_execute", look)
    try:
        with pytest.raises(KeyboardInterrupt):
            sync.sync_partitions(database, "t", "test")
    finally:
        event.remove(database.engine, "before_cursor_execute", look)


def came_before_a_revert(database: Database) -> Iterator[Step]:
    yield from came(database)
    yield lambda: revert.revert(database, "ix", "test")


def came_before_a_rebuild(database: Database) -> Iterator[Step]:
    yield from came(database)
    yield lambda: steps.make_index(database, table=None, keys=None)


def came_before_a_compaction(database: Database) -> Iterator[Step]:
    yield from came(database)
    yield lambda: compacting.compact(database, act("rewrite", 1))


def went_again(database: Database) -> Iterator[Step]:
    yield from came(database)
    yield lambda: detach.detach_partition(database, "n3", "test")


def was_exchanged(database: Database) -> Iterator[Step]:
    yield lambda: run_sql(
        database.dsn,
        "ALTER TABLE t DETACH PARTITION t1",
        "UPDATE n3 SET d = 10 + d % 10",
        "ALTER TABLE t ATTACH PARTITION n3 FOR VALUES FROM (10) TO (20)",
    )
    yield lambda: sync.sync_partitions(database, "t", "test")


def was_attached(database: Database) -> Iterator[Step]:
    yield lambda: attach.attach_partition(database, "t", "n3", BOUNDS, "test", patience_s=0)


def was_damaged(database: Database) -> Iterator[Step]:
    yield lambda: run_sql(
        database.dsn,
        "DELETE FROM roir_data.g1 WHERE c2 % 10 = 3",
        "INSERT INTO roir_data.g1 SELECT 'ghost', d, 5000 + id, v FROM t WHERE id < 5",
        "UPDATE roir_data.g1 SET c4 = -7 WHERE c3 % 10 = 4",
    )
    yield lambda: verify(database, "ix", VerifyOptions(repair=True))


WAYS: dict[Callable[[Database], Iterator[Step]], Callable[[Database], None]] = {
    came: loaded,
    came_into_a_new_level: loaded,
    was_out_for_a_while: loaded,
    came_before_a_sync_that_was_killed: loaded,
    came_before_a_revert: rebuilt,
    came_before_a_rebuild: loaded,
    came_before_a_compaction: loaded,
    went_again: loaded,
    was_exchanged: loaded,
    was_attached: loaded,
    was_damaged: loaded,
}
ISOLATION = ("REPEATABLE READ", "SERIALIZABLE", "READ COMMITTED")
FUNCTION = f"CREATE FUNCTION differs() RETURNS bigint LANGUAGE plpgsql STABLE AS $$ BEGIN RETURN ({DIFFERENCE}); END $$"
CURSOR = "DECLARE c CURSOR FOR SELECT CASE WHEN i = 1 THEN 0 ELSE differs() END FROM generate_series(1, 2) i"
# At most this many sessions are open.
MOST = 16


class Readers:
    """Open snapshots, one for each moment."""

    def __init__(self, dsn: str, isolation: str) -> None:
        self.dsn = dsn
        self.isolation = isolation
        self.open: list[Any] = []
        self.turn = threading.Lock()

    def come(self, *_: Any) -> None:
        """Opens a reader with a new snapshot: of a transaction, or of a statement that calls a function later."""
        with self.turn:
            if len(self.open) >= MOST:
                # The first half of the readers stays.
                for user in self.open[MOST // 2 :: 2]:
                    user.close()
                del self.open[MOST // 2 :: 2]
            self._come()

    def _come(self) -> None:
        if self.isolation == "READ COMMITTED":
            user = steps.session(self.dsn)
            sql(user, CURSOR)
            sql(user, "FETCH 1 FROM c")
        else:
            user = steps.old_session(self.dsn, self.isolation)
        self.open.append(user)

    def seen(self) -> list[int | str]:
        """The difference that each reader sees, or `refused`. The readers end."""
        found = [self._seen(user) for user in self.open]
        self.end()
        return found

    def _seen(self, user: Any) -> int | str:
        query = "FETCH 1 FROM c" if self.isolation == "READ COMMITTED" else DIFFERENCE
        try:
            return int(sql(user, query)[0][0])
        except psycopg2.errors.SerializationFailure:
            return "refused"

    def end(self) -> None:
        for user in self.open:
            user.close()
        self.open.clear()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("way", WAYS)
def test_a_snapshot_of_any_moment_sees_the_whole_index_or_is_refused(
    database: Database, dsn: str, way: Callable[[Database], Iterator[Step]], isolation: str
) -> None:
    """There is a snapshot for each transaction of each command. They read when all is done."""
    published(database, dsn)
    run_sql(dsn, FUNCTION)
    WAYS[way](database)
    clean_up.clean_up(database)
    readers = Readers(dsn, isolation)
    event.listen(database.engine, "commit", readers.come)
    try:
        for step in way(database):
            readers.come()
            try:
                step()
            except LockNotAcquired:
                # This step waits for the readers.
                assert all(one in (0, "refused") for one in readers.seen())
                event.remove(database.engine, "commit", readers.come)
                step()
                event.listen(database.engine, "commit", readers.come)
    finally:
        event.remove(database.engine, "commit", readers.come)
    seen = readers.seen()
    assert all(one in (0, "refused") for one in seen), seen
    with closing(steps.session(dsn)) as user:
        assert sql(user, DIFFERENCE) == [(0,)]
    steps.assert_exact(database)
    clean_up.clean_up(database)
    clean_up.clean_up(database)
    with closing(steps.session(dsn)) as user:
        [(definition,)] = sql(user, "SELECT pg_get_viewdef('ix'::regclass)")
        assert "published" not in definition
        assert "NOT" not in definition
        assert sql(user, DIFFERENCE) == [(0,)]
