"""The rights that a role lacks for a build, all of them at once, each with the statement that grants it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName, argument, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.source import checks

# The role. `roir.trusts` and `roir.partition_tree` are called only if the role has `control`, rights on their schema.
ROLE = """
SELECT current_user::text AS name, r.rolsuper AS super,
       current_setting('server_version_num')::int >= 160000 AS by_options,
       (SELECT bool_and(has_schema_privilege(n.oid, 'USAGE')
                        AND (n.nspname = 'roir' OR has_schema_privilege(n.oid, 'CREATE')))
          FROM pg_namespace n WHERE n.nspname IN ('roir', 'roir_data')) AS control,
       (SELECT has_type_privilege(t.oid, 'USAGE') FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
         WHERE n.nspname = 'roir' AND t.typname = 'entry_state') AS states,
       (SELECT pg_get_userbyid(n.nspowner)::text FROM pg_namespace n WHERE n.nspname = 'roir') AS control_owner,
       (SELECT o.rolsuper FROM pg_namespace n JOIN pg_roles o ON o.oid = n.nspowner WHERE n.nspname = 'roir')
       AS control_of_super,
       current_database()::text AS database, has_database_privilege(current_database(), 'CREATE') AS may_init
  FROM pg_roles r WHERE r.rolname = current_user
"""
SOURCE = """
SELECT c.oid::bigint AS oid, c.oid::regclass::text AS name, pg_get_userbyid(c.relowner)::text AS owner,
       o.rolsuper AS of_super,
       pg_has_role(c.relowner, 'USAGE') AS member,
       has_schema_privilege(c.relowner, to_regnamespace('roir_data')::oid, 'CREATE') AND NOT o.rolsuper
       AND c.relowner <> (SELECT nspowner FROM pg_namespace WHERE nspname = 'roir_data')
       AND NOT pg_has_role(c.relowner, current_user, 'USAGE') AS may_create
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles o ON o.oid = c.relowner
 WHERE c.relname = %(name)s AND n.nspname = ANY (%(schemas)s) AND c.relkind IN ('r', 'p')
 ORDER BY array_position(%(schemas)s::text[], n.nspname::text) LIMIT 1
"""
MAY_BECOME = "SELECT pg_has_role(c.relowner, 'SET') FROM pg_class c WHERE c.oid = %(oid)s"
# The source and its partitions. To read a partition by its name, a role needs USAGE on its schema.
RELATIONS = """
SELECT c.oid::regclass::text AS name, quote_ident(n.nspname) AS schema, pg_get_userbyid(c.relowner)::text AS owner,
       c.relowner <> s.relowner AND NOT (roir.trusts(c.relowner) AND roir.trusts(s.relowner)) AS of_another,
       has_schema_privilege(n.oid, 'USAGE') AS reaches,
       has_schema_privilege(s.relowner, n.oid, 'USAGE') AS owner_reaches,
       has_table_privilege(c.oid, 'SELECT') AS reads, has_table_privilege(s.relowner, c.oid, 'SELECT') AS owner_reads,
       c.oid <> s.oid OR has_table_privilege(c.oid, 'TRIGGER') AS triggers,
       c.oid <> s.oid OR has_table_privilege(c.oid, 'UPDATE, DELETE, TRUNCATE') AS locks
  FROM pg_class s JOIN pg_class c ON c.oid = s.oid OR c.oid IN (SELECT t.relation FROM roir.partition_tree(s.oid) t)
  JOIN pg_namespace n ON n.oid = c.relnamespace WHERE s.oid = %(oid)s ORDER BY c.oid <> s.oid, 1
"""
SCHEMA = """
SELECT has_schema_privilege(oid, 'CREATE') AS may_create, has_schema_privilege(oid, 'USAGE') AS may_use
  FROM pg_namespace WHERE nspname = %(schema)s
"""
# A table can have thousands of partitions, all with the same problem.
MOST_NAMED = 5


def quoted(name: str) -> QualifiedName:
    """A name without a schema, which is quoted where a user has to."""
    return QualifiedName(None, name)


@dataclass(frozen=True)
class MissingRight:
    """what: the right, in a sentence; statement: the SQL that grants it, for a role that may."""

    what: str
    statement: str

    def __str__(self) -> str:
        return f"{self.what}; run: {self.statement}"


def missing(connection: Connection, definition: IndexDefinition, schemas: list[str]) -> list[MissingRight]:
    """The rights that our role lacks. schemas: where a source without a schema is looked for.

    If the table, its schema or the control schema doesn't exist, its rights aren't missing.
    """
    role = execute(connection, ROLE).one()
    if role.super:
        return []
    who = quote(role.name)
    found: list[MissingRight] = []

    def lack(what: str, statement: str) -> None:
        if len(found) < MOST_NAMED * 4 and statement not in (one.statement for one in found):
            found.append(MissingRight(what, statement))

    if role.control is False and role.control_of_super:
        where = "" if definition.name.schema is None else f" --schema {argument(quoted(definition.name.schema))}"
        tables = "" if definition.source is None else f" --tables {argument(definition.source)}"
        lack(
            f"role {who} has no rights on the control schema, which the superuser {quote(role.control_owner)} owns. "
            "As long as there is no index, a superuser hands it over by the SQL that a command prints",
            f"roir role-sql {argument(quoted(role.name))}{where}{tables}",
        )
    elif role.control is False:
        lack(
            f"role {who} has no rights on the control schema, which {quote(role.control_owner)} owns",
            f"GRANT {quote(role.control_owner)} TO {who}",
        )
    elif role.control is None and not role.may_init:
        database = quote(role.database)
        lack(f"role {who} may not create schemas, as roir init does", f"GRANT CREATE ON DATABASE {database} TO {who}")
    elif role.states is False:
        lack(
            f"role {who} lacks USAGE on type roir.entry_state, which the delta of an index has",
            f"GRANT USAGE ON TYPE roir.entry_state TO {who}",
        )
    source = None
    if definition.source is not None:
        wanted = [definition.source.schema] if definition.source.schema is not None else schemas
        source = execute(connection, SOURCE, {"name": definition.source.name, "schemas": wanted}).first()
    if source is not None:
        _of_source(connection, role, source, definition, lack)
    schema = definition.name.schema or (None if definition.source is None else definition.source.schema)
    if schema is not None and (row := execute(connection, SCHEMA, {"schema": schema}).first()) is not None:
        lacks = [name for name, may in (("USAGE", row.may_use), ("CREATE", row.may_create)) if not may]
        if lacks:
            rights = ", ".join(lacks)
            lack(
                f"role {who} lacks {rights} on schema {quote(schema)}, where the index's view is to be",
                f"GRANT {rights} ON SCHEMA {quote(schema)} TO {who}",
            )
    return found


def _of_source(connection: Connection, role: Any, source: Any, definition: IndexDefinition, lack: Any) -> None:
    who, owner = quote(role.name), quote(source.owner)
    may_become = not role.by_options or execute(connection, MAY_BECOME, {"oid": source.oid}).scalar_one()
    if not source.member or not may_become:
        if source.of_super:
            lack(
                f"table {source.name} belongs to the superuser {owner}, whose members can become superuser, too. Give "
                "the table to another role",
                f"ALTER TABLE {source.name} OWNER TO {who}",
            )
        else:
            options = " WITH INHERIT TRUE, SET TRUE" if role.by_options else ""
            why = "its capture runs as its owner" if source.member else "only its owner's members can capture writes"
            lack(
                f"role {who} can't act as {owner}, who owns table {source.name}: {why}",
                f"GRANT {owner} TO {who}{options}",
            )
    if source.may_create:
        lack(
            f"{owner}, who owns table {source.name}, could replace roir's functions in roir_data",
            f"REVOKE CREATE ON SCHEMA roir_data FROM {owner}",
        )
    if role.control is not True:
        return
    for row in execute(connection, RELATIONS, {"oid": source.oid}).all():
        if row.of_another:
            lack(
                f"partition {row.name} belongs to {quote(row.owner)}, its table to {owner}; one role must read both",
                f"ALTER TABLE {row.name} OWNER TO {owner}",
            )
            continue
        # A member has its owner's rights, and an owner can grant back the rights that it took from itself.
        for name, reaches in ((owner, row.owner_reaches), (who, row.reaches or not source.member)):
            if not reaches:
                lack(
                    f"role {name} may not look into schema {row.schema}, where {row.name} is",
                    f"GRANT USAGE ON SCHEMA {row.schema} TO {name}",
                )
        rights = [
            name
            for name, may in (
                ("SELECT", row.owner_reads and (row.reads or not source.member)),
                ("TRIGGER", row.triggers or not source.member),
                ("UPDATE", row.locks or not source.member),
            )
            if not may
        ]
        if rights:
            lack(
                f"{owner} took {', '.join(rights)} on {row.name} from itself",
                f"GRANT {', '.join(rights)} ON {row.name} TO {owner}",
            )
    for row in checks.types_not_usable(connection, source.oid, definition):
        lack(f"role {who} may not use type {row.type}", f"GRANT USAGE ON TYPE {row.type} TO {who}")
