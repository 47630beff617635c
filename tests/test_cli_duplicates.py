"""The command's output about rows that share a key: the list, statements to select them, JSON, exit codes."""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg2
import pytest

from airflow_roir.engine import lifecycle, switch
from airflow_roir.engine.control.run import driving, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.unique import duplicate_report, duplicates
from airflow_roir.engine.unique.statements import identifier, literal
from airflow_roir.errors import DuplicatesFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import session, sql
from tests.test_cli import as_json, here

TABLE = '"we\'ird\\ ""S"."T \'""\n%s"'
COLUMN = '"e\\mail; --"'
PAIRS = (
    "CREATE TABLE t (id int PRIMARY KEY, k int)",
    "INSERT INTO t SELECT i, i / 2 FROM generate_series(1, 9) i",
)
HOSTILE = ("a'b\\c\n\x1b[31m; DROP --", "", "NULL", "\u202eevil", " é ")

pytestmark = pytest.mark.sample(3)


@pytest.fixture
def hostile(dsn: str, database: Database) -> str:
    """A source whose names and keys are hostile; of each key there are two rows, in two partitions."""
    run_sql(
        dsn,
        f"CREATE SCHEMA {TABLE.rsplit('.', 1)[0]}",
        f'CREATE TABLE {TABLE} ("i\'d" text, day date, {COLUMN} text, PRIMARY KEY ("i\'d", day)) '
        "PARTITION BY RANGE (day)",
        f"CREATE TABLE p1 PARTITION OF {TABLE} FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')",
        f"CREATE TABLE p2 PARTITION OF {TABLE} FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')",
    )
    with session(dsn) as user, user.cursor() as cursor:
        for value in HOSTILE:
            for month in (1, 2):
                cursor.execute(
                    f"INSERT INTO {TABLE} VALUES (%s, %s, %s)".replace("\n%s", "\n%%s"),
                    (value, f"2026-0{month}-05", value),
                )
        user.commit()
    return TABLE


def pause_by_duplicates(database: Database, table: str, keys: str, **options: Any) -> None:
    """An operation that duplicates have paused, as its run does it."""
    run = steps.built(database, table=table, keys=keys, unique=True, **options)
    with pytest.raises(DuplicatesFound), driving(database, run):
        steps.seal_all(database, run)


def test_hostile_names_and_values_do_nothing_to_a_terminal_and_nothing_else_to_psql(
    database: Database, dsn: str, hostile: str
) -> None:
    pause_by_duplicates(database, hostile, COLUMN)
    shown = here(dsn, "duplicates", "ix", code=1).stdout
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert r"'a'b\c\n\x1b[31m; DROP --'" not in shown
    assert r"a'b\c\n\x1b[31m; DROP --" in shown
    assert "10 rows share 5 keys" in shown
    assert "public.p1" in shown
    statements = here(dsn, "duplicates", "ix", "--sql", code=1).stdout
    lines = statements.splitlines()
    assert len(lines) == 10
    assert all(line.isprintable() for line in lines)
    with session(dsn) as user:
        for off in ("on", "off"):
            sql(user, f"SET standard_conforming_strings = {off}")
            found = [row for line in lines[1::2] for row in sql_as_it_is(user, line) if off == "on" or "U&" not in line]
            if off == "on":
                assert sorted(row[3] for row in found) == sorted([*HOSTILE, *HOSTILE])
                assert {row[0] for row in found} == {"p1", "p2"}


def sql_as_it_is(user: psycopg2.extensions.connection, statement: str) -> list[tuple[Any, ...]]:
    try:
        with user.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    except psycopg2.errors.FeatureNotSupported:
        # Names with control characters need the setting.
        user.rollback()
        return []


@pytest.mark.parametrize("value", [*HOSTILE, "x", "\\", "''", "\x01\x7f\x9f", "$$", "%(a)s :a :'b'"])
def test_a_literal_is_its_value(dsn: str, value: str) -> None:
    with session(dsn) as user:
        for setting in ("on", "off"):
            sql(user, f"SET standard_conforming_strings = {setting}; SET escape_string_warning = off")
            assert sql_as_it_is(user, f"SELECT {literal(value)}") == [(value,)]
        if value:
            sql(user, "SET standard_conforming_strings = on")
            with user.cursor() as cursor:
                cursor.execute(f"SELECT 1 AS {identifier(value)}")
                assert [column.name for column in cursor.description or ()] == [value]


def test_the_list_in_json_limited_and_with_what_is_healed(database: Database, dsn: str, hostile: str) -> None:
    pause_by_duplicates(database, hostile, COLUMN)
    found = as_json(dsn, "duplicates", "ix", code=1)
    assert (found["groups"], found["rows"], found["status"]) == (5, 10, "paused")
    assert sorted(group["key"]["e\\mail; --"] for group in found["duplicates"]) == sorted(HOSTILE)
    [row, _] = found["duplicates"][0]["rows"]
    assert row.keys() == {"primary_key", "partition", "phase", "found_at", "healed_at"}
    assert row["primary_key"].keys() == {"i'd", "day"}
    assert len(as_json(dsn, "duplicates", "ix", "--limit", "2", code=1)["duplicates"]) == 2
    assert "2 keys shown" in here(dsn, "duplicates", "ix", "--limit", "2", code=1).stdout
    run_sql(dsn, f"UPDATE {hostile} SET {COLUMN} = \"i'd\" || 'x' WHERE day < '2026-02-01'")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    switch.switch(database, run)
    assert here(dsn, "duplicates", "ix").stdout.strip().endswith("no two rows share a key")
    assert as_json(dsn, "duplicates", "ix")["duplicates"] == []
    healed = as_json(dsn, "duplicates", "ix", "--all")["duplicates"]
    assert all(row["healed_at"] for group in healed for row in group["rows"])


def test_equal_keys_that_differ_are_one_group(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k numeric)", "INSERT INTO t VALUES (1, 1.0), (2, 1.00), (3, 3)")
    pause_by_duplicates(database, "t", "k")
    [group] = as_json(dsn, "duplicates", "ix", code=1)["duplicates"]
    assert [row["primary_key"] for row in group["rows"]] == [{"id": "1"}, {"id": "2"}]


def test_the_status_tells_of_duplicates_and_of_what_an_index_is(database: Database, dsn: str) -> None:
    run_sql(
        dsn, "CREATE TABLE t (id int PRIMARY KEY, k int)", "INSERT INTO t SELECT i, i / 2 FROM generate_series(1, 9) i"
    )
    pause_by_duplicates(database, "t", "k")
    shown = here(dsn, "status").stdout
    assert "unique: not enforced yet" in shown
    assert "duplicates: 8 rows share 4 keys; roir duplicates public.ix" in shown
    assert "then: roir resume public.ix" in shown
    seen = as_json(dsn, "status")
    assert (seen["indexes"][0]["unique"], seen["indexes"][0]["nulls_not_distinct"]) == (True, False)
    operation = seen["operations"][0]
    assert (operation["duplicate_keys"], operation["duplicate_rows"], operation["paused_by"]) == (4, 8, "duplicates")
    run_sql(dsn, "UPDATE t SET k = -id")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    lifecycle.finalize(database, "ix", "test", take_over=True)
    assert "unique: enforced over all partitions" in here(dsn, "status").stdout


def test_the_plan_says_what_unique_means(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k int)")
    make = ("plan", "ix", "--table", "t", "--keys", "k")
    assert as_json(dsn, *make)["unique"] is False
    told = as_json(dsn, *make, "--unique", "--nulls-not-distinct", "--on-duplicate", "stop")
    assert (told["unique"], told["nulls_not_distinct"], told["on_duplicate"]) == (True, True, "stop")
    assert "over all partitions; NULLs are equal, too" in here(dsn, *make, "--unique", "--nulls-not-distinct").stdout
    assert "a census" in here(dsn, *make, "--unique", "--census").stdout
    for more, said in (
        (("--nulls-not-distinct",), "give unique, too"),
        (("--census",), "give unique, too"),
        (("--on-duplicate", "stop"), "leave --on-duplicate out"),
        (("--unique", "--on-duplicate", "drop"), "must be one of pause, stop"),
    ):
        assert said in here(dsn, *make, *more, code=2).stderr


@pytest.mark.sample(0)
def test_who_asks_for_what_isnt_there_is_told_why(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database)
    assert "is not unique" in here(dsn, "duplicates", "ix", code=2).stderr
    assert "there is no index nope" in here(dsn, "duplicates", "nope", code=2).stderr
    assert "either --sql or --json" in here(dsn, "duplicates", "ix", "--sql", "--json", code=2).stderr


def test_a_census_is_told_after_its_index_is_gone(database: Database, dsn: str) -> None:
    run_sql(
        dsn, "CREATE TABLE t (id int PRIMARY KEY, k int)", "INSERT INTO t SELECT i, i / 2 FROM generate_series(1, 9) i"
    )
    _, run = steps.begin(database, unique=True, census=True)
    assert "census 1" in here(dsn, "status").stdout
    steps.build_all(database, run)
    steps.seal_all(database, run)
    lifecycle.finalize(database, "ix", "test", take_over=True)
    assert "ix" not in here(dsn, "status").stdout
    shown = here(dsn, "duplicates", "ix", code=1).stdout
    assert "public.ix, census 1: 8 rows share 4 keys" in shown
    assert "census" in here(dsn, "status", "ix", "--history").stdout
    assert json.loads(here(dsn, "duplicates", "public.ix", "--json", code=1).stdout)["census"] is True


def test_a_large_group_is_read_in_pieces(database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 700,000 rows with one key took 1.4 GB in the command, and five seconds on the page."""
    monkeypatch.setattr(duplicate_report, "ROWS", 3)
    of_key = {1: 7, 2: 2, 3: 3, 4: 1, 5: 2}
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int)",
        *(f"INSERT INTO t SELECT {k} * 100 + i, {k} FROM generate_series(1, {n}) i" for k, n in of_key.items()),
    )
    pause_by_duplicates(database, "t", "k")
    with database.transaction() as connection:
        of = duplicate_report.of_index(connection, "ix")
        pieces = list(duplicate_report.groups(connection, of))
    assert max(len(piece.rows) for piece in pieces) == 3
    assert {piece.count for piece in pieces if piece.key == ("1",)} == {7}
    found = as_json(dsn, "duplicates", "ix", code=1)
    told = {
        group["key"]["k"]: [int(row["primary_key"]["id"]) for row in group["rows"]] for group in found["duplicates"]
    }
    assert len(found["duplicates"]) == 4
    assert {int(k): sorted(ids) for k, ids in told.items()} == {
        k: [k * 100 + i for i in range(1, n + 1)] for k, n in of_key.items() if n > 1
    }
    shown = here(dsn, "duplicates", "ix", "--limit", "2", code=1).stdout
    assert "14 rows share 4 keys, 2 keys shown" in shown
    assert here(dsn, "duplicates", "ix", "--sql", code=1).stdout.count("::integer") == 14
    assert [len(group["rows"]) for group in duplicate_report.page(database, of.operation_id, 0)["groups"]] == [
        7,
        2,
        3,
        2,
    ]


def test_a_row_is_looked_for_in_its_own_partition_alone(database: Database, dsn: str) -> None:
    """A list of 10,000 rows, each looked for in all of 50 partitions, took 24 s."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int, day int, k int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(10)),
        "INSERT INTO t SELECT i, i % 10, i FROM generate_series(1, 50) i",
        "INSERT INTO t VALUES (101, 3, 7), (102, 4, 8)",
    )
    pause_by_duplicates(database, "t", "k")
    with database.transaction() as connection:
        of = duplicate_report.of_index(connection, "ix")
        assert of.source is not None
        execute(connection, "UPDATE roir.duplicate SET partition = NULL")
        # As if the partitions were large.
        execute(connection, "SET LOCAL enable_seqscan = off")
        duplicates.locate(connection, of.source, of.operation_id)
        looked = (
            "SELECT relname::text, idx_scan FROM pg_stat_xact_user_tables WHERE relname ~ '^t[0-9]$' AND idx_scan > 0"
        )
        scans = {row.relname: row.idx_scan for row in execute(connection, looked)}
        named = set(execute(connection, "SELECT partition FROM roir.duplicate").scalars())
    assert scans == {"t3": 1, "t4": 1, "t7": 1, "t8": 1}
    assert named == {f"public.{name}" for name in scans}


def test_a_partition_that_no_run_has_recorded_is_looked_up(database: Database, dsn: str) -> None:
    """Found: "not known" of rows that are found while the build runs. It holds: the list names every row's partition,
    and keeps no lock; of a row that is gone it isn't known.
    """
    run_sql(
        dsn,
        "CREATE TABLE t (id int, day int, k int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(3)),
        "INSERT INTO t SELECT i, i % 3, i / 2 FROM generate_series(0, 5) i",
    )
    pause_by_duplicates(database, "t", "k")
    run_sql(dsn, "UPDATE roir.duplicate SET partition = NULL", "DELETE FROM t WHERE id = 5")
    rows = [row for group in as_json(dsn, "duplicates", "ix", code=1)["duplicates"] for row in group["rows"]]
    named = {int(row["primary_key"]["id"]): row["partition"] for row in rows}
    assert named == {i: f"public.t{i % 3}" for i in range(5)} | {5: None}
    assert here(dsn, "duplicates", "ix", code=1).stdout.count("not known") == 1
    page = duplicate_report.page(database, 1, 0)["groups"]
    assert [row["partition"] for row in page[0]["rows"]] == ["public.t0", "public.t1"]
    with database.transaction() as connection:
        of = duplicate_report.of_index(connection, "ix")
        assert next(iter(duplicate_report.groups(connection, of))).rows[0].partition == "public.t0"
        held = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'public.t'::regclass"
        assert execute(connection, held).scalar_one() == 0


@pytest.mark.sample(0)
def test_duplicates_are_listed_once_then_counted(database: Database, dsn: str) -> None:
    """Found: 20 lines of duplicates in the build, again in the seal, again at each resume. It holds: some examples
    once, with their number and the command that lists all; a resume that finds no other only says how many there are.
    """
    run_sql(
        dsn, "CREATE TABLE t (id int PRIMARY KEY, k int)", "INSERT INTO t SELECT i, i / 2 FROM generate_series(0, 99) i"
    )
    steps.begin(database, unique=True)
    told: list[str] = []

    def drive() -> list[str]:
        del told[:]
        with pytest.raises(DuplicatesFound, match="100 rows share 50 keys"):
            lifecycle.drive(database, "ix", "test", None, told.append, take_over=True)
        return [line for line in told if "duplicate" in line]

    first = drive()
    assert len([line for line in first if "duplicate (k)=(" in line]) == 5
    # Rows are listed in the order in which the workers have found them.
    assert re.search(r"duplicate \(k\)=\(\d+\): \(id\)=\(\d+\) in public\.t; \(id\)=\(\d+\) in public\.t$", first[0])
    [count] = [line for line in first if "until now" in line]
    assert count.endswith("100 rows share 50 keys until now: roir duplicates public.ix")
    assert drive() == []


def test_duplicates_of_the_last_writes_are_listed_without_those_before(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k int)", "INSERT INTO t VALUES (1, 1), (2, 2), (3, 2)")
    pause_by_duplicates(database, "t", "k")
    run_sql(dsn, "UPDATE t SET k = 3 WHERE id = 3")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    run_sql(dsn, "INSERT INTO t VALUES (4, 1)")
    told: list[str] = []
    with pytest.raises(DuplicatesFound):
        lifecycle.finalize(database, "ix", "test", told.append, take_over=True)
    assert [line for line in told if "duplicate" in line] == [
        "duplicate (k)=(1): (id)=(1) in public.t; (id)=(4) in public.t"
    ]
