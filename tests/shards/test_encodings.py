"""Servers of several encodings: a text is the same on all of them, or a build is refused."""

from __future__ import annotations

import itertools

import pytest

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.engine import install
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.lifecycle import verify
from airflow_roir.errors import InvalidInput
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from servers.shards import Shards, drop_databases, on_server, run_sql
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.reading import create_servers

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v text)"
_numbers = itertools.count(1)


def made_of(server: str, encodings: tuple[str, str, str]) -> Shards:
    """The index server's, then those of two shards."""
    number, dsns = next(_numbers), []
    for place, encoding in enumerate(encodings):
        name = f"encoded_{number}_{place}"
        locale = "TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        run_sql(server, f"CREATE DATABASE {name} ENCODING '{encoding}' {locale}")
        dsns.append(on_server(server, name))
    install.init(Database(dsns[0], "roir"))
    made = Shards(dsns[0], {"s0": dsns[1], "s1": dsns[2]})
    made.run(TABLE, "INSERT INTO t SELECT i, 'k' || i, 'v' FROM generate_series(1, 9) i")
    return made


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("by", ["server", "client"])
@pytest.mark.parametrize("encodings", [("UTF8", "LATIN1", "UTF8"), ("LATIN1", "UTF8", "LATIN1")])
def test_a_text_is_the_same_on_all_servers(contrib: str, encodings: tuple[str, str, str], by: str) -> None:
    made = made_of(contrib, encodings)
    create_servers(made)
    for name, dsn in made.dsns.items():
        registry.add(made.database, name, dsn, index_dsn=index_dsn(made))
        with Database(dsn).transaction() as here:
            execute(here, "UPDATE public.t SET k = 'älter' WHERE id = 1")
    prepared, run = apart.begin(made)
    apart.finish_all(made, run)
    announce.announce(made.database, "public.ix", by)
    apart.ship_all(made, prepared.generation_id)
    for dsn in made.dsns.values():
        with Database(dsn).connect() as here, Database(made.index).connect() as there:
            execute(here, "UPDATE public.t SET k = 'älter', v = 'ß' WHERE id = 2")
            announce_by_client(here, there)
            here.commit()
    for _ in range(2):
        with Database(made.index).transaction() as connection:
            asked = """SELECT count(*) FROM roir.strict(NULL::public.ix, '{"k": "älter"}')"""
            assert execute(connection, asked).scalar_one() == 4
        apart.ship_all(made, prepared.generation_id)
    assert verify(made.database, "public.ix").found == 0
    drop_databases(contrib, made)


@pytest.mark.parametrize("encodings", [("SQL_ASCII", "SQL_ASCII", "UTF8"), ("UTF8", "UTF8", "SQL_ASCII")])
def test_bytes_that_mean_nothing_are_not_mixed_with_text(server: str, encodings: tuple[str, str, str]) -> None:
    made = apart.add_all(made_of(server, encodings))
    with pytest.raises(InvalidInput, match="must be in SQL_ASCII, or none"):
        apart.begin(made)
    drop_databases(server, made)
