"""Faults that attacks on shipping found: reverts, other servers under a DSN, tables that are gone, dumps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psycopg2
import pytest

from airflow_roir.engine import clean_up, drop, lifecycle, revert
from airflow_roir.errors import Fenced, RoirError, SourceChanged
from airflow_roir.options import VerifyOptions
from airflow_roir.shards import registry
from airflow_roir.shards.ship.shipping import Shipper, ship_once
from servers.postgres import programs
from servers.shards import Shards, on_server, run_sql
from tests.engine import steps
from tests.shards.apart import add_all, assert_exact, begin, finish_all, ship_all
from tests.shards.conftest import Make
from tests.shards.laid import lay
from tests.shards.test_lost_commits import Copies, copies

pytestmark = pytest.mark.sample(1)

__all__ = ["copies"]


def rebuilt(shards: Make) -> tuple[Shards, int, int]:
    """An index that was rebuilt; the ids of both generations."""
    made = add_all(shards(1))
    prepared, run = begin(made)
    finish_all(made, run)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    again, run = begin(made, keys=None, include=None, table=None)
    finish_all(made, run)
    return made, prepared.generation_id, again.generation_id


@pytest.mark.by_hand("sweeps")
def test_a_snapshot_from_before_a_revert_is_not_fresh_by_what_it_does_not_read(shards: Make) -> None:
    """The snapshot sees that the other generation is shown, but reads this one, which may be behind, or in doubt."""
    made, old, new = rebuilt(shards)
    ship_all(made, new)
    # The one that was replaced is far behind: its row isn't there.
    assert made.ask(f"SELECT count(*) FROM roir_data.g{old}") == [(0,)]
    reader = steps.session(made.index)
    reader.set_session(isolation_level="REPEATABLE READ")
    steps.sql(reader, "SELECT 1")
    revert.revert(made.database, "public.ix", "test")
    # As long as it is there the guard stays.
    assert clean_up.clean_up(made.database).guards_removed == 0
    with pytest.raises(psycopg2.errors.SerializationFailure):
        steps.sql(reader, "SELECT * FROM public.ix WHERE k = 'a' AND (SELECT roir.fresh('public.ix', '1 h'))")
    reader.rollback()
    reader.close()
    assert clean_up.clean_up(made.database).guards_removed == 1
    with pytest.raises(psycopg2.Error, match=r"lags|not been shipped"):
        made.ask("SELECT * FROM public.ix WHERE k = 'a' AND (SELECT roir.fresh('public.ix', '0 s'))")


def test_a_shard_that_gets_another_dsn_is_shipped_from_there(shards: Make, copies: Copies) -> None:
    """The old server lives on, and its sessions, too: what is shipped from there is as fresh as nothing is."""
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    laid.ship()
    moved = on_server(made.dsns["s0"], copies.keep(made.dsns["s0"]))
    shipper = laid.shipper("s0")
    assert shipper.claim()
    shipper.ship_pass()
    registry.add(made.database, "s0", moved)
    run_sql(moved, "INSERT INTO t VALUES (2, 'b', 2)")
    with pytest.raises(Fenced, match="no shipper"):
        shipper.ship_pass()
    shipper.close()
    laid.ship()
    assert [row[0] for row in laid.base()] == ["a", "b"]


GONE = {
    "the table": ("DROP TABLE t CASCADE", "its table was dropped"),
    "the outbox": ("DELETE FROM roir_shard.outbox", "its outbox is gone"),
    "the view": ("DROP VIEW roir_shard.{outbox}_source", None),
}


@pytest.mark.parametrize("kind", GONE)
def test_a_table_that_is_gone_is_told_and_the_rest_of_its_shard_is_worked_with(shards: Make, kind: str) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    laid.ship()
    statement, doubt = GONE[kind]
    made.run(statement.format(outbox=laid.feed("s0").outbox))
    shipper = Shipper(made.database)
    with pytest.raises(RoirError, match='shard "s0"'):
        ship_once(shipper)
    assert made.ask("SELECT away_until, problem IS NOT NULL FROM roir.shard") == [(None, True)]
    [(found,)] = made.ask("SELECT doubt FROM roir.feed")
    assert found == (doubt and f'shard "s0": {doubt}, so that writes may be missing here')


def test_a_shard_that_is_another_database_is_away(shards: Make) -> None:
    """Found: once the index server's clock was set back, a shard that had been away stayed so for as long. It holds:
    for no longer than fifteen seconds.
    """
    made = shards(1)
    lay(made)
    made.run("UPDATE roir_shard.home SET token = gen_random_uuid()")
    with pytest.raises(RoirError, match="another database"):
        ship_once(Shipper(made.database))
    assert made.ask("SELECT away_until IS NOT NULL FROM roir.shard") == [(True,)]
    assert made.ask("SELECT doubt FROM roir.feed") == [(None,)]
    assert [one.away for one in registry.listed(made.database)] == [True]
    # As it looks once the index server's clock was set back by a day.
    made.ask("UPDATE roir.shard SET away_until = away_until + interval '1 day'")
    assert not any(one.away for one in registry.listed(made.database))


@pytest.mark.by_hand("sweeps")
def test_a_shard_that_was_restored_from_a_dump_is_told_and_no_entry_of_it_goes(
    shards: Make, server: str, pg: int, tmp_path: Path
) -> None:
    """The restored tables have other oids. A verification that took its table for dropped would delete all its
    entries."""
    made = add_all(shards(2))
    _, run = begin(made)
    made.run("INSERT INTO t SELECT i, 'k' || i, i FROM generate_series(1, 20) i")
    finish_all(made, run)
    dump, name = tmp_path / "dump", "restored_shard"
    subprocess.run([programs(pg) / "pg_dump", "-Fc", "-f", dump, made.dsns["s0"]], check=True)
    run_sql(server, f"CREATE DATABASE {name}")
    try:
        restored = on_server(made.dsns["s0"], name)
        run_sql(restored, "CREATE TABLE padding (); DROP TABLE padding")
        subprocess.run([programs(pg) / "pg_restore", "--exit-on-error", "-d", restored, dump], check=True)
        made.dsns["s0"] = restored
        registry.add(made.database, "s0", restored)
        made.run("INSERT INTO t VALUES (99, 'later', 1)")
        with pytest.raises(SourceChanged, match='shard "s0" was restored from a dump'):
            lifecycle.verify(made.database, "public.ix", VerifyOptions(repair=True), "test")
        ship_once(Shipper(made.database))
        found = made.ask("SELECT doubt FROM roir.feed ORDER BY shard_id")
        assert "restored from a dump" in found[0][0]
        assert found[1] == (None,)
        assert made.ask("SELECT count(*) FROM public.ix") == [(42,)]
        again, run = begin(made, keys=None, include=None, table=None)
        finish_all(made, run)
        assert_exact(made, again.generation_id)
        assert made.ask("SELECT doubt FROM roir.feed WHERE generation_id = %s", again.generation_id) == [(None,)] * 2
        drop.drop_index(made.database, "public.ix", "test")
        assert made.ask("SELECT count(*) FROM roir_shard.outbox", shard="s0") == [(0,)]
        made.run("INSERT INTO t VALUES (100, 'free', 1)")
    finally:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")
