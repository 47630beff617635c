"""Finds sessions here, and standbys as far as they say, that may see the database as it was before a transaction.

An attach asks, since an older snapshot would see its rows without their entries; a view asks before it loses its guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# A snapshot that doesn't see transaction X has an xmin of at most X, and each session shows the xmin of its snapshot.
# Sessions of other databases don't read this one. An autovacuum, which can take hours, and the server's own processes,
# such as autovacuum's launcher, read no view: they have no user, which every role can see.
# A standby's snapshots are shown by its walsender, which has no database, or by its slot; a standby behind it reports
# through it. A walsender with a database serves a consumer of changes: decoding reads no rows of tables, but the
# snapshot that a new slot exports is like that of any session.
# While a transaction older than X still runs, every snapshot has an xmin of at most X, however young it is, and it is
# unknown which snapshots were handed from one session to another. So that transaction, in any database, is named first.
HOLDERS = """
WITH moment AS (
    SELECT age(m.xid::xid) AS age FROM (SELECT %(xid)s::xid8 AS xid) m
     -- An xid that this server hasn't assigned yet is from the dump of another server.
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
    """A session or standby that may hold an older snapshot. known: it shows its xmin, so its end can be seen.

    since: when its transaction began, None for a standby. While an older writer runs, sessions that began after the
    moment in question are listed, too: they have an older snapshot only if another session gave it to them.
    """

    who: str
    known: bool
    since: datetime | None = None

    def __str__(self) -> str:
        return self.who


def holders(connection: Connection, xid: str) -> list[Holder]:
    """The possible holders of a snapshot that doesn't see a transaction of this server (64-bit id), known ones first.

    One look misses a snapshot that one session gives to another meanwhile. No look finds a standby that has neither a
    connection nor a slot, nor one without feedback behind another standby.
    """
    rows = execute(connection, HOLDERS, {"xid": xid})
    return [Holder(row.who, row.known, row.since) for row in rows]


# The capture reads entries for SERIALIZABLE writers, too, and their predicate locks look like those of readers. So a
# generation is kept only if it has such locks and a session is old enough. The row of a retired generation was last
# written when it retired.
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
    """The sessions that may write beside a SERIALIZABLE transaction that has read one of these generations.

    For a generation that isn't retired, all sessions with a snapshot. The caller has locked the view, or it shows none
    of the generations.
    """
    return list(execute(connection, OVERLAPPING, {"ids": list(generation_ids)}).scalars())


def kept(found: Sequence[str]) -> str:
    """The line of a report that says why a generation isn't dropped yet."""
    return (
        f"entries that SERIALIZABLE transactions have read are kept, and maintained, until {found[0]} has ended, whose "
        "transaction is older; the next roir clean-up drops them"
    )


def retire(connection: Connection, generation_ids: Sequence[int]) -> None:
    """Retires the generations of an index whose view is gone: writes maintain them until a clean-up may drop them."""
    execute(connection, RETIRE, {"ids": list(generation_ids)})
