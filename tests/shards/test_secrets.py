"""Where a password goes: every command with a marked one, well and badly, and then everything is searched for it."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg2
import pytest
from psycopg2 import sql
from psycopg2.extensions import make_dsn
from typer.main import get_command

from airflow_roir import cli
from airflow_roir.cli.spark import spark_options
from servers import contrib
from servers.shards import Shards, shard_servers

ROIR = Path(sys.executable).parent / "roir"
# The passwords of the owner on the index server, of the owner in the shard, and of the login that announces.
MARKS = {"index": "markedforindex", "shard": "markedforshard", "announcer": "markedforannouncer"}
RULES = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"
# All that a server can be told to write down of statements, and of those inside functions what auto_explain sees.
TALKATIVE = """
log_statement = all
log_min_duration_statement = 0
log_min_error_statement = debug5
log_error_verbosity = verbose
log_parameter_max_length = -1
log_parameter_max_length_on_error = -1
session_preload_libraries = auto_explain
auto_explain.log_min_duration = 0
auto_explain.log_nested_statements = on
auto_explain.log_verbose = on
track_activity_query_size = 1MB
password_encryption = scram-sha-256
"""
# Where a secret may be: only its owner and superusers read it there (docs/rights.md#secrets).
ALLOWED = {"index": {"roir.shard.dsn", "roir.shard.index_dsn"}, "s0": {"pg_catalog.pg_user_mapping.umoptions"}}
COLUMNS = """
SELECT n.nspname, c.relname, a.attname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relkind = 'r' AND n.nspname <> 'information_schema' AND has_table_privilege(c.oid, 'SELECT')
"""
BUILD = ("build", "i", "--table", "public.t", "--keys", "k", "--shards", "s0")
INDEX = {"announce": ("i", "--by", "off"), "build": BUILD[1:], "change": ("i", "--parallelism", "2")}
# The arguments of each command; those that reach no database are left out.
COMMANDS = {
    **INDEX,
    **dict.fromkeys(("resume", "compact", "duplicates", "pause", "abort", "revert", "drop", "report"), ("i",)),
    "rows-view": ("i",),
    **dict.fromkeys(("init", "metrics", "queue", "clean-up", "status", "doctor"), ()),
    "plan": BUILD[1:],
    "verify": ("i", "--without-spark"),
    "ship": ("--once",),
    "attach-partition": ("t", "t1", "DEFAULT"),
    "detach-partition": ("t1",),
    "sync-partitions": ("t",),
    "on-conflict": ("t",),
    "reference": ("t(k)", "i", "--without-spark"),
    "shard add": ("s0",),
    "shard list": ("--check",),
    "shard remove": ("s0",),
}
WITHOUT_DATABASE = {"dags", "role-sql"}


@dataclass
class Place:
    """An index server and one shard that ask for passwords, and write down all that they can."""

    made: Shards
    home: Path
    seen: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def dsn(self, of: str, **other: str) -> str:
        """A DSN with the marked password. of: index, shard, announcer."""
        server = self.made.servers["s0" if of == "shard" else "index"]
        given = {"host": "127.0.0.1", "port": server.port, "dbname": "app", "password": MARKS[of]}
        return make_dsn(**given | {"user": "announcer" if of == "announcer" else "app"} | other)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PG", "ROIR"))},
            "ROIR_DSN": self.dsn("index"),
            "ROIR_SHARD_DSN": self.dsn("shard"),
            "ROIR_INDEX_DSN": self.dsn("announcer"),
            "TMPDIR": str(self.home / "tmp"),
            "COLUMNS": "200",
            "ROIR_LOG_FOLDER": str(self.home / "logs"),
            "XDG_STATE_HOME": str(self.home),
            "HOME": str(self.home),
        }

    def roir(self, *arguments: str, code: int | None = 0, **environment: str) -> str:
        """Runs a command, and looks meanwhile at everything that others can see of it."""
        process = subprocess.Popen(
            [ROIR, *arguments],
            env=self.environment | environment,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(process.pid, ended))
        watcher.start()
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            process.kill()
            ended.set()
            watcher.join()
        assert code is None or process.returncode == code, said
        self.seen.append((f"what roir {arguments[0]} says", said))
        self.said.append(said)
        return said

    def _watch(self, pid: int, ended: threading.Event) -> None:
        with closing(psycopg2.connect(self.made.servers["index"].dsn())) as index:
            index.autocommit = True
            cursor = index.cursor()
            while not ended.wait(0.05):
                cursor.execute("SELECT query, application_name FROM pg_stat_activity")
                self.seen += [("pg_stat_activity", str(row)) for row in cursor.fetchall()]
                with suppress(psutil.Error):
                    for child in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                        with suppress(psutil.Error):
                            line = " ".join(child.cmdline())
                            self.seen.append(("the list of processes", line))
                            if "java" in line or "worker_daemon" in line:
                                self.seen.append(("the environment of Spark's processes", str(without_own(child))))

    def search(self) -> set[str]:
        """The places that have any of the marks."""
        texts = list(self.seen)
        texts += [(f"log of {name}", server.log_file.read_text()) for name, server in self.made.servers.items()]
        texts += [(str(path), path.read_bytes().decode("latin-1")) for path in self.home.rglob("*") if path.is_file()]
        found = {where for where, text in texts if any(mark in text for mark in MARKS.values())}
        for name, server in self.made.servers.items():
            with closing(psycopg2.connect(server.dsn("app"))) as connection, connection.cursor() as cursor:
                cursor.execute(COLUMNS)
                for schema, table, column in cursor.fetchall():
                    names = [sql.Identifier(one) for one in (column, schema, table)]
                    cursor.execute(sql.SQL("SELECT {}::text FROM {}.{}").format(*names))
                    text = str(cursor.fetchall())
                    where = f"{schema}.{table}.{column}"
                    if any(mark in text for mark in MARKS.values()) and where not in ALLOWED.get(name, ()):
                        found.add(f"{where} of {name}")
        return found


@pytest.fixture(scope="module")
def place(pg: int) -> Iterator[Place]:
    with (
        tempfile.TemporaryDirectory(prefix="roir-secrets-") as home,
        tempfile.NamedTemporaryFile("w", prefix="roir-hba-") as rules,
    ):
        rules.write(RULES)
        rules.flush()
        os.chmod(rules.name, 0o644)
        with shard_servers(1, contrib.ensure(pg), f"hba_file = '{rules.name}'\n{TALKATIVE}") as made:
            for name, server in made.servers.items():
                server.execute("SET log_statement = none; SET log_min_duration_statement = -1")
                for of, role in (
                    (("index", "app"), ("announcer", "announcer")) if name == "index" else (("shard", "app"),)
                ):
                    silently = "SET log_statement = none; SET log_min_duration_statement = -1"
                    with closing(psycopg2.connect(server.dsn())) as connection, connection.cursor() as cursor:
                        cursor.execute(silently)
                        cursor.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{MARKS[of]}'")
                        connection.commit()
                server.execute("CREATE DATABASE app OWNER app")
                server.execute(
                    "CREATE EXTENSION postgres_fdw; GRANT USAGE ON FOREIGN DATA WRAPPER postgres_fdw TO app", "app"
                )
                server.execute("CREATE SCHEMA IF NOT EXISTS public; GRANT CREATE ON SCHEMA public TO app", "app")
            made.servers["s0"].execute("SET ROLE app; CREATE TABLE t (id int PRIMARY KEY, k text)", "app")
            made.servers["s0"].execute("SET ROLE app; INSERT INTO t SELECT n, n FROM generate_series(1, 500) n", "app")
            found = Place(made, Path(home))
            (found.home / "tmp").mkdir()
            yield found


def without_own(process: psutil.Process) -> dict[str, str]:
    """A process's environment without what the test itself has put there for other commands."""
    return {
        name: value for name, value in process.environ().items() if name not in ("ROIR_SHARD_DSN", "ROIR_INDEX_DSN")
    }


def test_every_command_is_here() -> None:
    known = get_command(cli.app).commands  # type: ignore[attr-defined]
    names = {f"shard {name}" for name in known["shard"].commands} | (known.keys() - {"shard"})
    assert names == COMMANDS.keys() | WITHOUT_DATABASE


@pytest.mark.by_hand("sweeps")
def test_no_secret_is_where_others_can_read_it(place: Place) -> None:
    """Found: passwords of shards in the servers' logs (`INSERT INTO roir.shard`, `CREATE USER MAPPING`) and in `ps`. It
    holds: they go by `COPY`, and by variables; the command warns of one among its arguments.
    """
    place.roir("init")
    place.roir("shard", "add", "s0")
    events = place.home / "events"
    events.mkdir()
    spark = ("--conf", "spark.eventLog.enabled=true", "--conf", f"spark.eventLog.dir=file://{events}")
    place.roir("plan", *BUILD[1:])
    place.roir(*BUILD, "--parallelism", "1", *spark)
    assert list(events.rglob("*"))
    place.roir("announce", "i", "--by", "server")
    # A changed login is sent again.
    place.roir("shard", "add", "s0", ROIR_INDEX_DSN=place.dsn("announcer", connect_timeout="7"))
    place.roir("announce", "i", "--by", "server")
    place.roir("ship", "--once", "--json")
    for command in ("status", "metrics", "queue", "shard list", "clean-up", "verify"):
        place.roir(*command.split(), *COMMANDS[command])
    for command in ("status", "shard list"):
        place.roir(*command.split(), "--json")
    # Commands that fail while they have the login: the last one is refused by the statement that has the password.
    for wrong in ({"user": "nobody"}, {"sslcert": "/none", "sslkey": "/none"}):
        place.roir("shard", "add", "s0", ROIR_INDEX_DSN=place.dsn("announcer", **wrong))
        place.roir("announce", "i", "--by", "server", code=None)
    assert "CREATE USER MAPPING" in place.said[-1]
    place.roir("shard", "add", "s0")
    place.roir("announce", "i", "--by", "off")
    assert place.search() == set()
    place.roir("drop", "i")
    place.roir("clean-up")
    place.roir("shard", "remove", "s0")
    with closing(psycopg2.connect(place.made.servers["index"].dsn("app"))) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT count(dsn) + count(index_dsn) FROM roir.shard")
        assert cursor.fetchone() == (0,)
    assert place.search() == set()


BAD = {
    "another password": {"password": "another{mark}"},
    "no such database": {"dbname": "nowhere"},
    "nobody listens": {"port": "1"},
}
# DSNs that libpq can't read, or reads otherwise than was meant.
UNREADABLE = (
    "postgresql://app:{mark}%ZZ@127.0.0.1/app",
    "host=127.0.0.1 password={mark} x",
    "postgresql://app:a@{mark}@h/app",
)


def in_process(place: Place, arguments: list[str], code: int | None = None, **environment: str) -> str:
    """The output of a command run in this process, without the second that a process takes to start; by default it must
    fail."""
    out = io.StringIO()
    thresholds = gc.get_threshold()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        for name, value in (place.environment | environment).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["roir", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    gc.set_threshold(*thresholds)
    assert bool(ended.value.code) if code is None else ended.value.code in (code, None)
    return out.getvalue()


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", [*BAD, *UNREADABLE])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_failure_says_a_secret(command: str, wrong: str, place: Place, caplog: pytest.LogCaptureFixture) -> None:
    for variable, of in (("ROIR_DSN", "index"), ("ROIR_SHARD_DSN", "shard"), ("ROIR_INDEX_DSN", "announcer")):
        if variable != "ROIR_DSN" and command != "shard add":
            continue
        mark = MARKS[of]
        more = {name: value.format(mark=mark) for name, value in BAD.get(wrong, {}).items()}
        dsn = place.dsn(of, **more) if wrong in BAD else wrong.format(mark=mark)
        said = in_process(place, [*command.split(), *COMMANDS[command]], **{variable: dsn})
        assert said
        assert mark not in said + caplog.text
        assert "Traceback" not in said


@pytest.mark.sample(1)
def test_a_password_among_the_arguments_is_warned_of(place: Place) -> None:
    """Found: passwords of shards in the servers' logs (`INSERT INTO roir.shard`, `CREATE USER MAPPING`) and in `ps`. It
    holds: they go by `COPY`, and by variables; the command warns of one among its arguments.
    """
    for arguments, variable in (
        (("--dsn", place.dsn("index", port="1"), "status"), "ROIR_DSN"),
        (("shard", "add", "s0", "--dsn", place.dsn("shard", port="1")), "ROIR_SHARD_DSN"),
        (("shard", "add", "s0", "--index-dsn", place.dsn("announcer", port="1")), "ROIR_INDEX_DSN"),
    ):
        said = in_process(place, list(arguments), ROIR_DSN=place.dsn("index", port="1"))
        assert f"environment variable {variable}," in said
        assert not any(mark in said for mark in MARKS.values())
    assert "environment variable" not in in_process(place, ["status"], ROIR_DSN=place.dsn("index", port="1"))


@pytest.mark.sample(1)
def test_a_secret_of_spark_among_the_arguments_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    spark_options("sc://h/;use_ssl=true;token=marked", ["spark.executor.memory=2g", "spark.authenticate.secret=marked"])
    said = capsys.readouterr().err
    assert "among the arguments: spark.authenticate.secret, token. Put" in said
    assert "marked" not in said
    spark_options("sc://h/;use_ssl=true", ["spark.executor.memory=2g"])
    assert not capsys.readouterr().err


@pytest.mark.sample(1)
def test_who_may_make_no_temporary_table_is_told_which_right_is_missing(place: Place) -> None:
    index = place.made.servers["index"]
    in_process(place, ["init"], code=0)
    index.execute("REVOKE TEMPORARY ON DATABASE app FROM PUBLIC, app")
    try:
        said = in_process(place, ["shard", "add", "s0"])
    finally:
        index.execute("GRANT TEMPORARY ON DATABASE app TO PUBLIC")
    assert "GRANT TEMPORARY ON DATABASE" in said
    assert not any(mark in said for mark in MARKS.values())
