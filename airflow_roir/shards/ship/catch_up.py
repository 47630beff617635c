"""Ships the writes since a generation's copies, before the generation is published over shards."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.control.run import Run, read_running
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import SourceChanged
from airflow_roir.shards.announce import announce
from airflow_roir.shards.ship.shipping import Shipper

# The most rows that may be left to ship after the switch: a second or so.
FEW = 10_000
NOT_CAUGHT_UP = """
SELECT s.name, s.problem, l.pending, l.fresh_at > %(began)s AS fresh
  FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
 WHERE l.generation_id = %(generation)s AND l.removed_at IS NULL
   AND (l.fresh_at > %(began)s AND l.pending <= %(few)s) IS NOT TRUE
 ORDER BY s.name
"""


def catch_up(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Ships the writes since the generation's copies, until little is left: then the generation has all writes that
    were committed before this call. A no-op for a generation whose source is in this database.

    It waits for shards that are out of reach, and reports that. Raises OperationPaused, Fenced, and SourceChanged if a
    shard is in doubt: only a published generation can be repaired.
    """
    with database.transaction() as connection:
        row = read_running(connection, run)
    # Before the moment up to which all is shipped: so strict reads are possible right after the publish.
    announce.keep_on(database, row.generation_id, report)
    with database.transaction() as connection:
        waiting = Waiting(connection, row.generation_id)
    if not waiting.feeds:
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
                    sign_of_life.note_wait(connection, run.operation_id, run.epoch, left)
            if left != said and left is not None:
                report(left)
            said = left
            if left is None:
                return
            time.sleep(0.2)


class Waiting:
    """The wait of a generation for shipping before its publish: all feeds must have been shipped to their end since."""

    def __init__(self, connection: Connection, generation_id: int) -> None:
        self.generation_id = generation_id
        self.began = execute(connection, "SELECT clock_timestamp()").scalar_one()
        counted = "SELECT count(*) FROM roir.feed WHERE generation_id = %(id)s AND removed_at IS NULL"
        self.feeds = int(execute(connection, counted, {"id": generation_id}).scalar_one())

    def doubt(self, connection: Connection) -> str | None:
        """Why entries of a shard may be wrong; None if they can't be."""
        query = "SELECT min(doubt) FROM roir.feed WHERE generation_id = %(id)s AND removed_at IS NULL"
        found: str | None = execute(connection, query, {"id": self.generation_id}).scalar_one()
        return found

    def left(self, connection: Connection, few: int) -> str | None:
        """The shards that it waits for, as a text; None if every feed has been shipped to its end since, and has few
        rows left."""
        values = {"generation": self.generation_id, "began": self.began, "few": few}
        found = execute(connection, NOT_CAUGHT_UP, values).all()
        if not found:
            return None
        told = [f"{quote(row.name)} ({row.problem})" if row.problem else f"{quote(row.name)}" for row in found[:5]]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return f"waiting for what shards have to ship: {', '.join(told)}{more}"
