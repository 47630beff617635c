"""A user's own DAG with mapped groups in a real Airflow: an XCom that goes, and a backfill of several runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from airflow_roir.engine.database import Database
from servers.airflow import StandaloneAirflow, wait_until
from servers.postgres import embedded_postgres
from tests.engine import steps

pytestmark = pytest.mark.by_hand("sweeps")

# Nothing here is a measurement.
PATIENCE_S = 600
INDEXES = ("public.by_kind", "public.by_price")
MINE = f"""
from datetime import datetime
from airflow.sdk import DAG, task
from airflow_roir.groups import rebuild_index_group

for name, schedule in (("mine", None), ("mine_daily", "@daily")):
  with DAG(name, schedule=schedule, start_date=datetime(2026, 1, 1), catchup=False, params={{"rate": 100000}},
           is_paused_upon_creation=schedule is not None, render_template_as_native_obj=True) as dag:
    @task
    def names():
        return {list(INDEXES)!r}

    rebuild_index_group.partial(
        postgres_conn_id="warehouse", options={{"parallelism": 1, "batch_rows": 1000,
                                               "max_rows_per_second": "{{{{ params.rate }}}}"}}, spark="local[2]"
    ).expand(index={list(INDEXES)!r} if schedule is None else names())
"""


@pytest.fixture
def airflow(shop: Any, dsn: str, tmp_path: Path) -> Iterator[StandaloneAirflow]:
    """It has that DAG and a connection to the shop, whose two indexes are built."""
    for name in INDEXES:
        steps.make_index(Database(dsn), name, "public.item", name.split("_")[1])
    dags = tmp_path / "dags"
    dags.mkdir()
    (dags / "mine.py").write_text(MINE)
    with embedded_postgres() as metadata, StandaloneAirflow(tmp_path / "home", dags, metadata) as running:
        running.wait_until_ready(["mine", "mine_daily"])
        running.add_connection("warehouse", "postgres", **{k: value for k, value in shop.fields.items() if value})
        yield running


def instances(airflow: StandaloneAirflow, run: str, name: str) -> dict[int, str]:
    """The states of a task of the group by map index."""
    found = [one for one in airflow.tasks("mine", run) if one["task_id"] == f"rebuild_index_group.{name}"]
    return {one["map_index"]: one["state"] for one in found}


def ended(airflow: StandaloneAirflow, run: str) -> str:
    wait_until(lambda: airflow.run_state("mine", run) in ("success", "failed"), PATIENCE_S, "the run's end")
    return airflow.run_state("mine", run)


def rebuilds(shop: Any) -> list[tuple[str, str]]:
    """Index and state of each rebuild."""
    return list(
        shop.run(
            "SELECT i.name, o.status FROM roir.operation o JOIN roir.index i ON i.id = o.index_id "
            "WHERE kind = 'rebuild' ORDER BY 1, o.id"
        )
    )


def test_mapped_builds_find_their_own_operations_where_the_xcom_is_gone(
    airflow: StandaloneAirflow, shop: Any, dsn: str
) -> None:
    """If the XComs are deleted while both builds are paused, each continues its own index's operation. If they are
    cleared after the end, each fails.

    The DAG itself has the list that the group is mapped over: if it were a task's XCom, Airflow itself would need it.
    """
    run = airflow.trigger("mine", {"rate": 1000})

    def under_way() -> bool:
        copied = "SELECT count(DISTINCT operation_id) FROM roir.scan_range WHERE rows > 0 AND operation_id > 2"
        return set(instances(airflow, run, "build").values()) == {"running"} and shop.run(copied) == [(2,)]

    def both_left() -> bool:
        return set(instances(airflow, run, "build").values()) == {"up_for_reschedule"}

    wait_until(under_way, PATIENCE_S, "two builds that are under way")
    airflow.pause("mine")
    wait_until(both_left, PATIENCE_S, "the tasks to leave")
    assert rebuilds(shop) == [("by_kind", "paused"), ("by_price", "paused")]
    before = datetime.now(timezone.utc).isoformat()
    clean = ["db", "clean", "--tables", "xcom", "--clean-before-timestamp", before, "--skip-archive", "--yes"]
    subprocess.run([sys.executable, "-m", "airflow", *clean], env=airflow.environment, check=True, capture_output=True)
    airflow.unpause("mine")
    assert ended(airflow, run) == "success"
    assert rebuilds(shop) == [("by_kind", "completed"), ("by_price", "completed")]
    for name in INDEXES:
        steps.assert_exact(Database(dsn), name)
    told = len(airflow.asset_events())
    again = {"dag_run_id": run, "task_ids": ["rebuild_index_group.finalize"], "dry_run": False, "only_failed": False}
    airflow.call("POST", "/api/v2/dags/mine/clearTaskInstances", again | {"reset_dag_runs": True})
    assert ended(airflow, run) == "failed"
    assert set(instances(airflow, run, "finalize").values()) == {"failed"}
    assert len(airflow.asset_events()) == told


def test_a_backfill_of_three_runs_rebuilds_and_announces_what_it_did(
    airflow: StandaloneAirflow, shop: Any, dsn: str
) -> None:
    """Two of its runs at once meet at the same indexes; of those that share a build one announces it."""
    airflow.unpause("mine_daily")
    asked = {"dag_id": "mine_daily", "from_date": "2026-01-02T00:00:00Z", "to_date": "2026-01-04T00:00:00Z"}
    airflow.call("POST", "/api/v2/backfills", asked | {"max_active_runs": 2, "reprocess_behavior": "none"})

    def all_ended() -> bool:
        found = airflow.call("GET", "/api/v2/dags/mine_daily/dagRuns?run_type=backfill")["dag_runs"]
        return len(found) == 3 and all(one["state"] in ("success", "failed") for one in found)

    wait_until(all_ended, PATIENCE_S, "the runs' end")
    found = airflow.call("GET", "/api/v2/dags/mine_daily/dagRuns?run_type=backfill")["dag_runs"]
    assert {one["state"] for one in found} == {"success"}
    assert {status for _, status in rebuilds(shop)} == {"completed"}
    for name in INDEXES:
        steps.assert_exact(Database(dsn), name)
    told = [event["extra"]["operation_id"] for event in airflow.asset_events()]
    assert told
    assert len(set(told)) == len(told)
