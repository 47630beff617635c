"""The DML path: installs the capture function of a source (DESIGN section 4).

One function per source serves all its generations. `CREATE OR REPLACE FUNCTION` under the drain lock switches
modes and adds or removes generations, without the ACCESS EXCLUSIVE lock that dropping a trigger takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from airflow_roir.definition import Scan
from airflow_roir.engine import tables
from airflow_roir.engine.capture_function import ACTIVE, CAPTURE, DIRECT, Target, body, function_name, render
from airflow_roir.engine.catalog import TRIGGER, TRUNCATE_TRIGGER, Source
from airflow_roir.engine.database import execute
from airflow_roir.engine.entry import Entry

# 32 is TRIGGER_TYPE_TRUNCATE.
FOLLOWED = """
SELECT tgrelid::regclass::text FROM pg_trigger
 WHERE tgfoid = to_regprocedure(%(function)s) AND tgtype & 32 <> 0 ORDER BY tgrelid
"""


def targets(connection: Connection, source_oid: int) -> list[Target]:
    """The generations that a source's writes maintain, by the control tables. Read it under the drain lock."""
    generation, index = tables.generation, tables.index
    rows = connection.execute(
        select(generation.c.id, generation.c.entry, generation.c.capture_mode, generation.c.scan)
        .join(index, index.c.id == generation.c.index_id)
        .where(
            index.c.source_oid == source_oid,
            generation.c.status.in_(("building", "active", "retired")),
            generation.c.capture_mode.in_((CAPTURE, DIRECT, ACTIVE)),
        )
        .order_by(generation.c.id)
    )
    return [Target(row.id, Entry.from_json(row.entry), row.capture_mode, Scan(row.scan)) for row in rows]


def mode(connection: Connection, generation_id: int) -> str:
    """A generation's capture mode."""
    query = "SELECT capture_mode FROM roir.generation WHERE id = %(id)s"
    return str(execute(connection, query, {"id": generation_id}).scalar_one())


def refresh(connection: Connection, source: Source) -> None:
    """Make the source's writes maintain exactly the generations that the control tables name. Needs the drain lock.

    Leaves the triggers as they are: where one is missing writes were lost, and a warning must stay until a rebuild.
    """
    execute(connection, render(source, targets(connection, source.oid)))
    execute(connection, f"REVOKE ALL ON FUNCTION {function_name(source.oid)}() FROM PUBLIC")


def install(connection: Connection, source: Source) -> None:
    """As `refresh`, and see to it that every write fires the capture triggers, from now on. Needs the drain lock."""
    name = function_name(source.oid)
    refresh(connection, source)
    # What follows needn't be looked at by the guard: that is us.
    execute(connection, "SET LOCAL roir.own_ddl = 'on'")
    present = set(
        execute(
            connection,
            "SELECT tgname FROM pg_trigger WHERE tgrelid = %(oid)s AND NOT tgisinternal",
            {"oid": source.oid},
        ).scalars()
    )
    if TRIGGER not in present:
        execute(
            connection,
            f"CREATE TRIGGER {TRIGGER} AFTER INSERT OR UPDATE OR DELETE ON {source.sql} "
            f"FOR EACH ROW EXECUTE FUNCTION {name}()",
        )
        # ALWAYS: the changes of a logical-replication apply worker are changes too.
        execute(connection, f"ALTER TABLE {source.sql} ENABLE ALWAYS TRIGGER {TRIGGER}")
    if TRUNCATE_TRIGGER not in present:
        execute(
            connection,
            f"CREATE TRIGGER {TRUNCATE_TRIGGER} AFTER TRUNCATE ON {source.sql} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {name}()",
        )
        execute(connection, f"ALTER TABLE {source.sql} ENABLE ALWAYS TRIGGER {TRUNCATE_TRIGGER}")
    execute(connection, "SELECT roir.watch_truncate(%(oid)s)", {"oid": source.oid})
    for gap in gaps(connection, source.oid):
        execute(connection, f"ALTER TABLE {gap.relation} ENABLE ALWAYS TRIGGER {gap.trigger}")


@dataclass(frozen=True)
class Gap:
    """A capture trigger that doesn't fire for every write. relation: its quoted name."""

    relation: str
    trigger: str
    state: str

    @property
    def missing(self) -> bool:
        """True where there is no such trigger at all."""
        return self.state == "missing"

    def __str__(self) -> str:
        return f"{self.trigger} on {self.relation} is {self.state}"


# A leaf that no generation holds yet may lack the trigger for TRUNCATE: it gets that when it is taken in.
GAPS = """
WITH relation AS (
    SELECT %(source)s::oid AS oid, true AS followed
    UNION ALL
    SELECT t.relation, t.leaf AND EXISTS (
             SELECT FROM roir.source_partition p
              WHERE p.relation = t.relation AND p.link = t.link AND p.status = 'present')
      FROM roir.partition_tree(%(source)s) t)
SELECT r.oid::regclass::text AS relation, wanted.name AS trigger,
       CASE coalesce(t.tgenabled, ' ') WHEN ' ' THEN 'missing' WHEN 'D' THEN 'disabled' ELSE 'not ENABLE ALWAYS' END
       AS state
  FROM relation r
 CROSS JOIN LATERAL (VALUES (%(row)s, true), (%(truncate)s, r.followed)) AS wanted (name, here)
  LEFT JOIN pg_trigger t
    ON t.tgrelid = r.oid AND t.tgname = wanted.name AND t.tgfoid = to_regprocedure(%(function)s)
 WHERE wanted.here AND t.tgenabled IS DISTINCT FROM 'A'
 ORDER BY r.oid <> %(source)s::oid, 1, 2
"""


def gaps(connection: Connection, source_oid: int) -> list[Gap]:
    """The capture triggers of a source and its partitions that are missing or disabled. Waits for no lock."""
    values = {
        "source": source_oid,
        "row": TRIGGER,
        "truncate": TRUNCATE_TRIGGER,
        "function": f"{function_name(source_oid)}()",
    }
    return [Gap(row.relation, row.trigger, row.state) for row in execute(connection, GAPS, values)]


def uninstall(connection: Connection, source: Source) -> None:
    """Drop the capture triggers and function of a source without generations. Takes an ACCESS EXCLUSIVE lock."""
    execute(connection, f"DROP TRIGGER IF EXISTS {TRIGGER} ON {source.sql}")
    drop_function(connection, source.oid)


def drop_function(connection: Connection, source_oid: int) -> None:
    """Drop a source's capture function, and the triggers for TRUNCATE: they stay on partitions that were detached."""
    name = function_name(source_oid)
    for relation in execute(connection, FOLLOWED, {"function": f"{name}()"}).scalars().all():
        execute(connection, f"DROP TRIGGER {TRUNCATE_TRIGGER} ON {relation}")
    execute(connection, f"DROP FUNCTION IF EXISTS {name}()")


def is_stale(connection: Connection, source: Source) -> bool:
    """True where the capture function isn't the one that `refresh` would make: the source has another name or primary
    key now, or other code made it.
    """
    query = "SELECT prosrc FROM pg_proc WHERE oid = to_regprocedure(%(name)s)"
    made = execute(connection, query, {"name": f"{function_name(source.oid)}()"}).scalar()
    return made is not None and made.strip() != body(source, targets(connection, source.oid))
