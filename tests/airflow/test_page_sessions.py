"""The session that the pages keep: the next look reuses it, it ends when no page looks, and it is never out of date."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute
from airflow_roir.page import databases
from airflow_roir.page.sessions import Sessions
from servers.postgres import embedded_postgres, programs

FOR_EVER = 1e6
OPEN = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'roir page' AND datname = current_database()"


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(databases.open_reader, idle_s=FOR_EVER)


def session_of(reading: AbstractContextManager[Database]) -> int:
    with reading as database, database.transaction() as connection:
        return int(execute(connection, "SELECT pg_backend_pid()").scalar_one())


def settings_of(reading: AbstractContextManager[Database]) -> tuple[Any, ...]:
    names = ("default_transaction_read_only", "statement_timeout", "search_path")
    with reading as database, database.transaction() as connection:
        return tuple(execute(connection, f"SHOW {name}").scalar_one() for name in names)


def until_open(shop: Any, wanted: int) -> None:
    """A session that is closed takes the server a moment to end."""
    for _ in range(600):
        if shop.run(OPEN) == [(wanted,)]:
            return
        shop.run("SELECT pg_sleep(0.05)")
    assert shop.run(OPEN) == [(wanted,)]


def test_a_look_takes_the_session_of_the_last_one(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps({"conn_type": "postgres"} | shop.fields))
    monkeypatch.setattr(databases, "_sessions", Sessions(databases.open_reader, idle_s=FOR_EVER))
    first = session_of(databases.reading("shop"))
    assert session_of(databases.reading("shop")) == first
    with databases.open_database("shop", "ann").transaction() as connection:
        own = execute(connection, "SELECT pg_backend_pid()").scalar_one()
    assert own != first, "a change has a session of its own"


def test_who_looks_at_the_same_time_gets_another_one_for_that_look(shop: Any, sessions: Sessions) -> None:
    met = Barrier(3, timeout=60)

    def look() -> int:
        with sessions.database("shop", shop.dsn) as database, database.transaction() as connection:
            met.wait()
            return int(execute(connection, "SELECT pg_backend_pid()").scalar_one())

    with ThreadPoolExecutor(3) as threads:
        assert len({one.result() for one in [threads.submit(look) for _ in range(3)]}) == 3
    until_open(shop, 1)


def test_a_session_that_was_ended_is_replaced(shop: Any, sessions: Sessions) -> None:
    first = session_of(sessions.database("shop", shop.dsn))
    settings = settings_of(sessions.database("shop", shop.dsn))
    assert settings[:2] == ("on", "6s")
    shop.run(f"SELECT pg_terminate_backend({first}, 10000)")
    assert session_of(sessions.database("shop", shop.dsn)) != first
    assert settings_of(sessions.database("shop", shop.dsn)) == settings


def test_a_server_that_was_restarted_is_looked_at_and_one_that_is_down_is_said_to_be(sessions: Sessions) -> None:
    with embedded_postgres() as dsn:
        first = session_of(sessions.database("shop", dsn))
        with sessions.database("shop", dsn) as database, database.transaction() as connection:
            data = execute(connection, "SHOW data_directory").scalar_one()
            socket = execute(connection, "SHOW unix_socket_directories").scalar_one()

        def control(*words: str) -> None:
            owner = os.stat(data)
            command = [programs(18) / "pg_ctl", "-D", data, "-w", "-l", "/dev/null", *words]
            subprocess.run(command, check=True, user=owner.st_uid, group=owner.st_gid, stdout=subprocess.DEVNULL)

        control("restart", "-m", "fast")
        assert session_of(sessions.database("shop", dsn)) != first
        control("stop", "-m", "fast")
        with pytest.raises(DBAPIError) as refused:
            session_of(sessions.database("shop", dsn))
        assert databases.trouble("shop", refused.value) == "the database of connection shop can't be reached"
        control("start", "-o", f"-h '' -k {socket}")
        session_of(sessions.database("shop", dsn))


def test_with_another_dsn_the_session_to_the_former_is_closed(shop: Any, sessions: Sessions) -> None:
    other = f"{shop.dsn} options='-c test.of=other'"
    with sessions.database("shop", shop.dsn) as database, database.transaction() as connection:
        # A look that is under way ends as it began.
        assert session_of(sessions.database("shop", other)) != execute(connection, "SELECT pg_backend_pid()").scalar()
        assert execute(connection, "SELECT current_setting('test.of', true)").scalar() is None
    until_open(shop, 1)


def test_a_session_that_nobody_uses_is_closed(shop: Any) -> None:
    sessions = Sessions(databases.open_reader, idle_s=0.01)
    for _ in range(3):
        with sessions.database("shop", shop.dsn) as database:
            for _ in range(2):
                with database.transaction() as connection:
                    execute(connection, "SELECT pg_sleep(0.03)")
        until_open(shop, 0)


def test_sessions_are_bounded(shop: Any) -> None:
    sessions = Sessions(databases.open_reader, idle_s=FOR_EVER, most=2)
    for number in range(5):
        session_of(sessions.database(f"connection {number}", shop.dsn))
    until_open(shop, 2)


def test_a_role_that_may_not_log_in_any_more_is_said_to_be_refused(shop: Any, sessions: Sessions) -> None:
    first = session_of(sessions.database("shop", shop.dsn))
    shop.run(f"ALTER ROLE {shop.fields['login']} NOLOGIN; SELECT pg_terminate_backend({first}, 10000)")
    with pytest.raises(DBAPIError) as refused:
        session_of(sessions.database("shop", shop.dsn))
    assert databases.trouble("shop", refused.value) == "the database of connection shop refuses the login"
