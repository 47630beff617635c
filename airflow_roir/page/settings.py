"""Airflow's configuration section `[roir]`, and the DAGs that are ours."""

from __future__ import annotations

from airflow.configuration import conf

DEFAULT_CONNECTION = "postgres_default"
VERIFY_DAG, CONTROL_DAG, CLEAN_UP_DAG = "verify_index", "control_index", "clean_up_indexes"
COMPACT_DAG = "keep_indexes_young"


def build_dag() -> str:
    """The DAG that builds: who may read it reads the page *Indexes*."""
    return str(conf.get("roir", "dag_id", fallback="rebuild_index")).strip() or "rebuild_index"


def our_dags() -> frozenset[str]:
    """The DAGs in whose runs the trigger form says which index and which connection they are about."""
    return frozenset({build_dag(), "rebuild_index", VERIFY_DAG, CONTROL_DAG, COMPACT_DAG})
