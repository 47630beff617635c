"""A shard and the index server trust each other with rows, and with nothing else: neither runs a text of the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn, parse_dsn
from sqlalchemy.exc import DBAPIError

import airflow_roir
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import dry_run, lifecycle
from airflow_roir.engine.source import catalog
from airflow_roir.errors import InvalidInput, RoirError, WorkerFailed
from airflow_roir.options import BuildOptions, VerifyOptions
from airflow_roir.shards import home, registry
from airflow_roir.shards.copy.copies import stream
from airflow_roir.shards.ship.shipping import Shipper, ship_once
from servers.shards import Shards, run_sql
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.laid import lay
from tests.shards.test_leaves import TABLE as PARTITIONED

pytestmark = pytest.mark.sample(1)

# A sequence that shows on the index server, and in another shard, whether a text of the first shard was run.
CANARY = (
    "CREATE SEQUENCE public.canary",
    "CREATE FUNCTION public.sing() RETURNS boolean LANGUAGE sql AS $$ SELECT nextval('public.canary') > 0 $$",
)
SONGS = (
    "public.sing()",
    "true OR (SELECT public.sing())",
    "1 = 1) e); SELECT public.sing(); --",
    "true; SELECT public.sing(); --",
    "'; SELECT public.sing(); --",
    '"; SELECT public.sing(); --',
    "$$; SELECT public.sing(); --",
    "FOR VALUES IN (public.sing())",
    "FOR VALUES IN ('1') OR public.sing()",
    "int); SELECT public.sing(); --",
)


def has_sung(made: Shards, shard: str | None = None) -> bool:
    return bool(made.ask("SELECT is_called FROM public.canary", shard=shard)[0][0])


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("song", [3, 7])
def test_bounds_that_are_sql_are_run_nowhere_else(shards: Make, song: int) -> None:
    """The owner of a shard may write anything into the shard's own registry."""
    made = apart.add_all(shards(2, *PARTITIONED))
    made.ask("; ".join(CANARY))
    made.run(*CANARY, only="s1")
    prepared, run = apart.begin(made)
    apart.finish_all(made, run)
    [(bounds,)] = made.ask("SELECT bounds FROM roir_shard.outbox", shard="s0")
    for one in bounds.values():
        for level in one["levels"]:
            level |= {"bound": SONGS[song], "others": [SONGS[song]]}
    made.ask("UPDATE roir_shard.outbox SET bounds = %s::jsonb", json.dumps(bounds), shard="s0")
    made.run("ALTER TABLE t DETACH PARTITION t_1", "ALTER TABLE t DETACH PARTITION t_rest", only="s0")
    ship_once(Shipper(made.database))
    assert not has_sung(made)
    assert not has_sung(made, "s1")
    # The shard says which entries they were.
    ship_once(Shipper(made.database))
    apart.assert_exact(made, prepared.generation_id)


def test_entries_of_another_shard_are_neither_written_nor_removed(shards: Make) -> None:
    made = shards(2)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    laid.ship()
    shipper = laid.shipper("s0")
    assert shipper.claim()
    made.run("UPDATE t SET v = 2; INSERT INTO t VALUES (2, 'b', 2)", "DELETE FROM t WHERE id = 1", only="s0")
    found = shipper.poll()
    assert found.there
    assert found.gone
    lies = {name: tuple(one.replace("s0", "s1") for one in getattr(found, name)) for name in ("there", "gone")}
    shipper.apply(replace(found, **lies))
    assert laid.base() == laid.projection()
    shipper.close()


def test_rows_that_are_not_a_shards_own_are_not_copied(shards: Make) -> None:
    made = shards(1)
    made.ask("CREATE TABLE public.into (c1 text, c2 int)")
    query = "SELECT CASE i WHEN 3 THEN 's1' ELSE 's0' END, i FROM generate_series(1, 5) i"
    with (
        made.shard("s0").transaction() as there,
        pytest.raises(WorkerFailed, match="returned 5 rows, but 1 of them"),
        made.database.transaction() as here,
    ):
        stream(there, query, None, here, "public.into", "c1 = 's0'")
    assert made.ask("SELECT count(*) FROM public.into") == [(0,)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("song", [SONGS[0], SONGS[9]])
def test_a_type_or_a_collation_is_a_name_and_no_sql(shards: Make, song: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that isn't PostgreSQL may tell any name for them."""
    made = apart.add_all(shards(1))
    made.ask("; ".join(CANARY))
    real = catalog.columns_of
    for change in ({"type": song}, {"collation": song}, {"type": "int --"}, {"type": "int /*"}):

        def told(connection: object, oid: int, change: dict[str, str] = change) -> object:
            found = real(connection, oid)  # type: ignore[arg-type]
            return {name: replace(one, **change) if name == "k" else one for name, one in found.items()}

        with monkeypatch.context() as patched:
            patched.setattr(catalog, "columns_of", told)
            wanted = IndexDefinition.parse("public.ix", "t", "k", "v", shards=made.names)
            with pytest.raises((InvalidInput, DBAPIError)):
                dry_run.run(made.database, wanted, BuildOptions())
    assert not has_sung(made)


def test_a_domain_of_another_role_on_the_index_server_is_not_checked_as_us(shards: Make) -> None:
    made = apart.add_all(
        shards(1, "CREATE TYPE pair AS (a int, b int)", "CREATE TABLE t (id int PRIMARY KEY, k pair, v text)")
    )
    made.ask("; ".join(CANARY))
    made.run("INSERT INTO t VALUES (1, '(1,2)', 'x')")
    made.ask("DROP ROLE IF EXISTS domains; CREATE ROLE domains; GRANT CREATE ON SCHEMA public TO domains")
    try:
        made.ask(
            "SET ROLE domains; CREATE DOMAIN public.one AS int CHECK (public.sing()); "
            "CREATE TYPE pair AS (a public.one, b int)"
        )
        wanted = IndexDefinition.parse("public.ix", "t", "k", "v", shards=made.names)
        with pytest.raises(InvalidInput, match=r"domain public\.one, which belongs to \"domains\""):
            dry_run.run(made.database, wanted, BuildOptions())
        made.ask("DROP TYPE pair; SET ROLE domains; CREATE DOMAIN public.pair AS text CHECK (public.sing())")
        with pytest.raises(InvalidInput, match="a domain"):
            dry_run.run(made.database, wanted, BuildOptions())
    finally:
        made.ask("DROP OWNED BY domains CASCADE; DROP ROLE domains")
    assert not has_sung(made)


@pytest.mark.parametrize("shape", ["key", "include"])
def test_a_virtual_column_is_refused_in_every_shard(shards: Make, pg: int, shape: str) -> None:
    if pg < 18:
        pytest.skip("PostgreSQL 18 has them")
    made = apart.add_all(shards(2, "CREATE TABLE t (id int PRIMARY KEY, k text, v int, w int)"))
    made.run("ALTER TABLE t DROP w, ADD w int GENERATED ALWAYS AS (v + 1) VIRTUAL", only="s1")
    columns = {"keys": "w", "include": "v"} if shape == "key" else {"keys": "k", "include": "w"}
    with pytest.raises(InvalidInput, match=r'shard "s1": column "w" of public\.t is a virtual generated column'):
        apart.begin(made, **columns)


@pytest.fixture
def owned(shards: Make) -> Iterator[tuple[Shards, str]]:
    """A shard whose owner, and login, is a plain role; and the role's name."""
    made = shards(1, "SELECT 1")
    [(database,)] = made.ask("SELECT current_database()", shard="s0")
    role = f"owner_{database}"
    made.run(
        f"CREATE ROLE {role} LOGIN",
        f"GRANT ALL ON DATABASE {database} TO {role}",
        f"GRANT ALL ON SCHEMA public TO {role}",
    )
    own = make_dsn(**{**parse_dsn(made.dsns["s0"]), "user": role})
    run_sql(own, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)")
    yield Shards(made.index, {"s0": own}), role
    made.run(
        *(
            f"DO $$ BEGIN IF to_regrole('{one}') IS NOT NULL THEN "
            f"EXECUTE 'DROP OWNED BY {one} CASCADE; DROP ROLE {one}'; END IF; END $$"
            for one in (role, f"{role}_new")
        )
    )


@pytest.mark.by_hand("sweeps")
def test_the_owner_of_a_shard_may_be_renamed(owned: tuple[Shards, str], server: str) -> None:
    made, role = owned
    apart.add_all(made)
    prepared, run = apart.begin(made)
    apart.finish_all(made, run)
    run_sql(server, f"ALTER ROLE {role} RENAME TO {role}_new")
    dsn = make_dsn(**{**parse_dsn(made.dsns["s0"]), "user": f"{role}_new"})
    renamed = Shards(made.index, {"s0": dsn})
    registry.add(made.database, "s0", dsn)
    renamed.run("INSERT INTO t VALUES (1, 'a', 1)")
    ship_once(Shipper(made.database))
    assert made.ask("SELECT doubt FROM roir.feed") == [(None,)]
    assert apart.assert_exact(renamed, prepared.generation_id) == 1
    lifecycle.verify(made.database, "public.ix", VerifyOptions(), "test")
    again, run = apart.begin(renamed, keys=None, include=None, table=None)
    apart.finish_all(renamed, run)
    assert apart.assert_exact(renamed, again.generation_id) == 1


# Ways in which a table, or a part of it, comes to belong to another role, whose code is run by reading.
GIVEN = {
    "table": ("t", "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"),
    "leaf": (
        "t_0",
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t_0 PARTITION OF t DEFAULT",
    ),
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("reads", ["ship", "verify", "rebuild"])
@pytest.mark.parametrize("given", GIVEN)
def test_a_table_that_somebody_else_owns_is_not_read_as_its_former_owner(
    owned: tuple[Shards, str], server: str, given: str, reads: str
) -> None:
    made, role = owned
    relation, *table = GIVEN[given]
    made.run("DROP TABLE t", *table)
    apart.add_all(made)
    _, run = apart.begin(made)
    apart.finish_all(made, run)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    superuser = make_dsn(**{**parse_dsn(made.dsns["s0"]), "user": parse_dsn(server)["user"]})
    new = f"{role}_new"
    run_sql(
        superuser,
        f"CREATE ROLE {new}; GRANT CREATE, USAGE ON SCHEMA public TO {new}",
        f"ALTER TABLE {relation} OWNER TO {new}",
        "CREATE SEQUENCE heard; GRANT ALL ON heard TO PUBLIC",
        f"SET ROLE {new}; CREATE FUNCTION sing() RETURNS bool LANGUAGE plpgsql AS $$ BEGIN "
        f"IF current_user <> '{new}' THEN PERFORM nextval('public.heard'); END IF; RETURN true; END $$; "
        "CREATE FUNCTION sung(int) RETURNS bool LANGUAGE sql IMMUTABLE AS 'SELECT public.sing()'; "
        f"GRANT ALL ON {relation} TO {role}; CREATE INDEX ON {relation} (k) WHERE sung(1)",
    )
    read: Callable[[], object] = {
        "ship": lambda: ship_once(Shipper(made.database)),
        "verify": lambda: lifecycle.verify(made.database, "public.ix", VerifyOptions(repair=True), "test"),
        "rebuild": lambda: apart.begin(made, keys=None, include=None, table=None),
    }[reads]
    with pytest.raises((RoirError, DBAPIError)) as told:
        read()
    assert "belongs to" in str(told.value)
    assert made.ask("SELECT is_called FROM heard", shard="s0") == [(False,)]


def test_every_function_of_the_small_schema_that_is_named_is_made() -> None:
    """Statements of PL/pgSQL and of Python name them in texts, which nothing checks when they are made."""
    made = set(re.findall(r"CREATE FUNCTION roir_shard\.(\w+)\(", home.sql()))
    texts = [home.sql()]
    for path in Path(airflow_roir.__file__).parent.rglob("*.py"):
        texts.append(path.read_text().replace("{SHARD_SCHEMA}", "roir_shard").replace("{schema}", "roir_shard"))
    named = {name for text in texts for name in re.findall(r"roir_shard\.(\w+)\(", text)}
    assert named >= {"capture_of", "check_owners", "levels", "unannounced"}
    assert named - made == set()
    # The functions that these call in turn, by the names that both servers share.
    shared = set(re.findall(r"\broir\.(\w+)\(", home.sql()))
    assert shared == set()
