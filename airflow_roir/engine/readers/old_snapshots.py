"""Who may still see the database as it was before a transaction: sessions here, and on standbys as far as they tell.

Asked before an attach, whose rows an older snapshot would see without their entries, and before a view loses its guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# A snapshot that doesn't see transaction X has an xmin of at most X, and whoever holds a snapshot shows its xmin.
# Sessions of other databases read nothing of this one. An autovacuum, which can take hours, and the server's own
# processes, autovacuum's launcher too, read no view: they have no user. That every role sees.
# A standby's snapshots are told by its walsender, which has no database, or by its slot; those of a standby behind it
# come through it. A walsender with a database serves a consumer of changes: decoding looks at no table's rows, but the
# snapshot that a new slot exports is one like any session's.
# Beside a writer of before X every snapshot has an xmin of at most X, however young it is, and nobody knows which of
# them were handed on. So that writer, in whatever database, is named first.
HOLDERS = """
WITH moment AS (
    SELECT age(m.xid::xid) AS age FROM (SELECT %(xid)s::xid8 AS xid) m
     -- Not yet assigned here: the database was restored from another server's dump.
     WHERE m.xid < pg_snapshot_xmax(pg_current_snapshot())
       -- PostgreSQL lets no snapshot become that old; age() would wrap around.
       AND pg_snapshot_xmax(pg_current_snapshot())::text::numeric - m.xid::text::numeric < 2000000000),
other AS (
    SELECT a.*, a.pid || coalesce(' (' || coalesce(nullif(a.application_name, ''), a.usename) || ')', '') AS named
      FROM pg_stat_activity a WHERE a.pid <> pg_backend_pid()),
session AS (
    SELECT a.* FROM moment m, other a
     WHERE age(a.backend_xmin) >= m.age AND a.usesysid IS NOT NULL
       AND (a.datid IS NULL OR a.datid = (SELECT oid FROM pg_database WHERE datname = current_database()))),
writer AS (
    SELECT 'pid ' || a.named || CASE WHEN a.datname <> current_database() THEN ' of database ' || quote_ident(a.datname)
                                ELSE '' END AS who, a.pid, a.backend_xid AS xid
      FROM moment m, other a WHERE age(a.backend_xid) >= m.age
    UNION ALL
    SELECT 'prepared transaction ' || quote_literal(p.gid), NULL, p.transaction
      FROM moment m, pg_prepared_xacts p WHERE age(p.transaction) >= m.age)
SELECT w.who || ', whose open transaction makes the snapshots of others as old as itself' AS who, true AS known,
       NULL::timestamptz AS since
  FROM writer w WHERE EXISTS (SELECT FROM session s WHERE s.backend_xmin = w.xid AND s.pid IS DISTINCT FROM w.pid)
UNION ALL
SELECT CASE WHEN r.pid IS NULL OR a.datid IS NOT NULL THEN 'pid ' ELSE 'a standby, by its walsender of pid ' END
       || a.named, true, a.xact_start
  FROM session a LEFT JOIN pg_stat_replication r ON r.pid = a.pid
UNION ALL
SELECT 'a standby, by its replication slot ' || quote_ident(s.slot_name), true, NULL
  FROM moment m, pg_replication_slots s
 WHERE age(s.xmin) >= m.age
UNION ALL
SELECT 'a standby without hot_standby_feedback, pid ' || r.pid, false, NULL
  FROM moment m, pg_stat_replication r
  JOIN pg_stat_activity a ON a.pid = r.pid
  LEFT JOIN pg_replication_slots s ON s.active_pid = r.pid
 WHERE a.datid IS NULL AND a.backend_xmin IS NULL AND s.xmin IS NULL AND s.slot_type IS DISTINCT FROM 'logical'
   AND r.state IS DISTINCT FROM 'backup'
UNION ALL
SELECT 'a standby that isn''t connected, of replication slot ' || quote_ident(s.slot_name), false, NULL
  FROM moment m, pg_replication_slots s
 WHERE s.slot_type = 'physical' AND NOT s.active AND s.xmin IS NULL AND s.restart_lsn IS NOT NULL
"""


@dataclass(frozen=True)
class Holder:
    """Who may hold an older snapshot. known: it says so itself, and will say when it is gone.

    since: when its transaction began, None for a standby. One that began after the moment in question is listed, too,
    beside a writer of before: it has an older snapshot only if that was handed on.
    """

    who: str
    known: bool
    since: datetime | None = None

    def __str__(self) -> str:
        return self.who


def holders(connection: Connection, xid: str) -> list[Holder]:
    """Who may hold a snapshot that doesn't see a transaction of this server (its 64-bit id); those that say so first.

    One look doesn't see a snapshot that is handed from one session to another meanwhile. A standby that has neither a
    connection nor a slot is unknown, and so is one without feedback behind another standby.
    """
    rows = execute(connection, HOLDERS, {"xid": xid})
    return [Holder(row.who, row.known, row.since) for row in rows]


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
