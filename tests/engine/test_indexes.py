"""The facts about each index, beside its operations: sizes, generations, verification, bloat, warnings."""

from __future__ import annotations

import os
from dataclasses import replace

import psycopg2.extensions
import pytest
from sqlalchemy import event

from airflow_roir.engine import clean_up, drop, install, lifecycle, revert
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot import details
from airflow_roir.engine.snapshot.index import IndexFacts, indexes
from airflow_roir.engine.snapshot.querying import lines
from airflow_roir.errors import NotFound, SchemaVersionMismatch
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_contrib import create_extension

pytestmark = pytest.mark.sample(2)

ROWS = 10_000


def only(database: Database, exact: bool = False) -> IndexFacts:
    [one] = indexes(database, exact=exact)
    return one


def sizes(dsn: str) -> tuple[int, int]:
    """Bytes of the first generation with its delta, and of its source."""
    [(entries, source)] = sql(
        steps.session(dsn),
        "SELECT sum(pg_total_relation_size(relid))::bigint + pg_total_relation_size('roir_data.g1_delta'), "
        "pg_table_size('t') FROM pg_partition_tree('roir_data.g1')",
    )
    return entries, source


@pytest.mark.parametrize("name", ["plain", "We\"ird '%s"])
def test_a_published_index_says_how_to_query_it(database: Database, dsn: str, name: str) -> None:
    """The statements run as they are, with a value for …; none before the publish."""
    column = '"' + name.replace('"', '""') + '"'
    run_sql(
        dsn,
        f"CREATE TABLE {column} (id int PRIMARY KEY, {column} text, v int)",
        f"INSERT INTO {column} VALUES (1, 'a', 7)",
    )
    _, run = steps.begin(database, column.replace(name[0], f"ix {name[0]}", 1), column, column, "v")
    assert (only(database).queries, details.progress(database).queries) == ((), ())
    steps.finish_all(database, run)
    by_view, whole = only(database).queries
    assert details.progress(database).queries == (by_view, whole)
    user = steps.session(dsn)
    with user.cursor() as cursor:
        cursor.execute(by_view.replace("…", "'a'"))
        assert cursor.fetchall() == [("a", 7)]
        cursor.execute(whole.replace("…", '"a"'))
        assert cursor.fetchall() == [(1, "a", 7)]


def test_an_owner_who_may_not_read_the_view_gets_the_grant(database: Database, dsn: str) -> None:
    """Found: the statement that a build tells of ended with `permission denied` for the table's owner."""
    steps.make_table(dsn, ROWS)
    steps.make_index(database)
    owner = f"The Owner {os.getpid()}"
    run_sql(dsn, f'CREATE ROLE "{owner}"', f'ALTER TABLE t OWNER TO "{owner}"')
    try:
        *two, grant = only(database).queries
        assert details.progress(database).queries == (*two, grant)
        assert grant == f'GRANT SELECT ON public.ix TO "{owner}"'
        assert lines([*two, grant])[-1] == f"the table's owner may not read it yet: {grant}"
        run_sql(dsn, grant)
        assert list(only(database).queries) == two
    finally:
        run_sql(dsn, "ALTER TABLE t OWNER TO CURRENT_USER", f'DROP OWNED BY "{owner}"', f'DROP ROLE "{owner}"')


@pytest.mark.sample(0)
def test_an_index_from_its_first_build_over_rebuild_and_revert_to_its_drop(database: Database, dsn: str) -> None:
    steps.make_table(dsn, ROWS)
    assert indexes(database) == []
    prepared, run = steps.begin(database, include="v")
    one = only(database)
    assert (one.state, one.generation, one.published_at, one.bloat, one.verified) == (
        "building",
        None,
        None,
        None,
        None,
    )
    assert (one.operation, one.source, [g.status for g in one.generations]) == (
        prepared.operation_id,
        "public.t",
        ["building"],
    )
    steps.finish_all(database, run)
    # Autovacuum may add a fork meanwhile.
    before = sizes(dsn)
    one = only(database)
    assert (one.state, one.rows, one.generation, one.operation) == ("published", ROWS, 1, None)
    assert one.bytes is not None
    assert one.source_bytes is not None
    for least, told, most in zip(before, (one.bytes, one.source_bytes), sizes(dsn), strict=True):
        assert 0 < least <= told <= most
    assert one.age_seconds is not None
    assert 0 <= one.age_seconds < 600
    assert one.verified is not None
    assert (one.verified.rows, one.verified.found, one.verified.part) == (ROWS, 0, "all")
    assert one.bloat is not None
    assert (one.bloat.win_bytes, one.bloat.note) == (0, None)
    steps.make_index(database, table=None, keys=None, verify="none")
    one = only(database)
    assert [(g.id, g.status) for g in one.generations] == [(2, "active"), (1, "retired")]
    assert one.revert_until == one.generations[1].drop_after
    # The verification was one of the generation that is replaced.
    assert (one.generation, one.verified) == (2, None)
    revert.revert(database, "ix", "test")
    one = only(database)
    assert one.generation == 1
    assert one.verified is not None
    assert one.as_dict()["verified"]["at"] == one.verified.at.isoformat()
    drop.drop_index(database, "ix", "test")
    assert indexes(database) == []
    with pytest.raises(NotFound, match="no index ix"):
        indexes(database, "ix")


def test_a_verification_says_what_it_found_and_of_what_part(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database, include="v")
    run_sql(dsn, "DELETE FROM roir_data.g1 WHERE c2 = 7", "UPDATE roir_data.g1 SET c3 = -1 WHERE c2 = 8")
    lifecycle.verify(database, "ix", VerifyOptions(repair=True))
    found = only(database).verified
    assert found is not None
    assert (found.rows, found.missing, found.extra, found.different, found.repaired) == (100, 1, 0, 1, 2)
    assert (found.differences_left, found.outcome, replace(found, repaired=0).outcome) == (
        0,
        "2 differences repaired",
        "2 differences",
    )
    for options, part in ((VerifyOptions(sample=10), "sample"), (VerifyOptions(slices=2), "slice")):
        lifecycle.verify(database, "ix", options)
        found = only(database).verified
        assert found is not None
        assert (found.part, found.missing, found.outcome) == (part, 0, f"exact in a {part}")


@pytest.mark.sample(0)
@pytest.mark.parametrize("deleted", [0, 10, 70])
def test_the_bloat_is_what_a_rebuild_wins(database: Database, dsn: str, deleted: int) -> None:
    """With several shapes of rows, the forecast is compared with the bytes that a rebuild then wins.

    Found: the status advised a rebuild for 7.7 %, which comes back, and which no compaction acts on.
    """
    run_sql(
        dsn,
        "CREATE TABLE t (id bigint PRIMARY KEY, k text, flag bool, n numeric, note text)",
        "INSERT INTO t SELECT i, repeat(chr(97 + i % 26), 3 + i % 30), i % 2 = 0, nullif(i % 5, 0) * 1.5, "
        f"CASE WHEN i % 3 > 0 THEN repeat('n', i % 90) END FROM generate_series(1, {3 * ROWS}) i",
        "ANALYZE t",
    )
    steps.make_index(database, keys="k, flag", include="n, note")
    run_sql(dsn, f"DELETE FROM t WHERE id % 100 < {deleted}")
    run_sql(dsn, "SELECT pg_stat_force_next_flush()")
    before = only(database)
    assert before.bloat is not None
    assert before.bloat.win_bytes is not None
    assert before.bloat.win_share is not None
    steps.make_index(database, table=None, keys=None, verify="none")
    after = only(database)
    won = before.generations[0].bytes - after.generations[0].bytes
    assert before.rows == after.rows == 3 * ROWS * (100 - deleted) // 100
    if deleted < 25:
        # A rebuild wins nothing worth mentioning, and the status mentions nothing.
        assert (before.bloat.win_bytes, won < 256 * 1024) == (0, not deleted)
    else:
        assert before.bloat.win_bytes == pytest.approx(won, rel=0.15)
        assert before.bloat.win_share == pytest.approx(won / before.generations[0].bytes, abs=0.1)
    assert after.bloat is not None
    assert after.bloat.win_bytes == 0


@pytest.mark.sample(0)
def test_the_bloat_measured_by_pgstattuple_agrees_and_says_what_it_lacks(database: Database, dsn: str) -> None:
    steps.make_table(dsn, ROWS)
    steps.make_index(database, include="v")
    run_sql(dsn, "DELETE FROM t WHERE id % 10 > 0", "SELECT pg_stat_force_next_flush()")
    guessed = only(database, exact=True).bloat
    assert guessed is not None
    assert not guessed.exact
    assert guessed.note == "estimated, since the extension pgstattuple isn't installed"
    create_extension(dsn, "pgstattuple", "ext")
    exact = only(database, exact=True).bloat
    assert exact is not None
    assert exact.exact
    assert exact.win_bytes is not None
    assert exact.win_bytes == pytest.approx(guessed.win_bytes, rel=0.1)


def test_without_statistics_the_bloat_says_so(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database)
    run_sql(dsn, "DELETE FROM pg_statistic WHERE starelid = ANY (SELECT inhrelid FROM pg_inherits)")
    found = only(database).bloat
    assert found is not None
    assert (found.bytes, found.win_bytes, found.note) == (
        None,
        None,
        "its tables have no statistics: ANALYZE makes them",
    )


def test_a_server_that_has_forgotten_its_counts_makes_no_index_look_empty(database: Database, dsn: str) -> None:
    """After a crash, for example, the counts hold only the writes since then."""
    steps.make_table(dsn, rows=ROWS)
    steps.make_index(database)
    before = only(database)
    run_sql(
        dsn, "SELECT pg_stat_reset()", f"INSERT INTO t SELECT i, 'x', i FROM generate_series({ROWS + 1}, {ROWS + 9}) i"
    )
    found = only(database)
    assert found.rows == before.rows
    assert found.bloat is not None
    assert found.bloat.win_bytes == 0


@pytest.mark.sample(0)
@pytest.mark.parametrize("what", ["t", "ix", "roir_data.g1"])
def test_who_holds_a_table_for_itself_holds_up_no_status(database: Database, dsn: str, what: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database)
    free = only(database)
    holder = steps.session(dsn)
    # The view can't be locked by name.
    sql(holder, "ALTER VIEW ix SET SCHEMA public" if what == "ix" else f"LOCK TABLE {what} IN ACCESS EXCLUSIVE MODE")
    one = only(database)
    assert (one.state, one.rows, one.generation) == (free.state, free.rows, free.generation)
    assert one.bytes > 0
    assert one.source_bytes > 0
    assert ["can't be checked now" in line for line in one.warnings] == [True]
    holder.rollback()
    assert only(database).warnings == ()


@pytest.mark.sample(0)
def test_what_is_gone_is_told_and_the_rest_shown(database: Database, dsn: str) -> None:
    """With hostile names: the source is gone, then the entries, and at last the control schema."""
    run_sql(
        dsn,
        'CREATE TABLE "T "".%s\n<b>" (id int PRIMARY KEY, "k%" text)',
        'INSERT INTO "T "".%s\n<b>" SELECT i, i FROM generate_series(1, 50) i',
    )
    name = 'public."ix %s\n\x1b[31m"'
    steps.make_index(database, name, '"T "".%s\n<b>"', '"k%"')
    one = only(database)
    assert (one.index, one.source, one.rows) == (name, 'public."T "".%s\n<b>"', 50)
    run_sql(dsn, "DROP TABLE roir_data.g1 CASCADE")
    one = only(database)
    assert one.bytes < 100_000
    assert one.bloat is not None
    assert one.bloat.note == "the index's tables are gone"
    assert one.warnings
    run_sql(dsn, 'DROP TABLE "T "".%s\n<b>" CASCADE')
    one = only(database)
    assert (one.source, one.source_bytes) == (None, 0)
    assert "was dropped" in one.warnings[0]
    run_sql(dsn, "UPDATE roir.schema_version SET version_num = '9999'")
    with pytest.raises(SchemaVersionMismatch, match="Upgrade"):
        indexes(database)
    run_sql(dsn, "DROP SCHEMA roir CASCADE")
    with pytest.raises(SchemaVersionMismatch, match="roir init"):
        indexes(database)


@pytest.mark.sample(0)
def test_an_unfinished_operation_is_named_until_it_ends(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database)
    prepared, _ = steps.begin(database, table=None, keys=None)
    requests.pause(database, "ix", "test")
    one = only(database)
    assert (one.state, one.generation, one.operation) == ("published", 1, prepared.operation_id)
    assert [g.status for g in one.generations] == ["building", "active"]
    clean_up.clean_up(database)
    assert only(database).operation == prepared.operation_id


def test_a_plain_owner_sees_its_indexes_with_their_bloat(server: str, dsn: str) -> None:
    name = psycopg2.extensions.parse_dsn(dsn)["dbname"]
    run_sql(
        dsn,
        "DROP ROLE IF EXISTS indexer",
        "CREATE ROLE indexer LOGIN",
        f"GRANT CREATE ON DATABASE {name} TO indexer",
        "DROP SCHEMA roir, roir_data CASCADE",
        "GRANT CREATE ON SCHEMA public TO indexer",
    )
    plain = Database(psycopg2.extensions.make_dsn(dsn, user="indexer"))

    install.init(plain)
    run_sql(
        plain.dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text)",
        f"INSERT INTO t SELECT i, i FROM generate_series(1, {ROWS}) i",
    )
    try:
        steps.make_index(plain)
        run_sql(plain.dsn, "DELETE FROM t WHERE id % 10 > 0", "SELECT pg_stat_force_next_flush()")
        one = only(plain)
        assert (one.rows, one.warnings) == (ROWS // 10, ())
        assert one.bloat is not None
        assert one.bloat.win_bytes is not None
        assert one.bloat.win_bytes > 256 * 1024
        create_extension(dsn, "pgstattuple", "ext")
        one = only(plain, exact=True)
        assert one.bloat is not None
        assert not one.bloat.exact
        assert one.bloat.note is not None
        assert "may not use pgstattuple" in one.bloat.note
    finally:
        run_sql(dsn, "DROP SCHEMA roir, roir_data CASCADE", "DROP OWNED BY indexer CASCADE", "DROP ROLE indexer")


def test_a_look_at_an_index_costs_the_same_however_many_its_table_has(database: Database, dsn: str) -> None:
    """The page Indexes looks at all indexes. Each index's rights of the capture once took a look at all others."""
    steps.make_table(dsn, 100)
    sent: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda _c, _cursor, sql, *_: sent.append(sql))
    costs = []
    for number in range(4):
        steps.make_index(database, f"public.i{number}", "public.t", "v")
        sent.clear()
        assert [one.warnings for one in indexes(database)] == [()] * (number + 1)
        costs.append(len(sent))
    assert costs[3] - costs[2] == costs[2] - costs[1]
