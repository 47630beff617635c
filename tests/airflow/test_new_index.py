"""The questions that the page Indexes asks a database before it triggers the build of a new index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from airflow_roir.engine.database import Database
from airflow_roir.page import databases, new_index
from airflow_roir.page.new_index import Asked
from tests.conftest import run_sql
from tests.engine import steps
from tests.test_cli_doctor import everything

pytestmark = pytest.mark.sample(2)

GOOD = Asked("public.by_k", "public.t", "k", "", unique=False)


@pytest.fixture(autouse=True)
def connection(database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' way to the database, and a table."""

    @contextmanager
    def reading(_connection_id: str) -> Iterator[Database]:
        yield database

    monkeypatch.setattr(databases, "reading", reading)
    monkeypatch.setattr(databases, "open_database", lambda _connection_id, _user: database)
    steps.make_table(dsn)


def refused(asked: Asked) -> list[str]:
    found: Any = new_index.check("c", asked)["refused"]
    return list(found)


def test_all_that_is_against_an_index_is_named_at_once_with_the_nearest_names(dsn: str) -> None:
    before = everything(dsn)
    assert refused(GOOD) == []
    said = " ".join(refused(Asked("publik.by_k", "public.t", "kk", "", unique=True)))
    assert "Did you mean k?" in said
    assert "Did you mean public?" in said
    [one] = refused(Asked("public.by_k", "public.tt", "k", "", unique=False))
    assert "Did you mean public.t?" in one
    assert "at most a schema" in " ".join(refused(Asked("a.b.c", "public.t", "k", "", unique=False)))
    assert everything(dsn) == before


def test_the_condition_and_expressions_are_judged(dsn: str) -> None:
    """Found: the form had no field for the condition."""
    before = everything(dsn)
    assert refused(replace(GOOD, where="k > 'a'")) == []
    assert refused(replace(GOOD, keys="lower(k), k")) == []
    assert "kk" in " ".join(refused(replace(GOOD, where="kk > 'a'")))
    assert "IMMUTABLE" in " ".join(refused(replace(GOOD, where="random() > 0.5", keys="lower(k)")))
    assert everything(dsn) == before


def test_tables_are_listed_as_the_form_takes_them_without_their_partitions_and_ours(dsn: str) -> None:
    run_sql(
        dsn,
        'CREATE TABLE "Old, Way" ("Key" int, gone int)',
        'ALTER TABLE "Old, Way" DROP COLUMN gone',
        "CREATE TABLE parted (a int) PARTITION BY LIST (a)",
        "CREATE TABLE part PARTITION OF parted FOR VALUES IN (1)",
    )
    found = {one["table"]: one["columns"] for one in new_index.tables_of("c")["tables"]}
    assert found['public."Old, Way"'] == ['"Key"']
    assert found["public.parted"] == ["a"]
    assert "public.t" in found
    assert not [name for name in found if name == "public.part" or name.startswith(("roir", "pg_"))]
