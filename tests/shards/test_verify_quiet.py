"""A verification never reports a correct entry, whatever is written, shipped and shifted meanwhile."""

from __future__ import annotations

import random
import threading
from contextlib import closing, suppress

import psycopg2
import pytest
from psycopg2 import errors

from airflow_roir.engine.lifecycle import verify
from airflow_roir.options import VerifyOptions
from airflow_roir.shards.verify import judge
from tests.shards.conftest import Make
from tests.shards.verified import FILL, TABLE, Verified, build

WRITES = (
    "UPDATE t SET k = {key}, v = v + 1 WHERE id = {id}",
    "UPDATE t SET v = -v WHERE id = {id}",
    "DELETE FROM t WHERE id = {id}",
    "INSERT INTO t VALUES ({id}, {key}, {id}) ON CONFLICT (id) DO UPDATE SET k = EXCLUDED.k",
    "UPDATE t SET id = -id WHERE id = {id}",
    "UPDATE t SET k = {key} WHERE id BETWEEN {id} AND {id} + 20",
    # Back and forth: an entry comes and goes.
    "BEGIN; DELETE FROM t WHERE id = 100; COMMIT; INSERT INTO t VALUES (100, 'a', 1) ON CONFLICT DO NOTHING",
)


def _write(one: Verified, name: str, seed: int, stop: threading.Event, truncates: bool) -> None:
    chance = random.Random(f"{seed} {name}")
    with closing(psycopg2.connect(one.made.dsns[name])) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        while not stop.is_set():
            statement = chance.choice(WRITES).format(
                id=chance.randrange(420), key=chance.choice(["NULL", "'a'", "'6'"])
            )
            if truncates and chance.random() < 0.01:
                statement = "TRUNCATE t"
            with suppress(errors.UniqueViolation, errors.DeadlockDetected):
                cursor.execute(statement)
            stop.wait(chance.choice([0, 0, 0.002, 0.02]))


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("seed", range(12))
def test_writers_beside_a_verification_are_no_discrepancy(
    shards: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a difference that stays hide among them."""
    monkeypatch.setattr(judge, "REST_S", 0.05)
    one = build(shards(2, TABLE, FILL.replace("{number}", "0")))
    stop, truncates = threading.Event(), seed % 3 == 1
    writers = [threading.Thread(target=_write, args=(one, name, seed, stop, truncates)) for name in one.made.names]
    with one.shipping():
        for writer in writers:
            writer.start()
        try:
            for turn, options in enumerate([VerifyOptions(), VerifyOptions(sample=50), VerifyOptions(repair=True)]):
                report = verify(one.made.database, "ix", options)
                assert report.found == 0, (turn, report.first)
            # No row of that key is ever written.
            one.run("INSERT INTO {base} VALUES ('kept', 's1', 3, 7)", "INSERT INTO {base} VALUES ('kept', 'no', 3, 7)")
            report = verify(one.made.database, "ix")
            # A TRUNCATE takes that of s1, too.
            wanted = (1, 2) if truncates else (2,)
            assert report.extra in wanted
            assert report.found == report.extra, report.first
            report = verify(one.made.database, "ix", VerifyOptions(repair=True))
            assert report.extra in wanted
            assert report.found == report.repaired == report.extra, report.first
            assert verify(one.made.database, "ix").found == 0
        finally:
            stop.set()
            for writer in writers:
                writer.join()
    one.ship()
    assert one.is_exact()


@pytest.mark.by_hand("sweeps")
def test_what_was_not_shipped_yet_is_no_discrepancy(shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "REST_S", 0.01)
    monkeypatch.setattr(judge, "MOST_LOOKS", 2)
    one = build(shards(2, TABLE, FILL))
    one.made.run("UPDATE t SET v = 0 WHERE id % 2 = 0", "DELETE FROM t WHERE id % 5 = 1")
    for options in (VerifyOptions(), VerifyOptions(sample=100), VerifyOptions(repair=True)):
        assert verify(one.made.database, "ix", options).found == 0
    one.made.run("TRUNCATE t", only="s1")
    assert verify(one.made.database, "ix").found == 0
    one.ship()
    assert one.is_exact()
    assert verify(one.made.database, "ix").found == 0
