"""The buttons *Continue* and *Trigger again*: which DAG they trigger, with exactly which values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from airflow.models.dagbag import DBDagBag
from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_roir.actor import RUN
from airflow_roir.options import LIVE_OPTIONS
from airflow_roir.page.answer import LONGEST_MESSAGE, Long
from airflow_roir.page.settings import COMPACT_DAG, VERIFY_DAG, build_dag


def wish(dag_id: str, conf: dict[str, Any]) -> dict[str, Any] | None:
    """A DAG to trigger, and its conf as JSON text: a browser would round numbers, and an answer's texts are cut.

    None if that text is too long for an answer.
    """
    text = json.dumps(conf)
    return {"dag_id": dag_id, "conf": Long(text)} if len(text) <= LONGEST_MESSAGE else None


def continuation(connection_id: str, index: str, kind: str, created_by: str, options: str) -> dict[str, Any] | None:
    """The DAG to trigger, and its conf: as the operation's first run had it, if that was one of these DAGs.

    Its live options are those in effect now. created_by: who began the operation, as its row has it. options: as
    `options_text` gives them.
    """
    named = RUN.fullmatch(created_by)
    first, conf = (named[1], _conf(named[1], named[2])) if named is not None else ("", None)
    of_kind = {"verify": (VERIFY_DAG, build_dag()), "compact": (COMPACT_DAG,)}.get(kind, (build_dag(),))
    only = {"indexes": [index]} if kind == "compact" else {"index": index}
    now = json.loads(options)
    as_before = None
    if conf is not None and first in of_kind:
        # A night's run compacts many indexes: this one does this index alone.
        as_before = wish(first, _with_options(first, {**conf, **({} if conf.get("index") else only)}, now))
    # Else with the options alone that the form would set: the operation's row has the others.
    return as_before or wish(of_kind[0], _with_options(of_kind[0], {**only, "postgres_conn_id": connection_id}, now))


def options_text(shown: Mapping[str, Any]) -> str:
    """The live options in effect, as JSON text. shown: an operation's options, or its document for JSON."""
    return json.dumps({name: shown[name] for name in LIVE_OPTIONS})


def _with_options(dag_id: str, conf: dict[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The conf with the options in effect: those that it names, and those that the DAG's form would change.

    An empty field keeps the operation's value, and so does an option without a value.
    """
    defaults = _defaults(dag_id)
    rest = {name: value for name, value in conf.items() if name not in now}
    for name, value in now.items():
        default = defaults.get(name)
        if value is None:
            rest |= {name: None} if default is not None else {}
        elif name in conf or (default is not None and default != value):
            rest[name] = value
    return rest


def _defaults(dag_id: str) -> dict[str, Any]:
    """The first values of a DAG form's fields; none for a DAG that is gone."""
    with create_session() as session:
        dag = DBDagBag(load_op_links=False).get_latest_version_of_dag(dag_id, session=session)
        return {} if dag is None else dict(dag.params.dump())


def _conf(dag_id: str, run_id: str) -> dict[str, Any] | None:
    """The values that a run was triggered with; None if it is gone."""
    with create_session() as session:
        found = session.execute(
            select(DagRun.conf).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        ).one_or_none()
    return None if found is None else dict(found[0] or {})
