"""A census lists all duplicates under a unique key without keeping an index, whatever is killed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, lifecycle, prepare
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.unique import census, duplicate_report
from airflow_roir.engine.unique.duplicate_report import Duplicates, Group
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_unique import PARTITIONED, PLAIN, ROWS

pytestmark = pytest.mark.sample(1)


def report(database: Database, index: str = "ix") -> tuple[Duplicates, list[Group]]:
    with database.transaction() as connection:
        found = duplicate_report.of_index(connection, index)
        return found, list(duplicate_report.groups(connection, found))


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> Iterator[None]:
    """In the block, that function raises KeyboardInterrupt, as if its process died."""

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        yield


def sealed(database: Database, dsn: str, **options: Any) -> Run:
    """A sealed census. Keys of the base, of the delta, and of both collide; one pair is healed meanwhile."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"), "UPDATE t SET k = 1 WHERE id IN (5, 10)")
    run_sql(dsn, "UPDATE t SET k = 2 WHERE id = 3")
    run = steps.built(database, unique=True, census=True, ranges=3, segments=4, **options)
    run_sql(
        dsn, "INSERT INTO t VALUES (101, 1, 100, 0), (102, 2, 100, 0), (103, 3, 20, 0)", "DELETE FROM t WHERE id = 3"
    )
    steps.seal_all(database, run)
    return run


KEYS = [("1",), ("100",), ("20",)]


def test_it_lists_all_and_keeps_nothing_else(database: Database, dsn: str) -> None:
    run = sealed(database, dsn)
    ended = lifecycle.finalize(database, "ix", "test", take_over=True)
    assert (ended.status, ended.census) == ("aborted", True)
    found, groups = report(database)
    assert (found.operation_id, found.groups, found.rows) == (run.operation_id, 3, 7)
    assert sorted(group.key for group in groups) == KEYS
    assert ended.end_reason == "census: 7 rows share 3 keys"
    assert "census" in [event.action for event in operations.events(database, "ix")]
    with database.transaction() as connection:
        assert execute(connection, "SELECT count(*) FROM pg_tables WHERE schemaname = 'roir_data'").scalar_one() == 0
        assert (
            execute(connection, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'public.t'::regclass").scalar_one()
            == 0
        )
    # The name is free, and from now on names the index.
    steps.begin(database, "ix", unique=True, keys="id")
    assert report(database)[0].groups == 0


@pytest.mark.parametrize("name", ["finish_abort", "removal.remove"])
def test_whoever_is_killed_while_it_ends_loses_nothing(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sealed(database, dsn)
    module: object = abort
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
    with killed_at(monkeypatch, module, name.split(".")[-1]), pytest.raises(KeyboardInterrupt):
        lifecycle.finalize(database, "ix", "test", take_over=True)
    row = operations.find_operation(database, "ix")
    assert row.status == "aborting"
    assert operations.has_outcome(row)
    abort.finish_abort(database, row.id, "test")
    assert sorted(group.key for group in report(database)[1]) == KEYS


@pytest.mark.sample(0)
def test_what_is_written_after_a_kill_counts(database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sealed(database, dsn)
    with killed_at(monkeypatch, census, "read_running"), pytest.raises(KeyboardInterrupt):
        lifecycle.finalize(database, "ix", "test", take_over=True)
    assert operations.find_operation(database, "ix").status == "paused"
    run_sql(dsn, "DELETE FROM t WHERE id = 101", "INSERT INTO t VALUES (104, 0, 30, 0)")
    lifecycle.finalize(database, "ix", "test", take_over=True)
    found, groups = report(database)
    assert found.operation_id == run.operation_id
    assert sorted(group.key for group in groups) == [("1",), ("20",), ("30",)]


def test_without_duplicates_it_says_so(database: Database, dsn: str) -> None:
    run_sql(dsn, *PLAIN, ROWS.format("t"))
    steps.sealed(database, unique=True, census=True)
    assert lifecycle.finalize(database, "ix", "test", take_over=True).end_reason == "census: no two rows share a key"
    assert report(database)[0].groups == 0


def test_it_is_refused_where_it_cant_be(database: Database, dsn: str) -> None:
    run_sql(dsn, *PLAIN, ROWS.format("t"))

    def refused(said: str, index: str, unique: bool, **options: Any) -> None:
        definition = IndexDefinition.parse(index, "t", "k", unique=unique)
        with pytest.raises(InvalidInput, match=said):
            prepare.prepare(database, definition, BuildOptions(**options), "test")

    refused("give unique, too", "ix", False, census=True)
    refused("give unique, too, or leave on_duplicate out", "ix", False, on_duplicate="stop")
    steps.begin(database, "census", unique=True, census=True)
    refused("operation . is a census and is unfinished", "census", True)
    steps.begin(database, "ix", unique=True, keys="k")
    refused("operation . is no census but a build, and is unfinished", "ix", True, census=True)
    run = start_run(database, "ix", "test", take_over=True)
    steps.build_all(database, run)
    steps.seal_all(database, run)
    lifecycle.finalize(database, "ix", "test", take_over=True)
    refused("exists, but a census removes all that it builds", "ix", True, census=True)


def test_a_rebuild_stays_unique_whatever_is_given(database: Database, dsn: str) -> None:
    run_sql(dsn, *PLAIN, ROWS.format("t"))
    steps.make_index(database, unique=True, nulls_not_distinct=True)
    whole: dict[str, Any] = {"unique": True, "nulls_not_distinct": True}
    for table, keys, given in ((None, None, {}), ("t", "k", {}), ("t", "k", whole)):
        steps.begin(database, "ix", table, keys, **given)
        with database.transaction() as connection:
            entry = execute(connection, "SELECT entry FROM roir.generation ORDER BY id DESC LIMIT 1").scalar_one()
        assert entry["unique"] == "not distinct"
        abort.abort(database, "ix", "test")
    with pytest.raises(InvalidInput, match=r"is unique \(NULLs not distinct\); a rebuild keeps that. For a unique one"):
        steps.begin(database, "ix", "t", "k", unique=True)
