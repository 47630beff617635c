"""The roles that meet our objects: the rights that the documentation grants each, and the rights that each has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg2
import psycopg2.extensions
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

DOCS = Path(__file__).parents[2] / "docs" / "rights.md"
NAMES = ("builder", "alice", "bob", "app", "reader", "watcher", "monitor", "pauser")
# Objects by kind and name. Numbers in names are replaced by N.
OBJECTS = """
SELECT o.kind, regexp_replace(regexp_replace(o.name, '_[0-9]{4,}', '_N'), '\\mg[0-9]+', 'gN') AS name, o.oid
  FROM (SELECT CASE c.relkind WHEN 'S' THEN 'sequence' ELSE 'relation' END AS kind, c.oid::regclass::text AS name,
               c.oid::bigint AS oid
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.relkind IN ('r', 'p', 'v', 'S', 'm', 'f')
           AND (n.nspname IN ('roir', 'roir_data') OR c.oid IN (SELECT to_regclass(format('%%I.%%I', schema_name, name))
                                                                  FROM roir.index))
        UNION ALL
        SELECT 'function', p.oid::regprocedure::text, p.oid::bigint FROM pg_proc p
         WHERE p.pronamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace)
        UNION ALL
        SELECT 'type', t.oid::regtype::text, t.oid::bigint FROM pg_type t
         WHERE t.typnamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND t.typelem = 0
        UNION ALL
        SELECT 'schema', n.nspname, n.oid::bigint FROM pg_namespace n WHERE n.nspname IN ('roir', 'roir_data')) o
"""
VERBS = {
    "relation": ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER"),
    "sequence": ("USAGE", "SELECT", "UPDATE"),
    "function": ("EXECUTE",),
    "type": ("USAGE",),
    "schema": ("USAGE", "CREATE"),
}
ASK = {"relation": "table", "sequence": "sequence", "function": "function", "type": "type", "schema": "schema"}


@dataclass
class World:
    """A database with its roles. dsn: a superuser's; database: by roir's role."""

    dsn: str
    database: Database
    roles: dict[str, str]

    def dsn_of(self, role: str) -> str:
        """A role's own DSN; `super` is the superuser."""
        return self.dsn if role == "super" else make_dsn(**{**parse_dsn(self.dsn), "user": self.roles[role]})

    def session(self, role: str, isolation: str = "READ COMMITTED") -> psycopg2.extensions.connection:
        """A session of a role's own."""
        return steps.session(self.dsn_of(role), isolation)

    def run(self, *statements: str) -> None:
        """Runs statements as the superuser, with roles by their names here."""
        run_sql(self.dsn, *(self.named(statement) for statement in statements))

    def named(self, statement: str) -> str:
        """The statement with the names that the roles have on the server."""
        return re.sub(r"\b(" + "|".join(NAMES) + r")\b", lambda found: self.roles[found[0]], statement)

    def outcome(self, role: str, statement: str) -> str:
        """The outcome of a statement that is rolled back: `done`, or its SQLSTATE. It doesn't wait for locks."""
        one = self.session(role)
        try:
            sql(one, "SET lock_timeout = '1ms'")
            sql(one, statement)
            return "done"
        except psycopg2.Error as error:
            return str(error.pgcode)
        finally:
            one.close()

    def rights(self, role: str) -> dict[tuple[str, str], str]:
        """A role's rights on our objects, as the server reports them: verbs by the kind and the name of each object."""
        one = self.session("super")
        name = self.roles.get(role, role)
        found: dict[tuple[str, str], str] = {}
        for kind, called, oid in sql(one, OBJECTS.replace("%%", "%")):
            verbs = [
                verb
                for verb in VERBS[kind]
                if sql(one, f"SELECT has_{ASK[kind]}_privilege(%s, %s::oid, %s)", name, oid, verb) == [(True,)]
            ]
            if kind == "relation":
                verbs += [
                    f"{verb} of columns"
                    for verb in ("SELECT", "INSERT", "UPDATE")
                    if verb not in verbs
                    and sql(one, "SELECT has_any_column_privilege(%s, %s::oid, %s)", name, oid, verb) == [(True,)]
                ]
            if verbs:
                found[kind, called] = ", ".join(verbs)
        one.close()
        return found


def documented(role: str) -> list[str]:
    """The grants that the documentation gives to a role."""
    blocks = re.findall(r"^(GRANT .*?;)$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    found = [" ".join(block.split()) for block in blocks if block.endswith(f" TO {role};")]
    assert found, role
    return found


@pytest.fixture(params=["superuser", "plain"])
def world(request: pytest.FixtureRequest, dsn: str) -> Iterator[World]:
    """The world with two roles for roir: a superuser, and a role that has only the rights that it needs."""
    [(tag,)] = sql(steps.session(dsn), "SELECT current_database()")
    roles = {name: f"{name}_{tag}" for name in NAMES}
    run_sql(dsn, *(f"CREATE ROLE {name} LOGIN" for name in roles.values()))
    database = Database(dsn, "roir tests")
    made = World(dsn, database, roles)
    if request.param == "plain":
        made.run(
            "GRANT alice, bob TO builder",
            "DROP SCHEMA roir, roir_data CASCADE",
            f"GRANT CREATE ON DATABASE {tag} TO builder",
            "GRANT CREATE ON SCHEMA public TO builder",
        )
        made.database = Database(made.dsn_of("builder"), "roir tests")
        install.init(made.database)
    made.run(
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 100) i",
        "GRANT CREATE ON SCHEMA public TO alice, bob",
        "ALTER TABLE t OWNER TO alice",
    )
    yield made
    # The clean-up below would wait for sessions that a failed test has left open.
    run_sql(
        dsn,
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{tag}' AND pid <> pg_backend_pid()",
    )
    for name in roles.values():
        run_sql(dsn, f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")
