"""The switch: under the drain lock, puts the capture from capture mode into direct mode; the publish makes it active.

From the switch on, DML maintains the base itself (docs/architecture.md#phases).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection

from airflow_roir.engine.capture import installation, partition_changes
from airflow_roir.engine.capture.installation import mode
from airflow_roir.engine.capture.target import CAPTURE, DIRECT
from airflow_roir.engine.control import operations, sign_of_life
from airflow_roir.engine.control.job import Job, check_fingerprint, check_partitions, load_job
from airflow_roir.engine.control.run import Run, read_control, read_running
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.unique import duplicates
from airflow_roir.errors import IllegalTransition, LockNotAcquired

T = TypeVar("T")

COPY_AGAIN = """
INSERT INTO roir.emptied (generation_id, relation)
SELECT DISTINCT 0, p.relation FROM roir.source_partition p
 WHERE p.generation_id = %(generation)s AND p.status = 'joining' AND p.bounds IS NOT NULL
"""
# also: more columns to set.
SET_MODE = """
UPDATE roir.generation SET capture_mode = %(new)s, mode_xid = pg_current_xact_id()::text{also}
 WHERE id = %(generation)s AND status = 'building' AND capture_mode = %(old)s
"""


def drain(
    database: Database,
    job: Job,
    body: Callable[[Connection, Callable[[], None]], T],
    report: Callable[[str], None],
    exclusive: Sequence[str] = (),
) -> T:
    """Run `body` under the drain lock of an operation's source, with the operation's own time limits (`Drain.run`).

    `report` and, meanwhile, the operation's `notice` say for which sessions it waits.
    """
    run = job.run

    def note(line: str | None) -> None:
        with database.transaction() as connection:
            sign_of_life.note_wait(connection, run.operation_id, run.epoch, line)

    def tell(line: str) -> None:
        report(line)
        note(line)

    def noted(connection: Connection, lock: Callable[[], None]) -> T:
        result = body(connection, lock)
        sign_of_life.note_wait(connection, run.operation_id, run.epoch, None)
        return result

    timeout_ms, patience_s = int(job.options["lock_timeout_ms"]), float(job.options["lock_patience_s"])
    try:
        with telling_of_names():
            source = job.source
            return Drain(database, source.sql, source.relations, timeout_ms, patience_s).run(noted, tell, exclusive)
    except LockNotAcquired:
        note(None)  # the pause that follows names them
        raise


def lock_checked(connection: Connection, job: Job, lock: Callable[[], None]) -> None:
    """Takes the drain lock; checks the source before and under it. Raises SourceChanged, PartitionsChanged.

    Before, so that writers don't wait while new leaves are read and statements are planned.
    """
    known: set[partition_changes.Change] = set()
    check_partitions(connection, job, known)
    check_fingerprint(connection, job)
    lock()
    check_fingerprint(connection, job)
    check_partitions(connection, job, known, adopt=True)


def switch(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Switch the capture from capture to direct mode, under the drain lock. A no-op if it is switched already.

    Raises LockNotAcquired (try again), Fenced, SourceChanged, OperationPaused, DuplicatesFound (in a unique index).
    """
    with database.transaction() as connection:
        job = load_job(connection, run)
        done = mode(connection, job.generation_id) != CAPTURE
    if done:
        return
    # Looks for duplicates among all rows written until now, so that little is left to do under the lock.
    duplicates.look_and_refuse(database, job)

    def body(connection: Connection, lock: Callable[[], None]) -> bool:
        row = read_running(connection, run)
        lock_checked(connection, job, lock)
        if duplicates.look(connection, job):
            return False
        if job.entry.enforced:
            # A table that is being attached must be copied again: from now on its entries in the delta hold no key.
            execute(connection, COPY_AGAIN, {"generation": job.generation_id})
        set_mode(connection, job.generation_id, CAPTURE, DIRECT)
        installation.refresh(connection, job.source)
        operations.record_event(
            connection, row.index_id, row.id, run.owner, "switch", "writes go straight into the new index"
        )
        return True

    if not drain(database, job, body, report):
        duplicates.refuse(database, job)


def follow_partitions(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Register partitions that came since the switch. Raises LockNotAcquired, Fenced, SourceChanged.

    Entries of rows that such a partition lost to a TRUNCATE before are then neither compared nor shown.
    """
    with database.transaction() as connection:
        job = load_job(connection, run)
        came = partition_changes.changes(connection, job.source, job.generation_id)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        read_control(connection, run)
        known: set[partition_changes.Change] = set()
        check_partitions(connection, job, known)
        lock()
        check_partitions(connection, job, known, adopt=True)

    if came:
        drain(database, job, body, report)


def set_mode(connection: Connection, generation_id: int, old: str, new: str, also: str = "", **values: object) -> None:
    """Record the capture mode of a generation that is being built; `installation.refresh` then makes the capture so.

    also: SQL, `column = value, …`, more columns to set; values: bound there.
    Raises IllegalTransition if the mode isn't `old`.
    """
    mode = {"generation": generation_id, "old": old, "new": new}
    if execute(connection, SET_MODE.format(also=also and f", {also}"), {**mode, **values}).rowcount != 1:
        raise IllegalTransition(
            f"generation {generation_id} is not being built in {old} mode; it can't go to {new} mode"
        )
