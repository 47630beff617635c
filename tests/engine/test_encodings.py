"""Databases in other encodings than UTF8: names and values with any character of theirs, or with any byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import psycopg2
import pytest

from airflow_roir.engine import clean_up, drop, install
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

_numbers = itertools.count(1)


@pytest.fixture
def in_encoding(server: str) -> Iterator[Callable[[str], str]]:
    """A function that creates a database of an encoding and returns its DSN."""
    made: list[str] = []

    def make(encoding: str) -> str:
        made.append(f"encoded_{next(_numbers)}")
        run_sql(server, f"CREATE DATABASE {made[-1]} ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'")
        return database_dsn(server, made[-1])

    yield make
    for name in made:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


# A letter that the encoding has, and the client encoding with which the test writes it.
ENCODINGS = {"LATIN1": ("é", "UTF8"), "WIN1251": ("ж", "UTF8"), "EUC_JP": ("あ", "UTF8"), "SQL_ASCII": ("é", "LATIN1")}


@pytest.mark.sample(0)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("default", [None, "SQL_ASCII"])
def test_an_operation_goes_its_way_in_any_encoding(
    in_encoding: Callable[[str], str], encoding: str, default: str | None
) -> None:
    """Found: databases in LATIN1 and SQL_ASCII failed. It holds: any encoding that PostgreSQL converts to UTF8;
    SQL_ASCII keeps each byte.
    """
    dsn = in_encoding(encoding)
    letter, client = ENCODINGS[encoding]
    if default:
        run_sql(
            dsn,
            f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET client_encoding = {default}', current_database()); "
            "END $$",
        )
    database = Database(dsn, "roir tests")
    install.init(database)
    user = psycopg2.connect(dsn)
    user.set_client_encoding(client)
    # Bytes that are no UTF-8, alone and in JSON; a backslash, which JSON escapes.
    sql(user, f'CREATE TABLE t (id text PRIMARY KEY, "k{letter}" text, v text)')
    sql(
        user,
        f"INSERT INTO t SELECT '{letter}' || i || '\\\"', '{letter}' || i % 7, '{letter}' "
        "FROM generate_series(1, 90) i",
    )
    user.commit()
    _, run = steps.begin(database, keys=f'"k{letter}"', include="v", ranges=3, segments=2, batch_rows=7)
    requests.change_options(database, "ix", actor="me", parallelism=3)
    requests.pause(database, "ix", "me", "what no encoding but Unicode has: → … 🦀")
    run = start_run(database, "ix", "test")
    sql(user, f"UPDATE t SET \"k{letter}\" = '{letter}x' WHERE id LIKE '{letter}1%%'")
    user.commit()
    steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 90
    sql(user, f"DELETE FROM t WHERE \"k{letter}\" = '{letter}x'")
    user.commit()
    steps.assert_exact(database)
    clean_up.clean_up(database)
    drop.drop_index(database, "ix", "test")
    user.close()


def test_a_database_whose_encoding_cannot_be_read_is_refused(in_encoding: Callable[[str], str]) -> None:
    with pytest.raises(InvalidInput, match="MULE_INTERNAL"):
        install.init(Database(in_encoding("MULE_INTERNAL"), "roir tests"))
