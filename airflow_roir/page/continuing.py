"""The buttons *Continue* and *Trigger again*: which DAG they trigger, with exactly which values."""

from __future__ import annotations

import json
from typing import Any

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_roir.actor import RUN
from airflow_roir.page.answer import LONGEST_MESSAGE, Long
from airflow_roir.page.settings import COMPACT_DAG, VERIFY_DAG, build_dag


def wish(dag_id: str, conf: dict[str, Any]) -> dict[str, Any] | None:
    """A DAG to trigger, and its conf as JSON text: a browser would round numbers, and an answer's texts are cut.

    None if that text is too long for an answer.
    """
    text = json.dumps(conf)
    return {"dag_id": dag_id, "conf": Long(text)} if len(text) <= LONGEST_MESSAGE else None


def continuation(connection_id: str, index: str, kind: str, created_by: str) -> dict[str, Any] | None:
    """The DAG to trigger, and its conf: as the operation's first run had it, if that was one of these DAGs.

    created_by: who began the operation, as its row has it.
    """
    named = RUN.fullmatch(created_by)
    first, conf = (named[1], _conf(named[1], named[2])) if named is not None else ("", None)
    of_kind = {"verify": (VERIFY_DAG, build_dag()), "compact": (COMPACT_DAG,)}.get(kind, (build_dag(),))
    only = {"indexes": [index]} if kind == "compact" else {"index": index}
    as_before = None
    if conf is not None and first in of_kind:
        # A night's run compacts many indexes: this one does this index alone.
        as_before = wish(first, {**conf, **({} if conf.get("index") else only)})
    # Else without options: the operation's row has them.
    return as_before or wish(of_kind[0], {**only, "postgres_conn_id": connection_id})


def _conf(dag_id: str, run_id: str) -> dict[str, Any] | None:
    """The values that a run was triggered with; None if it is gone."""
    with create_session() as session:
        found = session.execute(
            select(DagRun.conf).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        ).one_or_none()
    return None if found is None else dict(found[0] or {})
