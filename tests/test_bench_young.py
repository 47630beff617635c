"""The claims of `make bench-young` hold: each side gets the same writes, vacuums come when due, and all of it runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from benchmarks.server import bench_server
from benchmarks.young import table
from benchmarks.young_care import Arm, autovacuum, compact, cost_of, vacuum
from benchmarks.young_tables import CHURNS, Tasks


@pytest.fixture(scope="module")
def session() -> Iterator[psycopg2.extensions.connection]:
    with bench_server(18, "128MB", "autovacuum = off\n") as server:
        connection = psycopg2.connect(server.dsn("bench"))
        connection.autocommit = True
        yield connection
        connection.close()


def test_a_day_writes_the_same_wherever_rows_lie(session: psycopg2.extensions.connection) -> None:
    cursor = session.cursor()
    for kind in CHURNS:
        churn = kind(900, 3)
        sums = []
        shuffle = (
            f"CREATE TABLE moved AS SELECT * FROM {churn.table} ORDER BY hashint8(id); TRUNCATE {churn.table}; "
            f"INSERT INTO {churn.table} SELECT * FROM moved; DROP TABLE moved"
        )
        for shuffled in (False, True):
            cursor.execute(f"DROP TABLE IF EXISTS {churn.table}")
            cursor.execute(churn.create)
            churn.load(cursor)
            for day in range(100):
                if shuffled and day % 10 == 0:
                    cursor.execute(shuffle)
                churn.write(cursor, day)
            cursor.execute(f"SELECT count(*), sum(hashtextextended(x::text, 0)) FROM {churn.table} x")
            sums.append(cursor.fetchone())
            asked = [(one.name, one.values) for one in churn.lookups(cursor, 100, 20)]
            assert [len(values) for _, values in asked] == [20, 20]
            sums.append(asked)
        assert sums[:2] == sums[2:]
        # As many as ever, or nearly so: waves come and go.
        assert 450 < sums[0][0] < 1500
        cursor.execute(f"DROP TABLE {churn.table}")


def test_updates_follow_zipfs_law() -> None:
    tasks, chance = Tasks(10_000, 1), random.Random(7)
    counted = Counter(tasks.rank(chance) for _ in range(20_000))
    assert min(counted) == 0
    assert max(counted) < 10_000
    # A tenth of the logarithm of the rows each: the ranks 1 and 2 to 3, and 4,000 to 10,000.
    assert counted[0] == pytest.approx(20_000 * 0.0753, rel=0.1)
    assert sum(counted[rank] for rank in range(3999, 10_000)) == pytest.approx(20_000 * 0.0995, rel=0.1)
    assert len({tasks.row(rank) for rank in range(10_000)}) == 10_000


def test_a_table_is_vacuumed_once_its_threshold_is_passed(session: psycopg2.extensions.connection) -> None:
    cursor = session.cursor()
    cursor.execute("CREATE TABLE aged (id int PRIMARY KEY, v int)")
    cursor.execute("INSERT INTO aged SELECT i, 0 FROM generate_series(1, 1000) i")
    cursor.execute("SELECT pg_stat_force_next_flush()")
    cursor.execute("VACUUM (FREEZE, ANALYZE) aged")
    count = (
        "SELECT pg_stat_clear_snapshot(), vacuum_count, analyze_count FROM pg_stat_all_tables WHERE relname = 'aged'"
    )
    # 50 and 20 %; ANALYZE 50 and 10 %.
    for deleted, expected in ((140, (1, 1)), (20, (1, 2)), (100, (2, 2))):
        cursor.execute("DELETE FROM aged WHERE id IN (SELECT id FROM aged ORDER BY id LIMIT %s)", (deleted,))
        autovacuum(cursor)
        cursor.execute(count)
        assert cursor.fetchone()[1:] == expected
    cursor.execute("DROP TABLE aged")


def test_a_cost_counts_what_is_new_and_stays(session: psycopg2.extensions.connection) -> None:
    cursor = session.cursor()
    cursor.execute("CREATE SCHEMA roir_data")
    cursor.execute("CREATE TABLE roir_data.old AS SELECT i FROM generate_series(1, 1000) i")
    assert cost_of(cursor, lambda: None).files == 0

    def work() -> None:
        cursor.execute("CREATE TABLE roir_data.new AS SELECT i FROM generate_series(1, 5000) i")
        cursor.execute("CREATE TABLE roir_data.gone AS SELECT i FROM generate_series(1, 5000) i")
        cursor.execute("DROP TABLE roir_data.gone")

    cost = cost_of(cursor, work)
    cursor.execute("SELECT pg_relation_size('roir_data.new')")
    assert cursor.fetchone() == (cost.files,)
    assert cost.wal > 2 * cost.files
    cursor.execute("DROP SCHEMA roir_data CASCADE")


def test_an_arm_says_every_how_many_nights() -> None:
    arm = Arm.parse("vacuum+compact/7")
    assert [arm.care(day) for day in (5, 6, 7)] == [[vacuum], [vacuum, compact], [vacuum]]
    assert not Arm.parse("none").care(0)
    assert [Arm.parse(name).forgets for name in ("rebuild", "rebuild/2", "vacuum")] == [True, False, False]
    for wrong in ("rebuilt", "rebuild/0", "rebuild/x", "vacuum+", "vacuum/"):
        with pytest.raises(ValueError, match="choose from none"):
            Arm.parse(wrong)


def test_ratios_are_to_the_nightly_rebuild() -> None:
    names = ("mean_bytes", "most_bytes", "p50_ms", "p99_ms", "pages", "pages_p99", "care_wal", "care_files", "care_s",
             "vacuum_wal", "vacuum_s")  # fmt: skip
    one = dict.fromkeys(names, 3e6)
    printed = table([{"arm": "none", **one, "care_wal": 0}, {"arm": "rebuild", **one, "mean_bytes": 2e6}])
    assert "| none | 3.0 (1.50) |" in printed
    assert "| 0 (0.00) |" in printed


@pytest.mark.slow
def test_it_runs_and_each_index_is_exact_on_each_side(tmp_path: Path) -> None:
    results = tmp_path / "young.json"
    arms = ["none", "vacuum+reindex/3", "rebuild", "compact", "vacuum+compact/2"]
    size = ("--rows", "2000", "--days", "6", "--segments", "3", "--look-every", "3", "--lookups", "20")
    command = [sys.executable, "-m", "benchmarks.young", *size, "--shared-buffers", "128MB", "--arms", *arms]
    done = subprocess.run([*command, "--results", str(results)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert [(one["arm"], one["exact"]) for one in found["arms"]] == [(arm, True) for arm in arms]
    entries = [{look["arm"]: look["entries"] for look in found["looks"] if look["day"] == day} for day in (3, 6)]
    assert all(len(on_a_day) == len(arms) and len(set(on_a_day.values())) == 1 for on_a_day in entries)
    assert {path.name for path in tmp_path.glob("*.svg")} == {"young-light.svg", "young-dark.svg"}
    written = {one["arm"]: one["care_files"] for one in found["arms"]}
    assert 0 == written["none"] < written["vacuum+reindex/3"] < written["rebuild"]
