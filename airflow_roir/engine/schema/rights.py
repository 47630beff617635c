"""Takes back the rights that a new object gives to others: those of PUBLIC, and ALTER DEFAULT PRIVILEGES of our role.

All roles may use our schemas, so roir alone must give the rights on their objects. That includes row types: a role that
may use one can make a column of it, and then neither the table nor its generation can be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# The grants in the control schema's files, but for its tables and views.
IS_WITHOUT = "SELECT NOT has_schema_privilege('public', 'roir', 'USAGE')"
OF_SCHEMA = (
    "GRANT USAGE ON SCHEMA roir, roir_data TO PUBLIC",
    "REVOKE ALL ON FUNCTION roir.note_arrival(), roir.note_taken(bigint, oid, tid), roir.take_sample() FROM PUBLIC",
    "REVOKE ALL ON TYPE roir.entry_state FROM PUBLIC",
)
OURS = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname IN ('roir', 'roir_data') AND c.relkind IN ('r', 'p', 'v') ORDER BY 1
"""

# Functions that readers call by the view, or writers by the capture, and that PUBLIC can't call now. The functions
# named here are for roir alone.
CLOSED = """
SELECT p.oid::regprocedure::text FROM pg_proc p
 WHERE p.pronamespace = 'roir'::regnamespace AND p.proname NOT IN ('note_arrival', 'note_taken', 'take_sample')
   AND NOT EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
                    WHERE a.grantee = 0 AND a.privilege_type = 'EXECUTE')
 ORDER BY p.proname <> 'published', 1
"""

GIVEN = """
SELECT DISTINCT format('REVOKE ALL ON %%s %%s FROM %%s CASCADE', o.kind, o.name,
                       CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END)
  FROM (SELECT 'TABLE' AS kind, c.oid::regclass::text AS name, c.relowner AS owner, c.relacl AS acl
          FROM pg_class c WHERE c.oid IN (SELECT to_regclass(r)::oid FROM unnest(%(relations)s::text[]) r)
        UNION ALL
        SELECT 'TYPE', t.oid::regtype::text, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
          FROM pg_class c JOIN pg_type t ON t.oid = c.reltype
         WHERE c.oid IN (SELECT to_regclass(r)::oid FROM unnest(%(relations)s::text[]) r)
        UNION ALL
        SELECT 'FUNCTION', p.oid::regprocedure::text, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
          FROM pg_proc p WHERE p.oid IN (SELECT to_regprocedure(f)::oid FROM unnest(%(functions)s::text[]) f)) o
 CROSS JOIN LATERAL aclexplode(o.acl) a WHERE a.grantee <> o.owner
"""


def take_back(connection: Connection, relations: Sequence[str] = (), functions: Sequence[str] = ()) -> None:
    """Take the rights on objects from all roles but the owner. relations: by name; functions: with argument types."""
    given = execute(connection, GIVEN, {"relations": list(relations), "functions": list(functions)})
    for statement in given.scalars().all():
        execute(connection, statement)


def closed(connection: Connection) -> list[str]:
    """The functions that readers and writers need, but that PUBLIC may not call."""
    return list(execute(connection, CLOSED).scalars())


def give_again(connection: Connection) -> None:
    """Restore the rights if a dump was restored without its grants; the rights of sources' owners follow later.

    PUBLIC gets EXECUTE on these functions in any case: `ALTER DEFAULT PRIVILEGES`, or a hardening script, may have
    taken it.
    """
    for function in closed(connection):
        execute(connection, f"GRANT EXECUTE ON FUNCTION {function} TO PUBLIC")
    if not execute(connection, IS_WITHOUT).scalar_one():
        return
    for statement in OF_SCHEMA:
        execute(connection, statement)
    take_back(connection, execute(connection, OURS).scalars().all())
