"""Obstacles to the swap of a unit, whatever it copies: looked up before the work, and once more before the swap.

The swap drops the old segments and attaches the new ones. So no object of others may depend on the old ones, and the
new ones must have all that the base requires of its partitions. Our role reads their bounds from text, which runs the
checks of domains: this is refused if a domain's owner isn't trusted (docs/architecture.md, "Whose code runs as whom").
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry

# An object that makes DROP TABLE fail: it depends on the table, its row type, indexes or constraints, and isn't a part
# of any of these.
DEPENDENT = """
WITH part (classid, objid) AS (
    SELECT 'pg_class'::regclass, unnest(%(oids)s::oid[])
    UNION ALL SELECT 'pg_class'::regclass, x.indexrelid FROM pg_index x WHERE x.indrelid = ANY (%(oids)s::oid[])
    UNION ALL SELECT 'pg_constraint'::regclass, n.oid FROM pg_constraint n WHERE n.conrelid = ANY (%(oids)s::oid[])
    UNION ALL SELECT 'pg_type'::regclass, t.oid FROM pg_type t
                JOIN pg_class c ON t.oid = c.reltype OR t.typelem = c.reltype AND t.typcategory = 'A'
               WHERE c.oid = ANY (%(oids)s::oid[]) AND c.reltype <> 0)
SELECT DISTINCT CASE WHEN w.oid IS NULL THEN pg_describe_object(d.classid, d.objid, d.objsubid)
                     ELSE pg_describe_object('pg_class'::regclass, w.ev_class, 0) END AS what
  FROM part p
  JOIN pg_depend d ON d.refclassid = p.classid AND d.refobjid = p.objid AND d.deptype = 'n'
  LEFT JOIN pg_rewrite w ON d.classid = 'pg_rewrite'::regclass AND w.oid = d.objid
 WHERE (d.classid, d.objid) NOT IN (SELECT p.classid, p.objid FROM part p)
   AND NOT EXISTS (SELECT FROM pg_depend a JOIN part o ON o.classid = a.refclassid AND o.objid = a.refobjid
                    WHERE a.classid = d.classid AND a.objid = d.objid AND a.deptype <> 'n')
 ORDER BY 1 LIMIT 1
"""
# Roir's own constraints are on segments alone. Before PostgreSQL 18 a NOT NULL is no row of pg_constraint.
CONSTRAINT = """
SELECT quote_ident(conname) FROM pg_constraint
 WHERE conrelid = to_regclass(%(base)s) AND contype IN ('c', 'n') AND NOT connoinherit
UNION ALL
SELECT concat('NOT NULL of ', attname) FROM pg_attribute
 WHERE attrelid = to_regclass(%(base)s) AND attnum > 0 AND attnotnull ORDER BY 1 LIMIT 1
"""
# Alterations that the status warns of, since the index may have missed writes. New segments would hide them.
ALTERED = """
SELECT roir.table_additions(%(generation)s) > 0
       OR EXISTS (SELECT FROM pg_class WHERE oid = ANY (%(oids)s::oid[]) AND relpersistence <> 'p')
       OR ARRAY(SELECT attname::text FROM pg_attribute
                 WHERE attrelid = to_regclass(%(base)s) AND attnum > 0 AND NOT attisdropped
                 ORDER BY attnum) <> %(columns)s::text[]
"""
DOMAIN = """
SELECT t.oid::regtype::text FROM pg_attribute a
 CROSS JOIN LATERAL roir.type_tree(a.atttypid) x (oid)
  JOIN pg_type t ON t.oid = x.oid
 WHERE a.attrelid = to_regclass(%(base)s) AND a.attname = ANY (%(columns)s) AND t.typtype = 'd'
   AND NOT roir.trusts(t.typowner)
 ORDER BY 1 LIMIT 1
"""
# Only an ALWAYS trigger, as roir creates it: others don't fire if session_replication_role is replica. A trigger that
# was disabled meanwhile has missed writes.
CAPTURED = """
SELECT count(*) FROM pg_trigger t
 WHERE t.tgrelid = ANY (%(oids)s::oid[]) AND t.tgfoid = to_regprocedure(%(function)s) AND t.tgenabled = 'A'
"""


def obstacle(connection: Connection, claim: UnitClaim, entry: Entry, oids: Sequence[int]) -> str | None:
    """The obstacle to a unit's swap, in words with the remedy; None if there is none. oids: of its segments."""
    what = execute(connection, DEPENDENT, {"oids": list(oids)}).scalar()
    if what is not None:
        return f"{what} depends on a segment of it. Let that read the index's view, or drop it"
    base = physical.base(claim.generation_id)
    constraint = execute(connection, CONSTRAINT, {"base": base}).scalar()
    if constraint is not None:
        return f"{base} has got a constraint that isn't roir's, {constraint}: drop it"
    return altered(connection, claim, entry, oids) or unread(connection, claim, entry)


def altered(connection: Connection, claim: UnitClaim, entry: Entry, oids: Sequence[int]) -> str | None:
    """Why entries may be missing: others altered the index's tables; None if they didn't."""
    base = physical.base(claim.generation_id)
    values = {"generation": claim.generation_id, "base": base, "oids": list(oids), "columns": entry.physical()}
    if not execute(connection, ALTERED, values).scalar_one():
        return None
    return (
        f"{base} or its segments were altered by others, so entries may be missing, and new segments would hide that: "
        "first do what roir status says of it"
    )


def unread(connection: Connection, claim: UnitClaim, entry: Entry) -> str | None:
    """Why our role must not read the bounds of a unit's segments; None if it may."""
    if claim.segments[0] == physical.DEFAULT_SEGMENT:
        return None
    domain = others_domain(connection, claim.generation_id, entry)
    if domain is None:
        return None
    return f"to read its bounds would run the checks of {domain} as roir: make a superuser the owner of that type"


def others_domain(connection: Connection, generation_id: int, entry: Entry) -> str | None:
    """A domain whose owner isn't trusted, among the types that segments are cut by; None if there is none."""
    values = {"base": physical.base(generation_id), "columns": entry.physical(range(entry.partition))}
    found: str | None = execute(connection, DOMAIN, values).scalar()
    return found


def missed(connection: Connection, claim: UnitClaim) -> str | None:
    """Why the list of touched identities may be incomplete; None if each segment has its trigger."""
    values = {"oids": [oid for oid, _, _ in claim.files], "function": f"{claim.touch}()"}
    if execute(connection, CAPTURED, values).scalar_one() == len(claim.files):
        return None
    return "a trigger of it on its segments was disabled or dropped meanwhile"
