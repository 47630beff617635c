"""Waits at a unique index: no writer waits for the fold, and the fold waits for no writer."""

from __future__ import annotations

import pytest

from airflow_roir.engine.apply_delta import Folding
from airflow_roir.engine.database import Database, execute
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.twins import PARTITIONED, begin, table
from tests.engine.unique_keys import KINDS

pytestmark = pytest.mark.sample(1)

INT = KINDS[0]


def direct(database: Database, dsn: str, *written: str) -> Folding:
    """Table t of six rows, with these writes before the switch; returns its fold, to be stepped."""
    run_sql(
        dsn, *table(INT, PARTITIONED), "INSERT INTO t SELECT i, i % 3, i, i FROM generate_series(1, 6) i", "ANALYZE t"
    )
    run = begin(database, INT)
    steps.build_all(database, run)
    steps.seal_all(database, run)
    run_sql(dsn, *written)
    steps.switch.switch(database, run)
    connection = database.engine.connect()
    with connection.begin():
        job = steps.load_job(connection, run)
    return Folding(connection, job.generation_id, job.entry)


@pytest.mark.parametrize(
    "written",
    [
        ("DELETE FROM t WHERE id = 1",),
        ("UPDATE t SET k = 10 WHERE id = 1",),
        ("UPDATE t SET k = k + 10 WHERE id = 1", "UPDATE t SET v = 0 WHERE id = 2"),
    ],
)
def test_the_fold_waits_for_no_writer_who_took_a_stale_entry_over(
    database: Database, dsn: str, written: tuple[str, ...]
) -> None:
    """Otherwise the fold could hold an entry that the writer needs next: a deadlock (I6)."""
    fold = direct(database, dsn, *written)
    user = steps.session(dsn)
    sql(user, "INSERT INTO t VALUES (7, 1, 1, 7)")
    steps.fold_blocks(fold.connection, fold, 0, 16)
    user.commit()
    steps.fold_blocks(fold.connection, fold, 0, 16)
    with fold.connection.begin():
        assert execute(fold.connection, f"SELECT count(*) FROM {fold.delta} WHERE state <> 'ghost'").scalar() == 0
        left = f"SELECT count(*) FROM (SELECT c1 FROM {fold.base} EXCEPT SELECT k FROM public.t) x"
        assert execute(fold.connection, left).scalar() == 0
    fold.connection.close()
