"""The operators for partitions, run as tasks are: without Spark, against a real table."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from airflow_roir.engine.database import Database
from airflow_roir.operators.partitions import AttachPartitionOperator, DetachPartitionOperator
from tests.airflow.test_operators import context, driver_code
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_partitions import make

__all__ = ["context", "driver_code"]  # fixtures


@pytest.mark.sample(0)
def test_a_partition_is_detached_and_another_attached(context: dict[str, Any], database: Database, dsn: str) -> None:
    make(dsn)
    steps.make_index(database)
    where = {"postgres_conn_id": "warehouse"}
    out = DetachPartitionOperator(task_id="out", partition="public.t1", drop=True, reason="old", **where)
    assert out.execute(context) == 100  # type: ignore[arg-type]
    assert steps.assert_exact(database).rows == 200
    run_sql(dsn, "CREATE TABLE n (LIKE t INCLUDING ALL)", "INSERT INTO n VALUES (15, 1, 'a', 1)")
    bounds = "FOR VALUES FROM (10) TO (20)"
    joins = AttachPartitionOperator(task_id="in", table="public.t", partition="public.n", bounds=bounds, **where)
    assert joins.execute(context) == 1  # type: ignore[arg-type]
    assert steps.assert_exact(database).rows == 201
    with pytest.raises(AirflowFailException, match=r"public\.t1 doesn't exist"):
        out.execute(context)  # type: ignore[arg-type]
