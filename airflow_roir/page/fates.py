"""Which operations Airflow's runs have left for good: the pages find that out from Airflow's database, and write it."""

from __future__ import annotations

import logging
import time

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import expected
from airflow_roir.engine.control.expected import ENDED, Fate, FateOf
from airflow_roir.engine.database import Database
from airflow_roir.errors import RoirError
from airflow_roir.one_line import one_line
from airflow_roir.page.databases import open_database
from airflow_roir.task.run_state import OWNER, fate

log = logging.getLogger(__name__)

# A login that may not write is asked to so seldom.
REFUSED_S = 60.0
_refused: dict[str, float] = {}


def settle_runs(connection_id: str, reading: Database, operation: int | None = None) -> None:
    """Write what became of the runs of operations that no run drives, of one or of all. Raises nothing for that.

    reading: a handle of that connection's database.
    """
    with reading.transaction() as connection:
        found = expected.changes(connection, _fates(), operation)
    if not found or time.monotonic() - _refused.get(connection_id, -REFUSED_S) < REFUSED_S:
        return
    try:
        expected.apply(open_database(connection_id, "runs"), found)
    except (DBAPIError, RoirError) as error:
        _refused[connection_id] = time.monotonic()
        log.warning("Connection %s: an abandoned operation can't be noted: %s", connection_id, one_line(str(error)))


def _fates() -> FateOf:
    """Finds out what became of the run of that name; reads of each run once."""
    known: dict[tuple[str, str], Fate] = {}

    def fate_of(owner: str) -> Fate | None:
        named = OWNER.fullmatch(owner)
        if named is None:
            return None
        run = (named[1], named[2])
        if run not in known:
            known[run] = _read(*run)
        return known[run]

    return fate_of


def _read(dag_id: str, run_id: str) -> Fate:
    with create_session() as session:
        state = session.scalar(select(DagRun.state).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
        dag = session.get(DagModel, dag_id)
        if state is None or dag is None or dag.is_stale:
            return ENDED

        def tasks() -> list[str]:
            of_run = select(TaskInstance.state).where(TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id)
            return [str(getattr(one, "value", one)) for one in session.scalars(of_run)]

        return fate(str(getattr(state, "value", state)), bool(dag.is_paused), tasks, dag_id)
