"""A Spark master, given directly or by an Airflow connection."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.spark import resolve_spark, target_of
from airflow_roir.spark.options import SparkOptions


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__ROIR__SPARK_MASTERS", "spark://a:7077,b:7077 yarn\nsc://h:15002")


@pytest.mark.parametrize("master", ["local[4]", "local[*]", "local[2,4]", "local[2, 4]"])
def test_local_mode_needs_nobody_s_leave(master: str) -> None:
    assert resolve_spark(f" {master} ") == SparkOptions(master=master)


@pytest.mark.parametrize("master", ["spark://a:7077,b:7077", "yarn", "sc://h:15002"])
def test_an_address_that_the_deployment_allows_is_taken_as_it_is(master: str, allowed: None) -> None:
    assert resolve_spark(f" {master} ") == SparkOptions(master=master)


FOREIGN = (
    *("spark://evil:7077", "spark://a:7077,evil:7077", "spark://a:7077", "SPARK://evil:7077", "spark:evil", "//evil"),
    *("k8s://https://evil:443", "sc://evil:15002", "sc://h:15002/;token=x", "mesos://evil", "yarn-client"),
    *("local-cluster[1,1,1024]", "local[4] spark://evil:7077", "local[4,spark://evil]", "local[4]\nspark://evil:7077"),
    *(
        "spark://a:7077,b:7077 yarn",
        "yarn sc://h:15002",
        "local[]",
        "local[4",
        "LOCAL",
        "http://evil",
        "file:///etc/passwd",
    ),
)


@pytest.mark.parametrize("master", FOREIGN)
def test_no_other_address_is_taken_from_a_form(master: str, allowed: None) -> None:
    """Found: `spark://…` in the form: that Spark got the DSN with its password; a connection of any type was taken for
    a Spark's. It holds: `local`, connections of type `spark` and `spark_connect`, and what `[roir] spark_masters`
    lists.
    """
    with pytest.raises((InvalidInput, AirflowNotFoundException)) as refused:
        resolve_spark(master)
    if "://" in master and ":" in master.split()[0] and master[0] in "sk":
        assert isinstance(refused.value, InvalidInput)
        assert "type spark" in str(refused.value)


@pytest.mark.parametrize(
    "conn_type", ["postgres", "http", "ssh", "generic", "", "spark_jdbc", "spark_sql", "kubernetes"]
)
def test_a_connection_of_another_type_is_no_spark(conn_type: str) -> None:
    with pytest.raises(InvalidInput, match=f"'cluster' is of type {conn_type!r}"):
        target_of(Connection(conn_id="cluster", conn_type=conn_type, host="spark://evil:7077", password="hush"))


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
        ("spark-connect://h", "sc://h:15002"),
        ("spark-connect://h:7", "sc://h:7"),
        ("spark-connect://sc%3A%2F%2Fh:15002", "sc://h:15002"),
    ],
)
def test_a_connection_holds_a_master(uri: str, master: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: Spark Connect's token in a connection was an argument of the driver; a connection of type `spark_connect`
    without a scheme was called by `spark://`. It holds: refused, with the variable that takes it; `sc://`.
    """
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
    ("fields", "message"),
    [
        ({"extra": {"deploy-mode": "cluster"}}, "deploy mode 'cluster'"),
        ({"extra": {"conf": ["spark.executor.memory"]}}, "must be an object"),
        ({"extra": ["spark.executor.memory"]}, "must be a JSON object"),
        ({"extra": {"conf": {"spark.hadoop.fs.s3a.secret.key": "hush"}}}, "looks like a secret"),
        ({"extra": {"spark.executorEnv.PGPASSWORD": "hush"}}, "looks like a secret"),
        ({"host": "sc://h:15002/;use_ssl=true;token=hush"}, "'token' looks like a secret"),
        ({"conn_type": "spark_connect", "password": "hush"}, "'password' looks like a secret"),
    ],
)
def test_what_would_fail_or_show_a_secret_is_refused(fields: dict[str, Any], message: str) -> None:
    """Found: Spark Connect's token in a connection was an argument of the driver; a connection of type `spark_connect`
    without a scheme was called by `spark://`. It holds: refused, with the variable that takes it; `sc://`.
    """
    given = {"conn_type": "spark", "host": "h"} | fields | {"extra": json.dumps(fields.get("extra", {}))}
    with pytest.raises(InvalidInput, match=message) as refusal:
        target_of(Connection(conn_id="cluster", **given))
    assert "hush" not in str(refusal.value)
