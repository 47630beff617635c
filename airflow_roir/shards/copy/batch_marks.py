"""Leaves marks of a build's batches in the shards, to notice if a shard loses rows that were copied.

A batch's mark is committed in the shard, and on disk there, after its rows were read and before they are committed on
the index server. A shard loses its newest commits first: if it has the mark, it has all rows that were read. Once all
is copied a tick replaces the marks, as polls count it: by the tick the first poll notices a loss.
"""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.errors import SourceChanged
from airflow_roir.shards import home
from airflow_roir.shards.shard import SHARD_SCHEMA, Shard, feeds_of, set_away

FOUND = f"SELECT piece, mark FROM {SHARD_SCHEMA}.mark WHERE outbox = %(outbox)s"
LEAVE = f"""
SET LOCAL synchronous_commit = on;
INSERT INTO {SHARD_SCHEMA}.mark (outbox, piece, mark) VALUES (%(outbox)s, %(piece)s, %(mark)s)
    ON CONFLICT (outbox, piece) DO UPDATE SET mark = EXCLUDED.mark
"""


COUNT = f"""
SET LOCAL synchronous_commit = on;
UPDATE {SHARD_SCHEMA}.outbox SET tick = tick + 1 WHERE name = %(outbox)s RETURNING tick
"""
COUNTED = "UPDATE roir.feed SET tick = greatest(tick, %(tick)s) WHERE id = %(feed)s"


def of(connection: Connection, outbox: str, piece: int) -> int:
    """The mark of a range in its shard; 0 if there is none."""
    found = execute(connection, f"{FOUND} AND piece = %(piece)s", {"outbox": outbox, "piece": piece}).first()
    return 0 if found is None else int(found.mark)


COPIED = "SELECT shard_id, id, mark FROM roir.scan_range WHERE operation_id = %(operation)s AND mark IS NOT NULL"


def leave(connection: Connection, outbox: str, piece: int, mark: int) -> None:
    """Leaves a mark, in the shard's open transaction."""
    execute(connection, LEAVE, {"outbox": outbox, "piece": piece, "mark": mark})


def check_marks(database: Database, index: str, generation_id: int, operation_id: int) -> None:
    """Checks, at the end of the copies, that no shard has lost copied rows; counts a tick in each shard.

    Does nothing for other indexes. Nothing is shipped before. Raises SourceChanged.
    """
    with database.transaction() as connection:
        feeds = feeds_of(connection, generation_id)
        if not feeds:
            return
        rows = execute(connection, COPIED, {"operation": operation_id}).all()
    for feed in feeds:
        try:
            with feed.shard.database(database.application_name, database.limits).transaction() as there:
                home.check(there, feed.shard)
                found = {row.piece: row.mark for row in execute(there, FOUND, {"outbox": feed.outbox})}
                if any(found.get(row.id, 0) < row.mark for row in rows if row.shard_id == feed.shard.id):
                    raise lost(index, feed.shard)
                tick = execute(there, COUNT, {"outbox": feed.outbox}).scalar()
        except DBAPIError as error:
            # The status shows for which shard the operation waits.
            with database.transaction() as connection:
                set_away(connection, feed.shard.id, reason_of(error))
            raise
        with database.transaction() as connection:
            execute(connection, COUNTED, {"feed": feed.id, "tick": tick})


def lost(index: str, shard: Shard) -> SourceChanged:
    """The error of a shard that has lost commits."""
    return SourceChanged(
        f"index {index}: shard {quote(shard.name)} has lost its last commits, by a failover to a replica, a crash or a "
        "restore, and rows of them were copied. Abort the operation and start again"
    )
