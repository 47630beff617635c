"""Commands of several transactions are killed before each commit. Repeated, or left to a clean-up, they complete."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import event

from airflow_roir.engine import abort, clean_up, drop, revert
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach, remove_entries, sync
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import IllegalTransition, InvalidInput, LockNotAcquired, NotFound
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

SOURCE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (100) TO (200)",
    "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 199) i",
    "CREATE TABLE t3 (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t3 SELECT i, (i % 5)::text, i FROM generate_series(200, 260) i",
    "ANALYZE t",
)
BOUNDS = "FOR VALUES FROM (200) TO (300)"


class Killed(Exception):
    """The process dies."""


def published(database: Database) -> None:
    steps.finish_all(database, steps.begin(database, segments=2)[1])


def rebuilt(database: Database) -> None:
    published(database)
    steps.finish_all(database, steps.begin(database, table=None, keys=None, revert_window_s=0)[1])


def building(database: Database) -> None:
    steps.begin(database, segments=2)


def gone(database: Database) -> None:
    """Detaches one partition without roir, and attaches one with rows."""
    published(database)
    run_sql(database.dsn, "ALTER TABLE t DETACH PARTITION t1", f"ALTER TABLE t ATTACH PARTITION t3 {BOUNDS}")


# The state before the command, and the command.
COMMANDS: dict[str, tuple[Callable[[Database], None], Callable[[Database], object]]] = {
    "drop": (published, lambda database: drop.drop_index(database, "ix", "test", patience_s=5)),
    "drop of a rebuilt one": (rebuilt, lambda database: drop.drop_index(database, "ix", "test", patience_s=5)),
    "abort": (building, lambda database: abort.abort(database, "ix", "test", patience_s=5)),
    "detach": (published, lambda database: detach.detach_partition(database, "t1", "test")),
    "detach and drop": (published, lambda database: detach.detach_partition(database, "t1", "test", drop=True)),
    "attach": (published, lambda database: attach.attach_partition(database, "t", "t3", BOUNDS, "test")),
    "sync": (gone, lambda database: sync.sync_partitions(database, "t", "test")),
    "clean-up": (rebuilt, clean_up.clean_up),
    "revert": (rebuilt, lambda database: revert.revert(database, "ix", "test")),
}
# Commands that a clean-up alone completes, once they have begun.
BY_CLEAN_UP = ("drop", "drop of a rebuilt one", "abort", "detach", "detach and drop", "clean-up")
OURS = """
SELECT 'trigger', tgrelid::regclass::text, tgname::text FROM pg_trigger WHERE NOT tgisinternal
   AND tgrelid NOT IN (SELECT oid FROM pg_class WHERE relnamespace = 'roir'::regnamespace)
UNION ALL SELECT 'function', proname::text, '' FROM pg_proc WHERE pronamespace = 'roir_data'::regnamespace
UNION ALL SELECT 'relation', relname::text, relkind::text FROM pg_class
 WHERE relnamespace IN ('roir_data'::regnamespace, 'public'::regnamespace)
UNION ALL SELECT 'partition', relation::regclass::text, status FROM roir.source_partition WHERE status <> 'present'
UNION ALL SELECT 'index', name, (dropped_at IS NULL)::text FROM roir.index
UNION ALL SELECT 'generation', id::text, status FROM roir.generation
UNION ALL SELECT 'operation', id::text, status FROM roir.operation
ORDER BY 1, 2, 3
"""


@contextmanager
def killed_at(database: Database, commit: int) -> Iterator[list[int]]:
    """In the block, commit number `commit` fails, and so do all later ones. Yields the number of commits."""
    seen = [0]

    def look(_connection: Any) -> None:
        seen[0] += 1
        if seen[0] >= commit:
            raise Killed

    event.listen(database.engine, "commit", look)
    try:
        yield seen
    finally:
        event.remove(database.engine, "commit", look)


_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def templates(server: str) -> Iterator[Callable[[Callable[[Database], None]], str]]:
    """Databases in the state before a command, each made once and cloned."""
    made: dict[str, str] = {}

    def template(state: Callable[[Database], None]) -> str:
        name = f"resumable_{state.__name__}"
        if state.__name__ not in made:
            run_sql(server, f"CREATE DATABASE {name} TEMPLATE roir_template")
            run_sql(database_dsn(server, name), *SOURCE)
            state(Database(database_dsn(server, name), "roir tests"))
            made[state.__name__] = name
        return name

    yield template
    for name in made.values():
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def cloned(server: str, template: str) -> Iterator[Database]:
    name = f"resumed_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield Database(database_dsn(server, name), "roir tests")
    finally:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


def ours(database: Database) -> list[tuple[Any, ...]]:
    session = steps.session(database.dsn)
    try:
        return sql(session, OURS)
    finally:
        session.close()


def repeat(database: Database, command: Callable[[Database], object]) -> None:
    # A command that has completed can't be repeated.
    with suppress(NotFound, InvalidInput, IllegalTransition):
        command(database)


def walk(server: str, template: str, name: str, every: int) -> int:
    """Kills the command at every `every`-th commit. Returns the number of commits."""
    command = COMMANDS[name][1]
    with cloned(server, template) as database:
        with killed_at(database, 1_000_000) as seen:
            command(database)
        commits = seen[0]
        if name != "revert":
            clean_up.clean_up(database)
        wanted = ours(database)
    for commit in range(1, commits + 1, every):
        for by_clean_up in {False, name in BY_CLEAN_UP}:
            with cloned(server, template) as database:
                with killed_at(database, commit), pytest.raises(Killed):
                    command(database)
                begun = ours(database) != before(server, template)
                # A clean-up finishes a command that has begun. Otherwise its user begins it again.
                if not by_clean_up or not begun:
                    if name == "revert" and begun:
                        continue
                    repeat(database, command)
                if name != "revert":
                    clean_up.clean_up(database)
                assert ours(database) == wanted, f"{name}, killed at commit {commit}, by clean-up: {by_clean_up}"
    return commits


_before: dict[str, list[tuple[Any, ...]]] = {}


def before(server: str, template: str) -> list[tuple[Any, ...]]:
    if template not in _before:
        _before[template] = ours(Database(database_dsn(server, template), "roir tests"))
    return _before[template]


@pytest.mark.sample(0)
def test_a_drop_that_dies_is_finished_by_the_next_one_or_by_clean_up(server: str, templates: Any) -> None:
    """Found: a drop that died left triggers that no command found. It holds: the index is found until all is gone;
    clean-up continues.
    """
    assert walk(server, templates(published), "drop", every=1) > 3


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_dies_is_finished(server: str, templates: Any, name: str) -> None:
    """Found: a drop that died left triggers that no command found. It holds: the index is found until all is gone;
    clean-up continues.
    """
    walk(server, templates(COMMANDS[name][0]), name, every=1)


@pytest.mark.sample(0)
def test_a_drop_without_the_lock_for_its_triggers_says_what_is_left(server: str, templates: Any) -> None:
    with cloned(server, templates(published)) as cloned_database:
        database = Database(cloned_database.dsn, limits=Limits(attempt_ms=50))
        reader = steps.session(database.dsn)
        sql(reader, "SELECT count(*) FROM t")
        with pytest.raises(LockNotAcquired, match="roir clean-up removes them, or run again: roir drop ix"):
            drop.drop_index(database, "ix", "test", patience_s=0)
        assert sql(reader, "SELECT to_regclass('ix')") == [(None,)]
        reader.rollback()
        drop.drop_index(database, "ix", "test")
        assert not [one for one in ours(database) if one[0] in ("trigger", "function")]
        with pytest.raises(NotFound):
            drop.drop_index(database, "ix", "test")


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("spoil", "bounds", "said"),
    [
        (None, "FOR VALUES FROM (200) TO (250)", "violated by some row"),
        ("ALTER TABLE t3 ALTER v TYPE bigint", BOUNDS, "different type"),
        ("ALTER TABLE t3 ADD extra int", BOUNDS, "extra"),
    ],
)
def test_an_attach_that_fails_opens_the_table_again(
    server: str, templates: Any, spoil: str | None, bounds: str, said: str
) -> None:
    """Found: an attach that failed left the table closed to writers. It holds: it is opened again, or the error says
    that it isn't.
    """
    with cloned(server, templates(published)) as database:
        if spoil:
            run_sql(database.dsn, spoil)
        with pytest.raises(InvalidInput, match=said) as refused:
            attach.attach_partition(database, "t", "t3", bounds, "test")
        # The table's shape is checked before the table is closed.
        assert ("takes writes again" in str(refused.value)) == (spoil is None)
        user = steps.session(database.dsn)
        sql(user, "INSERT INTO t3 (id) VALUES (1000)")
        user.commit()
        clean_up.clean_up(database)
        steps.assert_exact(database)
        with database.transaction() as connection:
            assert remove_entries.leaving(connection) == []
