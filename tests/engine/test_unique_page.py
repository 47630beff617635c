"""docs/unique.md is true: its blocks run in order, their output is the one that it shows, and its tables are right."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
from contextlib import closing, redirect_stdout
from datetime import date
from itertools import pairwise
from pathlib import Path

import psycopg2
import psycopg2.errors
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from typer.testing import CliRunner

from airflow_roir import cli
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.lifecycle import verify
from airflow_roir.errors import DuplicatesFound
from airflow_roir.options import VerifyOptions
from servers.postgres import programs
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

PAGE = (Path(__file__).parents[2] / "docs" / "unique.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INDEX = "shop.customers_by_email"
INSERT = "INSERT INTO shop.customers (joined, email) VALUES ('{}', '{}@example.com')"


class Base(DeclarativeBase):
    """The models of the page's reader."""


class Customer(Base):
    """A customer."""

    __tablename__ = "customers"
    __table_args__ = {"schema": "shop"}
    id: Mapped[int] = mapped_column(primary_key=True)
    joined: Mapped[date]
    email: Mapped[str | None]


def plain(output: str) -> str:
    """An output as one line, without times, and without psql's position when a statement failed."""
    return re.sub(r"\s+", " ", re.sub(r"psql:<stdin>:\d+: |\d{4}(-\d\d){2} (\d\d:){2}\d\d", "", output)).strip()


def carried_on(database: Database, command: str, block: str = "") -> str:
    """Does what `roir build` and `roir resume` do, without Spark. Returns their message if they stop."""
    words = shlex.split(block)
    given = {name: words[words.index(f"--{name}") + 1] for name in ("keys", "where") if f"--{name}" in words}
    index = words[2] if words else INDEX
    try:
        if command == "build":
            given = {"keys": "email", **given}
            _, run = steps.begin(database, index, "shop.customers", unique=True, segments=4, **given)
        else:
            run = start_run(database, INDEX, "test", take_over=True)
        steps.finish_all(database, run)
    except DuplicatesFound as found:
        return str(found)
    return ""


def printed(dsn: str, block: str) -> str:
    """The output of the page's Python, with the names that its reader has."""
    with redirect_stdout(io.StringIO()) as output, closing(psycopg2.connect(dsn)) as connection:
        engine = create_engine(dsn)
        names = {"psycopg2": psycopg2, "connection": connection, "engine": engine, "Session": Session, "text": text}
        exec(block, {**names, "IntegrityError": IntegrityError, "Customer": Customer, "date": date})
        engine.dispose()
    return output.getvalue()


@pytest.mark.by_hand("sweeps")
def test_the_page_does_what_it_says(database: Database, dsn: str, pg: int) -> None:
    psql = [programs(pg) / "psql", dsn, "-X", "-f", "-"]
    said = ""
    for (language, block), (following, shown) in pairwise([*BLOCKS, ("", "")]):
        if language == "text":
            assert [line for line in block.splitlines() if plain(line) not in plain(said)] == []
        elif language == "sql":
            done = subprocess.run(psql, input=block, capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            assert said.count("ERROR:") == (following == "text" and "ERROR:" in shown), said
        elif language == "python":
            said = printed(dsn, block)
        elif (command := block.split()[1]) == "reference":
            # The page doesn't create these tables.
            continue
        elif command in ("build", "resume"):
            said = carried_on(database, command, block)
        else:
            called = CliRunner().invoke(cli.app, shlex.split(block)[1:], env={"ROIR_DSN": dsn})
            said = called.output
            assert called.exit_code == (command == "duplicates"), said
    steps.assert_exact(database, INDEX)


@pytest.fixture
def users(database: Database, dsn: str) -> str:
    """Creates the page's table, without duplicates, and its index; user1 is in partition 2024. Returns the DSN."""
    created = next(block for language, block in BLOCKS if language == "sql")
    run_sql(dsn, created.split("INSERT", 1)[0].replace("IDENTITY", "IDENTITY (START WITH 100)"))
    run_sql(
        dsn,
        "INSERT INTO shop.customers "
        "SELECT i, '2024-01-01', format('user%s@example.com', i) FROM generate_series(1, 9) i",
    )
    assert not carried_on(database, "build")
    return dsn


REFUSED = psycopg2.errors.UniqueViolation
UPSERT = "INSERT INTO shop.customers VALUES (2, '2024-01-01', '{}@example.com') ON CONFLICT {}"
STATEMENTS: dict[str, type[psycopg2.Error] | None] = {
    INSERT.format("2025-07-01", "user1") + " ON CONFLICT (email) DO NOTHING": psycopg2.errors.InvalidColumnReference,
    INSERT.format("2025-07-01", "user1") + " ON CONFLICT DO NOTHING": REFUSED,
    UPSERT.format("user1", "DO NOTHING"): None,
    UPSERT.format("user1", "(id, joined) DO UPDATE SET email = excluded.email"): REFUSED,
    UPSERT.format("user10", "(id, joined) DO UPDATE SET email = excluded.email"): None,
    "UPDATE shop.customers SET email = format('user%s@example.com', id + 1)": None,
    "MERGE INTO shop.customers u USING (VALUES (2)) v (id) ON u.id = v.id "
    "WHEN MATCHED THEN UPDATE SET email = 'user1@example.com'": REFUSED,
    "INSERT INTO shop.customers_2025 VALUES (200, '2025-01-01', 'user1@example.com')": REFUSED,
    f"SET LOCAL session_replication_role = replica; {INSERT.format('2025-07-01', 'user1')}": REFUSED,
    "CREATE TABLE letters (email text REFERENCES shop.customers (email))": psycopg2.errors.InvalidForeignKey,
    "ALTER TABLE shop.customers REPLICA IDENTITY USING INDEX customers_by_email": psycopg2.errors.WrongObjectType,
    "SET CONSTRAINTS shop.customers_by_email DEFERRED": psycopg2.errors.UndefinedObject,
}


def test_what_statements_do(users: str) -> None:
    with closing(steps.session(users)) as user:
        for statement, error in STATEMENTS.items():
            if error is None:
                sql(user, statement)
            else:
                with pytest.raises(error):
                    sql(user, statement)
            user.rollback()


def test_what_a_snapshot_that_is_older_gets(users: str) -> None:
    for number, isolation in enumerate(("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")):
        with closing(steps.old_session(users, isolation)) as user, closing(steps.session(users)) as other:
            sql(other, INSERT.format("2024-07-01", f"new{number}"))
            other.commit()
            for code in ("40001" if number else "23505", "23505"):
                with pytest.raises(psycopg2.Error) as error:
                    sql(user, INSERT.format("2025-07-01", f"new{number}"))
                assert error.value.pgcode == code
                user.rollback()


def test_what_a_write_waits_for(users: str) -> None:
    held = {
        INSERT.format("2024-07-01", "user1"): "rollback",
        "DELETE FROM shop.customers WHERE id = 2": "commit",
        "UPDATE shop.customers SET email = NULL WHERE id = 3": "commit",
        "SELECT FROM shop.customers WHERE id = 4 FOR UPDATE": "commit",
    }
    run_sql(users, "DELETE FROM shop.customers WHERE id = 1")
    for number, (statement, end) in enumerate(held.items(), 1):
        insert = INSERT.format("2025-07-01", f"user{number}")
        with closing(steps.session(users)) as other, closing(steps.session(users)) as user:
            sql(other, statement)
            sql(user, "SET LOCAL lock_timeout = 100")
            with pytest.raises(psycopg2.errors.LockNotAvailable):
                sql(user, insert)
            user.rollback()
            getattr(other, end)()
            if "FOR UPDATE" in statement:
                with pytest.raises(REFUSED):
                    sql(user, insert)
            else:
                sql(user, insert)


def test_a_role_that_may_not_read_the_key_gets_no_detail(users: str, stranger: str) -> None:
    with closing(steps.session(stranger)) as user:
        [(role,)] = sql(user, "SELECT quote_ident(current_user)")
        user.commit()
        run_sql(users, f"GRANT USAGE ON SCHEMA shop TO {role}; GRANT INSERT ON shop.customers TO {role}")
        with pytest.raises(psycopg2.errors.UniqueViolation) as refused:
            sql(user, INSERT.format("2025-07-01", "user1"))
    assert refused.value.diag.message_detail is None


@pytest.mark.slow
def test_triggers_that_are_disabled_are_told(database: Database, users: str) -> None:
    trigger, _ = steps.capture_triggers(users, "shop.customers")
    run_sql(users, f"ALTER TABLE shop.customers DISABLE TRIGGER {trigger}", INSERT.format("2025-07-01", "user1"))
    with database.transaction() as connection:
        [warning] = faults.warnings(connection)
    assert "is disabled" in warning
    assert "ENABLE ALWAYS TRIGGER" in warning
    run_sql(users, f"ALTER TABLE shop.customers ENABLE ALWAYS TRIGGER {trigger}")
    found = verify(database, INDEX, VerifyOptions(repair=True))
    assert (found.missing, found.duplicate) == (0, 1)
    run_sql(users, "DELETE FROM shop.customers_2025")
    assert verify(database, INDEX).is_exact
