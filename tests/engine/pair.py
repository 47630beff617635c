"""Two servers: the second follows the first and takes over, with or without the last commits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sqlalchemy import event

from airflow_roir.engine.database import Database
from servers.killable import Server
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_replication import replayed, standby_of, wait_until


class Pair:
    """A primary, and a standby that can take over with or without the last commits. name: of the database."""

    def __init__(self, primary: Server, standby: str, name: str) -> None:
        self.primary = primary
        self.name = name
        self.there = database_dsn(standby, name)
        self.here = primary.dsn(name)
        self.is_over = False
        [socket] = parse_qs(urlsplit(standby).query)["host"]
        self._both = f"host={primary.address},{socket} port={primary.port},5999 user=postgres dbname={name}"
        replayed(self.here, self.there)

    @property
    def dsn(self) -> str:
        """The address of the server that takes writes."""
        return f"{self._both} target_session_attrs=read-write"

    @property
    def any_dsn(self) -> str:
        """The addresses of both servers, the first one first."""
        return self._both

    def lose(self) -> None:
        """Cuts the standby off: later commits never reach it."""
        replayed(self.here, self.there)
        run_sql(self.there, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
        wait_until(lambda: not sql(self._session(), "SELECT FROM pg_stat_wal_receiver"), "the receiver's end")

    def _session(self) -> Any:
        session = steps.session(self.there)
        session.autocommit = True
        return session

    def kill(self) -> None:
        """Kills the primary. No standby takes over yet."""
        self.primary.kill()
        self.is_over = True

    def promote(self) -> None:
        """Promotes the standby."""
        run_sql(self.there, "SELECT pg_promote()")

    def fail_over(self) -> None:
        """Kills the primary and promotes the standby."""
        self.kill()
        self.promote()


@contextmanager
def pair(primary: Server, dsn: str) -> Iterator[Pair]:
    """A server and a standby of it. At the end the server is as before. dsn: of a database there."""
    with standby_of(primary) as standby:
        both = Pair(primary, standby, dsn.rsplit("/", 1)[1])
        try:
            yield both
        finally:
            if both.is_over:
                primary.start()


@contextmanager
def between(database: Database, beginning: str, act: Callable[[], object], at: int = 1) -> Iterator[None]:
    """In the block, calls `act` once: after the session of the `at`-th statement that begins like this."""
    seen, armed = 0, False

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal seen, armed
        if statement.lstrip().startswith(beginning):
            seen += 1
            armed = armed or seen == at

    def closed(*_: Any) -> None:
        nonlocal armed
        if armed and seen < 1 << 30:
            armed = False
            act()

    event.listen(database.engine, "before_cursor_execute", look)
    event.listen(database.engine, "close", closed)
    try:
        yield
    finally:
        event.remove(database.engine, "before_cursor_execute", look)
        event.remove(database.engine, "close", closed)
    assert seen >= at, f"{seen} statements began with {beginning}"
