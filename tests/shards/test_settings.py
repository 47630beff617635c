"""Settings that a database has by default, on the index server and in the shards, change nothing of the promises."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.lifecycle import verify
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.conftest import Make
from tests.shards.reading import create_servers

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k timestamptz, v interval)",
    "INSERT INTO t SELECT i, '2020-01-01 00:00Z'::timestamptz + i * interval '1 h', i * interval '1 day' "
    "FROM generate_series(1, 20) i",
)
SETTINGS = {
    "limits of time": (
        "statement_timeout = '200ms'",
        "lock_timeout = '50ms'",
        "idle_in_transaction_session_timeout = '300ms'",
        "idle_session_timeout = '300ms'",
    ),
    "read only": ("default_transaction_read_only = on",),
    "serializable": ("default_transaction_isolation = serializable", "default_transaction_deferrable = on"),
    "texts": (
        "DateStyle = 'SQL, DMY'",
        "TimeZone = 'Asia/Kolkata'",
        "IntervalStyle = sql_standard",
        "client_encoding = LATIN1",
        "standard_conforming_strings = off",
        "quote_all_identifiers = on",
        "bytea_output = escape",
    ),
    "replica": ("session_replication_role = replica",),
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("by", ["server", "client"])
@pytest.mark.parametrize("which", SETTINGS)
def test_defaults_of_databases_change_nothing(contrib_shards: Make, which: str, by: str) -> None:
    made = contrib_shards(2, *TABLE)
    create_servers(made)
    for dsn in (made.index, *made.dsns.values()):
        name = urlsplit(dsn).path[1:]
        with Database(dsn).transaction() as connection:
            for one in SETTINGS[which]:
                execute(connection, f"ALTER DATABASE {name} SET {one}")
    for name, dsn in made.dsns.items():
        registry.add(made.database, name, dsn, index_dsn=index_dsn(made))
    prepared, run = apart.begin(made, index="public.ix")
    apart.finish_all(made, run)
    announce.announce(made.database, "public.ix", by)
    apart.ship_all(made, prepared.generation_id)
    for dsn in made.dsns.values():
        with Database(dsn).connect() as here, Database(made.index).connect() as there:
            execute(here, "UPDATE public.t SET k = '2021-06-01 12:00+02' WHERE id = 7")
            assert announce_by_client(here, there) == (2 if by == "client" else 0)
            here.commit()
    asked = """SELECT count(*) FROM roir.strict(NULL::public.ix, '{"k": "2021-06-01T10:00:00Z"}')"""
    with Database(made.index).transaction() as connection:
        assert execute(connection, asked).scalar_one() == 2
    apart.ship_all(made, prepared.generation_id)
    assert apart.assert_exact(made, prepared.generation_id) == 40
    assert made.ask(f"SELECT count(*) FROM roir_data.g{prepared.generation_id}_intent") == [(0,)]
    assert verify(made.database, "public.ix").found == 0
