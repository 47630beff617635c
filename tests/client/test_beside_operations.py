"""An application that uses the indexes goes on while they are rebuilt, reverted, dropped and built again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from airflow_roir.engine import drop, revert
from airflow_roir.engine.database import Database
from roir_client.sqlalchemy import use_indexes
from tests.client.shop import engine_of, orders
from tests.engine import steps


class Users:
    """Threads that look for rows which are there all the time, and change what no condition is about."""

    def __init__(self, dsn: str, number: int, levels: list[str]) -> None:
        self.done = threading.Event()
        self.errors: list[str] = []
        self.statements = 0
        self._engines = [engine_of(dsn, "psycopg2", isolation_level=levels[n % len(levels)]) for n in range(number)]
        self.indexes = [use_indexes(engine, least_partitions=1, refresh_s=0.2) for engine in self._engines]
        self._threads = [threading.Thread(target=self._use, args=one) for one in enumerate(self._engines)]
        for thread in self._threads:
            thread.start()

    def _use(self, number: int, engine: Engine) -> None:
        chance = random.Random(number)
        while not self.done.is_set():
            try:
                with engine.begin() as connection:
                    for _ in range(chance.randint(1, 3)):
                        row = chance.randrange(number + 1, 600, len(self._engines))
                        found = connection.execute(select(orders.c.id).where(orders.c.no == f"no{row}")).scalars().all()
                        assert found == [row], (row, found)
                        change = update(orders).where(orders.c.no == f"no{row}").values(note=str(chance.random()))
                        assert connection.execute(change).rowcount == 1, row
                        self.statements += 2
            except Exception as error:
                if getattr(getattr(error, "orig", None), "pgcode", None) != "40001":
                    self.errors.append(repr(error)[:500])

    def stop(self) -> int:
        """Ends the threads; gives how many of their statements were rewritten."""
        self.done.set()
        for thread in self._threads:
            thread.join()
        for engine in self._engines:
            engine.dispose()
        return sum(indexes.counts["rewritten"] for indexes in self.indexes)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [["READ COMMITTED"], ["REPEATABLE READ"]], ids=str)
def test_statements_go_on_beside_operations(shop_dsn: str, levels: list[str]) -> None:
    database = Database(shop_dsn, "roir tests")
    users = Users(shop_dsn, 3, levels)
    operations: list[Callable[[], Any]] = [
        lambda: steps.make_index(database, "shop.by_no", None, None),
        lambda: revert.revert(database, "shop.by_no", "test"),
        lambda: drop.drop_index(database, "shop.by_no", "test"),
        lambda: steps.make_index(database, "shop.by_no", "shop.orders", "no"),
    ]
    try:
        for operation in operations * 2:
            operation()
    finally:
        rewritten = users.stop()
        database.engine.dispose()
    print(f"{users.statements} statements, {rewritten} rewritten: {[dict(one.counts) for one in users.indexes]}")
    assert not users.errors, users.errors[:3]
    assert rewritten
