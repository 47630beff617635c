"""Refuses a run whose conf has a key without a parameter of the DAG: Airflow itself drops it silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_roir.nearest import nearest

# `TriggerDagRunOperator` puts it there, so that lineage knows the parent.
OF_AIRFLOW = frozenset({"openlineage"})


def refuse_unknown_keys(context: Mapping[str, Any]) -> None:
    """Checks the conf in `pre_execute` of a DAG's tasks, by its `default_args`: so the first task fails before it
    changes anything.

    Raises AirflowFailException, without a retry, which names the nearest parameter.
    """
    known = list(context["dag"].params)
    unknown = [key for key in context["dag_run"].conf or {} if key not in {*known, *OF_AIRFLOW}]
    if not unknown:
        return
    meant = [
        f"{key}: did you mean {near}?" if (near := nearest(str(key), known)) else f"{key}: there is nothing like it"
        for key in unknown
    ]
    raise AirflowFailException(
        f"The run's conf has keys that DAG {context['dag'].dag_id} has no parameter for ({'; '.join(meant)}). Nothing "
        "was done. Trigger the DAG again with the right names"
    )
