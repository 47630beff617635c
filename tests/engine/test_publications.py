"""Publications of every kind, made at any time: a user's write fails only if it would fail without an index."""

from __future__ import annotations

import itertools
import random

import psycopg2
import psycopg2.extensions
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, dry_run, prepare
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

# `twin` is like `t`, without an index: it shows PostgreSQL's own behaviour.
TABLES = ("t", "twin")
PLAIN = "CREATE TABLE {0} (id int PRIMARY KEY, k text, v int, u serial UNIQUE)"
PARTITIONED = (
    "CREATE TABLE {0} (id int PRIMARY KEY, k text, v int, u serial) PARTITION BY RANGE (id)",
    "CREATE TABLE {0}_1 PARTITION OF {0} FOR VALUES FROM (MINVALUE) TO (30)",
    "CREATE TABLE {0}_2 PARTITION OF {0} FOR VALUES FROM (30) TO (MAXVALUE)",
)
FILL = "INSERT INTO {0} (id, k, v) SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i"
KINDS = {
    "all tables": "FOR ALL TABLES",
    "all tables, inserts": "FOR ALL TABLES WITH (publish = 'insert')",
    "all tables, deletes": "FOR ALL TABLES WITH (publish = 'delete')",
    "all tables, by root": "FOR ALL TABLES WITH (publish_via_partition_root)",
    "schema": "FOR TABLES IN SCHEMA public",
    "our schemas": "FOR TABLES IN SCHEMA public, roir, roir_data",
    "table": "FOR TABLE t, twin",
    "table, by root": "FOR TABLE t, twin WITH (publish_via_partition_root)",
    "rows": "FOR TABLE t WHERE (id > 5), twin WHERE (id > 5) WITH (publish_via_partition_root)",
    "columns": "FOR TABLE t (id, k), twin (id, k) WITH (publish_via_partition_root)",
}
OURS = ("all tables", "all tables, inserts", "all tables, deletes", "all tables, by root", "our schemas")
MOMENTS = ("before", "mid-build", "mid-fold", "published")
IDENTITIES = ("DEFAULT", "FULL", "NOTHING", "USING INDEX {0}_u_key")
WRITES = (
    "UPDATE {0} SET v = v + 1 WHERE id % 2 = 0",
    "UPDATE {0} SET k = 'other' WHERE id % 3 = 0",
    "UPDATE {0} SET id = id + 1000 WHERE id % 7 = 0",
    "DELETE FROM {0} WHERE id % 5 = 0",
    "INSERT INTO {0} (id, k, v) SELECT i, 'again', 0 FROM generate_series(1, 12) i "
    "ON CONFLICT (id) DO UPDATE SET k = 'conflict'",
    "MERGE INTO {0} USING generate_series(5, 70) i ON id = i WHEN MATCHED THEN DELETE "
    "WHEN NOT MATCHED THEN INSERT (id, k, v) VALUES (i, 'merged', i)",
    "TRUNCATE {0}",
    FILL,
)

# Errors of updates and deletes in a publication if the table's replica identity doesn't suffice.
NO_IDENTITY = ("55000", "42P10")

Case = tuple[str, str, str, bool]
EVERY: list[Case] = [
    case
    for case in itertools.product(KINDS, MOMENTS, IDENTITIES, (False, True))
    # A unique index of a partitioned table contains its partition key.
    if not (case[3] and case[2].startswith("USING"))
]


def _outcome(user: psycopg2.extensions.connection, statement: str) -> str:
    try:
        sql(user, statement)
    except psycopg2.Error as error:
        user.rollback()
        return str(error.pgcode)
    user.commit()
    return "done"


def _lives(database: Database, dsn: str, case: Case) -> None:
    kind, moment, identity, partitioned = case
    for name in TABLES:
        made = [one.format(name) for one in (PARTITIONED if partitioned else (PLAIN,))]
        run_sql(dsn, *made, FILL.format(name))
        for one in (name, f"{name}_1", f"{name}_2") if partitioned else (name,):
            run_sql(dsn, f"ALTER TABLE {one} REPLICA IDENTITY {identity.format(one)}")
    user = steps.session(dsn)
    refused: list[str] = []

    def reach(now: str) -> None:
        if now == moment:
            run_sql(dsn, f"CREATE PUBLICATION p {KINDS[kind]}")
        for statement in WRITES:
            one, other = (_outcome(user, statement.format(name)) for name in TABLES)
            assert one == other, (now, statement)
            assert one in ("done", *NO_IDENTITY)
            refused.extend([one] * (one != "done"))

    reach("before")
    _, run = steps.begin(database, include="v", ranges=3, segments=2, batch_rows=7, ignore_publications=True)
    worker, claim = steps.claimed(database, run)
    assert isinstance(worker.step(claim), Step)
    worker.connection.close()
    reach("mid-build")
    steps.switch_all(database, run)
    reach("mid-fold")
    steps.fold_and_publish(database, run)
    reach("published")
    steps.assert_exact(database)
    # Otherwise the publication had no effect.
    if identity == "NOTHING":
        assert bool(refused) == (kind != "all tables, inserts")


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", EVERY, ids=lambda case: ", ".join(map(str, case)))
def test_a_users_write_fails_only_where_it_would_without_an_index(database: Database, dsn: str, case: Case) -> None:
    """Found: `CREATE PUBLICATION … FOR ALL TABLES` failed every write to the source. It holds: each table of entries
    has a replica identity.
    """
    _lives(database, dsn, case)


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_refuses_what_would_publish_the_indexs_own_tables(database: Database, dsn: str, kind: str) -> None:
    run_sql(dsn, PLAIN.format("t"), PLAIN.format("twin"), f'CREATE PUBLICATION "my P" {KINDS[kind]}')
    definition = IndexDefinition.parse("ix", "t", "k")
    if kind not in OURS:
        dry_run.run(database, definition, BuildOptions())
        return
    with pytest.raises(InvalidInput, match=r'publication "my P".*subscriber stops.*ignore_publications'):
        prepare.prepare(database, definition, BuildOptions())
    with database.transaction() as connection:
        assert execute(connection, "SELECT count(*) FROM roir.operation").scalar_one() == 0
    prepare.prepare(database, definition, BuildOptions(ignore_publications=True))


def test_one_that_publishes_nothing_is_nobodys_concern(database: Database, dsn: str) -> None:
    run_sql(dsn, PLAIN.format("t"), "CREATE PUBLICATION p FOR ALL TABLES WITH (publish = '')")
    steps.begin(database)


def test_one_that_comes_after_the_publish_is_warned_of_unless_that_is_known(database: Database, dsn: str) -> None:
    run_sql(dsn, PLAIN.format("t"), FILL.format("t"))
    steps.make_index(database)
    assert clean_up.clean_up(database).warnings == []
    run_sql(dsn, "CREATE PUBLICATION p FOR ALL TABLES")
    for lines in (clean_up.clean_up(database).warnings, status(database, "ix")[0].warnings):
        [line] = lines
        assert 'index public.ix: publication "p" is for all tables' in line
        assert "ALTER SUBSCRIPTION" in line
    steps.make_index(database, table=None, keys=None, ignore_publications=True)
    assert clean_up.clean_up(database).warnings == []


@pytest.mark.parametrize("seed", [random.SystemRandom().randrange(2**32)], ids=["random"])
def test_a_random_publication(database: Database, dsn: str, seed: int) -> None:
    case = random.Random(seed).choice(EVERY)
    print(case)
    _lives(database, dsn, case)
