"""Failed runs of a versioned bundle, in mapped groups, and for users of FAB who may not read logs: a real Airflow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from airflow_roir.page.failures import UNREADABLE
from servers.airflow import AirflowError, ApiServer, wait_until
from servers.postgres import embedded_postgres

pytestmark = [pytest.mark.by_hand("sweeps"), pytest.mark.timeout(1800)]

DAG, MINE = "rebuild_index", "mine"
PATIENCE_S = 600
NAMES = ("public.nowhere", "public.nothing")
GROUP = "rebuild_index_group"
MAPPED = f"""
from airflow.sdk import DAG
from airflow_roir.groups import rebuild_index_group

with DAG("{MINE}", schedule=None, is_paused_upon_creation=False):
    rebuild_index_group.partial(postgres_conn_id="warehouse").expand(index={list(NAMES)!r})
"""
# Its next version: another task, and none of the old ones.
RENAMED = f"""
from airflow.sdk import DAG
from airflow.providers.standard.operators.empty import EmptyOperator

with DAG("{DAG}", schedule=None, is_paused_upon_creation=False):
    EmptyOperator(task_id="renamed")
"""
BUNDLE = """
from pathlib import Path
from airflow.dag_processing.bundles.base import BaseDagBundle, BundleVersion

class Versions(BaseDagBundle):
    supports_versioning = True

    def __init__(self, *, folder, **more):
        super().__init__(**more)
        self.folder = Path(folder)

    def get_current_version(self):
        return BundleVersion(version=self.version or (self.folder / "newest").read_text())

    @property
    def path(self):
        return self.folder / self.get_current_version().version

    def refresh(self):
        pass
"""
# `clerk` reads the mapped DAG and its runs, but no logs. Airflow's UI shows tabs only to users who may read plugins.
USERS = f"""
from airflow.providers.fab.auth_manager.cli_commands.utils import get_application_builder
import sys
with get_application_builder() as builder:
    sm = builder.sm
    sm.sync_roles()
    clerk = sm.add_role("Clerk")
    for resource in ("DAG:{MINE}", "DAG Runs", "Website", "Plugins"):
        sm.add_permission_to_role(clerk, sm.create_permission("can_read", resource))
    for name, role in [("admin", "Admin"), ("viewer", "Viewer"), ("clerk", "Clerk")]:
        assert sm.add_user(name, name, name, name + "@example.org", sm.find_role(role), password=sys.argv[1])
"""


class Whole(ApiServer):
    """An API server with users of FAB, a scheduler and a DAG processor: `airflow standalone` never starts FAB."""

    def __init__(self, home: Path, folder: Path, metadata: str) -> None:
        kwargs = {"folder": str(folder), "refresh_interval": 1}
        bundles = [{"name": "versions", "classpath": "roir_bundle.Versions", "kwargs": kwargs}]
        more = {
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles),
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH": str(home / "bundles"),
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
            "AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "0",
        }
        super().__init__(home, folder, metadata, fab=True, environment=more)
        self.folder = folder
        self._others: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._prepare_home()
        (self.home / "config").mkdir()
        (self.home / "config" / "roir_bundle.py").write_text(BUNDLE)
        self.run("db", "migrate")
        self.run_python("-c", USERS, self.password)
        for component in ("scheduler", "dag-processor"):
            self._spawn(component)
            assert self._process is not None
            self._others.append(self._process)
        self._spawn("api-server")

    def stop(self) -> None:
        for one in self._others:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGTERM)
        super().stop()
        for one in self._others:
            one.wait()

    def release(self, version: str, **files: str) -> None:
        """A new version of the bundle, with these DAG files."""
        (self.folder / version).mkdir()
        for name, text in files.items():
            (self.folder / version / f"{name}.py").write_text(text)
        (self.folder / "newest").write_text(version)

    def knows(self, dag: str, version: str) -> bool:
        """Whether that version of the bundle is the newest that Airflow has read this DAG from."""
        with suppress(AirflowError):
            return bool(self.call("GET", f"/api/v2/dags/{dag}/details")["bundle_version"] == version)
        return False

    def seen(self, dag: str, run: str, user: str = "admin", **of_task: Any) -> dict[str, Any]:
        """The answer that the tab of the run, or of a task of it, shows."""
        query = urlencode({"dag_id": dag, "run_id": run, **of_task})
        answer: dict[str, Any] = self.call("GET", f"/roir/api/run?{query}", user=user)
        return answer


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    """It has read version 1, whose tasks are tried again after an hour."""
    folder = tmp_path_factory.mktemp("versions")
    shipped = (dags_folder / f"{DAG}.py").read_text()
    assert shipped.count("timedelta(seconds=30)") == shipped.count("timedelta(minutes=10)") == 1
    later = shipped.replace("timedelta(seconds=30)", "timedelta(hours=1)").replace("minutes=10", "hours=1")
    with embedded_postgres() as metadata:
        running = Whole(tmp_path_factory.mktemp("airflow"), folder, metadata)
        running.release("one", **{DAG: later, MINE: MAPPED})
        with running:
            running.wait_until_ready()
            wait_until(lambda: running.knows(DAG, "one") and running.knows(MINE, "one"), PATIENCE_S, "the DAGs")
            yield running


@pytest.fixture
def warehouse(airflow: Whole, shop: Any) -> Iterator[None]:
    airflow.add_connection("warehouse", "postgres", **{key: value for key, value in shop.fields.items() if value})
    yield
    airflow.call("DELETE", "/api/v2/connections/warehouse")


@pytest.mark.usefixtures("warehouse")
def test_failed_instances_of_a_mapped_group_say_why_to_users_who_may_read_logs(airflow: Whole) -> None:
    run = airflow.trigger(MINE)
    wait_until(lambda: airflow.run_state(MINE, run) == "failed", PATIENCE_S, "the run's end")
    for user in ("viewer", "clerk"):
        seen = airflow.seen(MINE, run, user)
        *failed, rest = seen["failures"]
        for one in failed:
            name = NAMES[one["map_index"]]
            told = f"Task {GROUP}.prepare [{one['map_index']}] has failed"
            if one["try_number"] > 1:
                # On a machine without time, Airflow may have lost the first try.
                told += f" at try {one['try_number']} of 7"
            if user == "viewer":
                assert (one["text"], f"there is no index {name} to rebuild" in one["message"]) == (told, True), one
            else:
                assert (one["text"], one["message"]) == (told + UNREADABLE, "")
        assert sorted(one["map_index"] for one in failed) == [0, 1]
        assert rest["text"] == f"Not started, since a task before failed: {GROUP}.build, {GROUP}.finalize"
        assert "to rebuild" not in str(seen) or user == "viewer"
    assert "Index build" in str(airflow.call("GET", "/api/v2/plugins", user="clerk"))
    with pytest.raises(AirflowError, match=r": 403 "):
        # As docs/airflow.md says of the roles Viewer and User.
        airflow.call("GET", "/api/v2/plugins", user="viewer")
    for index in (0, 1):
        # Each task's own tab begins with its own failure, whose link leads to that log.
        own = airflow.seen(MINE, run, task_id=f"{GROUP}.prepare", map_index=index)["failures"][0]
        assert (own["task_id"], own["map_index"]) == (f"{GROUP}.prepare", index)
        of = f"/api/v2/dags/{MINE}/dagRuns/{quote(run, safe='')}/taskInstances/{GROUP}.prepare/logs/{own['try_number']}"
        of += f"?map_index={index}"
        assert NAMES[index] in str(airflow.call("GET", of))
        with pytest.raises(AirflowError, match=r": 403 "):
            airflow.call("GET", of, user="clerk")


@pytest.mark.usefixtures("warehouse")
def test_a_run_of_an_older_version_is_shown_as_its_own_version_has_it(airflow: Whole) -> None:
    """Its next try is that of its own version, although the newest has no such task; a file that can't be imported any
    more ends it, and then it isn't offered again. Found: while the database was away, the tab of a run whose first task
    would be tried again said neither its message nor when.
    """
    closed = {"host": "127.0.0.1", "port": 9, "login": "app", "password": "sesame", "schema": "app"}
    airflow.add_connection("closed", "postgres", **closed)
    waiting = airflow.trigger(DAG, {"index": "public.i", "table": "t", "keys": "k", "postgres_conn_id": "closed"})
    failing = airflow.trigger(DAG, {"index": "public.i", "table": "nope", "keys": "k", "postgres_conn_id": "warehouse"})
    wait_until(lambda: airflow.run_state(DAG, failing) == "failed", PATIENCE_S, "the run's end")
    wait_until(lambda: airflow.task_state(DAG, waiting, "verify_before") == "up_for_retry", PATIENCE_S, "the wait")

    def shown() -> dict[str, list[dict[str, Any]]]:
        return {run: airflow.seen(DAG, run)["failures"] for run in (waiting, failing)}

    before = shown()
    assert airflow.seen(DAG, waiting)["troubles"] == ["the database of connection closed can't be reached"]
    tried, *rest = before[waiting]
    assert (tried["text"], rest) == ("Try 1 of 7 of task verify_before has failed", [])
    ahead = datetime.fromisoformat(tried["again"]) - datetime.fromisoformat(tried["at"])
    assert ahead >= timedelta(minutes=50)
    assert [one["text"] for one in before[failing]] == [
        "Task verify_before has failed",
        "Not started, since a task before failed: prepare, build, finalize",
    ]
    assert airflow.seen(DAG, failing)["again"]["dag_id"] == DAG

    airflow.release("two", **{DAG: RENAMED, MINE: MAPPED})
    wait_until(lambda: airflow.knows(DAG, "two"), PATIENCE_S, "the new version")
    assert shown() == before
    assert airflow.run_state(DAG, waiting) == "running"
    assert "sesame" not in str(before)

    airflow.release("three", **{DAG: "from airflow.sdk import DAG, nothing_of_that_name", MINE: MAPPED})
    gone = f"The file of DAG {DAG} can't be imported, so none of its tasks can run. Airflow's page Dags shows the error"
    wait_until(lambda: airflow.seen(DAG, waiting)["failures"][-1]["text"] == gone, PATIENCE_S, "the error")
    seen = airflow.seen(DAG, failing)
    assert [one["text"] for one in seen["failures"][:-1]] == [one["text"] for one in before[failing]]
    assert (seen["failures"][-1]["text"], seen["again"]) == (gone, None)
    assert "nothing_of_that_name" not in str(seen), "only users who may see import errors may see it"
    assert airflow.seen(DAG, waiting)["run"]["has_ended"] is True
