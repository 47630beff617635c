"""The SQL that creates a role with the rights to build, those under "The role that builds" in docs/rights.md."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.errors import InvalidInput

HEAD = """\
-- Run it in the tables' database as a superuser, by psql for example. Then give the role a password there, by
-- \\password and its name: so the password itself is in no log. Then, as the new role: roir init.\
"""


def role_sql(role: str, schemas: Sequence[str] = ("public",), tables: Sequence[QualifiedName] = ()) -> str:
    """Statements for a superuser, or another role that may grant all this. Safe to repeat.

    They run in the database of the tables. role: its name, not quoted. schemas: the names of the schemas for indexes.
    tables: the role becomes a member of their owners; if an owner is a superuser the statements stop, since its members
    could become superuser, too.

    They set no password: psql's `\\password` sends only its hash. Raises InvalidInput for a reserved name.
    """
    if role in ("public", "none") or role.startswith("pg_"):
        raise InvalidInput(f"role {role}: PostgreSQL reserves that name; choose another")
    who, name = quote(role), _literal(role)
    statements = [
        _block(
            "BEGIN",
            f"  IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) {name}) THEN",
            f"    CREATE ROLE {who} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;",
            "  END IF;",
            "  -- For roir init, which makes the schemas roir and roir_data.",
            "  EXECUTE pg_catalog.format('GRANT CONNECT, CREATE, TEMPORARY ON DATABASE %I TO %I',",
            f"                            pg_catalog.current_database(), {name});",
            "END",
        ),
        "-- For the views of the indexes.",
        *(f"GRANT USAGE, CREATE ON SCHEMA {quote(schema)} TO {who};" for schema in schemas),
        *(_membership(name, _literal(table.sql)) for table in tables),
        _control_schema(name),
    ]
    return "\n".join([HEAD, "BEGIN;", *statements, "COMMIT;"])


def _membership(role: str, table: str) -> str:
    return _block(
        "DECLARE",
        "  owner record;",
        "BEGIN",
        "  -- The capture runs as the table's owner, who alone may also trigger, lock and attach.",
        "  SELECT r.rolname AS name, r.rolsuper INTO STRICT owner",
        "    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_roles r ON r.oid OPERATOR(pg_catalog.=) c.relowner",
        f"   WHERE c.oid OPERATOR(pg_catalog.=) {table}::pg_catalog.regclass;",
        "  IF owner.rolsuper THEN",
        "    RAISE EXCEPTION USING",
        "      MESSAGE = pg_catalog.format('table %s belongs to a superuser, whose members can become superuser, too',",
        f"                                  {table}),",
        "      HINT = 'Give the table to another role first: ALTER TABLE ... OWNER TO ...';",
        f"  ELSIF owner.name OPERATOR(pg_catalog.<>) {role} THEN",
        f"    EXECUTE pg_catalog.format('GRANT %I TO %I', owner.name, {role});",
        "  END IF;",
        "END",
    )


# The objects of a control schema without indexes. A sequence follows its table.
OF_THE_SUPERUSER = """\
      SELECT pg_catalog.format('%s %s', CASE c.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END,
                               c.oid::pg_catalog.regclass) AS thing
        FROM pg_catalog.pg_class c WHERE c.relkind IN ('r', 'p', 'v')
         AND c.relnamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir')
      UNION ALL
      SELECT pg_catalog.format('ROUTINE %s', p.oid::pg_catalog.regprocedure)
        FROM pg_catalog.pg_proc p
       WHERE p.pronamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir')
      UNION ALL
      SELECT pg_catalog.format('TYPE %s', t.oid::pg_catalog.regtype)
        FROM pg_catalog.pg_type t WHERE t.typtype IN ('e', 'd')
         AND t.typnamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir')
      UNION ALL
      SELECT pg_catalog.format('SCHEMA %I', n.nspname)
        FROM pg_catalog.pg_namespace n WHERE n.nspname IN ('roir', 'roir_data')"""


def _control_schema(role: str) -> str:
    """Gives the role rights on a control schema that exists: membership in its owner, or that of a superuser whole."""
    return _block(
        "DECLARE",
        "  had record;",
        "  one record;",
        "BEGIN",
        "  SELECT r.rolname AS name, r.rolsuper INTO had",
        "    FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid OPERATOR(pg_catalog.=) n.nspowner",
        "   WHERE n.nspname OPERATOR(pg_catalog.=) 'roir';",
        f"  IF NOT FOUND OR had.name OPERATOR(pg_catalog.=) {role} THEN",
        "    RETURN;",
        "  ELSIF NOT had.rolsuper THEN",
        f"    EXECUTE pg_catalog.format('GRANT %I TO %I', had.name, {role});",
        "    RETURN;",
        "  END IF;",
        "  -- A superuser has run roir init. Its members can become superuser, so the role becomes the owner instead.",
        "  IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relkind IN ('r', 'p')",
        "              AND c.relnamespace OPERATOR(pg_catalog.=) pg_catalog.to_regnamespace('roir_data')) THEN",
        "    RAISE EXCEPTION USING",
        "      MESSAGE = pg_catalog.format('the control schema of superuser %I has indexes', had.name),",
        "      HINT = 'Drop them first (roir drop), then run this again. Or build as that superuser.';",
        "  END IF;",
        "  FOR one IN",
        OF_THE_SUPERUSER,
        "  LOOP",
        f"    EXECUTE pg_catalog.format('ALTER %s OWNER TO %I', one.thing, {role});",
        "  END LOOP;",
        "END",
    )


def _block(*lines: str) -> str:
    body = "\n".join(lines)
    tag = "$roir$"
    while tag in body:
        tag = f"{tag[:-1]}_$"
    return f"DO {tag}\n{body}\n{tag};"


def _literal(text: str) -> str:
    """A literal that is right with standard_conforming_strings on or off."""
    doubled = text.replace("'", "''")
    return "E'" + doubled.replace("\\", "\\\\") + "'" if "\\" in text else f"'{doubled}'"
