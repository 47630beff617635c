"""The services that ship, of docker-compose.shards.yml and of systemd: run with the environment that they name."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from psycopg2.extensions import parse_dsn

from servers.shards import Shards, drop_databases, make_databases, run_sql
from tests.packaging.test_compose import REPOSITORY, SERVICES, environment_of, filled_in

UNIT = REPOSITORY / "deploy" / "systemd" / "roir-ship.service"
SCRIPTS = Path(sys.executable).parent


class Unit(configparser.ConfigParser):
    """A systemd unit: names are as they are written."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit() -> Unit:
    found = Unit(interpolation=None)
    found.read(UNIT)
    return found


def here(made: Shards, text: str) -> str:
    """The text with the composed servers' addresses replaced: a shard is a host there, and a database here."""
    given = parse_dsn(made.index)
    server = f"host={given['host']}" + (f" port={given['port']}" if "port" in given else "")
    text = text.replace("host=shard-$n port=5432 dbname=$POSTGRES_DB", f"{server} dbname=composed_s$n")
    return text.replace("host=postgres port=5432 dbname=app", f"{server} dbname=composed_x")


def environment(made: Shards, home: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a container or a systemd service: the given variables, and none of this session's."""
    own = {name: here(made, value) for name, value in given.items()}
    return {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), **own}


@pytest.fixture
def made(server: str) -> Iterator[Shards]:
    """The composed servers as databases of one, with the role that their images make at the first start."""
    found = make_databases(server, "composed", 3, "template0")
    role = (REPOSITORY / "deploy" / "postgres" / "10-role.sql").read_text()
    try:
        for dsn in (found.index, *found.dsns.values()):
            run_sql(dsn, role)
        yield found
    finally:
        drop_databases(server, found)
        run_sql(server, "DROP ROLE roir")


def ends_in_order(command: list[str], given: dict[str, str]) -> None:
    """Starts a shipper; once it says so, SIGTERM ends it within the time that systemd gives it."""
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        assert "ships; SIGTERM" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=float(unit()["Service"]["TimeoutStopSec"]))
    finally:
        process.kill()
    assert process.returncode == 0, said


@pytest.mark.by_hand("sweeps")
def test_the_composed_services_do_what_they_are_for(made: Shards, tmp_path: Path) -> None:
    for name in ("roir-init", "roir-shards", "roir-shards"):
        # The second time nothing changes.
        service = SERVICES[name]
        command = [here(made, filled_in(part)) for part in service["command"]]
        given = environment(made, tmp_path, environment_of(service))
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert made.ask("SELECT name FROM roir.shard ORDER BY 1") == [(f"shard_{n}",) for n in range(3)]
    ship = SERVICES["roir-ship"]
    ends_in_order(ship["command"], environment(made, tmp_path, environment_of(ship)))


@pytest.mark.slow
def test_the_unit_of_systemd_ships_with_its_own_environment_alone(made: Shards, tmp_path: Path) -> None:
    given = environment(made, tmp_path, {"ROIR_DSN": "host=postgres port=5432 dbname=app user=roir"})
    subprocess.run(["roir", "init"], env=given, check=True, capture_output=True)
    program, *arguments = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(program).name == "roir"
    # A dynamic user has no home.
    ends_in_order([str(SCRIPTS / "roir"), *arguments], given | {"HOME": "/nonexistent"})


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if (verify := shutil.which("systemd-analyze")) is None:
        # Its sections and options are still those that it knows.
        assert set(unit().sections()) == {"Unit", "Service", "Install"}
        return
    installed = tmp_path / UNIT.name
    installed.write_text(UNIT.read_text().replace(unit()["Service"]["ExecStart"].split()[0], sys.executable))
    done = subprocess.run([verify, "verify", installed], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
