"""Writes straight to an entry's segment, by kept plans: exact, even if the segment is a wrong guess."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2.errors
import pytest

from airflow_roir.engine.capture import installation, segment_writes
from airflow_roir.engine.capture.row_function import body
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.source import catalog
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import MODES, Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

WORDS = "(ARRAY['a', '''', E'\\\\', E'a\\\\''\"', '%s', E'\\n', 'é', '$roir$', ' ', ''])[1 + i % 10] || i % 4"
# The key's columns, and their values in row i.
KEYS = {
    "integer": ("k int", "i % 20"),
    "text": ("k text", WORDS),
    "varchar": ("k varchar(9)", WORDS),
    "padded": ("k char(9)", WORDS),
    "numeric": ("k numeric", "(i % 9)::numeric / 4"),
    "float": ("k float8", "CASE WHEN i % 9 = 0 THEN 'NaN' ELSE (i % 9) / 3.0 END"),
    "uuid": ("k uuid", "md5((i % 20)::text)::uuid"),
    "bytes": ("k bytea", "convert_to(" + WORDS + ", 'UTF8')"),
    "time": ("k timestamptz", "timestamptz '2020-02-03 04:05:06.789+00' + i % 20 * interval '1 day'"),
    "before Christ": ("k date", "CASE WHEN i % 9 = 0 THEN '-infinity' ELSE date '0044-03-15 BC' + i % 9 END"),
    "domain": ("k word", WORDS),
    "NULLs": ("k int", "nullif(i % 5, 3)"),
    # Neither column alone divides the rows.
    "two columns": ("a int, b date", "i % 2, date '2020-02-03' + i % 5"),
    "with the primary key": ("k text", "'same'"),
}
# No segment is guessed for these: the meaning of their texts depends on settings, or can be altered.
UNGUESSED = {"money": ("k money", "(i % 20)::money"), "enum": ("k mood", "('{a,b,c,d}'::mood[])[1 + i % 4]")}
WRITES = (
    "UPDATE t SET v = v + 1 WHERE id % 2 = 0",
    "DELETE FROM t WHERE id % 3 = 0",
    "UPDATE t SET id = id + 1000 WHERE id % 3 = 1",
    "DELETE FROM t WHERE id > 1020",
)


def make(dsn: str, key: tuple[str, str]) -> str:
    """Creates table `t` with such a key; returns the key's columns."""
    run_sql(
        dsn,
        "CREATE DOMAIN word AS text",
        "CREATE TYPE mood AS ENUM ('a', 'b', 'c', 'd')",
        f"CREATE TABLE t (id int PRIMARY KEY, {key[0]}, v int)",
        f"INSERT INTO t SELECT i, {key[1]}, i FROM generate_series(1, 60) i",
    )
    return ",".join(column.split()[0].strip('"') for column in key[0].split(", "))


def text_of(database: Database) -> str:
    """The capture function of t."""
    with database.transaction() as connection:
        oid = int(execute(connection, "SELECT 'public.t'::regclass::oid::bigint").scalar_one())
        return body(catalog.read_source_by_oid(connection, oid), installation.targets(connection, oid))


@pytest.mark.sample(0)
@pytest.mark.parametrize("key", [*KEYS, *UNGUESSED])
def test_writes_are_exact_for_a_key_of_any_type(database: Database, dsn: str, key: str) -> None:
    """With any settings of the writer's session."""
    columns = make(dsn, {**KEYS, **UNGUESSED}[key])
    stage = Stage(database, "published", keys=columns, include="v", segments=5)
    assert ("DELETE FROM roir_data.g1_s002" in text_of(database)) == (key in KEYS)
    with closing(steps.session(dsn)) as user:
        for setting in ("DateStyle = 'SQL, DMY'", "standard_conforming_strings = off", "TimeZone = 'Asia/Tokyo'"):
            with user.cursor() as cursor:
                try:
                    cursor.execute(f"SET {setting}")
                except psycopg2.errors.FeatureNotSupported:
                    user.rollback()
        for statement in WRITES:
            sql(user, statement)
            user.commit()
            stage.assert_exact(statement)
    stage.finish()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_wrong_guess_of_the_segment_costs_only_time(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch, mode: str, isolation: str
) -> None:
    make(dsn, KEYS["integer"])
    guess = segment_writes._bounds

    def wrong(target: Any, most: int) -> Any:
        return tuple(reversed(guess(target, most) or ()))

    monkeypatch.setattr(segment_writes, "_bounds", wrong)
    stage = Stage(database, mode, include="v", segments=5)
    with closing(steps.session(dsn, isolation)) as user:
        for statement in WRITES:
            sql(user, statement)
            user.commit()
            stage.assert_exact(statement)
    stage.finish()


@pytest.mark.parametrize(("key", "updated"), [("k int", "g1_s020"), ("k money", "g1")], ids=["guessed", "not guessed"])
@pytest.mark.parametrize("mode", MODES[1:])
def test_an_update_of_what_a_unique_index_includes_is_one_update(
    database: Database, dsn: str, key: str, updated: str, mode: str
) -> None:
    """With `put` it would be three statements, and two of them would be planned again for each row."""
    make(dsn, (key, f"i::text::{key.split()[1]}"))
    stage = Stage(database, mode, include="v", segments=20, unique=True)
    stage.mix()
    assert f"UPDATE roir_data.{updated} SET" in text_of(database)
    for statement in ("UPDATE t SET v = v + 1 WHERE id % 2 = 0", "UPDATE t SET v = NULL WHERE id > 30"):
        run_sql(dsn, statement)
        stage.assert_exact(statement)
    stage.finish()


READ = """
SELECT coalesce(sum(seq_scan), 0) FROM pg_stat_xact_all_tables
 WHERE relid = 't'::regclass OR relname ~ '^g1(_s[0-9]+|_delta)?$'
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_that_was_kept_from_an_empty_table_reads_no_table_for_each_row(
    database: Database, dsn: str, mode: str
) -> None:
    """Such a plan would read the whole table, as it is by now, for each row that is written."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k int, v int)", "INSERT INTO t VALUES (1, 1, 1)")
    stage = Stage(database, mode, include="v", ranges=1, segments=1)
    with closing(steps.session(dsn)) as user:
        # From the sixth time on a plan is kept.
        for number in range(10):
            sql(user, "INSERT INTO t VALUES (%s, %s, 1)", 10 + number, number)
            user.commit()
            sql(user, "UPDATE t SET v = 2 WHERE id = %s", 10 + number)
            user.commit()
            sql(user, "DELETE FROM t WHERE id = %s", 10 + number)
            user.commit()
        sql(user, "INSERT INTO t SELECT i, i, i FROM generate_series(100, 3000) i")
        user.commit()
        before = sql(user, READ)[0][0]
        sql(user, "UPDATE t SET v = v + 1 WHERE v > 50")
        sql(user, "DELETE FROM t WHERE v > 50")
        after = sql(user, READ)[0][0]
        user.commit()
        # The statements themselves read two.
        assert after - before <= 2
    stage.assert_exact("removed")
    stage.finish()


def test_the_owner_of_a_table_may_remove_from_the_segments_and_is_told_if_not(database: Database, dsn: str) -> None:
    make(dsn, KEYS["integer"])
    role = "removal_owner"
    run_sql(dsn, f"DROP ROLE IF EXISTS {role}", f"CREATE ROLE {role}", f"ALTER TABLE t OWNER TO {role}")
    try:
        stage = Stage(database, "published", segments=3)
        run_sql(dsn, "DELETE FROM t WHERE id % 3 = 0")
        stage.assert_exact("by its owner")
        run_sql(dsn, f"REVOKE DELETE ON roir_data.g1_s001 FROM {role}")
        with database.transaction() as connection:
            oid = int(execute(connection, "SELECT 'public.t'::regclass::oid::bigint").scalar_one())
            source = catalog.read_source_by_oid(connection, oid)
            assert installation.lacks_rights(connection, source)
            installation.refresh(connection, source)
            assert not installation.lacks_rights(connection, source)
        stage.finish()
    finally:
        run_sql(dsn, f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


HELD = """
SELECT c.relname FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
 WHERE c.relnamespace = 'roir_data'::regnamespace AND a.grantee = 'removal_former'::regrole
"""


@pytest.mark.parametrize("mode", ["direct", "active"])
def test_a_former_owner_keeps_no_right_on_the_entries(database: Database, dsn: str, mode: str) -> None:
    """The former owner could read and write them once the capture runs as another role."""
    make(dsn, KEYS["integer"])
    roles = "removal_former", "removal_next"
    for role in roles:
        run_sql(dsn, f"DROP ROLE IF EXISTS {role}", f"CREATE ROLE {role}")
    run_sql(dsn, "ALTER TABLE t OWNER TO removal_former")
    try:
        stage = Stage(database, mode, include="v", segments=3)
        run_sql(dsn, "ALTER TABLE t OWNER TO removal_next")
        with database.transaction() as connection:
            oid = int(execute(connection, "SELECT 'public.t'::regclass::oid::bigint").scalar_one())
            installation.refresh(connection, catalog.read_source_by_oid(connection, oid))
            assert execute(connection, HELD).all() == []
        run_sql(dsn, "UPDATE t SET v = v + 1", "DELETE FROM t WHERE id % 3 = 0")
        stage.assert_exact("by the next owner")
        stage.connection.close()
    finally:
        for role in roles:
            run_sql(dsn, f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_a_segment_of_another_name_is_told(database: Database, dsn: str) -> None:
    make(dsn, KEYS["integer"])
    steps.make_index(database, segments=3)
    name = physical.segment(1, 2)
    assert not [line for line in status(database)[0].warnings if "name" in line]
    run_sql(dsn, f"ALTER TABLE {name} RENAME TO lost")
    assert any("segment" in line and "name" in line for line in status(database)[0].warnings)
