"""The login by which a shard's server announces is one for all indexes: another one may write for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2.extensions import make_dsn

from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.test_unique_attacks import TABLE, enforced

pytestmark = pytest.mark.sample(1)
ROLES = ("first_announcer", "second_announcer")


@pytest.fixture
def made(contrib_shards: Make) -> Iterator[Shards]:
    made = contrib_shards(2, TABLE)
    for role in ROLES:
        made.ask(f"DROP ROLE IF EXISTS {role}")
        made.ask(f"CREATE ROLE {role} LOGIN")
    announced_as(made, ROLES[0])
    yield made
    for role in ROLES:
        made.ask(f"DROP OWNED BY {role}")
        made.ask(f"DROP ROLE {role}")


def announced_as(made: Shards, role: str) -> None:
    for name, dsn in made.dsns.items():
        registry.add(made.database, name, dsn, index_dsn=make_dsn(made.index, user=role))


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("by", ["another index", "a rebuild", "an abort"])
def test_another_login_keeps_no_writer_out(made: Shards, by: str) -> None:
    enforced(made)
    if by == "another index":
        enforced(made, index="public.iy")
    made.run("INSERT INTO t VALUES (1, 'a{number}', 0)")
    announced_as(made, ROLES[1])
    made.run("INSERT INTO t VALUES (2, 'b{number}', 0)")
    if by == "another index":
        announce.announce(made.database, "public.iy", "server")
    else:
        _, run = apart.begin(made, keys=None, include=None, table=None)
        if by == "a rebuild":
            apart.finish_all(made, run)
    made.run("INSERT INTO t VALUES (3, 'c{number}', 0)")
