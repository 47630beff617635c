"""SERIALIZABLE readers of a generation that is to go: PostgreSQL forgets with its tables what they have read.

A later write of what they have read is no conflict any more then. Whoever overlaps with such a reader has a snapshot
that is older than the moment since which the index's view doesn't show the generation. Until he has ended, it is kept,
and maintained.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# The capture reads entries for SERIALIZABLE writers, too, and their locks can't be told from readers': so both are
# asked, who has read, and whether anybody is old enough. A retired generation's row was last written at its retirement.
OVERLAPPING = """
WITH g AS (SELECT id, CASE WHEN status = 'retired' THEN age(xmin) ELSE 0 END AS age FROM roir.generation
            WHERE id = ANY (%(ids)s) AND published_at IS NOT NULL),
     own AS (SELECT g.id, to_regclass('roir_data.g' || g.id)::oid AS relation FROM g
             UNION ALL SELECT g.id, t.relation FROM g, roir.partition_tree(to_regclass('roir_data.g' || g.id)) t),
     part AS (SELECT id, relation FROM own
              UNION ALL SELECT own.id, i.indexrelid FROM own JOIN pg_index i ON i.indrelid = own.relation)
SELECT DISTINCT concat('pid ', a.pid, ' (' || coalesce(nullif(a.application_name, ''), a.usename) || ')')
  FROM g JOIN pg_stat_activity a ON age(a.backend_xmin) >= g.age
 WHERE a.pid <> pg_backend_pid() AND a.datname = current_database()
   AND EXISTS (SELECT FROM part p JOIN pg_locks l ON l.relation = p.relation
                WHERE p.id = g.id AND l.mode = 'SIReadLock' AND l.database = a.datid)
 ORDER BY 1
"""
RETIRE = """
UPDATE roir.generation SET status = 'retired', retired_at = clock_timestamp(), drop_after = clock_timestamp()
 WHERE id = ANY (%(ids)s) AND status = 'active'
"""


def overlapping(connection: Connection, generation_ids: Sequence[int]) -> list[str]:
    """Who may write beside a SERIALIZABLE transaction that has read one of these generations.

    Of a generation that isn't retired: whoever has a snapshot now. The caller holds the view, or it shows none of them.
    """
    return list(execute(connection, OVERLAPPING, {"ids": list(generation_ids)}).scalars())


def kept(found: Sequence[str]) -> str:
    """Why a generation isn't dropped yet, for whoever reads the report."""
    return (
        f"entries that SERIALIZABLE transactions have read are kept, and maintained, until {found[0]} has ended, whose "
        "transaction is older; the next roir clean-up drops them"
    )


def retire(connection: Connection, generation_ids: Sequence[int]) -> None:
    """Of an index whose view is gone: its generations are maintained until a clean-up may drop them."""
    execute(connection, RETIRE, {"ids": list(generation_ids)})
