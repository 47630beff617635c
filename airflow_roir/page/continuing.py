"""The button *Continue*: which DAG it triggers with which values, so that a run continues an operation."""

from __future__ import annotations

from typing import Any

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_roir.actor import RUN
from airflow_roir.page.settings import COMPACT_DAG, VERIFY_DAG, build_dag


def continuation(connection_id: str, index: str, kind: str, created_by: str) -> dict[str, Any]:
    """The DAG to trigger, and its conf: as the operation's first run had it, if that was one of these DAGs.

    created_by: who began the operation, as its row has it.
    """
    named = RUN.fullmatch(created_by)
    first, conf = (named[1], _conf(named[1], named[2])) if named is not None else ("", None)
    of_kind = {"verify": (VERIFY_DAG, build_dag()), "compact": (COMPACT_DAG,)}.get(kind, (build_dag(),))
    only = {"indexes": [index]} if kind == "compact" else {"index": index}
    if conf is None or first not in of_kind:
        return {"dag_id": of_kind[0], "conf": {**only, "postgres_conn_id": connection_id}}
    # A night's run compacts many indexes: this one does this index alone.
    return {"dag_id": first, "conf": {**conf, **({} if conf.get("index") else only)}}


def _conf(dag_id: str, run_id: str) -> dict[str, Any] | None:
    """The values that a run was triggered with; None if it is gone."""
    with create_session() as session:
        found = session.execute(
            select(DagRun.conf).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        ).one_or_none()
    return None if found is None else dict(found[0] or {})
