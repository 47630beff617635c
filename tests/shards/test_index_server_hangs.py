"""An index server that hangs: its processes stand still, and the kernel goes on to answer for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg2
import psycopg2.extensions
import pytest

from airflow_roir.engine.shards import announce_functions
from servers import contrib as contribs
from servers.killable import Server
from servers.shards import Shards, shard_servers
from tests.shards.announced import scene

pytestmark = pytest.mark.sample(1)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k', 0 FROM generate_series(1, 9) i",
)
WAITS = "SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s AND query = 'COMMIT' AND state = 'active'"


@contextmanager
def hung(server: Server) -> Iterator[None]:
    """Every process of a server stands still."""
    root = (server.log_file.parent / "postmaster.pid").read_text().split()[0]
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", root], capture_output=True, text=True).stdout.split()
    processes = [int(one) for one in (root, *listed)]
    for one in processes:
        os.kill(one, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in processes:
            os.kill(one, signal.SIGCONT)


@pytest.fixture
def made(pg: int) -> Iterator[Shards]:
    with shard_servers(1, contribs.find(pg) or contribs.ensure(pg)) as found:
        found.run(*TABLE)
        scene(found, "server")
        yield found


@contextmanager
def committing(made: Shards, *settings: str) -> Iterator[tuple[psycopg2.extensions.connection, list[str]]]:
    """A writer whose session has announced before, and who commits while the index server hangs; what came of it."""
    came: list[str] = []
    with closing(psycopg2.connect(made.dsns["s0"])) as writer, writer.cursor() as cursor:
        cursor.execute("UPDATE t SET k = 'before' WHERE id = 1")
        writer.commit()
        for one in settings:
            cursor.execute(one)
        cursor.execute("UPDATE t SET k = 'after' WHERE id = 2")

        def commit() -> None:
            try:
                writer.commit()
                came.append("")
            except psycopg2.Error as error:
                came.append(str(error))

        with hung(made.servers["index"]):
            thread = threading.Thread(target=commit)
            thread.start()
            while not came and made.ask(WAITS, writer.info.backend_pid, shard="s0") != [("Extension",)]:
                pass
            yield writer, came
            thread.join()


def is_free(made: Shards) -> bool:
    """Whether nobody holds the row, and the write is undone."""
    return made.ask("SELECT k FROM t WHERE id = 2 FOR UPDATE NOWAIT", shard="s0") == [("k",)]


def test_a_writer_that_waits_for_a_hung_index_server_is_cancelled(made: Shards) -> None:
    """As the docs advise: its locks are free, though the index server stands still."""
    with committing(made) as (writer, came):
        assert made.ask("SELECT pg_cancel_backend(%s)", writer.info.backend_pid, shard="s0") == [(True,)]
        while not came:
            pass
        assert "canceling statement due to user request" in came[0]
        assert is_free(made)


def test_a_writer_that_leaves_is_noticed_by_a_shard_that_looks_for_it(made: Shards) -> None:
    with committing(made, "SET client_connection_check_interval = '100ms'") as (writer, _):
        pid = writer.info.backend_pid
        with socket.socket(fileno=os.dup(writer.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        while made.ask("SELECT 1 FROM pg_locks WHERE pid = %s", pid, shard="s0"):
            pass
        assert is_free(made)


@pytest.mark.parametrize("whose", ["the trigger's", "the session's"])
def test_a_shard_of_17_ends_the_wait_itself(pg: int, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = contribs.find(pg) or contribs.ensure(pg)
    if version < 17:
        pytest.skip("PostgreSQL 17 has transaction_timeout")
    if whose == "the trigger's":
        monkeypatch.setattr(announce_functions, "HUNG_S", 1)
    settings = () if whose == "the trigger's" else ("SET LOCAL transaction_timeout = '1s'",)
    with shard_servers(1, version) as made:
        made.run(*TABLE)
        scene(made, "server")
        with committing(made, *settings) as (_, came):
            while not came:
                pass
            # psycopg2 doesn't repeat what the server said last.
            assert "server closed the connection" in came[0]
            assert "terminating connection due to transaction timeout" in made.servers["s0"].log_file.read_text()
            assert is_free(made)


def test_a_transaction_that_goes_on_after_it_has_announced_is_not_ended(made: Shards) -> None:
    """It announces at once, and commits when it likes."""
    with closing(psycopg2.connect(made.dsns["s0"])) as writer, writer.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("UPDATE t SET k = 'at once' WHERE id = 3")
        cursor.execute("SELECT coalesce(current_setting('transaction_timeout', true), '0')")
        assert cursor.fetchall() == [("0",)]
        writer.commit()
