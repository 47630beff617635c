"""Changes of rows that are no writes, while writes are announced."""

from __future__ import annotations

import psycopg2
import pytest

from airflow_roir.engine.generation import physical
from airflow_roir.shards.announce.announce import strict_problem
from airflow_roir.shards.ship.shipping import Shipper, ship_once
from tests.shards.announced import scene
from tests.shards.conftest import Make

GENERATED = "CREATE TABLE t (id int PRIMARY KEY, k text, n int, v int GENERATED ALWAYS AS (n % 5) STORED)"
CHANGES = {
    "another expression": "ALTER TABLE t ALTER v SET EXPRESSION AS (n % 7)",
    "no expression any more": "ALTER TABLE t ALTER v DROP EXPRESSION",
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_the_server_generates_again_are_shipped_though_none_is_announced(
    shards: Make, pg: int, change: str
) -> None:
    if pg < 17 and "SET" in CHANGES[change]:
        pytest.skip("PostgreSQL 17 has SET EXPRESSION")
    rows = "INSERT INTO t (id, k, n) SELECT i, 'a', i FROM generate_series(1, 9) i"
    found = scene(shards(1, GENERATED, rows), "client")
    made = found.made
    made.run(CHANGES[change])
    ship_once(Shipper(made.database))
    base = physical.base(found.generation_id)
    assert made.ask(f"SELECT c3, c4 FROM {base} ORDER BY 1") == made.ask("SELECT id, v FROM t ORDER BY 1", shard="s0")
    with made.database.transaction() as connection:
        assert strict_problem(connection, found.generation_id) is None
    # Whose rows are changed by a write still has to announce it.
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="not announced"):
        made.ask("UPDATE t SET k = 'b'", shard="s0")
