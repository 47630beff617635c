"""Spark's driver and workers, while their server fails over to a replica that lost their last batches."""

from __future__ import annotations

import pytest

from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from servers.killable import Server
from tests.engine.pair import pair
from tests.engine.test_replication import primary as primary
from tests.spark.driving import Running, events, finish_and_check, lift_rate, make_table, prepared, rows_committed


@pytest.mark.by_hand("sweeps")
def test_a_driver_goes_on_where_batches_were_lost(primary: Server) -> None:
    primary.execute("CREATE DATABASE lost TEMPLATE roir_template")
    make_table(primary.dsn("lost"))
    with pair(primary, primary.dsn("lost")) as both:
        database = Database(both.dsn)
        prepared(database, rate=4000)
        with Running(database) as driver:
            driver.wait_for(lambda: rows_committed(database) > 3000)
            both.lose()
            lost = rows_committed(database)
            driver.wait_for(lambda: rows_committed(database) > lost + 3000)
            both.kill()
            # Before it takes over: a worker may commit a batch there at once.
            assert rows_committed(Database(both.there)) <= lost
            both.promote()
            lift_rate(database)
            assert driver.wait() == 0, driver.said
        assert operations.find_operation(database, "ix").phase == "fold"
        assert [action for action, _ in events(database) if action in ("pause", "fail")] == []
        finish_and_check(database)
