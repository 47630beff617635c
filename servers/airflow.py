"""A real Airflow on this machine, for as long as a block lasts: `airflow standalone` in a session of its own.

    with embedded_postgres() as metadata, StandaloneAirflow(home, dags, metadata) as airflow:
        airflow.wait_until_ready(["rebuild_index"])
        run = airflow.trigger("rebuild_index", {"index": "public.i"})

It has its own home, ports and secrets, and takes about 40 s to come up and 1.2 GB. Everything it starts
ends with `stop()`, the Spark drivers of its tasks included, by process number. Needs Airflow and a PostgreSQL.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

import psutil
import psycopg2

T = TypeVar("T")
Airflow = TypeVar("Airflow", bound="StandaloneAirflow")

# Bringing up a cold Airflow on two busy cores: its database is created first.
READY_S = 240
# Measured: eight seconds from SIGTERM to the process group until everything is gone.
STOP_S = 20
FAB = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
PORTS = (
    "AIRFLOW__API__PORT",
    "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT",
    "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_PORT",
)


class AirflowError(Exception):
    """Airflow answered with an error, ended, or didn't get ready in time."""


class StandaloneAirflow:
    """One Airflow: API server with the UI, scheduler with a LocalExecutor, DAG processor, triggerer.

    home: an empty directory; its logs stay there. dags: the DAGs folder, read in place. metadata: DSN of a PostgreSQL
    superuser, where Airflow gets a database of its own: on a busy machine its processes find SQLite locked, and answer
    500. environment: more variables, such as `AIRFLOW_CONN_…`. everyone_is_admin: the UI and the API ask for no
    password; it listens on the loopback interface only.
    """

    def __init__(
        self,
        home: Path,
        dags: Path,
        metadata: str,
        *,
        environment: Mapping[str, str] | None = None,
        everyone_is_admin: bool = True,
        parallelism: int = 4,
    ) -> None:
        self.home = home.resolve()
        self.log_file = self.home / "standalone.log"
        self.password = secrets.token_urlsafe(12)
        self.everyone_is_admin = everyone_is_admin
        ports = dict(zip(PORTS, map(str, _free_ports(len(PORTS))), strict=True))
        self.url = f"http://localhost:{ports['AIRFLOW__API__PORT']}"
        self.environment = _without_airflow(os.environ) | ports
        self.environment |= {
            # The subcommands are found by name.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags.absolute()),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": str(parallelism),
            "AIRFLOW__CORE__FERNET_KEY": urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": str(everyone_is_admin),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / "passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": _database_of_airflow(metadata),
        }
        self.environment |= environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._tokens: dict[str, str] = {}

    # --- life

    def __enter__(self: Airflow) -> Airflow:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; returns at once. See `wait_until_ready`."""
        self._prepare_home()
        self._spawn("standalone")

    def _prepare_home(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        users = self.environment["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"].split(",")
        passwords = {user.split(":")[0]: self.password for user in users}
        (self.home / "passwords.json").write_text(json.dumps(passwords))
        _offer_plugin(self.home)

    def _spawn(self, *command: str) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "airflow", *command],
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, dag_ids: Iterable[str] = (), seconds: float = READY_S) -> None:
        """Wait until every component is healthy and these DAGs are there to be triggered.

        Raises AirflowError with the end of the log, or with a DAG file's import error.
        """
        wanted = set(dag_ids)

        def ready() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise AirflowError(f"airflow standalone has ended:\n{self.log_tail()}")
            try:
                health = self.call("GET", "/api/v2/monitor/health")
                parts = ("metadatabase", "scheduler", "dag_processor", "triggerer")
                if any((health.get(part) or {}).get("status") != "healthy" for part in parts):
                    return False
                if errors := self.import_errors():
                    raise AirflowError(f"a DAG file can't be imported:\n{errors[0]}")
                known = {dag["dag_id"] for dag in self.call("GET", "/api/v2/dags")["dags"]}
            except (URLError, ConnectionError, TimeoutError):
                return False
            return wanted <= known

        try:
            wait_until(ready, seconds, f"Airflow and the DAGs {sorted(wanted)}")
        except AirflowError as error:
            raise AirflowError(f"{error}\n{self.log_tail()}") from None

    def stop(self) -> None:
        """End everything that was started, and wait for it. Safe to call twice."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End Airflow as a power cut would: SIGKILL to every process, the drivers of running tasks excepted.

        `start()` brings it up again on the same home and ports; `stop()` is still needed at the end.
        """
        assert self._process is not None
        for process in processes_of(self.home):
            # A driver has a session of its own, and so goes on when its machine's Airflow dies.
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self._process.pid:
                    process.kill()
        self._process.wait()

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        # Known by number and time of birth, so that nothing else is hit should a number be used again.
        family = processes_of(self.home)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        _, left = psutil.wait_procs(family, timeout=STOP_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=STOP_S)
        self._process.wait()
        self._process = None

    def log_tail(self, lines: int = 40) -> str:
        """The end of what `airflow standalone` has printed, but for fetched pages and what the DAG processor does."""
        if not self.log_file.exists():
            return ""
        said = self.log_file.read_text(errors="replace").splitlines()
        said = [line for line in said if "http.access" not in line and not line.startswith("dag-processor |")]
        return "\n".join(said[-lines:])

    # --- the REST API

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        user: str = "admin",
        accept: str = "application/json",
    ) -> Any:
        """Call Airflow's REST API; the decoded answer, None for an empty one.

        user: `admin` or `viewer`. Raises AirflowError with the status and text of a refusal, URLError if
        no server listens.
        """
        request = Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Accept": accept}
            | {"Authorization": f"Bearer {self._token(user)}"},
        )
        return _answer(request)

    def _token(self, user: str) -> str:
        if user not in self._tokens:
            if self.everyone_is_admin:
                request = Request(f"{self.url}/auth/token")
            else:
                login = json.dumps({"username": user, "password": self.password}).encode()
                request = Request(f"{self.url}/auth/token", data=login, headers={"Content-Type": "application/json"})
            self._tokens[user] = _answer(request)["access_token"]
        return self._tokens[user]

    def import_errors(self) -> list[str]:
        """Tracebacks of DAG files that can't be imported."""
        answer = self.call("GET", "/api/v2/importErrors")
        return [error["stack_trace"] for error in answer["import_errors"]]

    def add_connection(self, connection_id: str, conn_type: str, **fields: Any) -> None:
        """Add an Airflow connection; fields are host, port, login, password, schema, extra (a dict)."""
        if isinstance(fields.get("extra"), dict):
            fields["extra"] = json.dumps(fields["extra"])
        self.call(
            "POST",
            "/api/v2/connections",
            {"connection_id": connection_id, "conn_type": conn_type, **fields},
        )

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None) -> str:
        """Trigger a run; returns its id."""
        body: dict[str, Any] = {"logical_date": None, "conf": dict(conf or {})}
        if run_id is not None:
            body["dag_run_id"] = run_id
        return str(self.call("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def pause(self, dag_id: str) -> None:
        """Turn the DAG's switch off, as the UI does."""
        self.call("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": True})

    def unpause(self, dag_id: str) -> None:
        """Turn the DAG's switch on, as the UI does."""
        self.call("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": False})

    def run_state(self, dag_id: str, run_id: str) -> str:
        """`queued`, `running`, `success` or `failed`."""
        return str(self.call("GET", f"/api/v2/dags/{dag_id}/dagRuns/{_q(run_id)}")["state"])

    def task(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """The task instance: state, try_number, rendered_fields and so on."""
        return dict(self.call("GET", self._task_path(dag_id, run_id, task_id)))

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """All task instances of a run, each as `task`."""
        return list(self.call("GET", f"/api/v2/dags/{dag_id}/dagRuns/{_q(run_id)}/taskInstances")["task_instances"])

    def task_state(self, dag_id: str, run_id: str, task_id: str) -> str | None:
        """The task instance's state; None before it is scheduled."""
        state = self.task(dag_id, run_id, task_id)["state"]
        return None if state is None else str(state)

    def set_task_state(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """Mark the task `success` or `failed`, as the UI does."""
        self.call("PATCH", self._task_path(dag_id, run_id, task_id), {"new_state": state})

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The log of one try, all its stretches, one event per line."""
        path = f"{self._task_path(dag_id, run_id, task_id)}/logs/{try_number}?full_content=true"
        return _log_text(self.call("GET", path))

    def xcoms(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """All XCom values of a task by key."""
        path = self._task_path(dag_id, run_id, task_id) + "/xcomEntries"
        keys = [entry["key"] for entry in self.call("GET", path)["xcom_entries"]]
        return {key: self.call("GET", f"{path}/{_q(key)}")["value"] for key in keys}

    def links(self, dag_id: str, run_id: str, task_id: str) -> dict[str, str | None]:
        """The task's extra links by their names."""
        return dict(self.call("GET", self._task_path(dag_id, run_id, task_id) + "/links")["extra_links"])

    def asset_events(self) -> list[dict[str, Any]]:
        """All asset events, newest last."""
        query = urlencode({"order_by": "timestamp", "limit": 100})
        return list(self.call("GET", f"/api/v2/assets/events?{query}")["asset_events"])

    def get_stored(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """The task's Task State Store."""
        answer = self.call("GET", self._task_path(dag_id, run_id, task_id) + "/state-store")
        return {entry["key"]: entry["value"] for entry in answer["task_state_store"]}

    def put_stored(self, dag_id: str, run_id: str, task_id: str, key: str, value: Any, user: str = "admin") -> None:
        """Edit one key of the task's Task State Store, as the UI does; it never expires."""
        path = f"{self._task_path(dag_id, run_id, task_id)}/state-store/{_q(key)}"
        self.call("PUT", path, {"value": value, "expires_at": None}, user=user)

    @staticmethod
    def _task_path(dag_id: str, run_id: str, task_id: str) -> str:
        return f"/api/v2/dags/{dag_id}/dagRuns/{_q(run_id)}/taskInstances/{task_id}"


class ApiServer(StandaloneAirflow):
    """The API server alone, with its database and the DAGs in it: nothing runs, runs that are triggered stay queued.

    Up in half a minute. users: `name:role`, separated by commas, all with the same password; of Airflow's simple auth
    manager, or of FAB if `fab`.
    """

    def __init__(
        self,
        home: Path,
        dags: Path,
        metadata: str,
        *,
        users: str = "admin:admin,op:op,user:user,viewer:viewer",
        fab: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        of_fab = {"AIRFLOW__CORE__AUTH_MANAGER": FAB, "AIRFLOW__FAB__AUTH_RATE_LIMITED": "False"}
        given = {"AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": users} | (of_fab if fab else {})
        super().__init__(home, dags, metadata, environment=given | dict(environment or {}), everyone_is_admin=False)
        self.fab = fab

    def start(self) -> None:
        """Make the database, read the DAGs, then start the server."""
        self._prepare_home()
        self.run("db", "migrate")
        self.run("dags", "reserialize")
        self._spawn("api-server")

    def run(self, *command: str) -> None:
        """Run one of Airflow's commands to its end. Raises AirflowError with what it said."""
        self.run_python("-m", "airflow", *command)

    def run_python(self, *arguments: str) -> None:
        """As `run`, for Python itself."""
        done = subprocess.run(
            [sys.executable, *arguments], env=self.environment, cwd=self.home, capture_output=True, text=True
        )
        if done.returncode:
            raise AirflowError(f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}")

    def wait_until_ready(self, dag_ids: Iterable[str] = (), seconds: float = READY_S) -> None:
        """Wait until the server answers. Raises AirflowError with the end of the log."""

        def ready() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise AirflowError(f"airflow api-server has ended:\n{self.log_tail()}")
            try:
                with urlopen(f"{self.url}/api/v2/version", timeout=10):
                    return True
            except (URLError, ConnectionError, TimeoutError):
                return False

        wait_until(ready, seconds, "Airflow's API server")

    def token(self, user: str) -> str:
        """A token of that user, as a header takes it."""
        return self._token(user)


def _offer_plugin(home: Path) -> None:
    """Have Airflow load the pages where the environment was made before they had an entry point."""
    plugin = "airflow_roir.page.plugin:RoirPlugin"
    if not any(point.value == plugin for point in entry_points(group="airflow.plugins")):
        (home / "plugins").mkdir(exist_ok=True)
        (home / "plugins" / "roir_pages.py").write_text(
            "from airflow_roir.page.plugin import RoirPlugin  # noqa: F401\n"
        )


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process of the Airflow with that home, those included whose parent has died.

    All of them run in its home, or carry it in their environment. Neither alone is enough: a task may change its
    directory, and Airflow's processes write their titles over their environment.
    """
    family: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            if str(home) in (process.cwd(), process.environ().get("AIRFLOW_HOME")):
                family.append(process)
    return family


def wait_until(condition: Callable[[], T], seconds: float, what: str, every: float = 0.5) -> T:
    """Ask until the answer is true, and return it. Raises AirflowError after `seconds`, naming `what`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AirflowError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(every)
    return answer


def _q(text: str) -> str:
    return quote(text, safe="")


def _answer(request: Request) -> Any:
    try:
        # An Airflow that comes up again on a busy machine takes longer than half a minute to answer.
        with urlopen(request, timeout=120) as response:
            content = response.read()
    except HTTPError as error:
        text = error.read().decode(errors="replace")
        raise AirflowError(f"{request.method} {request.full_url}: {error.code} {text}") from None
    return json.loads(content) if content else None


def _log_text(answer: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for entry in answer.get("content", ()):
        if isinstance(entry, str):
            lines.append(entry)
            continue
        # Whole, so that a secret in any field is seen by who looks for one.
        rest = {key: value for key, value in entry.items() if key not in ("timestamp", "event")}
        stamp = entry.get("timestamp") or ""
        lines.append(f"{stamp} {entry.get('event', '')} {json.dumps(rest) if rest else ''}".strip())
    return "\n".join(lines)


def _without_airflow(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("AIRFLOW", "_AIRFLOW"))}


def _database_of_airflow(superuser: str) -> str:
    """A fresh database on that server; its address as Airflow takes it."""
    with closing(psycopg2.connect(superuser)) as connection:
        connection.autocommit = True
        name = f"airflow_{secrets.token_hex(4)}"
        cursor = connection.cursor()
        cursor.execute(f"CREATE DATABASE {name}")
        # The processes of a killed scheduler's executor live on, and keep its sessions open: a transaction that it was
        # in would hold its runs for ever, and the next scheduler would pass them over.
        cursor.execute(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '30s'")
        dsn = connection.get_dsn_parameters()
    # The host may be a socket's folder, which only the query can hold.
    query = {key: dsn[key] for key in ("host", "port") if dsn.get(key)}
    return f"postgresql+psycopg2://{dsn['user']}@/{name}?{urlencode(query)}"


def _free_ports(count: int) -> list[int]:
    """Ports on which no process listens now; held together, so that they differ."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
