"""Publications that have the index's own tables too: of all tables, or of our schemas.

Writes still work, since our tables have a replica identity. But a PostgreSQL subscriber to them stops at the first
change of a table that it doesn't have, and replicates nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.tables import DATA_SCHEMA, SCHEMA
from airflow_roir.errors import InvalidInput

# One that publishes no kind of change sends nothing.
FIND = """
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


OURS = (DATA_SCHEMA, SCHEMA)


def found(connection: Connection, ours: Sequence[str] = OURS) -> list[str]:
    """Each such publication in a line: its name, why our tables are in it, and what to do. ours: our schemas there."""
    lines = []
    for row in execute(connection, FIND, {"ours": list(ours)}):
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


def check(connection: Connection, ignore: bool, ours: Sequence[str] = OURS) -> None:
    """Raise InvalidInput if the tables of a new generation would be published.

    ignore: the user knows that the subscribers can take it. Only prepare checks this; `roir status` warns of a later
    one.
    """
    if not ignore and (lines := found(connection, ours)):
        raise InvalidInput(
            f"{'. '.join(lines)}. If its subscribers skip unknown tables (as Debezium does, by its list of tables), "
            "set ignore_publications (roir build --ignore-publications)"
        )


def warnings(connection: Connection, index: str, ignored: bool) -> list[str]:
    """The warnings of a published index. ignored: the last build was told to ignore publications."""
    return [] if ignored else [f"index {index}: {line}" for line in found(connection)]
