"""Reads Airflow's configuration section `[roir]`, and names the DAGs that are ours."""

from __future__ import annotations

from airflow.configuration import conf

DEFAULT_CONNECTION = "postgres_default"
VERIFY_DAG, CONTROL_DAG, CLEAN_UP_DAG = "verify_index", "control_index", "clean_up_indexes"
COMPACT_DAG = "keep_indexes_young"


def build_dag() -> str:
    """The DAG that builds: a user who may read it may read the page *Indexes*."""
    return str(conf.get("roir", "dag_id", fallback="rebuild_index")).strip() or "rebuild_index"


def our_dags() -> frozenset[str]:
    """The DAGs whose trigger forms name the index and the connection of their runs."""
    return frozenset({build_dag(), "rebuild_index", VERIFY_DAG, CONTROL_DAG, COMPACT_DAG})
