"""A statement of a command fails once, with any SQLSTATE: a message names the rest, and a repetition completes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, install, lifecycle, prepare
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.partitions import attach, detach
from airflow_roir.engine.retry import patience
from airflow_roir.errors import RoirError
from airflow_roir.options import BuildOptions, CompactOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.steps import sql
from tests.engine.test_resumable_commands import BOUNDS, COMMANDS, building, cloned, published, templates
from tests.engine.test_resumable_commands import ours as all_of_ours

__all__ = ["templates"]
pytestmark = pytest.mark.sample(1)

# Errors that a statement can have: by the user's table, its rows, rights, a race, a shortage, a cancel, a bug.
STATES = (
    "55000",
    "42501",
    "23505",
    "23514",
    "22P02",
    "0A000",
    "42P07",
    "42P17",
    "P0001",
    "53100",
    "40001",
    "40P01",
    "57014",
    "XX000",
)
Command = Callable[[Database, Callable[[str], None]], object]


def _prepare(database: Database, say: Callable[[str], None]) -> None:
    prepare.prepare(database, IndexDefinition.parse("ix"), BuildOptions(), "test", say)


def _compact(database: Database, _say: Callable[[str], None]) -> None:
    options = CompactOptions(parallelism=1)
    begun = compaction.begin(database, "ix", [compacting.act("merge", 0, 1)], options, "test")
    lifecycle.drive(database, begun.index, "test")


def _verify(database: Database, _say: Callable[[str], None]) -> None:
    lifecycle.verify(database, "ix", VerifyOptions(), "test")


def _unheard(command: Callable[[Database], object]) -> Command:
    return lambda database, _say: command(database)


WALKED: dict[str, tuple[Callable[[Database], None], Command]] = {
    **{name: (state, _unheard(command)) for name, (state, command) in COMMANDS.items() if name[:2] not in ("at", "de")},
    "detach": (published, lambda database, say: detach.detach_partition(database, "t1", "test", report=say)),
    "attach": (published, lambda database, say: attach.attach_partition(database, "t", "t3", BOUNDS, "test", say)),
    "attach, building": (
        building,
        lambda database, say: attach.attach_partition(database, "t", "t3", BOUNDS, "test", say),
    ),
    "prepare": (published, _prepare),
    "compact": (published, _compact),
    "verify": (published, _verify),
    "init": (published, lambda database, _say: install.init(database)),
}


@contextmanager
def failing_at(database: Database, number: int, state: str) -> Iterator[list[str]]:
    """In the block, statement number `number` fails once. Yields the statements up to then."""
    seen: list[str] = []

    def fail(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        seen.append(statement)
        if len(seen) != number:
            return statement, parameters
        return f"DO $$ BEGIN RAISE EXCEPTION 'a fault of the test' USING ERRCODE = '{state}'; END $$", ()

    event.listen(database.engine, "before_cursor_execute", fail, retval=True)
    try:
        yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", fail)


_wanted: dict[str, tuple[int, list[tuple[Any, ...]]]] = {}


def wanted(server: str, template: str, name: str) -> tuple[int, list[tuple[Any, ...]]]:
    """The number of the command's statements, and our objects after it."""
    if name not in _wanted:
        with cloned(server, template) as database:
            with failing_at(database, -1, "") as seen:
                WALKED[name][1](database, lambda _line: None)
            if name != "revert":
                clean_up.clean_up(database)
            _wanted[name] = (len(seen), ours(database))
    return _wanted[name]


def ours(database: Database) -> list[tuple[Any, ...]]:
    """Our objects without the operations: a command that failed at its very end is repeated by another operation.

    Numbers that a rolled back transaction has drawn are left out: the newest generation is called N.
    """
    found = [row for row in all_of_ours(database) if row[0] != "operation"]
    newest = max(int(row[1]) for row in found if row[0] == "generation")
    return sorted(tuple(re.sub(rf"^(g?){newest}(?=_|$)", r"\1N", str(part)) for part in row) for row in found)


def is_closed(database: Database) -> bool:
    session = steps.session(database.dsn)
    try:
        return bool(sql(session, "SELECT count(*) > 0 FROM pg_trigger WHERE tgname = 'roir_joining'")[0][0])
    finally:
        session.close()


@pytest.mark.sample(0)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", WALKED)
def test_what_a_failed_statement_leaves(
    server: str, templates: Any, monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    """Each state takes its share of the statements: together they take all."""
    monkeypatch.setattr(patience.time, "sleep", lambda _seconds: None)
    template, command = templates(WALKED[name][0]), WALKED[name][1]
    count, end = wanted(server, template, name)
    for number in range(1 + STATES.index(state), count + 1, len(STATES)):
        with cloned(server, template) as database:
            said: list[str] = []
            failed: BaseException | None = None
            with failing_at(database, number, state) as seen:
                try:
                    command(database, said.append)
                except (RoirError, DBAPIError) as error:
                    failed = error
            case = f"{name}, {state} at statement {number}: {seen[min(number, len(seen)) - 1][:200]}"
            if failed is not None:
                said.append(str(getattr(failed, "orig", failed)))
                assert said[-1], case
                with database.transaction() as connection:
                    told = faults.warnings(connection)
                if name.startswith("attach") and is_closed(database):
                    assert any("roir.cancel_attach('" in line for line in said), f"{case}: {said}"
                    assert any("roir.cancel_attach('" in line for line in told), f"{case}: {told}"
                with steps.session(database.dsn) as session:
                    leaving = sql(session, "SELECT count(*) > 0 FROM roir.source_partition WHERE status = 'leaving'")
                if name.startswith("detach") and leaving == [(True,)]:
                    assert any("roir clean-up" in line for line in said), f"{case}: {said}"
                # Repeat the command without the fault, if it didn't complete.
                with suppress(RoirError):
                    command(database, said.append)
            if name != "revert":
                clean_up.clean_up(database)
            assert ours(database) == end, case
            with suppress(RoirError):
                run_sql(database.dsn, "INSERT INTO t VALUES (150, 'x', 1) ON CONFLICT DO NOTHING")
