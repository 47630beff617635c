"""An operation that pauses in each phase for a test's own writes, and the entries that the index must then have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psycopg2.errors
import psycopg2.extensions
from sqlalchemy import Connection, Row

from airflow_roir.definition import Scan
from airflow_roir.engine import switch
from airflow_roir.engine.build import Claim
from airflow_roir.engine.capture import installation
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.work.phase_work import Step
from tests.engine import steps

# One phase for each mode of the capture, for tests that need no more.
MODES = ("capture", "direct", "active")
_PHASE_OF = {"capture": "built", "direct": "mid-fold", "active": "published"}
PHASES = ("prepared", "mid-build", "paused", "built", "sealed", "mid-fold", "published", "rebuild", "rebuild mid-fold")


def through_modes(
    database: Database,
    write: Callable[[str], None],
    index: str = "ix",
    table: str = "t",
    compare: Callable[[Database, str], object] = steps.assert_exact,
    **definition: Any,
) -> None:
    """Builds an index in small pieces. Calls `write` in each mode, in the middle of that mode's work, and compares
    after it.

    capture: after the first batch. direct: after the switch, before the fold. active: after publish.
    """
    options = {"ranges": 3, "segments": 2, "batch_rows": 7}
    _, run = steps.begin(database, index, table, **{**options, **definition})
    worker = steps.worker(database, run)
    with worker.connection:
        claim = worker.claim()
        assert isinstance(claim, Claim)
        assert isinstance(worker.step(claim), Step)
    write("capture")
    steps.switch_all(database, run)
    write("direct")
    steps.fold_and_publish(database, run)
    compare(database, index)
    write("active")
    compare(database, index)


class Stage:
    """An operation on `t (id int, …)` that waits in one phase, for many writes one by one.

    In the phases of a rebuild both generations are maintained, and both are compared.
    """

    def __init__(self, database: Database, phase: str, **definition: Any) -> None:
        self.database = database
        self.phase = phase = _PHASE_OF.get(phase, phase)
        self.index = definition.get("index", "ix")
        self.older: Stage | None = None
        options = {"ranges": 3, "segments": 2, "batch_rows": 7}
        if phase.startswith("rebuild"):
            self.older = Stage(database, "published", **definition)
            definition = {"table": None, "keys": None}
        _, self.run = steps.begin(database, **{**options, **definition})
        self._reach(phase.removeprefix("rebuild ") if phase != "rebuild" else "mid-build")
        # One session for all looks: to connect takes longer than to compare.
        self.connection = database.engine.connect()
        with self.connection.begin():
            self.job: Job = load_job(self.connection, self.run)
        self.base = physical.base(self.job.generation_id)
        self.delta = physical.delta(self.job.generation_id)

    def _reach(self, phase: str) -> None:
        database, run = self.database, self.run
        if phase == "prepared":
            return
        if phase in ("mid-build", "paused"):
            # The first range is done, the second one is begun, the third one is untouched.
            worker = steps.worker(database, run)
            with worker.connection:
                begun, done = 0, 0
                while not (done and begun):
                    claim = worker.claim()
                    assert isinstance(claim, Claim)
                    held: Claim | None = claim
                    while held is not None and not (done and begun):
                        outcome = worker.step(held)
                        assert isinstance(outcome, Step)
                        held, begun = outcome.rest, begun + bool(done)
                    done += held is None
            if phase == "paused":
                requests.pause(database, self.index, "test", "")
            return
        steps.build_all(database, run)
        if phase == "built":
            return
        steps.seal_all(database, run)
        if phase == "sealed":
            return
        switch.switch(database, run)
        if phase == "published":
            steps.fold_and_publish(database, run)

    def mix(self) -> None:
        """Leaves every third entry to the delta, every third to the base, and the rest to both: touched and stale."""
        if self.phase == "published":
            return
        entry = self.job.entry
        columns = ", ".join(entry.physical())
        identity = f"c{[column.source for column in entry.columns].index('id') + 1}"
        spare = [f"c{i + 1}" for i in entry.included_positions]
        connection = self.connection
        with connection.begin():
            everything = f"SELECT {columns} FROM ({overlay(connection, self.job)}) o"
            execute(connection, f"CREATE TEMP TABLE mixed ON COMMIT DROP AS {everything}")
            execute(connection, f"DELETE FROM {self.base}; DELETE FROM {self.delta}")
            third = f"{identity} % 3"
            execute(
                connection,
                f"INSERT INTO {self.base} ({columns}) SELECT {columns} FROM mixed "
                f"WHERE {third} > 0 AND {scanned(self.job, identity)}",
            )
            execute(connection, f"INSERT INTO {self.delta} SELECT {columns}, 'regular' FROM mixed WHERE {third} < 2")
            if spare:  # the base's copy is stale
                execute(connection, f"UPDATE {self.base} SET {spare[0]} = NULL WHERE {third} = 1")

    def assert_exact(self, what: str) -> None:
        """Checks that the source = the base and the rows still to be scanned, overridden by the delta (I3, I1)."""
        if self.older is not None:
            self.older.assert_exact(what)
        with self.connection.begin():
            different = differences(self.connection, self.job, self.phase == "published")
        assert not different, f"{what}, in phase {self.phase}"

    def finish(self) -> None:
        """Carries the operation to its end, and checks that the index is exact."""
        if self.phase != "published":
            database = self.database
            self.run = steps.start_with(database, 1, self.index, take_over=True)
            finalize = installation.mode(self.connection, self.job.generation_id) == "direct"
            self.connection.rollback()
            if not finalize:
                steps.build_all(database, self.run)
                steps.seal_all(database, self.run)
            steps.fold_all(database, self.run)
            steps.publish_all(database, self.run)
        self.connection.close()
        if self.older is not None:
            self.older.connection.close()
        steps.assert_exact(self.database, self.index)


def differences(connection: Connection, job: Job, published: bool) -> Sequence[Row[Any]]:
    """The differences between the source and the base with the rows still to be scanned, overridden by the delta (I3).
    published: the base alone (I1).

    In the caller's snapshot. The source's primary key is `id int`.
    """
    entry = job.entry
    values = ", ".join(column.of("s") for column in entry.columns)
    source = f"SELECT {values} FROM {job.source.sql} s WHERE {entry.satisfied('s')}"
    ours = (
        f"SELECT {', '.join(entry.physical())} FROM {physical.base(job.generation_id)}"
        if published
        else overlay(connection, job)
    )
    # As text, since equal values may differ.
    source, ours = (f"SELECT o::text FROM ({side}) o" for side in (source, ours))
    sides = f"WITH ours AS ({ours}), source AS ({source}) SELECT 'extra' AS what, x.* FROM "
    sides += "(TABLE ours EXCEPT ALL TABLE source) x UNION ALL SELECT 'missing', x.* FROM "
    return execute(connection, f"{sides}(TABLE source EXCEPT ALL TABLE ours) x").all()


def overlay(connection: Connection, job: Job) -> str:
    """SQL for the entries that the index would have if the rest were copied now and the delta folded."""
    entry, base, delta = job.entry, physical.base(job.generation_id), physical.delta(job.generation_id)
    columns = ", ".join(entry.physical(prefix="b."))
    return (
        f"(SELECT {columns} FROM (SELECT {', '.join(entry.physical())} FROM {base} "
        f"UNION ALL {to_scan(connection, job)}) b "
        f"WHERE NOT EXISTS (SELECT FROM {delta} d WHERE d.state <> 'ghost' AND {entry.equal('b.', 'd.')}) "
        f"UNION ALL SELECT {', '.join(entry.physical())} FROM {delta} WHERE state = 'regular')"
    )


# The table whose segments are the ranges of a rebuild from the index.
READ = """
SELECT DISTINCT h.inhparent::regclass::text FROM roir.scan_range r JOIN pg_inherits h ON h.inhrelid = r.relation::oid
 WHERE r.operation_id = %(operation)s
"""


def to_scan(connection: Connection, job: Job) -> str:
    """SQL for the entries that the ranges would still bring."""
    entry = job.entry
    named = (f"{column.of('s')} AS {name}" for column, name in zip(entry.columns, entry.physical(), strict=True))
    where, source = f"NOT {scanned(job, 's.id')}", job.source.sql
    if job.scan.by_blocks:
        where = (
            f"EXISTS (SELECT FROM roir.scan_range r WHERE r.operation_id = {job.run.operation_id} "
            "AND r.relation = s.tableoid::bigint AND NOT r.done AND (s.ctid::text::point)[0] < (r.upper ->> 0)::int "
            "AND (s.ctid::text::point)[0] >= coalesce((r.watermark ->> 0)::int + 1, (r.lower ->> 0)::int) "
            f"AND NOT EXISTS (SELECT FROM roir.emptied e WHERE e.generation_id = {job.generation_id} "
            f"AND e.relation IN (r.relation, {job.source.oid})))"
        )
    if job.scan is Scan.INDEX:
        source = execute(connection, READ, {"operation": job.run.operation_id}).scalar_one()
        return f"SELECT {', '.join(entry.physical(prefix='s.'))} FROM {source} s WHERE {where}"
    return f"SELECT {', '.join(named)} FROM {source} s WHERE {where} AND {entry.satisfied('s')}"


def scanned(job: Job, identity: str) -> str:
    """SQL: the row with that id, of today's source, is in a range that is done, or not after its watermark."""
    leaf = f"(SELECT x.tableoid::bigint FROM {job.source.sql} x WHERE x.id = {identity})"
    of_leaf = f"AND r.relation = {leaf} " if job.source.partitioned and job.scan is not Scan.INDEX else ""
    return (
        f"EXISTS (SELECT FROM roir.scan_range r WHERE r.operation_id = {job.run.operation_id} "
        f"AND coalesce((r.lower ->> 0)::int <= {identity}, true) "
        f"AND coalesce({identity} < (r.upper ->> 0)::int, true) {of_leaf}"
        f"AND (r.done OR {identity} <= (r.watermark ->> 0)::int))"
    )


Write = str | Callable[[psycopg2.extensions.connection], object]


def follow(
    database: Database, dsn: str, mode: str, statements: Mapping[str, Write], refill: str, **definition: Any
) -> None:
    """Runs each statement on the same rows: rolled back, once, and again. Compares each time, and at the end after
    publish.

    mode: a mode of the capture, or a phase. refill: fills table `t`, which is emptied before each statement.
    """
    stage = Stage(database, mode, **{"include": "v", **definition})
    user = steps.session(dsn)
    for name, statement in statements.items():
        steps.sql(user, "DELETE FROM t; " + refill)
        user.commit()
        stage.mix()
        for time in ("in vain, ", "", "again, "):
            try:
                if callable(statement):
                    statement(user)
                else:
                    steps.sql(user, statement)
                if time == "in vain, ":
                    user.rollback()
                    continue
                user.commit()
            except psycopg2.errors.TriggeredDataChangeViolation:  # a BEFORE trigger went too far
                user.rollback()
            except psycopg2.errors.IntegrityError:
                if not time:
                    raise
                user.rollback()
            stage.assert_exact(time + name)
    stage.finish()
