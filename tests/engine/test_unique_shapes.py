"""A unique index over odd tables: any names, many columns, the primary key in the key, types that are renamed."""

from __future__ import annotations

from contextlib import closing

import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up, lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import Stage, through_modes
from tests.engine.steps import sql
from tests.engine.test_unique_verify import unseen

pytestmark = pytest.mark.sample(1)

REPAIRED = VerifyOptions(repair=True)
# Names of the capture's own variables and aliases, and a name that breaks a text.
NAMES = ("holder", "held", "here", "taken", "gone", "careful", "NEW", "d", "b", "s", "h", "x", "50% $roir$ 'it''s\" \\")
TABLE = '"T $roir$ 1%% ""q"""'


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
def test_names_of_ours_and_of_all_sorts(database: Database, dsn: str, partitioned: bool) -> None:
    table, names = TABLE.replace("%%", "%"), [quoted(name) for name in NAMES]
    keys, rest = ", ".join(names), f"{names[0]}, {names[-1]}"
    by = f" PARTITION BY LIST ({names[0]})" if partitioned else ""
    columns = ", ".join(f"{name} int" for name in names)
    run_sql(
        dsn,
        f"CREATE TABLE {table} ({columns}, id int, v int, PRIMARY KEY (id, {rest})){by}",
        *(f"CREATE TABLE p{n} PARTITION OF {table} FOR VALUES IN ({n})" for n in (0, 1) if partitioned),
        f"INSERT INTO {table} SELECT i % 2, {', '.join('i' for _ in names[1:])}, i, i FROM generate_series(1, 30) i",
    )
    index = '"$roir$ 50% ""x""\'"'

    def write(mode: str) -> None:
        with closing(steps.session(dsn)) as user:
            sql(user, f"UPDATE {table} SET {names[1]} = 31 - {names[1]}, id = -id")
            sql(user, f"UPDATE {table} SET {names[2]} = NULL WHERE id % 3 = 0")
            sql(user, f"UPDATE {table} SET v = v + 1")
            user.commit()
            again = f"INSERT INTO {table} SELECT {keys}, 1000, 0 FROM {table} WHERE id % 3 <> 0 LIMIT 1"
            if mode != "capture":
                with pytest.raises(psycopg2.errors.UniqueViolation) as refused:
                    sql(user, again)
                assert refused.value.diag.constraint_name == '$roir$ 50% "x"\''
                assert refused.value.diag.table_name == 'T $roir$ 1% "q"'
            user.rollback()

    through_modes(database, write, index, table, keys=keys, include="v", unique=True, segments=3)
    run_sql(dsn, "DELETE FROM roir_data.g1 WHERE c1 = 0")
    assert lifecycle.verify(database, index, REPAIRED).missing == 15
    assert lifecycle.verify(database, index).found == 0


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("nulls_not_distinct", [False, True], ids=["distinct", "not distinct"])
def test_thirty_columns_in_the_key(database: Database, dsn: str, nulls_not_distinct: bool) -> None:
    names = [f"k{n}" for n in range(30)]
    run_sql(
        dsn,
        f"CREATE TABLE t (id int, day int, {', '.join(f'{name} int' for name in names)}, PRIMARY KEY (id, day))",
        f"INSERT INTO t SELECT i, 1, {', '.join('i' for _ in names)} FROM generate_series(1, 30) i",
        "UPDATE t SET k29 = NULL, k0 = NULL WHERE id % 5 = 0",
    )
    stage = Stage(database, "published", keys=", ".join(names), unique=True, nulls_not_distinct=nulls_not_distinct)
    copied = f"INSERT INTO t SELECT id + 100, 1, {', '.join(names)} FROM t WHERE id = "
    with closing(steps.session(dsn)) as user:
        with pytest.raises(psycopg2.errors.UniqueViolation):
            sql(user, f"{copied} 7")
        user.rollback()
        if nulls_not_distinct:
            with pytest.raises(psycopg2.errors.UniqueViolation):
                sql(user, f"{copied} 5")
            user.rollback()
        else:
            sql(user, f"{copied} 5")
        sql(user, "UPDATE t SET k0 = NULL, k29 = NULL WHERE id = 7")
        sql(user, "UPDATE t SET k0 = 10, k29 = 10 WHERE id = 10")
        user.commit()
    stage.assert_exact("written")
    unseen(dsn, f"{copied} 8", "UPDATE t SET k3 = -1 WHERE id = 9")
    report = lifecycle.verify(database, "ix", REPAIRED)
    assert (report.duplicate, report.found - report.repaired) == (1, 1)
    run_sql(dsn, "DELETE FROM t WHERE id = 108")
    stage.finish()


@pytest.mark.sample(0)
@pytest.mark.parametrize("keys", ["id, k", "k, day", "k, day, id", "id, day"])
@pytest.mark.parametrize("mode", ["direct", "active"])
def test_a_key_with_the_primary_key_or_a_part_of_it(database: Database, dsn: str, keys: str, mode: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int, day int, k text, v int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(3)),
        "INSERT INTO t SELECT i, i % 3, i::text, i FROM generate_series(1, 30) i",
    )
    stage = Stage(database, mode, keys=keys, include="v", unique=True, segments=3)
    with closing(steps.session(dsn)) as user:
        # Another row of the same key, if the key allows one.
        again = "INSERT INTO t VALUES (6, 1, '6', 0)" if keys == "id, k" else "INSERT INTO t VALUES (106, 0, '6', 0)"
        if keys in ("id, k", "k, day"):
            with pytest.raises(psycopg2.errors.UniqueViolation):
                sql(user, again)
            user.rollback()
        else:
            sql(user, again)
        for statement in (
            "UPDATE t SET k = (31 - id)::text WHERE id < 31",
            "UPDATE t SET k = NULL WHERE id % 4 = 0",
            "UPDATE t SET day = (day + 1) % 3 WHERE id % 5 = 0",
            "UPDATE t SET id = 61 - id WHERE id BETWEEN 10 AND 20",
            "UPDATE t SET v = 0 WHERE id % 2 = 0",
            "DELETE FROM t WHERE id % 7 = 0",
        ):
            sql(user, statement)
            user.commit()
            stage.assert_exact(statement)
    stage.finish()
    assert lifecycle.verify(database, "ix", VerifyOptions(sample=100)).found == 0


@pytest.mark.sample(0)
def test_what_its_types_are_called_and_where_its_segments_are_stored_may_change(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE SCHEMA kinds",
        "CREATE TYPE kinds.mood AS ENUM ('a', 'b', 'c', 'd', 'e', 'f')",
        "CREATE TABLE t (id int PRIMARY KEY, k kinds.mood NOT NULL, v int)",
        "INSERT INTO t SELECT n, x, n FROM unnest(enum_range(NULL::kinds.mood)) WITH ORDINALITY u (x, n) WHERE n < 5",
    )
    stage = Stage(database, "published", include="v", unique=True, segments=2)
    run_sql(dsn, "ALTER TYPE kinds.mood RENAME TO feeling", "ALTER SCHEMA kinds RENAME TO sorts")
    clean_up.clean_up(database, "test")
    run_sql(
        dsn,
        # NULLs were impossible until now. They go to the default segment.
        "ALTER TABLE t ALTER k DROP NOT NULL",
        "INSERT INTO t VALUES (10, NULL, 1), (11, NULL, 1)",
        "UPDATE t SET k = 'e' WHERE id = 10",
        "REINDEX TABLE roir_data.g1",
        "CLUSTER roir_data.g1_s001 USING g1_s001_key",
        "VACUUM FULL roir_data.g1",
        "UPDATE t SET k = CASE k WHEN 'a' THEN 'b' ELSE 'a' END::sorts.feeling WHERE k IN ('a', 'b')",
        "UPDATE t SET k = NULL WHERE id = 3",
        "UPDATE t SET v = 7",
    )
    with closing(steps.session(dsn)) as user:
        for label in ("a", "e"):
            with pytest.raises(psycopg2.errors.UniqueViolation) as refused:
                sql(user, f"INSERT INTO t VALUES (12, '{label}', 1)")
            assert refused.value.diag.message_detail == f"Key (k)=({label}) already exists."
            user.rollback()
    stage.assert_exact("written")
    unseen(dsn, "INSERT INTO t VALUES (20, 'a', 1), (21, 'f', 1)")
    report = lifecycle.verify(database, "ix", REPAIRED)
    assert (report.duplicate, report.repaired) == (1, 1)
    run_sql(dsn, "DELETE FROM t WHERE id = 20")
    stage.finish()
