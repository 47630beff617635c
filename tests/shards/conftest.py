"""Fixtures: an index server and its shards, as databases of one server; a server that has contrib's postgres_fdw."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from servers import contrib as contribs
from servers.postgres import embedded_postgres
from servers.shards import Shards, drop_databases, make_databases
from tests.conftest import deadlocks, with_template

_numbers = itertools.count(1)
TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
Make = Callable[..., Shards]


def _factory(server: str, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Shards] = []

    def make(count: int = 2, *table: str) -> Shards:
        """An index server and `count` shards, s0…; `table`, by default `t (id, k, v)`, is run in each."""
        shards = make_databases(server, f"shards_{next(_numbers)}", count, "roir_template")
        made.append(shards)
        shards.run(*(table or (TABLE,)))
        return shards

    yield make
    found = 0
    for shards in made:
        found += sum(deadlocks(server, urlsplit(dsn).path[1:]) for dsn in (shards.index, *shards.dsns.values()))
        drop_databases(server, shards)
    if "deadlocks_meant" not in request.fixturenames:
        assert found == 0, f"{found} deadlocks (I6); a test that means them asks for `deadlocks_meant`"


@pytest.fixture
def shards(server: str, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes an index server with the control schema, and shards with a table: `shards(3)`, `shards(2, "CREATE …")`."""
    yield from _factory(server, request)


@pytest.fixture(scope="session")
def contrib(pg: int) -> Iterator[str]:
    """The DSN of a server with postgres_fdw and dblink, and `roir_template`; fails if none can be had."""
    version = contribs.find(pg) or contribs.ensure(pg)
    with embedded_postgres(version) as dsn:
        with_template(dsn)
        yield dsn


@pytest.fixture
def contrib_shards(contrib: str, request: pytest.FixtureRequest) -> Iterator[Make]:
    """As `shards`, on the server with contrib's extensions; they aren't created."""
    yield from _factory(contrib, request)
