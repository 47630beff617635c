"""The page Indexes while a look takes long: the age of its figures, and no index that is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.exceptions import AirflowNotFoundException
from psycopg2.extensions import make_dsn

from airflow_roir.engine import drop
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.page import databases, first_build, listings, lookups
from airflow_roir.page.cache import Looks
from airflow_roir.page.listings import AGED, Listings
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(2)


class Slow:
    """Looks at a database that answer at once, or, if it `hangs`, when the test ends."""

    def __init__(self, database: Database, patch: pytest.MonkeyPatch) -> None:
        self.database, self.patch = database, patch
        self.hangs = False
        self.end = threading.Event()

    def hang(self, looks: Looks) -> None:
        """From now on."""
        self.hangs = True
        looks.forget("c")
        self.patch.setattr(lookups, "SEVERAL_S", 0.2)

    def indexes_of(self, _connection_id: str) -> list[dict[str, Any]]:
        """As `lookups.indexes_of`, without Airflow's part."""
        if self.hangs:
            self.end.wait(60)
        nothing = {"run": None, "state_of_operation": None, "continues": None}
        return [one.as_dict() | nothing for one in lookups_of(self.database)]


def lookups_of(database: Database) -> Any:
    from airflow_roir.engine.snapshot.index import indexes

    return indexes(database)


@pytest.fixture
def slow(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    @contextmanager
    def reading(_connection_id: str) -> Iterator[Database]:
        yield database

    one = Slow(database, monkeypatch)
    monkeypatch.setattr(lookups, "indexes_of", one.indexes_of)
    monkeypatch.setattr(lookups, "SEVERAL_S", 60)
    monkeypatch.setattr(listings, "STATES_S", 60)
    monkeypatch.setattr(databases, "reading", reading)
    yield one
    one.end.set()


def asked(of: Listings) -> dict[str, Any]:
    found = asyncio.run(of.of("c"))
    assert found is not None
    return found


@pytest.mark.sample(0)
def test_an_index_that_is_dropped_meanwhile_is_not_shown_as_building(database: Database, dsn: str, slow: Slow) -> None:
    """Found: eleven minutes after its drop an index was *Building* on the page of a busy database."""
    steps.make_table(dsn)
    steps.make_index(database, "public.kept", "t", "v")
    steps.make_index(database, "public.dropped", "t", "v")
    run = steps.built(database, "public.first", "t", "k")
    looks = Looks(fresh_s=0)
    shown = Listings(looks)
    found = asked(shown)
    assert [one["index"] for one in found["indexes"]] == ["public.dropped", "public.first", "public.kept"]
    assert (found["trouble"], found["as_of"]) == (None, None)
    slow.hang(looks)
    found = asked(shown)
    assert "hasn't answered within" in found["trouble"]
    assert found["trouble"].endswith("This page keeps looking")
    assert found["as_of"] is None, "a moment ago"
    steps.seal_all(database, run)
    steps.finish_all(database, run)
    drop.drop_index(database, "public.dropped", "test")
    steps.begin(database, "public.kept", None, None)
    requests.pause(database, "public.kept", "test")
    at = shown._last["c"].at - 2 * AGED
    shown._last["c"] = replace(shown._last["c"], at=at)
    found = asked(shown)
    assert found["as_of"] == at.isoformat()
    states = {one["index"]: (one["state"], one["operation"], one.get("aged")) for one in found["indexes"]}
    assert states == {"public.first": ("published", None, None), "public.kept": ("published", 4, None)}


def test_states_that_are_not_known_are_as_old_as_the_figures(
    database: Database, dsn: str, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.make_table(dsn)
    steps.begin(database, "public.first", "t", "k")
    looks = Looks(fresh_s=0)
    shown = Listings(looks)
    asked(shown)
    slow.hang(looks)
    monkeypatch.setattr(lookups, "states_now", lambda _connection_id: slow.end.wait(60))
    monkeypatch.setattr(listings, "STATES_S", 0.2)
    [one] = asked(shown)["indexes"]
    assert (one["state"], one["aged"]) == ("building", True)


def test_a_connection_without_an_index_says_what_it_lacks(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: without a connection of that id, and with one of another type, the page spoke of the control schema."""
    at = {"there": dsn, "away": "host=127.0.0.1 port=1", "login": make_dsn(dsn, user="nobody-there")}

    def connection(connection_id: str) -> Any:
        if connection_id not in (*at, "mysql"):
            raise AirflowNotFoundException
        return SimpleNamespace(conn_type="mysql" if connection_id == "mysql" else "postgres", id=connection_id)

    monkeypatch.setattr(databases.Connection, "get_connection_from_secrets", connection)
    monkeypatch.setattr(databases, "dsn_of", lambda one: at[one.id])

    def found(connection_id: str) -> tuple[Any, ...]:
        one = asyncio.run(Listings(Looks(fresh_s=0, failed_s=0)).of(connection_id))
        assert one["indexes"] == []
        return one["lacks"], one["trouble"], one["remedy"]

    kept = "in Airflow's Admin → Connections or your secrets backend"
    add = "Add it: airflow connections add 'a b' --conn-uri postgresql://USER:PASSWORD@HOST/DATABASE"
    assert found("a b") == ("connection", "Airflow has no connection a b", add)
    assert found("mysql") == ("type", "connection mysql isn't of type postgres", f"Make it of that type {kept}")
    assert found("there") == (None, None, "")
    away = f"Start the server, or correct the connection's host and port {kept}"
    assert found("away") == (None, "the database of connection away can't be reached", away)
    lacks, trouble, remedy = found("login")
    assert (lacks, remedy) == (None, f"Correct the connection's login, password and database {kept}")
    assert "refuses the login" in trouble
    run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE")
    none = "the database of connection there has no control schema"
    assert found("there") == ("schema", none, "Create it: roir init")


def test_a_missing_connection_is_one_problem_of_the_check_for_a_first_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: it said so twice, as a session that failed and as a connection that isn't there."""

    def connection(_connection_id: str) -> Any:
        raise AirflowNotFoundException

    monkeypatch.setattr(databases.Connection, "get_connection_from_secrets", connection)
    monkeypatch.setattr(
        first_build.of_airflow, "look", lambda one, with_errors: [first_build.of_airflow._connection(one)]
    )
    found = [one for one in first_build.look("nowhere")["found"] if not one["where"].startswith("machine ")]
    assert [(one["what"], one["verdict"], one["says"]) for one in found] == [
        ("nowhere", "warning", "Airflow has no such connection")
    ]
