"""All objections to a build are shown at once. Each statement that is offered removes its objection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install, prepare
from airflow_roir.engine.database import Database
from airflow_roir.engine.dry_run import OWN_SCHEMAS
from airflow_roir.engine.forecast import objections
from airflow_roir.engine.forecast.objections import Objections
from airflow_roir.errors import RoirError
from airflow_roir.options import BuildOptions
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import session, sql

DEFINITION = IndexDefinition.parse("shown.ix", '"S 1".t', "k", "v")
# The refusals of the table `u` in these tests, before `roir init` and after.
OF_U = (
    "is unlogged",
    "has inheritance children",
    "has no primary key",
    "row-level security",
    'publication "everything"',
    'no column "w"',
)


def of(dsn: str, definition: IndexDefinition = DEFINITION, **options: object) -> Objections:
    return objections.find(Database(dsn), definition, BuildOptions.asked(**options))


@dataclass(frozen=True)
class Roles:
    """A role that made the control schema, one that owns the table, and one without rights, by its DSN."""

    keeper: str
    owner: str
    poor: str
    dsn: str

    def give(self, found: Objections) -> None:
        run_sql(self.dsn, *(one.statement for one in found.missing))


@pytest.fixture
def roles(dsn: str, stranger: str) -> Iterator[Roles]:
    [(name,)] = sql(session(dsn), "SELECT current_database()::text")
    keeper, owner = f'"keeper of {name}"', f'"owner ""of"" {name}"'
    run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE")
    for role in (keeper, owner):
        run_sql(dsn, f"CREATE ROLE {role} LOGIN")
    run_sql(
        dsn,
        f"GRANT CREATE ON DATABASE {name} TO {keeper}",
        f'CREATE SCHEMA "S 1" AUTHORIZATION {owner}',
        f'SET ROLE {owner}; CREATE TABLE "S 1".t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)',
        f'SET ROLE {owner}; CREATE TABLE "S 1".t1 PARTITION OF "S 1".t FOR VALUES FROM (0) TO (100)',
        "RESET ROLE",
        'CREATE TABLE "S 1".t2 PARTITION OF "S 1".t FOR VALUES FROM (100) TO (200)',
        "CREATE SCHEMA shown",
    )
    install.init(Database(make_dsn(**{**parse_dsn(dsn), "user": keeper.strip('"')})))
    yield Roles(keeper, owner, stranger, dsn)
    run_sql(dsn, *(f"DROP OWNED BY {role} CASCADE" for role in (keeper, owner)))
    run_sql(dsn, *(f"DROP ROLE {role}" for role in (keeper, owner)))


def test_the_statements_for_all_missing_rights_are_enough(roles: Roles) -> None:
    found = of(roles.poor)
    assert not found.refused
    said = [str(one) for one in found.missing]
    for part in ("no rights on the control schema", "can't act as", "USAGE, CREATE on schema"):
        assert any(part in one for one in said), (part, said)
    roles.give(found)
    # A role sees the partitions once it may use the control schema.
    [last] = of(roles.poor).missing
    assert last.statement == f'ALTER TABLE "S 1".t2 OWNER TO {roles.owner}'
    roles.give(of(roles.poor))
    assert not of(roles.poor)
    assert prepare.prepare(Database(roles.poor), DEFINITION, BuildOptions(), "test").index == "shown.ix"


TAKEN = {
    "the control schema": "REVOKE {keeper} FROM {poor}",
    "the owner": "REVOKE {owner} FROM {poor}",
    "the index's schema": "REVOKE CREATE ON SCHEMA shown FROM {poor}",
    "use of the index's schema": "REVOKE USAGE ON SCHEMA shown FROM {poor}",
    "the owner's own schema": 'REVOKE USAGE ON SCHEMA "S 1" FROM {owner}',
    "the owner's own table": 'REVOKE SELECT, TRIGGER ON "S 1".t FROM {owner}',
    "the owner's own partition": 'REVOKE SELECT ON "S 1".t1 FROM {owner}',
    "too much for the owner": "GRANT CREATE ON SCHEMA roir_data TO {owner}",
}


@pytest.mark.slow
def test_each_right_is_missed_by_itself(roles: Roles) -> None:
    for _ in range(2):
        roles.give(of(roles.poor))
    assert not of(roles.poor)
    [(name,)] = sql(session(roles.poor), "SELECT current_user::text")
    poor = f'"{name}"'
    for what, taken in TAKEN.items():
        run_sql(roles.dsn, taken.format(keeper=roles.keeper, owner=roles.owner, poor=poor))
        found = of(roles.poor)
        assert found.missing, what
        assert not found.refused, (what, found)
        roles.give(found)
        assert not of(roles.poor), what


def test_what_is_refused_is_said_at_once(dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE UNLOGGED TABLE u (k int, v text)",
        "CREATE TABLE child () INHERITS (u)",
        "CREATE PUBLICATION everything FOR ALL TABLES",
        "ALTER TABLE u ENABLE ROW LEVEL SECURITY",
        "CREATE TABLE ix (id int)",
    )
    definition = IndexDefinition.parse("ix", "u", "k,w,x", "v")
    refused = of(dsn, definition, on_duplicate="stop").refused
    for part in (
        *OF_U,
        'no column "x"',
        "another relation or type has that name",
        "on_duplicate",
    ):
        assert any(part in one for one in refused), (part, refused)
    with pytest.raises(RoirError) as first:
        prepare.prepare(Database(dsn), definition, BuildOptions.asked(on_duplicate="stop"), "test")
    assert str(first.value) in refused


@pytest.mark.parametrize("schema", OWN_SCHEMAS)
def test_an_index_has_no_name_in_a_schema_of_roir_or_the_server(dsn: str, schema: str) -> None:
    """Found: an index could have its name in the schemas `roir` and `roir_data`. It holds: refused, as in the server's
    own.
    """
    steps.make_table(dsn)
    [refused] = of(dsn, IndexDefinition.parse(f"{schema}.ix", "t", "k")).refused
    assert f"schema {schema} is roir's or the server's own" in refused


@pytest.mark.sample(0)
def test_nothing_speaks_against_what_can_be_built(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    assert not of(dsn, IndexDefinition.parse("ix", "t", "k"))
    steps.make_index(database)
    assert not of(dsn, IndexDefinition.parse("ix"))
    assert of(dsn, IndexDefinition.parse("other")).refused == (
        "there is no index other to rebuild; to create it, give the table and key columns",
    )


@pytest.fixture
def bare(server: str) -> Iterator[str]:
    """A database without a control schema."""
    run_sql(server, "CREATE DATABASE without_schema")
    yield database_dsn(server, "without_schema")
    run_sql(server, "DROP DATABASE without_schema WITH (FORCE)")


INIT = "this database has no control schema yet; create it with: roir init"


def test_without_a_control_schema_all_else_is_checked(bare: str) -> None:
    """Found: a plan before `roir init` checked nothing. It holds: all that needs no control schema is checked."""
    run_sql(
        bare,
        "CREATE UNLOGGED TABLE u (k int, v text, j json)",
        "CREATE TABLE child () INHERITS (u)",
        "CREATE PUBLICATION everything FOR ALL TABLES",
        "ALTER TABLE u ENABLE ROW LEVEL SECURITY",
        "CREATE TABLE ix (id int)",
    )
    definition = IndexDefinition.parse("ix", "u", "k,w,j", "v")
    found = of(bare, definition, on_duplicate="stop", lock_timeout_ms=5_000)
    for part in (
        "lock_timeout_ms is 5000",
        *OF_U,
        "no B-tree order",
        "another relation or type has that name",
        "on_duplicate",
    ):
        assert any(part in one for one in found.refused), (part, found.refused)
    assert found.refused[-1] == INIT
    assert found.verdict() == "not yet: 11 refusals. Do what each line says, then plan again"
    run_sql(bare, "CREATE TABLE h (d int PRIMARY KEY, k int) PARTITION BY HASH (d)")
    run_sql(bare, "CREATE TABLE h0 PARTITION OF h FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    good = of(bare, IndexDefinition.parse("iy", "h", "k"), ignore_publications=True)
    assert good.refused == (INIT,)
    assert good.verdict().startswith("not yet: nothing is against it but the missing control schema. Run: roir init")
    assert good.worth is not None
    assert (good.worth.pays, good.worth.partitions) == ("no", 1)
    assert list(of(bare, IndexDefinition.parse("iy", "h", "k", shards="s"), ignore_publications=True).refused) == [INIT]
    nowhere, init = of(bare, IndexDefinition.parse("iy", "nowhere", "k")).refused
    assert "table nowhere doesn't exist" in nowhere
    assert init == INIT
    assert "give the table and key columns" in of(bare, IndexDefinition.parse("iy")).refused[0]


def test_without_a_control_schema_the_rights_that_are_missing_are_said(bare: str, stranger: str) -> None:
    role = f'"{parse_dsn(stranger)["user"]}"'
    run_sql(bare, "CREATE SCHEMA hidden", "CREATE TABLE hidden.t (id int PRIMARY KEY, k int)")
    run_sql(bare, "CREATE SCHEMA mine")
    found = of(
        make_dsn(**{**parse_dsn(bare), "user": role.strip('"')}), IndexDefinition.parse("mine.ix", "hidden.t", "k")
    )
    statements = [one.statement for one in found.missing]
    assert f'GRANT CREATE ON DATABASE "without_schema" TO {role}' in statements
    assert f'GRANT USAGE, CREATE ON SCHEMA "mine" TO {role}' in statements
    assert f"ALTER TABLE hidden.t OWNER TO {role}" in statements
    assert found.refused == (INIT,)


def test_a_role_with_rights_of_its_own_hears_of_the_type_that_it_lacks(roles: Roles) -> None:
    """The role is no member of the control schema's owner."""
    [(name,)] = sql(session(roles.poor), "SELECT current_user::text")
    poor = f'"{name}"'
    run_sql(
        roles.dsn,
        f"GRANT USAGE ON SCHEMA roir TO {poor}; GRANT USAGE, CREATE ON SCHEMA roir_data, shown TO {poor}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA roir TO {poor}",
        *(
            f"ALTER {what} OWNER TO {poor}"
            for what in ('SCHEMA "S 1"', 'TABLE "S 1".t', 'TABLE "S 1".t1', 'TABLE "S 1".t2')
        ),
    )
    found = of(roles.poor)
    assert [one.statement for one in found.missing] == [f"GRANT USAGE ON TYPE roir.entry_state TO {poor}"]
    roles.give(found)
    assert not of(roles.poor)
