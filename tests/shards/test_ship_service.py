"""The shipping service: feeds are shared and taken over, servers come and go, and the service ends on request."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy import event

from airflow_roir.engine.governor.readings import SignalReader
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.metrics import reading as looking
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.errors import RoirError
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.ship import feed, freshness
from airflow_roir.shards.ship.feed import FeedShipper
from airflow_roir.shards.ship.freshness import Alarm
from airflow_roir.shards.ship.shipping import Shipper, ship_once
from tests.shards.conftest import Make
from tests.shards.laid import Laid, lay

pytestmark = pytest.mark.sample(3)

AGAIN = "INSERT INTO t SELECT i, 'k', i FROM generate_series(1, 5) i ON CONFLICT (id) DO UPDATE SET v = t.v + 1"
END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"


def until(true: Callable[[], object], what: str, patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_no_transaction_stays_open_in_a_shard_between_two_messages(shards: Make) -> None:
    """Asked of the session itself after each message, and of the server: it is idle, not idle in transaction."""
    made = shards(1)
    laid = lay(made)
    database = laid.feed("s0").shard.database("watched", made.database.limits)
    sent: list[str] = []
    states: list[Any] = []

    def look(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)
        states.append(cursor.connection.info.transaction_status)
        asked = "SELECT state FROM pg_stat_activity WHERE application_name = 'watched' AND datname = %s"
        states.extend(row[0] for row in made.ask(asked, cursor.connection.info.dbname))

    event.listen(database.engine, "after_cursor_execute", look)
    shipper = FeedShipper(made.database, laid.feed("s0").id, "a", shard=database, most=2)
    assert shipper.claim()
    for _ in range(3):
        made.run(
            "INSERT INTO t SELECT i, 'k', i FROM generate_series(1, 5) i ON CONFLICT (id) DO UPDATE SET v = t.v + 1"
        )
        shipper.ship_pass()
    made.run("TRUNCATE t")
    shipper.ship_pass()
    shipper.release()
    laid.assert_exact()
    assert len(sent) > 10
    assert set(states) == {0, "idle"}
    # One message for a poll and what it acknowledges.
    assert all("BEGIN" not in one for one in sent)


def test_a_writer_that_holds_a_row_of_the_outbox_holds_no_shipper_up(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 1)")
    shipper = laid.shipper("s0")
    assert shipper.claim()
    shipper.apply(shipper.poll())
    with made.shard("s0").connect() as writer:
        writer.exec_driver_sql("UPDATE public.t SET k = 'c' WHERE id = 1")
        shipper.acknowledge()
        left = f"SELECT c1 FROM {outbox.table(laid.feed('s0').outbox)} WHERE version > 0"
        assert made.ask(left, shard="s0") == [("a",)]
        shipper.ship_pass()
        writer.commit()
    shipper.ship_pass()
    shipper.release()
    laid.assert_exact()


def test_no_clock_of_a_shard_is_asked(shards: Make) -> None:
    """A touch writes its own time down, for people; no poll reads that, or any clock."""
    made = shards(1)
    laid = lay(made)
    database = laid.feed("s0").shard.database("watched", made.database.limits)
    sent: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    shipper = FeedShipper(made.database, laid.feed("s0").id, "a", shard=database)
    assert shipper.claim()
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    shipper.ship_pass()
    shipper.release()
    text = " ".join(sent)
    for clock in ("touched_at", "now(", "clock_timestamp", "current_timestamp", "statement_timestamp", "localtime"):
        assert clock not in text.lower()
    for name in ("capture_problem", "capture_of", "leaves", "partition_tree"):
        [(body,)] = made.ask("SELECT string_agg(prosrc, ' ') FROM pg_proc WHERE proname = %s", name, shard="s0")
        assert "timestamp" not in body
        assert "now(" not in body


def test_an_idle_poll_writes_nothing_in_the_shard(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    laid.ship()
    shipper = laid.shipper("s0")
    assert shipper.claim()
    fresh = laid.column("fresh_at")
    row = f"SELECT xmin, xmax, ctid, tick FROM roir_shard.outbox WHERE name = '{laid.feed('s0').outbox}'"
    before = made.ask(row, shard="s0")
    for _ in range(3):
        found = shipper.poll()
        assert (found.ticked, found.xid, found.rows, found.ended) == (False, None, 0, True)
        shipper.apply(found)
    assert made.ask(row, shard="s0") == before
    assert laid.column("fresh_at") > fresh  # type: ignore[operator]
    shipper.release()


def test_a_removal_and_an_upsert_use_the_index_of_the_base(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t SELECT i, 'k' || i, i FROM generate_series(1, 3000) i")
    laid.ship()
    plans: list[str] = []

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "DELETE FROM roir_data" in statement and "USING" in statement:
            cursor = connection.connection.cursor()
            cursor.execute("EXPLAIN " + statement, parameters)
            plans.append("\n".join(row[0] for row in cursor.fetchall()))

    database = made.database
    event.listen(database.engine, "before_cursor_execute", explain)
    shipper = FeedShipper(database, laid.feed("s0").id, "a")
    assert shipper.claim()
    made.run("DELETE FROM t WHERE id < 100", "UPDATE t SET k = NULL WHERE id = 200")
    shipper.ship_pass()
    made.run("DELETE FROM t WHERE id = 200")
    shipper.ship_pass()
    shipper.release()
    laid.assert_exact()
    assert plans
    for plan in plans:
        assert "Index Scan" in plan or "Bitmap Index Scan" in plan, plan
        assert "Seq Scan on g" not in plan, plan


def test_a_poll_asks_the_catalogs_once_however_many_rows_it_reads(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t SELECT i, 'k' || i, i FROM generate_series(1, 500) i")
    calls = "SELECT calls FROM pg_stat_user_functions WHERE funcname = 'capture_problem'"
    made.run(f"ALTER DATABASE {urlsplit(made.dsns['s0']).path[1:]} SET track_functions = 'all'")
    shipper = laid.shipper("s0")
    assert shipper.claim()
    assert shipper.poll().rows == 500
    shipper.release()
    until(lambda: made.ask(calls, shard="s0"), "the statistics are written")
    assert made.ask(calls, shard="s0") == [(1,)]


def shippers(laid: Laid, count: int) -> list[Shipper]:
    return [Shipper(laid.database, every_s=0.1) for _ in range(count)]


def test_a_shipper_that_is_started_gets_a_share_and_who_dies_leaves_his(shards: Make) -> None:
    laid = lay(shards(4))
    first, second = shippers(laid, 2)
    first.look()
    assert len(first.shipped) == 4
    held = "SELECT count(*) FROM roir.feed WHERE owner = %s"
    until(lambda: laid.shards.ask(held, first.owner) == [(4,)], "the first one claims")
    second.look()
    assert second.shipped == []

    def shared() -> bool:
        first.look()
        second.look()
        return len(first.shipped) == len(second.shipped) == 2 and not set(first.shipped) & set(second.shipped)

    until(shared, "two of four each")
    first.end()

    def all_of_them() -> bool:
        second.look()
        return len(second.shipped) == 4

    until(all_of_them, "what the first one had")
    laid.shards.run("INSERT INTO t VALUES (1, 'a', 1)")
    until(lambda: laid.base() == laid.projection(), "all is shipped")
    second.end()
    assert laid.shards.ask("SELECT count(*) FROM roir.feed WHERE owner IS NOT NULL") == [(0,)]


@pytest.mark.slow
def test_who_rests_for_long_keeps_the_feed(shards: Make) -> None:
    laid = lay(shards(1))
    beat = "SELECT heartbeat_at FROM roir.feed WHERE fresh_at IS NOT NULL"
    with Shipper(laid.database, every_s=3600).running():
        until(lambda: laid.shards.ask(beat), "a first pass")
        # Passes follow each other less and less often, then there is none for an hour.
        kept = "SELECT fresh_at, heartbeat_at FROM roir.feed"
        seen: list[tuple[Any, ...]] = []

        def beats_alone() -> bool:
            seen.extend(laid.shards.ask(kept))
            return any(a[0] == b[0] and a[1] != b[1] for a, b in pairwise(seen))

        until(beats_alone, "a sign of life without a pass")


def test_a_shard_that_is_away_is_named_and_the_others_go_on(shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = shards(2)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    made.ask("UPDATE roir.shard SET dsn = 'host=/nowhere dbname=none' WHERE name = 's0'")
    with pytest.raises(RoirError, match=r'^shard "s0": .*nowhere'):
        ship_once(Shipper(laid.database))
    assert laid.base() == [("a", "s1", "1", "1")]
    [(problem, away)] = made.ask("SELECT problem, away_until > now() FROM roir.shard WHERE name = 's0'")
    assert "nowhere" in problem
    assert away
    # The reason goes with the first poll that succeeds.
    made.ask("UPDATE roir.shard SET dsn = %s WHERE name = 's0'", made.dsns["s0"])
    ship_once(Shipper(laid.database))
    laid.assert_exact()
    assert made.ask("SELECT problem FROM roir.shard WHERE problem IS NOT NULL") == []


def test_sessions_that_are_lost_on_either_side_are_opened_again(shards: Make) -> None:
    made = shards(2)
    laid = lay(made)
    told: list[str] = []
    shipper = Shipper(laid.database, told.append, every_s=0.1)
    with shipper.running():
        for number in range(4):
            made.run(f"INSERT INTO t VALUES ({number}, 'a', 1)")
            until(lambda: laid.base() == laid.projection(), f"round {number}: {told}")
            end = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
            )
            for dsn in (made.index, made.dsns["s1"]):
                made.ask(end, urlsplit(dsn).path[1:])
    assert laid.base() == laid.projection()


def test_who_is_too_far_behind_is_told_once_and_that_it_caught_up(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    laid.ship()
    made.ask("UPDATE roir.feed SET fresh_at = clock_timestamp() - interval '1 hour', pending = 7")
    alarm = Alarm(age_s=60)

    def look() -> list[str]:
        with laid.database.transaction() as connection:
            return alarm.look(connection, "test")

    assert look() == ['index public.ix: shard "s0": 1 h behind, 7 rows to ship, and has no shipper: roir ship']
    assert look() == []
    laid.ship()
    assert look() == ['index public.ix: shard "s0" has caught up']
    assert [row[0] for row in made.ask("SELECT action FROM roir.event ORDER BY id")] == ["behind", "caught up"]


def test_lag_is_in_status_metrics_and_signals(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    laid.ship()
    made.ask("UPDATE roir.feed SET fresh_at = clock_timestamp() - interval '1 hour', pending = 7, pending_bytes = 8192")
    [found] = indexes(laid.database)
    assert [(one.shard, one.pending, one.shipper) for one in found.shards] == [("s0", 7, None)]
    assert json.loads(json.dumps(found.as_dict()))["shards"][0]["pending_bytes"] == 8192
    families = {one.name: one for one in looking.metrics(laid.database)[0]}
    [sample] = families["roir_shard_lag_seconds"].samples
    assert sample.labels["shard"] == "s0"
    assert 3600 <= sample.value < 3700
    reader = SignalReader(laid.database, Surroundings())
    with laid.database.connect() as connection:
        lag, outboxes = reader.read(connection, {"shard_lag": 30, "outbox": 1 << 30})
    reader.close()
    assert (lag.is_over, lag.of) == (True, "s0")
    assert str(outboxes) == "the outbox of shard s0 holds 8 kB, limit 1.0 GB"


def test_a_capture_that_is_disabled_puts_the_feed_in_doubt(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    laid.ship()
    fresh = laid.column("fresh_at")
    made.run("ALTER TABLE t DISABLE TRIGGER ALL")
    laid.ship()
    assert "is missing or disabled, so that writes may be missing here" in str(laid.column("doubt"))
    assert laid.column("fresh_at") == fresh
    with laid.database.transaction() as connection:
        told = freshness.unfit(connection, laid.generation, 60)
    assert "Abort the operation" in str(told)


def command(laid: Laid, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "airflow_roir.cli", "--dsn", laid.shards.index, "ship", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.by_hand("sweeps")
def test_the_command_ships_and_ends_when_it_is_told_to(shards: Make) -> None:
    made = shards(2)
    laid = lay(made)
    process = command(laid, "--every", "100ms")
    try:
        made.run("INSERT INTO t SELECT i, 'k', i FROM generate_series(1, 100) i")
        until(lambda: laid.base() == laid.projection(), "all is shipped")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert made.ask("SELECT count(*) FROM roir.feed WHERE owner IS NOT NULL") == [(0,)]
    once = command(laid, "--once", "--json", "--shards", "s0")
    made.run("DELETE FROM t WHERE id < 50")
    out, _ = once.communicate(timeout=60)
    assert once.returncode == 0
    assert "shipped" in json.loads(out)


@pytest.mark.by_hand("sweeps")
def test_what_the_command_refuses(shards: Make) -> None:
    laid = lay(shards(1))
    for arguments, said in (
        (("--shards", "none"), 'there is no shard "none"'),
        (("--indexes", "none"), "none"),
        (("--every", "1ms"), "it must be from 50ms to 1h"),
        (("--every", "soon"), "it must be a duration"),
    ):
        process = command(laid, "--once", *arguments)
        assert said in process.communicate(timeout=60)[1]
        assert process.returncode == 2


def test_a_database_without_the_small_schema_is_no_shard(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("DROP SCHEMA roir_shard CASCADE")
    shipper = laid.shipper("s0")
    assert shipper.claim()
    with pytest.raises(feed.InShard, match="has no schema roir_shard") as told:
        shipper.poll()
    assert not told.value.passes
    shipper.release()
