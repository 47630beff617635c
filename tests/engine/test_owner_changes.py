"""The table's owner changes during an operation: the messages of the status and the operation, and the repair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg2
import psycopg2.errors
import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import abort, clean_up, install, lifecycle
from airflow_roir.engine.control.remedies import remedy
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.errors import RightMissing, RoirError
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

FORMER, PRESENT, WORKS = "changing_former", "changing_present", "changing_roir"


@pytest.fixture(autouse=True)
def owners(dsn: str) -> Iterator[None]:
    """Creates the roles. `t` belongs to the former owner."""
    roles = f"{FORMER}, {PRESENT}, {WORKS}"
    run_sql(dsn, f"DROP ROLE IF EXISTS {roles}", *(f"CREATE ROLE {role} LOGIN" for role in roles.split(", ")))
    steps.make_table(dsn, rows=20)
    run_sql(dsn, f"ALTER TABLE t OWNER TO {FORMER}", "GRANT USAGE, CREATE ON SCHEMA public TO PUBLIC")
    yield
    run_sql(dsn, f"DROP OWNED BY {roles} CASCADE", f"DROP ROLE {roles}")


@pytest.mark.sample(0)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_build_whose_table_gets_another_owner_goes_on_after_a_clean_up(
    database: Database, dsn: str, guarded: bool
) -> None:
    """REASSIGN OWNED fires no event trigger. Seen to say nothing, and to fail for good."""
    if guarded:
        run_sql(dsn, "SELECT roir.guard()")
    _, run = steps.begin(database)
    run_sql(dsn, f"REASSIGN OWNED BY {FORMER} TO {PRESENT}")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        run_sql(dsn, "INSERT INTO t VALUES (1000, 'x', 1)")
    [warning] = warnings(database)
    assert "roir clean-up" in warning
    assert "roir resume public.ix" in warning
    with pytest.raises(RightMissing, match="Run: roir clean-up") as refused:
        steps.build_all(database, run)
    assert remedy(str(refused.value), "public.ix", failed=False) == "roir clean-up. Then: roir resume public.ix"
    clean_up.clean_up(database)
    assert warnings(database) == []
    run_sql(dsn, "INSERT INTO t VALUES (1000, 'x', 1)")
    steps.finish_all(database, start_run(database, "ix", "test", take_over=True))
    steps.assert_exact(database)


def warnings(database: Database) -> list[str]:
    with database.transaction() as connection:
        return faults.warnings(connection)


def verify(database: Database) -> None:
    assert lifecycle.verify(database, "ix", VerifyOptions()).is_exact


def repair(database: Database) -> None:
    run_sql(database.dsn, "UPDATE roir_data.g1 SET c1 = 'wrong' WHERE c2 = 7")
    assert lifecycle.verify(database, "ix", VerifyOptions(repair=True)).found


def rebuild(database: Database) -> None:
    steps.make_index(database, "ix", None, None)


COMMANDS: dict[str, Callable[[Database], None]] = {"verify": verify, "repair": repair, "rebuild": rebuild}
# A command has some 70 to 200 statements.
GAPS = 12


@pytest.fixture
def working(dsn: str) -> Database:
    """An index that a role without other rights than its owners' has built."""
    with closing(steps.session(dsn)) as user:
        [(name,)] = sql(user, "SELECT current_database()")
    run_sql(
        dsn,
        f"GRANT {FORMER}, {PRESENT} TO {WORKS}",
        f"GRANT CREATE ON DATABASE {name} TO {WORKS}",
        "DROP SCHEMA roir, roir_data CASCADE",
    )
    database = Database(dsn.replace("//postgres:@", f"//{WORKS}:@"), "roir tests")
    install.init(database)
    steps.make_index(database, ranges=1)
    return database


def owner_now(dsn: str) -> str:
    with closing(steps.session(dsn)) as user:
        [(owner,)] = sql(user, "SELECT relowner::regrole::text FROM pg_class WHERE oid = 't'::regclass")
        return str(owner)


@pytest.mark.sample(0)
def test_a_verification_goes_on_under_another_owner(dsn: str, working: Database) -> None:
    """Seen to fail for good, so that it could only be aborted."""
    run_sql(dsn, "SELECT roir.guard()")
    statements, _ = meet(dsn, working, verify, "SELECT 1", 0)
    # While the verification has the table locked, the owner can't change.
    at = statements // 2
    while owner_now(dsn) != PRESENT:
        _, error = meet(dsn, working, verify, f"ALTER TABLE t OWNER TO {PRESENT}", at)
        assert error is None
        at += 1
    rebuild(working)
    steps.assert_exact(working)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("guarded", [False, True], ids=["reassigned", "altered"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_owner_changes_in_a_gap(dsn: str, working: Database, command: str, guarded: bool) -> None:
    """Between any two statements: the command does its work, or names a remedy, which helps."""
    if guarded:
        run_sql(dsn, "SELECT roir.guard()")
    owner, wrong = FORMER, {}
    statements = meet(dsn, working, COMMANDS[command], "SELECT 1", 0)[0]
    for at in range(1, statements + 1, -(-statements // GAPS)):
        owner = PRESENT if owner == FORMER else FORMER
        _, error = meet(dsn, working, COMMANDS[command], f"ALTER TABLE t OWNER TO {owner}", at)
        if error is not None and not isinstance(error, RightMissing):
            wrong[at] = f"{type(error).__name__} {error}"
        if not guarded or error is not None:
            clean_up.clean_up(working)
        if error is not None:
            abort.abort(working, "ix", "test")
    steps.assert_exact(working)
    assert wrong == {}


def meet(
    dsn: str, database: Database, command: Callable[[Database], None], change: str, at: int
) -> tuple[int, BaseException | None]:
    """Runs the command, with the change before its statement number `at` if no lock prevents it. Returns the error."""
    seen = 0

    def look(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            with suppress(psycopg2.errors.LockNotAvailable):
                run_sql(dsn, f"SET lock_timeout = '100ms'; {change}")

    event.listen(database.engine, "before_cursor_execute", look)
    try:
        command(database)
    except (DBAPIError, RoirError) as error:
        return seen, error
    finally:
        event.remove(database.engine, "before_cursor_execute", look)
    return seen, None
