"""Publish: under the drain lock, the view gets the new generation and the old one retires; only metadata changes."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.definition import QualifiedName
from airflow_roir.engine import apply_delta, fold, switch
from airflow_roir.engine.apart import apart
from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.target import ACTIVE, DIRECT
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.run import Run, read_running
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.readers import rows_view, view
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import InvalidInput, InvariantViolated
from airflow_roir.quantity import counted

# The most delta rows that are folded while writers wait for the drain lock. Only rows that writers held are left.
MOST_ROWS_UNDER_LOCK = 2_000

RETIRE = """
UPDATE roir.generation
   SET status = 'retired', retired_at = clock_timestamp(),
       drop_after = clock_timestamp() + make_interval(secs => %(revert_window_s)s)
 WHERE index_id = %(index)s AND status = 'active'
"""


def publish(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Make the new generation the one that readers see (docs/architecture.md#phases).

    Raises LockNotAcquired and OperationPaused (both can be resumed), Fenced, SourceChanged, InvariantViolated
    (nothing was published).
    """
    # An abort may drop the generation meanwhile.
    with telling_of_names(), database.transaction() as connection:
        job = load_job(connection, run)
    # The view is replaced under an ACCESS EXCLUSIVE lock, which waits for its readers.
    exclusive = [_view(database, job)]
    while not switch.drain(database, job, lambda connection, lock: _publish(connection, lock, job), report, exclusive):
        fold.fold_here(database, run, report)


def _view(database: Database, job: Job) -> str:
    with database.transaction() as connection:
        return _name(connection, job).sql


def _name(connection: Connection, job: Job) -> QualifiedName:
    return operations.index_name(operations.read_index(connection, job.index_id))


def _publish(connection: Connection, lock: Callable[[], None], job: Job) -> bool:
    """Makes one attempt; False if too many rows are left in the delta to be folded under the lock."""
    run = job.run
    row = read_running(connection, run)
    _check_complete(connection, job)
    switch.lock_checked(connection, job, lock)
    if apply_delta.left_in_delta(connection, job.generation_id) > MOST_ROWS_UNDER_LOCK:
        return False
    apply_delta.Folding(connection, job.generation_id, job.entry).fold()
    ghosts = _only_ghosts(connection, job)
    view.show(connection, _name(connection, job), job.index_id, job.generation_id)
    values = {"index": job.index_id, "revert_window_s": int(job.options["revert_window_s"])}
    execute(connection, RETIRE, values)
    shown = "status = 'active', published_at = clock_timestamp(), ghosts = %(ghosts)s"
    switch.set_mode(connection, job.generation_id, DIRECT, ACTIVE, also=shown, ghosts=ghosts)
    installation.refresh(connection, job.source)
    if job.options.get("rows_view") and rows_view.shown(connection, job.index_id) is None:
        _make_rows_view(connection, job)
    operations.complete(connection, row, run.epoch)
    operations.record_event(
        connection,
        row.index_id,
        row.id,
        run.owner,
        "publish",
        f"{counted(ghosts, 'ghost')} left for the clean-up",
    )
    return True


def _make_rows_view(connection: Connection, job: Job) -> None:
    try:
        rows_view.make(connection, _name(connection, job), job.index_id)
    except InvalidInput as error:
        raise InvariantViolated(f"{error}, and resume; nothing was published") from error


def _check_complete(connection: Connection, job: Job) -> None:
    """Raise InvariantViolated unless all ranges are copied, all segments sealed, and the capture is switched.

    Otherwise the index would lack rows.
    """
    row = execute(
        connection,
        "SELECT (SELECT count(*) FROM roir.scan_range WHERE operation_id = %(operation)s AND NOT done) AS ranges, "
        "(SELECT count(*) FROM roir.segment WHERE generation_id = %(generation)s AND status <> 'sealed') AS segments",
        {"operation": job.run.operation_id, "generation": job.generation_id},
    ).one()
    if row.ranges or row.segments or not physical.is_sealed(connection, job.generation_id):
        raise InvariantViolated(
            f"index {job.run.index}: {row.ranges} ranges, {row.segments} segments are unfinished; nothing was published"
        )
    if (problem := apart().unfit(connection, job.generation_id, float(job.options.get("max_lag_s", 60)))) is not None:
        raise InvariantViolated(f"index {job.run.index}: {problem}; nothing was published")
    if installation.mode(connection, job.generation_id) != DIRECT:
        raise InvariantViolated(f"index {job.run.index}: its capture is not in direct mode; nothing was published")


def _only_ghosts(connection: Connection, job: Job) -> int:
    """The number of ghosts in the delta. Raises InvariantViolated if it has other rows.

    Under the drain lock no writer holds a row, so the fold has left only ghosts.
    """
    tally = f"SELECT state, count(*) AS rows FROM {physical.delta(job.generation_id)} GROUP BY state"
    counts = {row.state: row.rows for row in execute(connection, tally)}
    ghosts = int(counts.pop(EntryState.GHOST.value, 0))
    if counts:
        held = " and ".join(f"{rows:,} {state}" for state, rows in counts.items())
        raise InvariantViolated(f"index {job.run.index}: its delta still has {held} entries; nothing was published")
    return ghosts
