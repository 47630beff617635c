"""Takes back what the server gives to others with each object: to PUBLIC, and by ALTER DEFAULT PRIVILEGES of our role.

All roles may use our schemas, so we alone must give rights on what is in them. A row type needs that, too: whoever may
use it can make a column of it, and then neither the table nor its generation can be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# What the control schema's files say, of whatever else than its tables and views.
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

# Functions of ours that not all roles may call: readers call one by the view, writers others by the capture. Those that
# are named here are nobody's but ours.
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
    """Leave rights to the owner alone. relations: by name; functions: with their arguments' types."""
    given = execute(connection, GIVEN, {"relations": list(relations), "functions": list(functions)})
    for statement in given.scalars().all():
        execute(connection, statement)


def closed(connection: Connection) -> list[str]:
    """The functions of roir's that readers and writers need, and that not all roles may call."""
    return list(execute(connection, CLOSED).scalars())


def give_again(connection: Connection) -> None:
    """Make the rights as they were, where a dump was restored without its grants; those of a source's owner follow.

    Functions are given to PUBLIC in any case: `ALTER DEFAULT PRIVILEGES`, or a hardening script, may have taken them.
    """
    for function in closed(connection):
        execute(connection, f"GRANT EXECUTE ON FUNCTION {function} TO PUBLIC")
    if not execute(connection, IS_WITHOUT).scalar_one():
        return
    for statement in OF_SCHEMA:
        execute(connection, statement)
    take_back(connection, execute(connection, OURS).scalars().all())
