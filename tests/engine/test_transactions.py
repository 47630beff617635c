"""I7: no transaction of ours outlives one batch, one segment's index build, one step of a fold or one unit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, event

from airflow_roir.engine import build, lifecycle, seal
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

# The beginnings of the statements that do a piece, or commit it.
PIECES = {
    "batch": r"UPDATE roir\.scan_range p\s",
    "segment": r"CREATE UNIQUE INDEX g\d+_s\d+_key ",
    "fold step": r"WITH gone AS \(DELETE FROM roir_data\.g\d+_delta ",
    "unit": r"UPDATE roir\.verification_unit p\s",
}
OPEN = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND xact_start IS NOT NULL"
)


@contextmanager
def pieces_by_transaction(database: Database) -> Iterator[dict[str, list[int]]]:
    """For each kind of piece, the number of pieces in each transaction that did any, in the order of their ends."""
    seen: dict[Connection, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    ended: dict[str, list[int]] = defaultdict(list)

    def look(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        for kind, beginning in PIECES.items():
            if re.match(beginning, statement.lstrip()):
                seen[connection][kind] += 1

    def end(connection: Connection) -> None:
        for kind, pieces in seen.pop(connection, {}).items():
            ended[kind].append(pieces)

    listeners: dict[str, Callable[..., None]] = {"before_cursor_execute": look, "commit": end, "rollback": end}
    for name, listener in listeners.items():
        event.listen(database.engine, name, listener)
    try:
        yield ended
    finally:
        for name, listener in listeners.items():
            event.remove(database.engine, name, listener)


def test_a_transaction_does_one_piece_of_work_and_none_is_open_between_two(database: Database, dsn: str) -> None:
    database = Database(dsn, "roir tests", Limits(unit_rows=20, unit_blocks=1))
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, i % 9, i FROM generate_series(1, 200) i",
    )
    watch = steps.session(dsn)
    watch.autocommit = True
    with pieces_by_transaction(database) as done:
        _, run = steps.begin(database, include="v", ranges=3, segments=3, batch_rows=20)
        worker = steps.worker(database, run)
        claim = worker.claim()
        while isinstance(claim, build.Claim):
            assert sql(watch, OPEN) == [(0,)], "between two batches"
            outcome = worker.step(claim)
            assert isinstance(outcome, Step)
            assert sql(watch, OPEN) == [(0,)], "between two batches"
            claim = outcome.rest or worker.claim()
        worker.connection.close()
        build.finish(database, run)
        run_sql(dsn, "UPDATE t SET k = 'x' WHERE id < 60", "DELETE FROM t WHERE id > 190")
        for _ in seal.PHASE.work(database, run, 0):
            assert sql(watch, OPEN) == [(0,)], "between two segments"
        seal.finish(database, run)
        steps.fold_all(database, run)
        steps.publish_all(database, run)
        lifecycle.verify(database, "ix", VerifyOptions(parallelism=1))
    assert {kind: set(pieces) for kind, pieces in done.items()} == {kind: {1} for kind in PIECES}
    assert len(done["batch"]) >= 10
    assert len(done["segment"]) == 4
    assert len(done["unit"]) >= 10
    steps.assert_exact(database)
