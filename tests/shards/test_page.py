"""docs/shards.md does what it says: its commands in their order, by roles that have what the page says they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import psycopg2
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from servers import contrib
from servers.airflow import wait_until
from servers.shards import Shards, shard_servers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "shards.md").read_text()
# The superuser is asked for no password, all others are: PostgreSQL lets none but superusers reach servers without.
RULES = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
ROLES = ("app", "announcer", "shop")
PATIENCE_S = 60
HOSTS = {"index": "index", "db0": "s0", "db1": "s1"}


class Base(DeclarativeBase):
    """The base of the application's classes."""


class Order(Base):
    """A row of the table in the shards."""

    __tablename__ = "orders"
    __table_args__ = {"schema": "public"}
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    total: Mapped[int]


def section(heading: str) -> str:
    begin = PAGE.index(f"\n## {heading}\n")
    return PAGE[begin : PAGE.index("\n## ", begin + 1)]


def block(heading: str, has: str) -> str:
    """The only block of code in a section that has these words."""
    fenced = [code for _, code in re.findall(r"^```(\w+)\n(.*?)^```$", section(heading), re.MULTILINE | re.DOTALL)]
    indented = re.findall(r"(?:^    .*\n|^\n(?=    ))+", re.sub(r"```.*?```", "", section(heading), flags=re.S), re.M)
    [found] = [code for code in (*fenced, *indented) if has in code]
    return found


@dataclass
class Place:
    """Servers, and what a person has at hand."""

    made: Shards
    home: Path

    def host(self, code: str) -> str:
        """The page's code with the addresses and passwords of here."""
        for host, name in HOSTS.items():
            code = code.replace(f"host={host} ", f"host=127.0.0.1 port={self.made.servers[name].port} ")
        return code.replace("password=…", "password=announcer-pw")

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PGPASSFILE": str(self.home / "pass"),
            "XDG_STATE_HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "ROIR_DSN": self.host("host=index dbname=app user=app"),
        }

    def shell(self, code: str, expected: int = 0) -> str:
        """The output of a block of commands."""
        done = subprocess.run(
            ["bash", "-ec", self.host(code)],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == expected, done.stdout
        return done.stdout

    def sql(self, server: str, role: str, code: str) -> list[Any]:
        """Runs SQL as a role; returns the rows of the last statement."""
        port = self.made.servers[server].port
        password = "" if role == "postgres" else f" password={role}-pw"
        with closing(psycopg2.connect(f"host=127.0.0.1 port={port} dbname=app user={role}{password}")) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                for statement in re.sub(r"--.*", "", code).split(";"):
                    if statement.strip():
                        cursor.execute(statement)
                return cursor.fetchall() if cursor.description else []

    def engine(self, server: str, role: str) -> Engine:
        port = self.made.servers[server].port
        return create_engine(f"postgresql+psycopg2://{role}:{role}-pw@127.0.0.1:{port}/app")


@contextmanager
def ships(place: Place) -> Iterator[None]:
    """The block `roir ship`, meanwhile; SIGTERM ends it in order."""
    command = block("Ship", "roir ship").split()
    process = subprocess.Popen(
        command, env=place.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said


@pytest.fixture
def place(pg: int, tmp_path: Path) -> Iterator[Place]:
    """An index server and two shards, where only the superuser needs no password. Neither role may do anything yet."""
    with tempfile.NamedTemporaryFile("w", prefix="roir-hba-") as rules:
        rules.write(RULES)
        rules.flush()
        os.chmod(rules.name, 0o644)
        version = contrib.ensure(pg)
        with shard_servers(2, version, f"hba_file = '{rules.name}'\npassword_encryption = 'scram-sha-256'") as made:
            found = Place(made, tmp_path)
            (tmp_path / "pass").write_text("".join(f"*:*:*:{role}:{role}-pw\n" for role in ROLES))
            (tmp_path / "pass").chmod(0o600)
            for name, server in made.servers.items():
                for role in ROLES:
                    if role != "announcer":
                        server.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}-pw'")
                server.execute("CREATE DATABASE app")
                if name != "index":
                    # Since version 15 only roles with the right may create tables in `public`.
                    server.execute("CREATE SCHEMA IF NOT EXISTS public; GRANT CREATE ON SCHEMA public TO app", "app")
                    number = int(name[1:])
                    rows = (
                        f"INSERT INTO orders (email, total) SELECT n || '@{number}', n FROM generate_series(1, 500) n"
                    )
                    columns = "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, email text, total int"
                    found.sql(name, "app", f"CREATE TABLE orders ({columns}); {rows}; ANALYZE orders")
                    found.sql(name, "app", "GRANT INSERT, UPDATE ON orders TO shop")
            yield found


@pytest.mark.by_hand("sweeps")
def test_the_page_does_what_it_says(place: Place) -> None:
    # Set up.
    place.made.servers["index"].execute(place.shell("roir role-sql app"), "app")
    [grant] = re.findall(r"`(GRANT CREATE ON DATABASE [^`]*)`", section("Set up"))
    for shard in ("s0", "s1"):
        place.sql(shard, "postgres", grant)
    listed = place.shell(block("Set up", "roir init"))
    assert "orders_0" in listed
    assert "orders_1" in listed

    # Build.
    built = place.shell(block("Build", "roir build"))
    assert "compared with the table: 1,000 rows; missing 0, extra 0, different 0" in built
    place.shell("roir shard remove orders_1", expected=4)

    with ships(place):
        read_and_announce(place)
        clients_announce(place)
        checked = place.shell(block("Verify and repair", "--repair"))
        assert checked.count("missing 0, extra 0, different 0") == 2

    # And nothing stays.
    place.shell("roir drop orders_by_email; roir clean-up; roir shard remove orders_0; roir shard remove orders_1")
    for shard in ("s0", "s1"):
        there = (
            "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'roir_shard'), count(*) FROM pg_foreign_server"
        )
        assert place.sql(shard, "postgres", there) == [(0, 0)]
        assert place.sql(shard, "postgres", "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal") == []


def read_and_announce(place: Place) -> None:
    """`Ship`, `Read`, and `Strict` by the servers."""
    lag = block("Ship", "shard_lag")
    fresh, strict = (line for line in block("Read", "roir.fresh").splitlines() if line)
    # Rights: on the index server, in each shard, and for SQL that asks shards.
    place.sql("index", "app", block("Read", "GRANT USAGE ON SCHEMA roir, roir_data"))
    servers = block("Read", "CREATE EXTENSION dblink")
    first, _, each = servers.partition("CREATE EXTENSION dblink;\n")
    assert "as a superuser" in first
    place.sql("index", "postgres", "CREATE EXTENSION dblink")
    for number, shard in enumerate(("s0", "s1")):
        place.sql(shard, "app", block("Read", "GRANT SELECT ON roir_shard.home"))
        here = each.replace("orders_0", f"orders_{number}").replace("dbname 'orders'", "dbname 'app'")
        port = place.made.servers[shard].port
        here = here.replace("host '…'", f"host '127.0.0.1', port '{port}'").replace(
            "password '…'", "password 'shop-pw'"
        )
        place.sql("index", "postgres", here)

    def bounded() -> list[Any]:
        try:
            return place.sql("index", "shop", fresh)
        except psycopg2.Error as error:
            if error.pgcode != "40R01":
                raise
            return []

    place.sql("s0", "shop", "INSERT INTO orders (email, total) VALUES ('x@y.z', 1)")
    wait_until(bounded, PATIENCE_S, "what was shipped")
    assert [row[0] for row in place.sql("index", "app", lag)] == ["orders_0", "orders_1"]
    with pytest.raises(psycopg2.Error, match="roir announce"):
        place.sql("index", "shop", strict)

    # By the server.
    in_shards, on_index = block("Strict", "CREATE ROLE announcer").split("-- on the index server\n")
    for shard in ("s0", "s1"):
        place.sql(shard, "postgres", in_shards)
    place.sql("index", "postgres", on_index.replace("'…'", "'announcer-pw'"))
    command = block("Strict", "ROIR_INDEX_DSN")
    added = "\n".join(command.splitlines()[:2])
    place.shell(added.replace("orders_0", "orders_1") + "\n" + command)

    def strictly() -> list[Any]:
        try:
            return place.sql("index", "shop", strict)
        except psycopg2.Error as error:
            if "can't be read strictly now" not in str(error):
                raise
            return []

    wait_until(strictly, PATIENCE_S, "strict reads")
    place.sql("s1", "shop", "INSERT INTO orders (email, total) VALUES ('x@y.z', 2)")
    assert sorted(row[1] for row in strictly()) == ["orders_0", "orders_1"]
    found: list[Any] = []
    names = {"index_engine": place.engine("index", "shop"), "Order": Order, "found": found}
    names |= {f"engine_{number}": place.engine(f"s{number}", "shop") for number in (0, 1)}
    exec(dedent(block("Read", "ShardedIndex(")).replace("...", "found.append((order.total, shard))"), names)
    assert sorted(found) == [(1, "orders_0"), (2, "orders_1")]


def clients_announce(place: Place) -> None:
    """`Strict` by clients."""
    place.shell("roir announce orders_by_email --by client")
    code = block("Strict", "from airflow_roir.announcing import announce")
    names = {
        "new": "new@y.z",
        "text": text,
        "shard": place.engine("s0", "shop"),
        "index": place.engine("index", "shop"),
    }
    with pytest.raises(psycopg2.Error, match="was not announced"):
        place.sql("s0", "shop", "INSERT INTO orders (email, total) VALUES ('z', 2)")
    [grant] = re.findall(r"`(GRANT INSERT ON roir_data[^`]*)`", section("Strict"))
    [index] = json.loads(place.shell("roir status orders_by_email --json"))["indexes"]
    place.sql("index", "app", grant.replace("g42", f"g{index['generation']}"))
    exec(code, names)
    asked = """SELECT id FROM roir.strict(NULL::public.orders_by_email, '{"email": "new@y.z"}')"""

    def strictly() -> list[Any]:
        try:
            return place.sql("index", "shop", asked)
        except psycopg2.Error as error:
            if "can't be read strictly now" not in str(error):
                raise
            return []

    assert wait_until(strictly, PATIENCE_S, "strict reads") == [(7,)]
