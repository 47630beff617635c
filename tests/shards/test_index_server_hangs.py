"""An index server that hangs: its processes are stopped, and the kernel still accepts connections and data for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psycopg2
import psycopg2.extensions
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute
from airflow_roir.page.sessions import Sessions
from airflow_roir.shards.announce import functions
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


def running(server: Server) -> list[int]:
    """The server's processes, the postmaster first."""
    root = (server.log_file.parent / "postmaster.pid").read_text().split()[0]
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", root], capture_output=True, text=True).stdout.split()
    return [int(one) for one in (root, *listed)]


@contextmanager
def hung(server: Server) -> Iterator[list[int]]:
    """Stops every process of a server for the block; yields their ids."""
    processes = running(server)
    for one in processes:
        os.kill(one, signal.SIGSTOP)
    try:
        yield processes
    finally:
        for one in processes:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)


@pytest.fixture
def made(pg: int) -> Iterator[Shards]:
    with shard_servers(1, contribs.find(pg) or contribs.ensure(pg)) as found:
        found.run(*TABLE)
        scene(found, "server")
        yield found


@contextmanager
def committing(
    made: Shards, *settings: str, when: str = "it begins"
) -> Iterator[tuple[psycopg2.extensions.connection, list[str]]]:
    """A writer whose session has announced before, and who commits while the index server hangs; what came of it.

    when: the index server hangs before it begins its part of the transaction, before what it inserts, or its commit.
    """
    came: list[str] = []
    with closing(psycopg2.connect(made.dsns["s0"])) as writer, writer.cursor() as cursor:
        cursor.execute("UPDATE t SET k = 'before' WHERE id = 1")
        writer.commit()
        for one in settings:
            cursor.execute(one)
        if when != "it begins":
            cursor.execute("UPDATE t SET k = 'after' WHERE id = 3; SET CONSTRAINTS ALL IMMEDIATE")
        if when == "it commits":
            cursor.execute("UPDATE t SET k = 'after' WHERE id = 2")
        else:
            cursor.execute("SET CONSTRAINTS ALL DEFERRED; UPDATE t SET k = 'after' WHERE id = 2")

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


def is_held(made: Shards) -> bool:
    """Whether a transaction holds the row."""
    return made.ask("SELECT k FROM t WHERE id = 2 FOR UPDATE SKIP LOCKED", shard="s0") == []


def is_free(made: Shards) -> bool:
    """Whether no transaction holds the row, and the write is undone."""
    return made.ask("SELECT k FROM t WHERE id = 2 FOR UPDATE NOWAIT", shard="s0") == [("k",)]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("when", ["it begins", "it commits"])
def test_a_writer_that_waits_for_a_hung_index_server_is_cancelled(made: Shards, when: str) -> None:
    """As the docs advise: the writer's locks are freed, although the index server is stopped."""
    with committing(made, when=when) as (writer, came):
        assert made.ask("SELECT pg_cancel_backend(%s)", writer.info.backend_pid, shard="s0") == [(True,)]
        while not came:
            pass
        assert "canceling statement due to user request" in came[0]
        assert is_free(made)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("when", ["it begins", "it inserts", "it commits"])
@pytest.mark.parametrize("first", ["the server", "its sessions"])
def test_a_hung_index_server_that_is_ended_fails_the_commit_at_once(made: Shards, first: str, when: str) -> None:
    with committing(made, when=when) as (_, came):
        root, *others = running(made.servers["index"])
        assert is_held(made)
        for one in (root, *others) if first == "the server" else (*others, root):
            os.kill(one, signal.SIGKILL)
        while not came:
            pass
        if when == "it begins":
            assert 'could not connect to server "roir index server' in came[0]
        else:
            assert "server closed the connection unexpectedly" in came[0]
        assert is_free(made)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_a_writer_whose_announcement_hangs_in_the_middle_undoes_it_though_its_session_may_stay(
    made: Shards, how: str
) -> None:
    """On PostgreSQL 15 and 16 the session waits for an answer to the cancel that it passes on."""
    with committing(made, when="it inserts") as (writer, _):
        assert is_held(made)
        made.ask(f"SELECT pg_{how}_backend(%s)", writer.info.backend_pid, shard="s0")
        while is_held(made):
            pass
        assert made.ask("SELECT k FROM t WHERE id = 2", shard="s0") == [("k",)]
        for one in running(made.servers["index"]):
            os.kill(one, signal.SIGKILL)


@pytest.mark.by_hand("sweeps")
def test_a_writer_is_ended_by_the_shard(made: Shards) -> None:
    with committing(made) as (writer, came):
        assert made.ask("SELECT pg_terminate_backend(%s)", writer.info.backend_pid, shard="s0") == [(True,)]
        while not came:
            pass
        # psycopg2 doesn't repeat the server's last message.
        assert "server closed the connection" in came[0] or "could not connect to server" in came[0]
        assert is_free(made)


@pytest.mark.by_hand("sweeps")
def test_the_servers_own_process_alone_ends_no_wait(made: Shards) -> None:
    """The server's sessions are stopped, and keep their connections."""
    with committing(made) as (_, came):
        root, *others = running(made.servers["index"])
        os.kill(root, signal.SIGKILL)
        assert is_held(made)
        assert not came
        for one in others:
            os.kill(one, signal.SIGKILL)
        while not came:
            pass
        assert is_free(made)


@pytest.mark.by_hand("sweeps")
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
        monkeypatch.setattr(functions, "HUNG_S", 1)
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


@pytest.mark.by_hand("sweeps")
def test_a_transaction_that_goes_on_after_it_has_announced_is_not_ended(made: Shards) -> None:
    """The transaction announces at once, and commits at any time later."""
    with closing(psycopg2.connect(made.dsns["s0"])) as writer, writer.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("UPDATE t SET k = 'at once' WHERE id = 3")
        cursor.execute("SELECT coalesce(current_setting('transaction_timeout', true), '0')")
        assert cursor.fetchall() == [("0",)]
        writer.commit()


@pytest.mark.by_hand("sweeps")
def test_a_look_of_the_page_by_a_session_that_was_kept_ends_and_names_the_server(made: Shards) -> None:
    """The session that is kept doesn't answer, and a new one isn't let in."""
    sessions = Sessions(lambda dsn, **pool: Database(dsn, "roir page", **pool), hung_s=0.1)

    def look() -> None:
        with sessions.database("index", made.index) as database, database.transaction() as connection:
            execute(connection, "SELECT 1")

    look()
    with hung(made.servers["index"]), pytest.raises(DBAPIError, match=r"connection to server at .* timeout expired"):
        look()
    look()
