"""A drop beside a command that begins over the same generation: one of the two sees the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_roir.engine import clean_up, drop
from airflow_roir.engine.database import Database
from airflow_roir.engine.verify import record
from airflow_roir.errors import NotFound, OperationRunning
from airflow_roir.options import VerifyOptions
from tests.engine import compacting, steps
from tests.engine.interposed import before
from tests.engine.test_locks import in_thread, watching

WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
BEGIN: dict[str, Callable[[Database], object]] = {
    "compaction": lambda database: compacting.begin(database, compacting.act("rewrite", 1)),
    "verification": lambda database: record.begin(database, "ix", VerifyOptions(), "test"),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("what", BEGIN)
def test_nothing_begins_over_a_generation_that_a_drop_has_looked_at(database: Database, dsn: str, what: str) -> None:
    """Seen to begin, and to leave an operation of a dropped index that only an abort could end."""
    steps.make_table(dsn)
    steps.make_index(database, segments=2)
    watch = watching(dsn)
    found = []

    def begin() -> None:
        thread, errors = in_thread(lambda: BEGIN[what](Database(dsn, "other")))
        found.append((thread, errors))
        while thread.is_alive() and not steps.sql(watch, WAITS)[0][0]:
            pass

    with before(database, "DELETE FROM roir.source_partition WHERE generation_id", begin):
        drop.drop_index(database, "ix", "test")
    [(thread, errors)] = found
    thread.join()
    [error] = errors
    assert isinstance(error, OperationRunning | NotFound)
    assert steps.sql(watch, "SELECT count(*) FROM roir.operation WHERE status <> 'completed'") == [(0,)]
    clean_up.clean_up(database)
    assert steps.sql(watch, "SELECT count(*) FROM pg_class WHERE relname ~ '^g1'") == [(0,)]
