"""Finds operations that Airflow's runs have left for good, by Airflow's own database, and records that."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import expected
from airflow_roir.engine.control.expected import ENDED, Fate
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import RoirError
from airflow_roir.one_line import one_line
from airflow_roir.page.databases import open_database
from airflow_roir.task.run_state import fate, fates_by

log = logging.getLogger(__name__)

LAST_RUNS = """
SELECT id, run_ended_at IS NOT NULL AS has_ended, coalesce(awaited_by, owner, created_by) AS run
  FROM roir.operation WHERE id = ANY (%(ids)s)
"""
# After the database refused to write, a connection tries again after this time.
REFUSED_S = 60.0
_refused: dict[str, float] = {}


def settle_runs(connection_id: str, reading: Database, operations: Sequence[int] | None = None) -> None:
    """Records the fates of the runs of operations that no run drives, of these or of all. Logs an error of the write.

    reading: a handle of that connection's database. Raises SchemaVersionMismatch.
    """
    with reading.transaction() as connection:
        found = expected.changes(connection, fates_by(_read), operations)
    if not found or time.monotonic() - _refused.get(connection_id, -REFUSED_S) < REFUSED_S:
        return
    try:
        expected.apply(open_database(connection_id, "runs"), found)
    except (DBAPIError, RoirError) as error:
        _refused[connection_id] = time.monotonic()
        log.warning("Connection %s: an abandoned operation can't be noted: %s", connection_id, one_line(str(error)))


def left(database: Database, operations: Sequence[int]) -> set[int]:
    """Those of these operations that no run will continue: their runs have ended or are gone, or were commands.

    An operation that is paused needs this: `settle_runs` notes the ends of runs of the others.
    """
    with database.transaction() as connection:
        rows = execute(connection, LAST_RUNS, {"ids": list(operations)}).all() if operations else []
    fate_of = fates_by(_read)
    return {row.id for row in rows if row.has_ended or (found := fate_of(row.run)) is None or found.ended}


def deleted(runs: Mapping[int, Mapping[str, str]]) -> set[int]:
    """Those operations whose run Airflow doesn't have any more. runs: by operation, as `runs_of` finds them."""
    with create_session() as session:
        asked = {(one["dag_id"], one["run_id"]) for one in runs.values()}
        known = select(DagRun.dag_id, DagRun.run_id).where(DagRun.run_id.in_({run for _, run in asked}))
        found = {(row.dag_id, row.run_id) for row in session.execute(known)} if asked else set()
    return {operation for operation, one in runs.items() if (one["dag_id"], one["run_id"]) not in found}


def _read(dag_id: str, run_id: str) -> Fate:
    with create_session() as session:
        state = session.scalar(select(DagRun.state).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
        dag = session.get(DagModel, dag_id)
        if state is None or dag is None or dag.is_stale:
            return ENDED

        def tasks() -> Iterable[Any]:
            of_run = select(TaskInstance.state).where(TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id)
            states: Iterable[Any] = session.scalars(of_run)
            return states

        return fate(state, bool(dag.is_paused), tasks, dag_id)
