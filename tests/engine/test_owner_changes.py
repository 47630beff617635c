"""The table's owner changes while an operation is under way: what the status and the operation say, what mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg2
import psycopg2.errors
import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import VerifyOptions
from airflow_roir.engine import clean_up, health, schema
from airflow_roir.engine.database import Database, sqlstate
from airflow_roir.engine.remedies import remedy
from airflow_roir.engine.run import start_run
from airflow_roir.engine.verify import compare
from airflow_roir.errors import RightMissing, RoirError
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

FORMER, PRESENT, WORKS = "changing_former", "changing_present", "changing_roir"


@pytest.fixture(autouse=True)
def owners(dsn: str) -> Iterator[None]:
    """`t` belongs to the former one."""
    roles = f"{FORMER}, {PRESENT}, {WORKS}"
    run_sql(dsn, f"DROP ROLE IF EXISTS {roles}", *(f"CREATE ROLE {role} LOGIN" for role in roles.split(", ")))
    steps.make_table(dsn)
    run_sql(dsn, f"ALTER TABLE t OWNER TO {FORMER}", "GRANT USAGE, CREATE ON SCHEMA public TO PUBLIC")
    yield
    run_sql(dsn, f"DROP OWNED BY {roles} CASCADE", f"DROP ROLE {roles}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_build_whose_table_gets_another_owner_goes_on_after_a_clean_up(
    database: Database, dsn: str, guarded: bool
) -> None:
    """No event trigger hears of REASSIGN OWNED. Seen to say nothing, and to fail for good."""
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
        return health.warnings(connection)


def verify(database: Database) -> None:
    assert compare.verify(database, "ix", VerifyOptions()).is_exact


def repair(database: Database) -> None:
    assert compare.verify(database, "ix", VerifyOptions(repair=True)).found


def rebuild(database: Database) -> None:
    steps.make_index(database, "ix", None, None)


COMMANDS: dict[str, Callable[[Database], None]] = {"verify": verify, "repair": repair, "rebuild": rebuild}


@pytest.mark.long
@pytest.mark.parametrize("guarded", [False, True], ids=["reassigned", "altered"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_owner_changes_in_any_gap(dsn: str, command: str, guarded: bool) -> None:
    """Between any two statements, where neither is a superuser: the command says it in words, or begins again."""
    with closing(steps.session(dsn)) as user:
        [(name,)] = sql(user, "SELECT current_database()")
    run_sql(
        dsn,
        f"GRANT {FORMER}, {PRESENT} TO {WORKS}",
        f"GRANT CREATE ON DATABASE {name} TO {WORKS}",
        "DROP SCHEMA roir, roir_data CASCADE",
    )
    database = Database(dsn.replace("//postgres:@", f"//{WORKS}:@"), "roir tests")
    schema.init(database)
    steps.make_index(database)
    if guarded:
        run_sql(dsn, "SELECT roir.guard()")
    owner, at, wrong = FORMER, 1, {}
    while True:
        other = PRESENT if owner == FORMER else FORMER
        if command == "repair":
            run_sql(dsn, "UPDATE roir_data.g1 SET c1 = 'wrong' WHERE c2 = 7")
        done, said = meet(dsn, database, COMMANDS[command], f"ALTER TABLE t OWNER TO {other}", at)
        if said is not None:
            wrong[at] = said
        if not done:
            break
        owner = other
        clean_up.clean_up(database)
        at += 1
    assert wrong == {}


def meet(dsn: str, database: Database, command: Callable[[Database], None], change: str, at: int) -> tuple[bool, Any]:
    """The command, with the change before its so manieth statement: whether it came to that, and a raw error."""
    seen, done = 0, False

    def look(*_: Any) -> None:
        nonlocal seen, done
        seen += 1
        if seen == at:
            done = True
            with suppress(psycopg2.errors.LockNotAvailable):
                run_sql(dsn, f"SET lock_timeout = '100ms'; {change}")

    event.listen(database.engine, "before_cursor_execute", look)
    try:
        command(database)
    except DBAPIError as error:
        return done, f"{sqlstate(error)} {error.orig}"
    except RoirError as error:
        print(at, type(error).__name__, error)
    finally:
        event.remove(database.engine, "before_cursor_execute", look)
    return done, None
