"""The common parts of the tests of the Spark application: a table, a prepared operation, a driver, committed state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import lifecycle, prepare
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import BegunOperation
from airflow_roir.engine.database import Database, execute
from airflow_roir.options import BuildOptions
from airflow_roir.spark.driver_process import Driver, driver_command, driver_environment, driver_order
from airflow_roir.spark.options import SparkOptions
from tests.engine import steps

ROWS = 40_000
# A machine that is busy; nothing is measured by it.
GIVE_UP_S = float(os.environ.get("ROIR_TEST_GIVE_UP_S", "300"))


def make_table(dsn: str) -> None:
    """The source that all of them build an index on."""
    steps.make_table(dsn, ROWS, keys=500)


def prepared(database: Database, rate: int | None = None, **options: Any) -> BegunOperation:
    """An operation on it in small batches. rate: rows per second, so that it lasts."""
    small = {"batch_rows": 1000, "ranges": 8, "segments": 3, "parallelism": 4, "max_rows_per_second": rate}
    return prepare.prepare(
        database, IndexDefinition.parse("ix", "t", "k", "v"), BuildOptions(**small | options), "test"
    )


class Running:
    """A driver process, and what it says."""

    def __init__(
        self,
        database: Database,
        master: str | None = "local[4]",
        conf: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        owner: str = "test driver",
        **options: Any,
    ) -> None:
        self.lines: list[str] = []
        command = driver_command(SparkOptions(master, conf or {}), driver_order("ix", owner, **options))
        self.driver = Driver(
            command, driver_environment(database.dsn) | dict(environment or {}), forward=self.lines.append
        )

    @property
    def pid(self) -> int:
        """The driver's process id."""
        return self.driver.pid

    @property
    def said(self) -> str:
        """All it has said."""
        return "\n".join(self.lines)

    @property
    def last_told(self) -> str:
        """The last line that was for the user."""
        return [line for line in self.lines if line.startswith("roir: ")][-1]

    def wait(self) -> int:
        """Its exit code, once it has ended; GIVE_UP_S without an end is a failure."""
        code = self.driver.wait(GIVE_UP_S)
        assert code is not None, self.said
        return code

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Polls committed state until it holds; the driver's end or GIVE_UP_S without it is a failure."""
        deadline = time.monotonic() + GIVE_UP_S
        while not condition():
            assert self.driver.wait(0.05) is None, self.said
            assert time.monotonic() < deadline, self.said

    def wait_to_say(self, words: str) -> None:
        """Waits until it has said them."""
        self.wait_for(lambda: words in self.said)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.kill()


def rows_committed(database: Database) -> int:
    """Rows in committed batches."""
    return int(one(database, "SELECT coalesce(sum(rows), 0) FROM roir.scan_range"))


def at_work(database: Database) -> set[int]:
    """The numbers of the workers that have a session in the server."""
    found = one(
        database,
        r"SELECT array_agg(substring(application_name FROM ' worker (\d+)')::int) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name ~ '^roir [^ ]+ worker '",
    )
    return set(found or ())


def one(database: Database, sql: str, **values: Any) -> Any:
    """One value."""
    with database.transaction() as connection:
        return execute(connection, sql, values).scalar()


def lift_rate(database: Database) -> None:
    """Lifts the limit, so that the build runs as fast as it can from now on."""
    with database.transaction() as connection:
        execute(connection, "UPDATE roir.operation SET max_rows_per_second = NULL")


def events(database: Database) -> list[tuple[str, str | None]]:
    """The index's events: action and detail."""
    return [(event.action, event.detail) for event in operations.events(database, "ix")]


def finish_and_check(database: Database) -> None:
    """Fold and publish; then the index is the source, and every row was copied exactly once."""
    done = lifecycle.finalize(database, "ix", "test")
    assert (done.status, done.rows) == ("completed", ROWS)
    steps.assert_exact(database)
