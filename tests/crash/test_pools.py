"""A pooler between us and the server: one that shares sessions is refused, and finds them as they were before."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import typer
from sqlalchemy.exc import OperationalError

from airflow_roir import cli
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.replicas import _Own
from airflow_roir.engine.locks.giving_way import GaveWay, giving_way
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions
from servers.killable import Server
from tests.crash.network import Proxy
from tests.crash.pools import PGBOUNCER, PgBouncer, SmallPool
from tests.test_cli import here

pytestmark = pytest.mark.sample(2)
_numbers = itertools.count(1)
SHARED = "gives the server's session to others after each transaction or statement"
# The arguments of each command; each fails or does something on a database with one index being built.
COMMANDS: dict[str, tuple[str, ...]] = {
    "abort": ("ix",),
    "announce": ("ix", "--by", "server"),
    "attach-partition": ("t", "p", "DEFAULT"),
    "build": ("iy", "--table", "t", "--keys", "v"),
    "change": ("ix", "--parallelism", "2"),
    "clean-up": (),
    "compact": ("ix", "--without-spark"),
    "detach-partition": ("p",),
    "drop": ("ix",),
    "duplicates": ("ix",),
    "init": (),
    "metrics": (),
    "pause": ("ix",),
    "plan": ("iy", "--table", "t", "--keys", "v"),
    "queue": (),
    "resume": ("ix",),
    "report": ("ix",),
    "revert": ("ix",),
    "rows-view": ("ix",),
    "shard add": ("s", "--dsn", "host=127.0.0.1 port=1"),
    "shard list": (),
    "shard remove": ("s",),
    "ship": ("--once",),
    "status": (),
    "sync-partitions": ("t",),
    "on-conflict": ("t",),
    "reference": ("t(k)", "ix", "--without-spark"),
    "verify": ("ix", "--without-spark"),
}
# They ask no database of theirs, or, like doctor, name the pool among other findings.
WITHOUT = {"dags", "role-sql", "doctor"}
KINDS = [
    *(f"small transaction {size}" for size in (1, 2, 5)),
    "small transaction 5 in turn",
    *(f"pgbouncer {mode} {size}" for mode in ("transaction", "statement") for size in (1, 2, 5)),
    "pgbouncer transaction 5 in turn",
]
OURS = ["small session 5", "pgbouncer session 5"]


class Place:
    """A database, and its pools."""

    def __init__(self, server: Server, folder: Path, stack: ExitStack) -> None:
        self.server, self._folder, self._stack = server, folder, stack
        self.name = f"pools_{next(_numbers)}"
        server.execute(f"CREATE DATABASE {self.name} TEMPLATE roir_template")
        server.execute("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", self.name)
        server.execute("INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 100) i", self.name)
        self.dsn = server.dsn(self.name)
        self._pools: dict[str, str] = {}

    def pool(self, kind: str) -> str:
        """The DSN of a pool: `small` or `pgbouncer`, its mode, its size, and `in turn`."""
        if kind in self._pools:
            return self._pools[kind]
        maker, mode, size, *turn = kind.split()
        pool: PgBouncer | SmallPool
        if maker == "small":
            pool = SmallPool(self.server.port, mode, int(size), bool(turn))
        elif PGBOUNCER is None:
            pytest.skip("PgBouncer isn't installed")
        else:
            folder = self._folder / str(next(_numbers))
            folder.mkdir()
            pool = PgBouncer(folder, self.server.port, mode, int(size), bool(turn))
        self._stack.callback(pool.close)
        self._pools[kind] = self.server.dsn(self.name, pool.port)
        return self._pools[kind]


@contextmanager
def a_place(server: Server) -> Iterator[Place]:
    # PgBouncer runs as another user, who can't look into pytest's folders.
    with tempfile.TemporaryDirectory(prefix="roir-pools-") as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)
        place = Place(server, Path(folder), stack)
        yield place
        stack.close()
        server.execute(f"DROP DATABASE {place.name} WITH (FORCE)")


@pytest.fixture(scope="module")
def refused(crash_server: Server) -> Iterator[Place]:
    """One for all that change nothing, with an operation that has begun."""
    with a_place(crash_server) as place:
        begin(place)
        yield place


@pytest.fixture
def place(crash_server: Server) -> Iterator[Place]:
    with a_place(crash_server) as place:
        yield place


LEFT = """
SELECT pg_backend_pid(), (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name <> 'application_name'),
       current_user, session_user, (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM t),
       (SELECT count(*) FROM pg_listening_channels()), pg_my_temp_schema()::int,
       (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')
"""


def sessions(dsn: str, size: int) -> dict[int, Any]:
    """The settings and objects that an application finds in all of a pool's sessions, by the server's processes."""
    found = {}
    with ExitStack() as stack:
        for _ in range(size):
            connection = stack.enter_context(closing(psycopg2.connect(dsn)))
            # One that leaves in the middle of a transaction takes the session with it.
            stack.callback(connection.rollback)
            # All are held at once. A pool of single statements gives no transaction.
            connection.autocommit = size == 1
            with connection.cursor() as cursor:
                cursor.execute(LEFT)
                [(pid, *left)] = cursor.fetchall()
                found[pid] = left
    assert len(found) == size
    return found


def begin(place: Place) -> None:
    options = BuildOptions(batch_rows=1_000, ranges=2, segments=2)
    prepare.prepare(Database(place.dsn), IndexDefinition.parse("ix", "t", "k"), options, "test")


def test_each_command_is_in_the_sweep() -> None:
    group: Any = typer.main.get_command(cli.app)
    names = {
        f"{name} {sub}".strip()
        for name, command in group.commands.items()
        for sub in getattr(command, "commands", {"": None})
    }
    assert names - WITHOUT == set(COMMANDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_pool_that_shares_sessions_is_refused_and_left_as_it_was(refused: Place, kind: str, command: str) -> None:
    dsn = refused.pool(kind)
    size = 1 if "statement" in kind else int(kind.split()[2])
    before, operations = sessions(dsn, size), rows(refused)
    done = here(dsn, *command.split(), *COMMANDS[command], code=1 if command == "metrics" else 2)
    assert SHARED in done.stderr
    assert "use the server's own port, or a pool in session mode" in done.stderr
    assert sessions(dsn, size) == before
    assert rows(refused) == operations


def rows(place: Place) -> Any:
    with Database(place.dsn).transaction() as connection:
        query = "SELECT id, status, epoch, owner, heartbeat_at, (SELECT count(*) FROM roir.event) FROM roir.operation"
        return connection.exec_driver_sql(query).all()


CALLS: dict[str, Callable[[Database], Any]] = {
    "transaction": lambda database: database.transaction().__enter__(),
    "a session of its own": lambda database: database.connect().__enter__(),
    "outside of transactions": lambda database: database.autocommit().__enter__(),
    "a worker": lambda database: database.named("roir 1.1 worker 0 ix").connect().__enter__(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_a_session_refuses_it(refused: Place, kind: str, call: str) -> None:
    with pytest.raises(InvalidInput, match=SHARED):
        CALLS[call](Database(refused.pool(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_governor_asks_a_replica_through_a_pool_and_leaves_nothing_there(refused: Place, kind: str) -> None:
    if "statement" in kind:
        pytest.skip("transactions of several statements are refused there, by the pool's own words")
    dsn, size = refused.pool(kind), int(kind.split()[2])
    before = sessions(dsn, size)
    replica = _Own(dsn, clock=lambda: 0.0)
    assert replica.ask()[2] == "is no replica: it is not in recovery"
    replica.close()
    assert sessions(dsn, size) == before


@pytest.mark.parametrize("defaults", ["default_transaction_read_only", "default_transaction_deferrable"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "transaction" in kind])
def test_it_is_found_where_transactions_are_read_only_by_default(place: Place, kind: str, defaults: str) -> None:
    place.server.execute(f"ALTER DATABASE {place.name} SET {defaults} = on")
    with pytest.raises(InvalidInput, match=SHARED):
        Database(place.pool(kind)).connect().__enter__()


@pytest.mark.parametrize("command", ["status", "pause", "abort", "drop"])
@pytest.mark.parametrize("kind", OURS)
def test_a_pool_in_session_mode_is_as_good_as_the_server(place: Place, kind: str, command: str) -> None:
    begin(place)
    dsn = place.pool(kind)
    before = sessions(dsn, 5)
    if command == "drop":
        here(dsn, "abort", "ix")
        here(dsn, *command.split(), *COMMANDS[command], code=2)
    else:
        here(dsn, *command.split(), *COMMANDS[command])
    found = sessions(dsn, 5)
    [was, *_] = before.values()
    for left in found.values():
        changed = {name: value for name, value in left[0].items() if was[0].get(name, value) != value}
        assert (changed, left[1:]) == ({}, was[1:])


@pytest.mark.parametrize("kind", ["small session 1", "pgbouncer session 1"])
def test_a_pool_that_has_no_session_left_is_told_within_the_limit(place: Place, kind: str) -> None:
    """Found: through such a pool a build hung without a word: its driver waited for a worker's session to end, which
    the pool kept. It holds: the driver waits for workers that Spark still has; a session's first statements have a
    minute.
    """
    dsn = place.pool(kind)
    database = Database(dsn, limits=Limits(first_answer_s=3.0))
    with database.connect() as first:
        assert first.exec_driver_sql("SELECT count(*) FROM public.t").scalar() == 100
        with pytest.raises(OperationalError, match=r"a pool in front of it has no session left|timeout expired"):
            database.connect().__enter__()


@pytest.mark.parametrize("kind", OURS)
def test_a_seal_behind_a_pool_gives_way(place: Place, kind: str) -> None:
    """The number that a pooler tells of a session is the pooler's own."""
    database = Database(place.pool(kind))
    waiting = threading.Thread(target=place.server.execute, args=("BEGIN; LOCK TABLE t; COMMIT", place.name))

    def work() -> None:
        with database.connect() as connection, giving_way(database, connection, ["public.t"]), connection.begin():
            connection.exec_driver_sql("LOCK TABLE public.t IN ACCESS SHARE MODE")
            waiting.start()
            connection.exec_driver_sql("SELECT pg_sleep(60)")

    with pytest.raises(GaveWay):
        work()
    waiting.join()


def test_a_network_that_only_renames_ports_is_no_pool(place: Place) -> None:
    proxy = Proxy(("127.0.0.1", place.server.port))
    try:
        with Database(place.server.dsn(place.name, proxy.port)).connect() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM public.t").scalar() == 100
    finally:
        proxy.close()
