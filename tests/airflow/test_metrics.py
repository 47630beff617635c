"""An operation's figures among Airflow's own metrics, as they arrive at a socket."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.observability import stats
from airflow.sdk.observability.metrics.stats_utils import get_stats_factory

from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.task.metrics import EVERY_S, Sender
from tests.airflow.test_operators import Events, MemoryStore, Task
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

INDEX = "public.item_by_kind"
WHAT = {"index": INDEX, "postgres_conn_id": "warehouse"}
Configure = Callable[..., Callable[[], list[str]]]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """Airflow's metrics as a task has them, sent to a socket of ours; gives what reads the lines that have come."""
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    receiver.setblocking(False)

    def lines() -> list[str]:
        found: list[str] = []
        while True:
            try:
                found += receiver.recv(65_536).decode().split("\n")
            except BlockingIOError:
                return found

    def configured(**options: str) -> Callable[[], list[str]]:
        settings = {"statsd_on": "True", "statsd_host": "127.0.0.1", "statsd_port": str(receiver.getsockname()[1])}
        for name, value in (settings | options).items():
            monkeypatch.setenv(f"AIRFLOW__METRICS__{name.upper()}", value)
        # As the task's process does it.
        stats.initialize(factory=get_stats_factory(), export_legacy_names=True)
        return lines

    yield configured
    monkeypatch.undo()
    stats.initialize(factory=get_stats_factory(), export_legacy_names=True)
    receiver.close()


@pytest.fixture
def context(shop: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", json.dumps({"conn_type": "postgres"} | shop.fields))
    return {"ti": Task(), "task_state_store": MemoryStore(), "outlet_events": Events()}


def test_a_task_sends_them(shop: Any, context: dict[str, Any], configure: Configure) -> None:
    lines = configure()
    steps.sealed(shop.database, INDEX, "public.item", "kind")
    shop.run("UPDATE roir.operation SET heartbeat_at = NULL")
    FinalizeIndexBuildOperator(task_id="finalize", **WHAT).execute(context)
    # Plain StatsD forgets tags: two builds at a time may not write over each other.
    sent = lines()
    assert "airflow.roir.public__item_by_kind.percent:100.0|g" in sent
    assert "airflow.roir.public__item_by_kind.parallelism:2|g" in sent


@pytest.mark.by_hand("sweeps")
def test_the_tasks_on_spark_send_them(shop: Any, context: dict[str, Any], configure: Configure) -> None:
    lines = configure(statsd_influxdb_enabled="True")
    prepared, _ = steps.begin(shop.database, INDEX, "public.item", "kind")
    shop.run("UPDATE roir.operation SET heartbeat_at = NULL")
    BuildIndexOperator(task_id="build", operation_id=prepared.operation_id, **WHAT).execute(context)
    sent = lines()
    tags = f"dag_id=rebuild_index,task_id=build,index={INDEX},kind=create"
    assert f"airflow.roir.percent,{tags}:85.0|g" in sent
    rows = [int(one.rsplit(":", 1)[1].split("|")[0]) for one in sent if one.startswith(f"airflow.roir.rows,{tags}:")]
    assert sum(rows) == 20_000
    FinalizeIndexBuildOperator(task_id="finalize", **WHAT).execute(context)
    lines()
    VerifyIndexOperator(task_id="verify", **WHAT).execute(context)
    assert f"airflow.roir.percent,{tags.replace('create', 'verify')}:100.0|g" in lines()


NOW = SimpleNamespace(
    index="public.ix",
    kind="create",
    percent_complete=10.0,
    rows=1000,
    rows_per_second_now=50.5,
    seconds_left=9.0,
    options={"parallelism": 4},
    granted=1.5,
    delta_rows=7,
    throttle_seconds={"replica_lag": 2.0},
)


def but(**other: Any) -> Any:
    """The same, but for that."""
    return SimpleNamespace(**vars(NOW) | other)


def test_counters_grow_by_what_came_and_gauges_are_what_is(configure: Configure) -> None:
    lines = configure(statsd_influxdb_enabled="True")
    found = iter([NOW, but(rows=1500, rows_per_second_now=None, throttle_seconds={"replica_lag": 4.5, "exhausted": 1})])
    clock = iter([0.0, EVERY_S - 1, EVERY_S, EVERY_S])
    sender = Sender(lambda: next(found), {"dag_id": "d", "task_id": "t"}, True, lambda: next(clock))
    tags = "dag_id=d,task_id=t,index=public.ix,kind=create"
    sender.turn()
    first = lines()
    assert f"airflow.roir.granted,{tags}:1.5|g" in first
    assert not [one for one in first if one.endswith("|c")]
    sender.turn()
    assert lines() == []
    sender.turn()
    second = lines()
    assert f"airflow.roir.rows,{tags}:500|c" in second
    assert f"airflow.roir.throttled_seconds,{tags},cause=replica_lag:2.5|c" in second
    assert f"airflow.roir.throttled_seconds,{tags},cause=exhausted:1.0|c" in second
    assert not [one for one in second if "rows_per_second" in one]


@pytest.mark.parametrize("influx", ["True", "False"])
def test_a_hostile_name_is_no_metric_of_its_own(configure: Configure, influx: str) -> None:
    lines = configure(statsd_influxdb_enabled=influx)
    hostile = but(index='"a\nb:1|c".",=x#é"')
    Sender(lambda: hostile, {"dag_id": "d", "task_id": "t"}, influx == "True").send()
    sent = lines()
    assert len(sent) == 6
    assert all(one.startswith("airflow.roir.") and one.endswith("|g") and one.count(":") == 1 for one in sent)


def test_a_metric_never_fails_a_task(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    configure(statsd_custom_client_path="no.such.Client")

    def broken() -> Any:
        raise OSError("no server")

    for read in (broken, lambda: NOW):
        with caplog.at_level(logging.WARNING, "airflow_roir"):
            caplog.clear()
            sender = Sender(read, {}, True)
            sender.send()
            sender.send()
        assert len([one for one in caplog.records if one.name == "airflow_roir.task.metrics"]) == 1


def test_nothing_is_asked_where_airflows_are_off(
    shop: Any, context: dict[str, Any], configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = configure(statsd_on="False")
    monkeypatch.setattr("airflow_roir.task.metrics.operation_soon", lambda *_: pytest.fail("it looked"))
    steps.sealed(shop.database, INDEX, "public.item", "kind")
    shop.run("UPDATE roir.operation SET heartbeat_at = NULL")
    FinalizeIndexBuildOperator(task_id="finalize", **WHAT).execute(context)
    assert lines() == []
