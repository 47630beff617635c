"""Databases of the shop and of the zoo, cloned from one that has their indexes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tests.client.django_shop.set_up  # noqa: F401
from tests.client import shop, zoo
from tests.client.django_shop import databases
from tests.conftest import database_dsn, run_sql

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def shop_template(server: str) -> str:
    """The name of the database with the indexed orders."""
    run_sql(server, "CREATE DATABASE shop TEMPLATE roir_template")
    shop.make(database_dsn(server, "shop"))
    return "shop"


@pytest.fixture
def shop_dsn(server: str, shop_template: str) -> Iterator[str]:
    """The DSN of a copy of the shop."""
    name = f"shop_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {shop_template}")
    yield database_dsn(server, name)
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def django_shop(shop_dsn: str) -> Iterator[Any]:
    """The Django project's connection to a copy of the shop."""
    yield databases.point(shop_dsn)
    databases.leave()


@pytest.fixture(scope="session")
def zoo_template(server: str) -> str:
    """The name of the database with the zoo and its indexes."""
    run_sql(server, "CREATE DATABASE zoo TEMPLATE roir_template")
    zoo.make(database_dsn(server, "zoo"))
    return "zoo"


@pytest.fixture
def zoo_copy(server: str, zoo_template: str) -> Iterator[Callable[[], str]]:
    """Makes copies of the zoo: gives the DSN of each."""
    names: list[str] = []

    def make() -> str:
        names.append(f"zoo_{next(_numbers)}")
        run_sql(server, f"CREATE DATABASE {names[-1]} TEMPLATE {zoo_template}")
        return database_dsn(server, names[-1])

    yield make
    for name in names:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")
