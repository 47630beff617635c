"""A NULL in a key of a user's own type is announced, and settled, as one."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.conftest import Make
from tests.shards.reading import engine

MADE = (
    "CREATE TYPE mood AS ENUM ('ok')",
    "CREATE DOMAIN mine AS text",
    "CREATE TYPE pair AS (a int, b text)",
)


@pytest.mark.sample(0)
@pytest.mark.parametrize("type_", ["mood", "mine", "pair"])
@pytest.mark.parametrize("by", ["server", "client"])
def test_a_null_of_a_users_type(contrib_shards: Make, by: str, type_: str) -> None:
    made = contrib_shards(1, *MADE, f"CREATE TABLE t (id int PRIMARY KEY, k {type_}, v int)")
    for statement in MADE:
        made.ask(statement)
    registry.add(made.database, "s0", made.dsns["s0"], index_dsn=index_dsn(made))
    prepared, run = apart.begin(made)
    apart.finish_all(made, run)
    announce.announce(made.database, "public.ix", by)

    def write(statement: str) -> None:
        with engine(made.dsns["s0"]).begin() as here, engine(made.index).connect() as there:
            here.execute(text(statement))
            announce_by_client(here, there)

    intent = f"roir_data.g{prepared.generation_id}_intent"
    write("INSERT INTO t VALUES (1, NULL, 1)")
    apart.ship_all(made, prepared.generation_id)
    write("UPDATE t SET v = 2")
    found: Any = made.ask(f"UPDATE {intent} SET at = at - interval '5 s' RETURNING c1 IS NOT DISTINCT FROM NULL")
    assert found == [(True,)]
    apart.ship_all(made, prepared.generation_id)
    assert made.ask(f"SELECT * FROM {intent}") == []
    apart.assert_exact(made, prepared.generation_id)
