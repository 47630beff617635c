"""Before a generation over shards is published: what was written since its copies is shipped."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Run, read_running
from airflow_roir.engine.database import Database
from airflow_roir.errors import SourceChanged
from airflow_roir.shards.announce import announce
from airflow_roir.shards.ship import freshness
from airflow_roir.shards.ship.shipping import Shipper

# What is left to ship may take a second or so after the switch.
FEW = 10_000


def catch_up(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Ship what was written since the generation's copies, until little is left: all that was committed before this
    began is in it then. A no-op for a generation whose source is in this database.

    It waits for shards that are out of reach, and says so. Raises OperationPaused, Fenced, and SourceChanged if a shard
    is in doubt: only what is published can be repaired.
    """
    with database.transaction() as connection:
        row = read_running(connection, run)
    # Before the moment that all is shipped up to: strict reads are as good then as before the publish.
    announce.keep_on(database, row.generation_id, report)
    with database.transaction() as connection:
        waiting = freshness.Waiting(connection, row.generation_id)
    if not waiting.lanes:
        return
    shipper = Shipper(database, report, every_s=0.2, generation_id=row.generation_id, shares=False)
    said: str | None = None
    with shipper.running():
        while True:
            with database.transaction() as connection:
                read_running(connection, run)
                if (doubt := waiting.doubt(connection)) is not None:
                    raise SourceChanged(f"index {run.index}: {doubt}. Abort the operation and start again")
                left = waiting.left(connection, FEW)
                if left != said:
                    operations.note_wait(connection, run.operation_id, run.epoch, left)
            if left != said and left is not None:
                report(left)
            said = left
            if left is None:
                return
            time.sleep(0.2)
