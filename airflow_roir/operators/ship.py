"""Ships the writes of shards to the indexes over them, for some minutes, as a task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowSkipException

from airflow_roir.engine.schema import schema
from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.shards.ship.freshness import Alarm
from airflow_roir.shards.ship.shipping import Shipper
from airflow_roir.span import seconds
from airflow_roir.task.form_values import whole_number
from airflow_roir.task.open_database import open_database
from airflow_roir.task.roir_operator import failing_clearly, owner_of
from airflow_roir.task.shard_connections import keep_connections

if TYPE_CHECKING:
    from airflow.sdk import Context

DEFAULT_FOR = "10min"


class ShipChangesOperator(BaseOperator):
    """Ships all feeds of a database that no other shipper ships, for a time, and then ends: as `roir ship`, in turns.

    A turn gives all feeds back, so that the next one continues at once. A shard that can't be reached is named in the
    log; the others go on. If a shard is too far behind when the turn ends, the task fails, so that Airflow's own
    `on_failure_callback` is called.

    postgres_conn_id: the Airflow connection of the index server (templated).
    ship_for: the duration of a turn, `10min` or in seconds (templated). every_s: the time between two looks while
        nothing is written.
    warn_age, warn_rows: the limits of being too far behind: `5min` or seconds; rows to be shipped; None: no limit
        (templated).
    """

    template_fields: Sequence[str] = ("postgres_conn_id", "ship_for", "warn_age", "warn_rows")
    ui_color = "#dcebfa"

    def __init__(
        self,
        *,
        postgres_conn_id: str = RoirHook.default_conn_name,
        ship_for: int | str = DEFAULT_FOR,
        every_s: float = 1.0,
        warn_age: int | str | None = None,
        warn_rows: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id
        self.ship_for = ship_for
        self.every_s = every_s
        self.warn_age = warn_age
        self.warn_rows = warn_rows

    def execute(self, context: Context) -> int:
        """Runs one turn; returns the number of feeds that it had at its end."""
        with failing_clearly():
            turn_s = seconds("ship_for", self.ship_for) or 0
            rows = whole_number("warn_rows", self.warn_rows) or None
            if rows is not None and rows < 0:
                raise InvalidInput(f"warn_rows is {rows}; it must be a number of rows, or 0 for none")
            alarm = Alarm(seconds("warn_age", self.warn_age) or None, rows)
            database = open_database(self.postgres_conn_id, f"roir airflow {self.task_id}")
            with database.transaction() as connection:
                if schema.current(connection) is None:
                    raise AirflowSkipException(
                        f"nothing to ship: the database of connection {self.postgres_conn_id} has no control schema "
                        "yet; `roir init` creates it"
                    )
                schema.check_schema(connection, writes=True)
            keep_connections(database, self.postgres_conn_id, self.log.warning)
            shipper = Shipper(database, self.log.info, self.every_s, alarm=alarm)
            shipper.owner = f"{owner_of(context['ti'])} {shipper.owner}"
            until = time.monotonic() + turn_s
            with shipper.running() as thread:
                while time.monotonic() < until and thread.is_alive():
                    time.sleep(min(1.0, max(0.0, until - time.monotonic())))
                feeds, lives = len(shipper.shipped), thread.is_alive()
            if not lives:
                raise AirflowException("the shipper ended with an error; the log says why")
        if alarm.behind:
            raise AirflowException("; ".join(alarm.behind.values()))
        return feeds

    def on_kill(self) -> None:
        """Undoes nothing: applied writes are committed, and other shippers take over the feeds of one that is gone."""
