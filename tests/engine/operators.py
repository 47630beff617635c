"""An operator's commands, on an index with an object for each command to change.

It has a generation to revert to, a partition that left, one that joins, one that came, a table to attach, segments, and
(in a scene of its own) a rebuild that is about to be published.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, clean_up, drop, prepare, publish, revert
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.compact.worker import finish
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, retry, sqlstate
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.engine.retry.patience import Patience
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.verify import comparing as verifying
from airflow_roir.engine.verify import record
from airflow_roir.errors import (
    AttachDisturbed,
    Fenced,
    IllegalTransition,
    InvalidInput,
    LockNotAcquired,
    NotFound,
    OperationFailed,
    OperationPaused,
    OperationRunning,
    PartitionsChanged,
    SourceChanged,
)
from airflow_roir.options import BuildOptions, VerifyOptions
from servers.postgres import COPIED
from tests.conftest import database_dsn, run_sql
from tests.engine import compacting, steps
from tests.engine.verifying import units

ROWS = "d, id, k, v"
SOURCE = (
    "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(4)),
    "INSERT INTO t SELECT i % 40, i, (i % 7)::text, i FROM generate_series(1, 80) i",
    *(f"CREATE TABLE {name} (d int, id int, k text, v int, PRIMARY KEY (d, id))" for name in ("n", "m")),
    "INSERT INTO n SELECT 50 + i % 10, 500 + i, (i % 7)::text, i FROM generate_series(1, 20) i",
    "INSERT INTO m SELECT 60 + i % 10, 600 + i, (i % 7)::text, i FROM generate_series(1, 20) i",
    "ANALYZE t",
)
# The partition is hidden, and its entries are still there.
LEFT = "SELECT roir.detach_partition('public.t0')"
# The attach has begun, and no rows are copied.
JOINING = "SELECT roir.begin_attach('public.t', 'public.m', 'FOR VALUES FROM (60) TO (70)')"
# Without entries, and not registered yet.
CAME = "CREATE TABLE t4 PARTITION OF t FOR VALUES FROM (40) TO (50)"
# In the first two scenes only these statements change the view; in the others it is guarded by a publish.
SCENES = {"calm": (), "left": (LEFT,), "came": (LEFT, JOINING, CAME), "rebuilt": (LEFT, JOINING)}
# The first command gives way soon if both wait for each other; the second one waits until the first one continues.
FIRST = Limits(attempt_ms=60, table_lock_ms=60, repair_rest_s=0.01)
# The reader that this command waits for goes on as soon as the command waits.
WAITING = Limits(attempt_ms=20_000, table_lock_ms=20_000, repair_rest_s=0.01)
SECOND = Limits(attempt_ms=400, table_lock_ms=400, repair_rest_s=0.01)
PATIENCE_S = 15.0
OPTIONS = {"ranges": 2, "segments": 2, "lock_timeout_ms": 300, "lock_patience_s": 5}

Command = Callable[[Database], object]


def _clean_up(database: Database) -> None:
    report = clean_up.clean_up(database)
    # A warning says what the clean-up couldn't remove yet; it isn't an error.
    for line in report.warnings:
        assert not re.search("can't be cleaned up|does not exist", line), line


def _detach(database: Database) -> None:
    detach.detach_partition(database, "t2", "test", patience_s=PATIENCE_S)


def _detach_and_drop(database: Database) -> None:
    detach.detach_partition(database, "t3", "test", drop=True, patience_s=PATIENCE_S)


def called(statement: str) -> Command:
    """A function of ours that a user calls, and calls again if it gave way to another session."""

    def call(database: Database) -> None:
        for _ in range(40):
            try:
                with database.transaction() as connection:
                    connection.exec_driver_sql(statement)
                return
            except DBAPIError as error:
                if sqlstate(error) not in ("55P03", "40P01"):
                    raise
        raise LockNotAcquired(statement)

    return call


# The functions that a session can call that has read the view.
CALLS = {
    "begin attach": "SELECT roir.begin_attach('public.t', 'public.n', 'FOR VALUES FROM (50) TO (60)')",
    "cancel attach": "SELECT roir.cancel_attach('public.m')",
    "detach by SQL": "SELECT roir.detach_partition('public.t2')",
    "detach and drop by SQL": "SELECT roir.detach_partition('public.t3', and_drop => true)",
}


def _attach(database: Database) -> None:
    attach.attach_partition(database, "t", "n", "FOR VALUES FROM (50) TO (60)", "test", patience_s=0)


def _sync(database: Database) -> None:
    sync.sync_partitions(database, "t", "test", patience_s=PATIENCE_S)


def _revert(database: Database) -> None:
    revert.revert(database, "ix", "test", patience_s=PATIENCE_S)


def _compact(database: Database) -> None:
    run = compacting.begin(database, compacting.act("rewrite", 1), lock_timeout_ms=60, lock_patience_s=2)
    held_up = 0
    one = compacting.worker(database, run)
    with closing(one.connection):
        claim = one.claim()
        while isinstance(claim, UnitClaim):
            try:
                claim = one.advance(claim)[0] or one.claim()
            except LockNotAcquired:
                held_up += 1
                if held_up == 5:
                    raise
    finish(database, run)


def _drop(database: Database) -> None:
    drop.drop_index(database, "ix", "test", patience_s=PATIENCE_S)


def _abort(database: Database) -> None:
    abort.abort(database, "ix", "test", patience_s=PATIENCE_S)


def _prepare(database: Database) -> None:
    prepare.prepare(database, IndexDefinition.parse("ix"), BuildOptions(**OPTIONS), "test")  # type: ignore[arg-type]


def _verify(database: Database) -> None:
    begun = record.begin(database, "ix", VerifyOptions(repair=True), "test")
    run = start_run(database, "ix", "test")
    while True:
        # The worker decides which errors may pass; a lock that it can't get is one of them.
        retry(lambda: list(units(database, run)), Patience(database.limits, outage_s=PATIENCE_S))
        verifying.finish(database, run)
        with database.transaction() as connection:
            if not record.is_open(connection, record.last(connection, begun.operation_id).id):
                return


def _publish(database: Database) -> None:
    if operations.find_operation(database, "ix").kind == "compact":
        raise NotFound("a compaction has nothing to publish")
    publish.publish(database, start_run(database, "ix", "test", take_over=True))


COMMANDS: dict[str, Command] = {
    "clean-up": _clean_up,
    "detach": _detach,
    "detach and drop": _detach_and_drop,
    **{name: called(statement) for name, statement in CALLS.items()},
    "attach": _attach,
    "sync": _sync,
    "revert": _revert,
    "compact": _compact,
    "drop": _drop,
    "abort": _abort,
    "prepare": _prepare,
    "verify": _verify,
    "publish": _publish,
}
# The errors that the docs name. None of them hides a state that would last, because the command is repeated.
EXPECTED = (
    LockNotAcquired,
    NotFound,
    InvalidInput,
    OperationRunning,
    OperationPaused,
    OperationFailed,
    IllegalTransition,
    Fenced,
    PartitionsChanged,
    SourceChanged,
    AttachDisturbed,
)
# Errors of our SQL functions that the docs name too: no such partition or attach, being attached, gone since, defined
# differently.
REFUSED = ("P0002", "55006", "42P01", "42809", "P0001")
# A retry after these must succeed.
PASSING = (LockNotAcquired, AttachDisturbed)


def make_templates(server: str) -> dict[str, str]:
    """Makes the scenes once, to be cloned. `rebuilt`: a rebuild is about to be published."""
    names = {scene: f"operators_{scene}" for scene in SCENES}
    template = "roir_template"
    for scene, name in names.items():
        run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template} {COPIED}")
        dsn = database_dsn(server, name)
        database = Database(dsn, "roir tests")
        if scene == "calm":
            template = name
            run_sql(dsn, *SOURCE)
            steps.make_index(database, "ix", "t", "k", "v", **OPTIONS)
            steps.make_index(database, "ix", None, None, **OPTIONS)
            clean_up.clean_up(database)
        elif scene == "came":
            revert.revert(database, "ix", "test")
        if scene == "rebuilt":
            run = steps.switched(database, "ix", None, None, **OPTIONS)
            run_sql(dsn, "UPDATE t SET k = 'new' WHERE id % 9 = 0")
            steps.fold_delta(database, run)
        run_sql(dsn, *SCENES[scene])
    return names


def drop_templates(server: str, names: dict[str, str]) -> None:
    """Drops the scenes."""
    run_sql(server, *(f"DROP DATABASE {name} WITH (FORCE)" for name in names.values()))


_numbers = itertools.count(1)


@contextmanager
def cloned(server: str, template: str) -> Iterator[str]:
    """A clone of the template."""
    name = f"operators_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template} {COPIED}")
    try:
        yield database_dsn(server, name)
    finally:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")
