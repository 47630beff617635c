"""Subscriptions that stop for good if their partitioned table has a row trigger, as an index's source does.

One trigger on one of its partitions is enough, which then is the index's source.

PostgreSQL's workers leak a reference to the partition for each row that they apply through a partitioned table with a
row trigger that fires for them, and warn of each at the commit. A parallel worker (`streaming = parallel`, the default
from 18 on) sends these warnings to a leader that waits for its lock: both wait for ever, and no deadlock is seen. Seen
with any such trigger on 18.4; a table without partitions, or a leaf that is replicated by its own name, has none of it.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.source import Source
from airflow_roir.errors import InvalidInput

# Before 16 it is a truth value.
FIND = """
SELECT s.subname AS name, min(r.srrelid::regclass::text) AS relation
  FROM pg_subscription s
  JOIN pg_subscription_rel r ON r.srsubid = s.oid
  JOIN pg_class c ON c.oid = r.srrelid
 WHERE s.subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND s.substream::text = 'p' AND c.relkind = 'p'
   AND (c.oid = ANY (%(relations)s::oid[]) OR c.oid IN (SELECT a.relid FROM pg_partition_ancestors(%(source)s::oid) a))
 GROUP BY s.subname ORDER BY s.subname
"""


def found(connection: Connection, source: Source) -> list[str]:
    """Each such subscription in a line, with the remedy."""
    return [
        f"subscription {quote(row.name)} replicates into the partitioned table {row.relation} by parallel workers, "
        "which hang for good at a large transaction if the table has row triggers, and an index needs them. Use "
        f"one worker: ALTER SUBSCRIPTION {quote(row.name)} SET (streaming = on)"
        for row in execute(connection, FIND, {"source": source.oid, "relations": list(source.relations)})
    ]


def check(connection: Connection, source: Source) -> None:
    """Raise InvalidInput if a build would stop the replication. `roir status` warns of a later one."""
    if lines := found(connection, source):
        raise InvalidInput(". ".join(lines))
