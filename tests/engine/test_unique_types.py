"""A unique index on every type: equal values are duplicates, are reported, and are refused once it is enforced."""

from __future__ import annotations

from contextlib import closing

import psycopg2.errors
import pytest

from airflow_roir.engine import lifecycle, switch
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import DuplicatesFound
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_collations import ICU
from tests.engine.test_contrib import VALUES, create_extension
from tests.engine.test_types import EQUAL_BUT_DIFFERENT
from tests.engine.test_unique_verify import unseen
from tests.engine.values import ARRAYS, ORDERED, set_up, supported

pytestmark = pytest.mark.sample(1)

OPTIONS = {"ranges": 2, "segments": 3, "batch_rows": 3, "unique": True}


def unhealed(dsn: str) -> list[tuple[str, str]]:
    """Key and primary key of the duplicates that aren't healed."""
    with closing(steps.session(dsn)) as user:
        query = "SELECT key ->> 0, primary_key ->> 0 FROM roir.duplicate WHERE healed_at IS NULL ORDER BY id"
        return sql(user, query)


def refused(dsn: str, statement: str) -> str:
    """The detail of a refusal."""
    with closing(steps.session(dsn)) as user:
        with pytest.raises(psycopg2.errors.UniqueViolation) as error:
            sql(user, statement)
        user.rollback()
        return str(error.value.diag.message_detail)


def through_duplicates(database: Database, dsn: str, first: str, other: str) -> None:
    """Checks duplicates among copies and in the delta, which are then healed, and the refusals from the switch on.

    `t (id int, x …, …)` has a row of id 1 with the key `first`; `other` is equal to that.
    """
    run_sql(dsn, f"INSERT INTO t (id, x) VALUES (900, {other})")
    run = steps.built(database, keys="x", **OPTIONS)
    run_sql(dsn, f"INSERT INTO t (id, x) VALUES (901, {other}), (902, {first})")
    with pytest.raises(DuplicatesFound):
        steps.seal_all(database, run)
    assert sorted(one for _, one in unhealed(dsn)) == ["1", "900", "901", "902"]
    run_sql(dsn, "DELETE FROM t WHERE id IN (900, 901)")
    run = start_run(database, "ix", "test", take_over=True)
    steps.seal_all(database, run)
    with pytest.raises(DuplicatesFound):
        switch.switch(database, run)
    assert sorted(one for _, one in unhealed(dsn)) == ["1", "902"]
    run_sql(dsn, "UPDATE t SET x = NULL WHERE id = 902")
    run = start_run(database, "ix", "test", take_over=True)
    switch.switch(database, run)
    assert unhealed(dsn) == []
    refusals(dsn, first, other)
    steps.fold_and_publish(database, run)
    refusals(dsn, first, other)
    steps.assert_exact(database)
    assert lifecycle.verify(database, "ix", VerifyOptions(sample=100)).found == 0


def refusals(dsn: str, first: str, other: str) -> None:
    """In one mode: another row is refused the key, its own row may have an equal one, and other rows may have NULL."""
    said = refused(dsn, f"INSERT INTO t (id, x) VALUES (903, {other})")
    assert said.startswith("Key (x)=(")
    assert said.endswith(") already exists.")
    refused(dsn, f"UPDATE t SET x = {first} WHERE id = 902")
    run_sql(
        dsn,
        f"UPDATE t SET x = {other} WHERE id = 1",
        # The values are swapped, and swapped back.
        "UPDATE t SET x = (SELECT o.x FROM t o WHERE o.id = 903 - t.id) WHERE id IN (1, 902)",
        "UPDATE t SET x = (SELECT o.x FROM t o WHERE o.id = 903 - t.id) WHERE id IN (1, 902)",
        "INSERT INTO t (id, x) VALUES (904, NULL), (905, NULL)",
        "DELETE FROM t WHERE id IN (904, 905)",
        f"DELETE FROM t WHERE id = 1; INSERT INTO t (id, x) VALUES (1, {first})",
    )


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", [*ORDERED, *ARRAYS])
def test_a_key_of_every_type(database: Database, dsn: str, name: str) -> None:
    set_up(dsn)
    values = supported(dsn, name, {**ORDERED, **ARRAYS}[name])
    rows = ", ".join(f"({i}, {value}::{name})" for i, value in enumerate(values, start=1))
    run_sql(
        dsn,
        f"CREATE TABLE t (id int PRIMARY KEY, x {name})",
        f"INSERT INTO t SELECT min(i), x FROM (VALUES {rows}) v (i, x) GROUP BY x",
        "INSERT INTO t SELECT 100 + i FROM generate_series(1, 3) i",
    )
    with closing(steps.session(dsn)) as user:
        [(lowest,)] = sql(user, "SELECT min(id) FROM t")
    run_sql(dsn, f"UPDATE t SET id = 1 WHERE id = {lowest}")
    value = f"{values[lowest - 1]}::{name}"
    through_duplicates(database, dsn, value, value)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("name", EQUAL_BUT_DIFFERENT)
def test_equal_values_that_differ_are_one_key(database: Database, dsn: str, name: str) -> None:
    set_up(dsn)
    plain = name.split(" ")[0]
    one, two = (f"'{value}'::{plain}" for value in EQUAL_BUT_DIFFERENT[name][:2])
    assert len(supported(dsn, name, [one, two])) == 2
    run_sql(dsn, f"CREATE TABLE t (id int PRIMARY KEY, x {name})", f"INSERT INTO t VALUES (1, {one}), (2, NULL)")
    through_duplicates(database, dsn, one, two)


@pytest.mark.parametrize("kind", ICU)
def test_keys_in_icus_order(database: Database, dsn: str, kind: str) -> None:
    """The collation's own equality decides which rows are refused. Then a verification and a repair."""
    with closing(steps.session(dsn)) as user:
        if not sql(user, "SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'"):
            pytest.skip("this server is built without ICU, as the embedded ones are; Debian's has it (--pg 15)")
    run_sql(
        dsn,
        f"CREATE COLLATION odd ({ICU[kind]})",
        "CREATE TABLE t (id int PRIMARY KEY, x text COLLATE odd)",
        "INSERT INTO t SELECT i, 'Straße' || i FROM generate_series(1, 30) i",
        "UPDATE t SET x = 'álé' WHERE id = 1",
    )
    one = {"case insensitive": "'ÁLé'", "accent insensitive": "'ALE'"}.get(kind, "'álé'")
    through_duplicates(database, dsn, "'álé'", one)
    run_sql(dsn, f"INSERT INTO t VALUES (901, {one} || 'x')")
    unseen(dsn, "INSERT INTO t VALUES (902, 'álé') ON CONFLICT DO NOTHING", f"UPDATE t SET x = {one} WHERE id = 902")
    report = lifecycle.verify(database, "ix", VerifyOptions(repair=True))
    assert (report.duplicate, report.found - report.repaired) == (1, 1)
    run_sql(dsn, "DELETE FROM t WHERE id = 902")
    assert lifecycle.verify(database, "ix", VerifyOptions(repair=True)).is_exact
    steps.assert_exact(database)


@pytest.mark.parametrize("name", ["citext", "ltree", "hstore"])
def test_types_of_extensions(database: Database, dsn: str, name: str) -> None:
    create_extension(dsn, name, "ext")
    one, other, third, _ = (f"{value}::ext.{name}" for value in VALUES[name])
    run_sql(dsn, f"CREATE TABLE t (id int PRIMARY KEY, x ext.{name})", f"INSERT INTO t VALUES (1, {one}), (2, {third})")
    through_duplicates(database, dsn, one, other if name == "citext" else one)
