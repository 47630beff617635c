"""Finds logical replication that an index would stop: publications of its own tables, subscriptions to its source.

Publications of all tables, or of roir's schemas, include the index's own tables. Writes still work, since these tables
have a replica identity. But a PostgreSQL subscriber stops at the first change of a table that it doesn't have, and
replicates nothing more.

Subscriptions stop for good if their partitioned table has a row trigger, as an index's source does. One trigger on
one of its partitions is enough, if that partition is the index's source. PostgreSQL's workers leak a reference to the
partition for each row that they apply through a partitioned table with a row trigger that fires for them, and warn of
each at the commit. A parallel worker (`streaming = parallel`, the default from 18 on) sends these warnings to a
leader that waits for its lock: both wait for ever, and the server sees no deadlock. Observed with any such trigger on
18.4; a table without partitions, or a leaf that is replicated by its own name, isn't affected.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.definition import DATA_SCHEMA, SCHEMA, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput

# A publication that publishes no kind of change sends nothing.
PUBLICATIONS = """
SELECT p.pubname AS name, p.puballtables AS everything,
       (SELECT string_agg(n.nspname, ', ' ORDER BY n.nspname) FROM pg_publication_namespace s
          JOIN pg_namespace n ON n.oid = s.pnnspid
         WHERE s.pnpubid = p.oid AND n.nspname = ANY (%(ours)s)) AS schemas
  FROM pg_publication p
 WHERE (p.pubinsert OR p.pubupdate OR p.pubdelete OR p.pubtruncate)
   AND (p.puballtables OR EXISTS (SELECT FROM pg_publication_namespace s JOIN pg_namespace n ON n.oid = s.pnnspid
                                   WHERE s.pnpubid = p.oid AND n.nspname = ANY (%(ours)s)))
 ORDER BY p.pubname
"""
# Before 16, substream is a boolean.
SUBSCRIPTIONS = """
SELECT s.subname AS name, min(r.srrelid::regclass::text) AS relation
  FROM pg_subscription s
  JOIN pg_subscription_rel r ON r.srsubid = s.oid
  JOIN pg_class c ON c.oid = r.srrelid
 WHERE s.subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND s.substream::text = 'p' AND c.relkind = 'p'
   AND (c.oid = ANY (%(relations)s::oid[]) OR c.oid IN (SELECT a.relid FROM pg_partition_ancestors(%(source)s::oid) a))
 GROUP BY s.subname ORDER BY s.subname
"""

OURS = (DATA_SCHEMA, SCHEMA)


def in_publications(connection: Connection, ours: Sequence[str] = OURS) -> list[str]:
    """A line for each such publication: its name, why roir's tables are in it, the remedy. ours: roir's schemas."""
    lines = []
    for row in execute(connection, PUBLICATIONS, {"ours": list(ours)}):
        name = quote(row.name)
        if row.everything:
            # A publication of all tables can't be made one of some.
            lines.append(
                f"publication {name} is for all tables, so it contains the index's own tables in {' and '.join(ours)}"
                ", too. A PostgreSQL subscriber stops at their first change: logical replication target "
                "relation does not exist. Publish only your own schemas instead: CREATE PUBLICATION … FOR TABLES IN "
                f"SCHEMA public, then ALTER SUBSCRIPTION … SET PUBLICATION …, then DROP PUBLICATION {name}"
            )
        else:
            lines.append(
                f"publication {name} is for schema {row.schemas}, which contains the index's own tables. A PostgreSQL "
                "subscriber stops at their first change: logical replication target relation does not exist. "
                f"Take it out: ALTER PUBLICATION {name} DROP TABLES IN SCHEMA {row.schemas}"
            )
    return lines


def check_publications(connection: Connection, ignore: bool, ours: Sequence[str] = OURS) -> None:
    """Raise InvalidInput if the tables of a new generation would be published.

    ignore: the user knows that the subscribers can bear it. Only prepare checks this; `roir status` warns of a later
    publication.
    """
    if not ignore and (lines := in_publications(connection, ours)):
        raise InvalidInput(
            f"{'. '.join(lines)}. If its subscribers skip unknown tables (as Debezium does, by its list of tables), "
            "set ignore_publications (roir build --ignore-publications)"
        )


def in_subscriptions(connection: Connection, source: Source) -> list[str]:
    """A line for each such subscription, with the remedy."""
    return [
        f"subscription {quote(row.name)} replicates into the partitioned table {row.relation} by parallel workers, "
        "which hang for good at a large transaction if the table has row triggers, and an index needs them. Use "
        f"one worker: ALTER SUBSCRIPTION {quote(row.name)} SET (streaming = on)"
        for row in execute(connection, SUBSCRIPTIONS, {"source": source.oid, "relations": list(source.relations)})
    ]


def check_subscriptions(connection: Connection, source: Source) -> None:
    """Raise InvalidInput if a build would stop a subscription. `roir status` warns of a later subscription."""
    if lines := in_subscriptions(connection, source):
        raise InvalidInput(". ".join(lines))
