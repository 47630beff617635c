"""Finds capture triggers of a source that are missing or disabled, so that writes may be missed."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.engine.capture.row_function import function_name, trigger_name
from airflow_roir.engine.capture.truncate_function import truncate_function_name, truncate_trigger_name
from airflow_roir.engine.database import execute


@dataclass(frozen=True)
class Gap:
    """A capture trigger that doesn't fire for every write. oid, relation: of its table; kind: `rows` or `truncate`."""

    oid: int
    relation: str
    kind: str
    trigger: str
    state: str

    @property
    def missing(self) -> bool:
        """True if there is no such trigger at all."""
        return self.state == "missing"

    def __str__(self) -> str:
        return f"{self.trigger} on {self.relation} is {self.state}"


# Finds triggers by the functions that they call, since a trigger can be renamed. 1 is TRIGGER_TYPE_ROW. A leaf that no
# generation holds yet may lack the trigger for TRUNCATE: it gets that when it is registered.
GAPS = """
WITH relation AS (
    SELECT %(source)s::oid AS oid, true AS followed
    UNION ALL
    SELECT t.relation, t.leaf AND EXISTS (
             SELECT FROM roir.source_partition p
              WHERE p.relation = t.relation AND p.link = t.link AND p.status = 'present')
      FROM roir.partition_tree(%(source)s) t)
SELECT r.oid::bigint AS oid, r.oid::regclass::text AS relation, wanted.kind,
       coalesce(quote_ident(t.tgname), wanted.name) AS trigger,
       CASE coalesce(t.tgenabled, ' ') WHEN ' ' THEN 'missing' WHEN 'D' THEN 'disabled' ELSE 'not ENABLE ALWAYS' END
       AS state
  FROM relation r
 CROSS JOIN LATERAL (VALUES ('rows', %(rows)s, 1, %(rows_function)s, true),
                            ('truncate', %(truncate)s, 0, %(truncate_function)s, r.followed))
       AS wanted (kind, name, row, function, here)
  LEFT JOIN LATERAL (
       SELECT x.tgname, x.tgenabled FROM pg_trigger x
        WHERE x.tgrelid = r.oid AND x.tgfoid = to_regprocedure(wanted.function) AND x.tgtype & 1 = wanted.row
        ORDER BY x.tgenabled = 'A' DESC LIMIT 1) t ON true
 WHERE wanted.here AND t.tgenabled IS DISTINCT FROM 'A'
 ORDER BY r.oid <> %(source)s::oid, 2, 3
"""


def gaps(connection: Connection, source_oid: int) -> list[Gap]:
    """The capture triggers of a source and its partitions that are missing or disabled. Waits for no lock."""
    values = {
        "source": source_oid,
        "rows": trigger_name(source_oid),
        "rows_function": f"{function_name(source_oid)}()",
        "truncate": truncate_trigger_name(source_oid),
        "truncate_function": f"{truncate_function_name(source_oid)}()",
    }
    return [Gap(*tuple(row)) for row in execute(connection, GAPS, values)]
