"""A Spark master, given directly or by an Airflow connection."""

from __future__ import annotations

import json

import pytest
from airflow.sdk import Connection

from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.spark import resolve_spark, target_of
from airflow_roir.spark.options import SparkOptions


@pytest.mark.parametrize(
    "master",
    ["local[4]", "local[*]", "spark://a:7077,b:7077", "k8s://https://h:443", "yarn", "sc://h:15002"],
)
def test_a_master_is_taken_as_it_is(master: str) -> None:
    assert resolve_spark(f" {master} ") == SparkOptions(master=master)


@pytest.mark.parametrize("nothing", [None, "", "local"])
def test_no_master_leaves_it_to_the_driver(nothing: str | None) -> None:
    assert resolve_spark(nothing) == SparkOptions()


@pytest.mark.parametrize(
    ("uri", "master"),
    [
        ("spark://cluster:7077", "spark://cluster:7077"),
        ("spark://cluster", "spark://cluster:7077"),
        ("spark://local%5B3%5D", "local[3]"),
        ("spark://yarn", "yarn"),
        ("spark://k8s%3A%2F%2Fhttps%3A%2F%2Fkube:443", "k8s://https://kube:443"),
        ("spark://spark%3A%2F%2Fcluster:7077", "spark://cluster:7077"),
        ("spark://", None),
    ],
)
def test_a_connection_holds_a_master(uri: str, master: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", uri)
    assert resolve_spark("cluster").master == master


def test_extras_become_settings() -> None:
    extra = {
        "conf": {"spark.executor.memory": "2g", "spark.dynamicAllocation.enabled": True},
        "spark.executor.cores": 2,
        "namespace": "builds",
        "deploy-mode": "client",
        "spark-binary": "spark-submit",
    }
    connection = Connection(conn_id="cluster", conn_type="spark", host="k8s://https://kube", extra=json.dumps(extra))
    assert target_of(connection).conf == {
        "spark.executor.memory": "2g",
        "spark.dynamicAllocation.enabled": "true",
        "spark.executor.cores": "2",
        "spark.kubernetes.namespace": "builds",
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"deploy-mode": "cluster"}, "deploy mode 'cluster'"),
        ({"conf": ["spark.executor.memory"]}, "must be an object"),
        ({"conf": {"spark.hadoop.fs.s3a.secret.key": "hush"}}, "looks like a secret"),
    ],
)
def test_what_would_fail_or_show_a_secret_is_refused(extra: object, message: str) -> None:
    connection = Connection(conn_id="cluster", conn_type="spark", host="h", extra=json.dumps(extra))
    with pytest.raises(InvalidInput, match=message) as refusal:
        target_of(connection)
    assert "hush" not in str(refusal.value)
