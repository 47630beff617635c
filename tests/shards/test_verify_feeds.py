"""The effect of a verification on feeds and shards: doubt, shards that are away, removed or restored, tables
dropped."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy import event

from airflow_roir.engine import abort, lifecycle
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.verify import comparing, record
from airflow_roir.engine.verify.comparing import load
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.errors import Fenced, VerificationFailed
from airflow_roir.options import VerifyOptions
from airflow_roir.shards.shard import Shard
from airflow_roir.shards.verify import compare as shard_compare
from airflow_roir.shards.verify.compare import ApartWorker
from servers.shards import on_server, run_sql
from tests.engine.verifying import units
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.verified import FILL, TABLE, Verified, build, found

pytestmark = pytest.mark.slow
REPAIR = VerifyOptions(repair=True)


def _doubt(one: Verified, name: str = "s1") -> None:
    one.made.ask(
        "UPDATE roir.feed SET doubtful_at = clock_timestamp(), doubt = 'lost' WHERE id = %s", one.feeds[name].id
    )


@pytest.mark.by_hand("sweeps")
def test_a_doubtful_feed_is_trusted_after_a_whole_verification_with_repair_that_began_later(shards: Make) -> None:
    one = build(shards(2, TABLE, FILL))
    _doubt(one)
    with one.shipping():
        verify(one.made.database, "ix")
        assert one.feed("doubt", "s1") == "lost"
        verify(one.made.database, "ix", VerifyOptions(repair=True, sample=100))
        assert one.feed("doubt", "s1") == "lost"
        verify(one.made.database, "ix", REPAIR)
        assert (one.feed("doubt", "s1"), one.feed("doubtful_at", "s1")) == (None, None)


def test_a_doubt_that_arises_during_a_verification_stays(shards: Make) -> None:
    one = build(shards(2, TABLE, FILL))
    _doubt(one)
    record.begin(one.made.database, "ix", REPAIR, "test")
    _doubt(one)
    run = start_run(one.made.database, "ix", "test", take_over=True)
    _finish(one.made.database, run)
    assert one.feed("doubt", "s1") == "lost"


@pytest.mark.by_hand("sweeps")
def test_what_could_not_be_repaired_leaves_the_doubt(shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_roir.shards.verify.repair.PATIENCE_S", 0.3)
    one = build(shards(2, TABLE, FILL))
    _doubt(one)
    one.run("DELETE FROM {base} WHERE c3 = 7")
    report = verify(one.made.database, "ix", REPAIR)
    assert (report.missing, report.repaired, report.is_exact) == (1, 0, False)
    assert one.feed("doubt", "s1") == "lost"
    # The row was touched, so shipping repairs its entry.
    one.ship()
    assert one.is_exact()


@pytest.mark.by_hand("sweeps")
def test_a_shard_that_was_restored_to_an_older_state_is_repaired_and_trusted(shards: Make) -> None:
    """By a copy of its database, as a backup has it; nothing else is written."""
    one = build(shards(2, TABLE, FILL))
    server, name = on_server(one.made.index, "postgres"), urlsplit(one.made.dsns["s1"]).path[1:]
    run_sql(server, f"CREATE DATABASE {name}_backup TEMPLATE {name}")
    one.made.run("UPDATE t SET v = v + 1 WHERE id % 2 = 0; DELETE FROM t WHERE id % 7 = 1", only="s1")
    one.ship()
    run_sql(
        server,
        f"DROP DATABASE {name} WITH (FORCE)",
        f"CREATE DATABASE {name} TEMPLATE {name}_backup",
        f"DROP DATABASE {name}_backup",
    )
    assert not one.is_exact()
    assert verify(one.made.database, "ix").found > 100
    one.made.run("UPDATE t SET v = 5 WHERE id = 1003", only="s1")
    with one.shipping():
        report = verify(one.made.database, "ix", REPAIR)
        assert report.is_exact
        # Named when it was polled first, maybe since the verification began.
        verify(one.made.database, "ix", REPAIR)
    assert one.feed("doubt", "s1") is None
    assert one.is_exact()


def test_a_base_that_was_restored_is_repaired(shards: Make) -> None:
    one = build(shards(2, TABLE, FILL))
    one.run("CREATE TABLE backup AS SELECT * FROM {base}")
    one.made.run("UPDATE t SET k = 'new' WHERE id % 2 = 0", "DELETE FROM t WHERE id % 3 = 0")
    one.ship()
    one.run("TRUNCATE {base}", "INSERT INTO {base} SELECT * FROM backup")
    with one.shipping():
        assert verify(one.made.database, "ix", REPAIR).is_exact
    assert one.is_exact()


def test_entries_of_a_removed_shard_and_of_a_dropped_table_go(shards: Make) -> None:
    one = build(shards(3, TABLE, FILL))
    one.made.ask("UPDATE roir.feed SET removed_at = now() WHERE id = %s", one.feeds["s2"].id)
    one.made.run("DROP TABLE t CASCADE", only="s1")
    report = verify(one.made.database, "ix")
    assert (report.extra, report.found) == (802, 802)
    report = verify(one.made.database, "ix", REPAIR)
    assert (report.extra, report.repaired) == (802, 802)
    assert one.made.ask(f"SELECT DISTINCT c2 FROM {one.base}") == [("s0",)]
    assert verify(one.made.database, "ix").found == 0


def test_a_build_that_went_wrong_is_not_published(shards: Make) -> None:
    made = shards(2, TABLE, FILL)
    apart.add_all(made)
    prepared, run = apart.begin(made, verify="after")
    apart.build_all(made, run)
    apart.seal_all(made, run)
    made.ask(f"DELETE FROM roir_data.g{prepared.generation_id} WHERE c2 = 's1' AND c3 = 1007")
    with pytest.raises(VerificationFailed, match="missing 1"):
        lifecycle.run_phases(made.database, run)
    assert found(made) == [("missing", "s1", "1007", None)]


# --- what comes over the network


def test_no_row_crosses_the_network_where_the_sides_agree(shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where they differ, no more than the suspicious buckets hold."""
    one = build(shards(2, TABLE, FILL))
    rows = _counting(monkeypatch)
    assert verify(one.made.database, "ix").rows == 802
    quiet = sum(rows)
    assert quiet < 60
    one.run("DELETE FROM {base} WHERE c3 = 1007")
    rows.clear()
    assert verify(one.made.database, "ix").missing == 1
    assert quiet < sum(rows) < 200


def _counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the number of rows that each statement in a shard returned."""
    rows: list[int] = []
    made = Shard.database

    def database(self: Shard, *given: Any) -> Database:
        opened = made(self, *given)

        def after(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            rows.append(cursor.rowcount if cursor.description and cursor.rowcount > 0 else 0)
            if rows[-1] > 9:
                print(rows[-1], statement[:300])
            if cursor.name is not None:
                # A streamed result's number of rows isn't known yet: it counts as 64.
                rows.append(64)

        event.listen(opened.engine, "after_cursor_execute", after)
        return opened

    monkeypatch.setattr(Shard, "database", database)
    return rows


# --- kills, pauses, fences


def _worker(database: Database, run: Run, number: int = 0) -> ApartWorker:
    connection = database.engine.connect()
    with connection.begin():
        verify_job = load(connection, run)
    return ApartWorker(connection, verify_job, number, database)


def _finish(database: Database, run: Run) -> None:
    while True:
        with database.transaction() as connection:
            if not execute(
                connection, "SELECT EXISTS (SELECT FROM roir.verification WHERE finished_at IS NULL)"
            ).scalar_one():
                return
        for _ in units(database, run):
            pass
        comparing.finish(database, run)


def _break(one: Verified) -> None:
    one.run("DELETE FROM {base} WHERE c3 % 50 = 7", "UPDATE {base} SET c4 = -1 WHERE c3 % 50 = 8")


@pytest.mark.by_hand("sweeps")
def test_at_every_unit_a_worker_dies_is_fenced_or_pauses_and_the_next_goes_on(shards: Make) -> None:
    """Workers die, are fenced or pause in turns; another run does the rest; in the end all is found and repaired."""
    one = build(shards(2, TABLE, FILL))
    _break(one)
    database = one.made.database
    record.begin(database, "ix", REPAIR, "test")
    turn = 0
    with one.shipping():
        while operations.find_operation(database, "ix").status != "completed":
            run = start_run(database, "ix", f"run {turn}", take_over=True)
            worker = _worker(database, run)
            claim = worker.claim()
            if isinstance(claim, Stop):
                comparing.finish(database, run)
            elif turn % 4 == 0:
                # Dies while it holds it.
                pass
            elif turn % 4 == 1:
                start_run(database, "ix", "newer", take_over=True)
                with pytest.raises(Fenced):
                    _do(worker, claim)
            elif turn % 4 == 2:
                requests.pause(database, "ix", "test")
                _do(worker, claim)
            else:
                _do(worker, claim)
            worker.close()
            worker.connection.close()
            turn += 1
            assert turn < 400
    told = found(one.made)
    assert len(told) == 32
    assert {(kind, outcome) for kind, _, _, outcome in told} == {("missing", "repaired"), ("different", "repaired")}
    assert one.is_exact()
    assert one.made.ask("SELECT count(*) FROM roir.suspect") == [(0,)]


def _do(worker: ApartWorker, claim: UnitClaim) -> None:
    done = None if claim.compared else worker.unit(claim)
    if done is None or done.found:
        worker.repair(claim)


@pytest.mark.parametrize("stage", ["total", "sum", "check", "whole"])
def test_an_abort_leaves_nothing(shards: Make, stage: str) -> None:
    one = build(shards(2, TABLE, FILL))
    _break(one)
    database = one.made.database
    before = apart.entries(one.made, one.generation)
    begun = record.begin(database, "ix", VerifyOptions(), "test")
    run = start_run(database, "ix", "test", take_over=True)
    while True:
        with database.transaction() as connection:
            compared = record.unfinished(connection, begun.operation_id)
            if record.stage(connection, compared.id) == stage:
                break
        for _ in units(database, run):
            pass
        comparing.finish(database, run)
    worker = _worker(database, run)
    claim = worker.claim()
    assert isinstance(claim, UnitClaim)
    abort.abort(database, "ix", "test")
    with pytest.raises(Fenced):
        worker.unit(claim)
    worker.close()
    worker.connection.close()
    assert one.made.ask(
        "SELECT (SELECT count(*) FROM roir.verification_unit), (SELECT count(*) FROM roir.suspect)"
    ) == [(0, 0)]
    assert apart.entries(one.made, one.generation) == before


def test_a_shard_that_is_away_holds_its_own_units_alone(shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_compare, "AWAY_REST_S", 0.05)
    monkeypatch.setattr("airflow_roir.shards.shard.AWAY_S", 0.5)
    one = build(shards(2, TABLE, FILL))
    database = one.made.database
    record.begin(database, "ix", VerifyOptions(), "test")
    right = one.made.dsns["s1"]
    one.made.ask("UPDATE roir.shard SET dsn = %s WHERE name = 's1'", "postgresql://nobody@127.0.0.1:1/x")
    run = start_run(database, "ix", "test", take_over=True)
    for _ in units(database, run):
        pass
    [(left,)] = one.made.ask(
        "SELECT string_agg(DISTINCT s.name, ',') FROM roir.verification_unit u JOIN roir.feed l ON "
        "l.id = u.feed_id JOIN roir.shard s ON s.id = l.shard_id WHERE NOT u.done"
    )
    assert left == "s1"
    assert (
        'waiting for shard "s1": ' in one.made.ask("SELECT notice FROM roir.operation ORDER BY id DESC LIMIT 1")[0][0]
    )
    one.made.ask("UPDATE roir.shard SET dsn = %s, away_until = NULL WHERE name = 's1'", right)
    _finish(database, run)
    assert found(one.made) == []
