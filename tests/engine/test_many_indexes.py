"""A look at many indexes: as many statements as a look at few, and the same findings as looks at each alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.metrics.reading import metrics
from airflow_roir.engine.sessions.side_by_side import side_by_side
from airflow_roir.engine.snapshot.index import IndexFacts, indexes, states
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.snapshot.overview import overview
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(3)


def statements(database: Database, look: Callable[[], object]) -> list[str]:
    """The statements that a look sends."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    look()
    event.remove(database.engine, "before_cursor_execute", note)
    return sent


def three(database: Database, dsn: str, number: int) -> None:
    """A published index, one that is paused in its first build, and one that is being built; over a table."""
    run_sql(dsn, f"CREATE TABLE t{number} (id int PRIMARY KEY, k text)", f"INSERT INTO t{number} VALUES (1, 'a')")
    steps.make_index(database, f"public.published{number}", f"t{number}", verify="none", parallelism=1)
    steps.begin(database, f"public.building{number}", f"t{number}")
    steps.begin(database, f"public.paused{number}", f"t{number}")
    requests.pause(database, f"public.paused{number}", "test")


@pytest.mark.sample(0)
def test_thirty_indexes_take_as_many_statements_as_six(database: Database, dsn: str) -> None:
    """Found: 36 statements for each index of the page Indexes and of a scrape, and some more for each operation of
    status.
    """
    looks = [partial(look, database) for look in (indexes, overview, states, metrics, status)]
    for number in range(2):
        three(database, dsn, number)
    six = [len(statements(database, look)) for look in looks]
    for number in range(2, 10):
        three(database, dsn, number)
    assert len(states(database)) == 30
    assert [len(statements(database, look)) for look in looks] == six


def still(facts: IndexFacts) -> IndexFacts:
    """The facts without what differs between two moments."""
    shards = tuple(replace(one, lag_s=None, oldest_s=None) for one in facts.shards)
    return replace(facts, age_seconds=None, shards=shards)


def assert_as_alone(database: Database) -> list[IndexFacts]:
    """The facts of all indexes at once are those of each alone, and so are the operations."""
    many = indexes(database)
    alone = [one for facts in many for one in indexes(database, facts.index)]
    assert list(map(still, many)) == list(map(still, alone))
    assert {name: state for name, (state, _) in states(database).items()} == {one.index: one.state for one in many}
    assert {name: found for name, (_, found) in states(database).items()} == {one.index: one.operation for one in many}
    seen = overview(database)
    each = [one for facts in many for one in overview(database, facts.index).operations]
    assert [shown(one) for one in seen.operations] == [shown(one) for one in each]
    return many


def shown(one: Any) -> dict[str, Any]:
    """An operation without what differs between two moments."""
    left_out = ("now", "phases", "heartbeat_age", "total_execution_time", "phase_seconds", "long_pause")
    return {
        name: value
        for name, value in vars(one).items()
        if name not in left_out and "seconds" not in name and "per_second" not in name
    }


FAULTS = {
    "disabled": "ALTER TABLE {t} DISABLE TRIGGER {trigger}",
    "view_gone": "DROP VIEW {ix}",
    "view_replaced": "CREATE OR REPLACE VIEW {ix} AS SELECT k, id FROM {t}",
    "view_filtered": "DO $$ BEGIN EXECUTE format('CREATE OR REPLACE VIEW {ix} AS %s WHERE false', "
    "regexp_replace(pg_get_viewdef('{ix}'::regclass), '(WHERE.*)?;$', '')); END $$",
    "column_renamed": "ALTER TABLE {t} RENAME COLUMN k TO other",
    "row_security": "ALTER TABLE {t} ENABLE ROW LEVEL SECURITY",
    "entries_gone": "DROP TABLE {base} CASCADE",
    "segment_renamed": "ALTER TABLE {base}_s001 RENAME TO elsewhere",
    "source_gone": "DROP TABLE {t} CASCADE",
    "leaf_detached": "ALTER TABLE {t} DETACH PARTITION {t}_1",
    "leaf_attached": "CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES IN (3)",
    "rule": "CREATE RULE r AS ON INSERT TO {base} DO ALSO NOTHING",
    "closed": "REVOKE EXECUTE ON FUNCTION roir.published(bigint, integer) FROM PUBLIC",
    "published_all": "CREATE PUBLICATION everything FOR ALL TABLES",
    "quoted": "SELECT 1",
}


@pytest.mark.by_hand("sweeps")
def test_many_indexes_are_found_as_each_alone(database: Database, dsn: str) -> None:
    """Every kind of index and operation, and faults of each kind."""
    run_sql(dsn, "DROP EVENT TRIGGER IF EXISTS roir_guard_drop")
    for kind in FAULTS:
        table, index = ('"t %s"', 'public."ix %s"') if kind == "quoted" else (f"t_{kind}", f"public.ix_{kind}")
        parts = kind.startswith("leaf")
        run_sql(dsn, f"CREATE TABLE {table} (id int, k text, PRIMARY KEY (id))" + " PARTITION BY LIST (id)" * parts)
        for part in (1, 2) if parts else ():
            run_sql(dsn, f"CREATE TABLE {table}_{part} PARTITION OF {table} FOR VALUES IN ({part})")
        run_sql(dsn, f"INSERT INTO {table} VALUES (1, 'a'), (2, NULL)", f"ANALYZE {table}")
        steps.make_index(database, index, table, unique=kind in ("disabled", "rule"))
    steps.make_table(dsn)
    steps.make_index(database, "public.a_second", "t", "v")
    steps.begin(database, "public.building", "t", "k")
    steps.built(database, "public.copied", "t", "k")
    steps.sealed(database, "public.sealed", "t", "k", unique=False)
    steps.begin(database, "public.paused", "t", "v")
    requests.pause(database, "public.paused", "test")
    run_sql(
        dsn,
        "UPDATE roir.operation SET paused_at = paused_at - interval '3 days', warn_after_s = 60 "
        "WHERE status = 'paused'",
    )
    steps.begin(database, "public.failed", "t", "v")
    run_sql(
        dsn,
        "UPDATE roir.operation SET status = 'failed', error = 'test' WHERE id = (SELECT max(id) FROM roir.operation)",
    )
    # A run that has just left is still there for a while.
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
    before = assert_as_alone(database)
    assert [one.warnings for one in before if one.state == "published"] == [()] * (len(FAULTS) + 1)
    for kind, statement in FAULTS.items():
        index = f"public.ix_{kind}"
        table = f"t_{kind}"
        values = {"t": table, "ix": index}
        if kind != "quoted":
            [(generation,)] = sql(
                steps.session(dsn),
                "SELECT g.id FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE i.name = %s",
                f"ix_{kind}",
            )
            values |= {"base": f"roir_data.g{generation}", "trigger": steps.capture_triggers(dsn, table)[0]}
        run_sql(dsn, "SET roir.guard = 'off'", statement.format(**values))
    warned = {one.index: one.warnings for one in assert_as_alone(database) if one.warnings}
    assert len(warned) >= len(FAULTS)


@pytest.mark.by_hand("sweeps")
def test_a_lock_on_one_index_hides_no_warning_of_others(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    for number in range(5):
        steps.make_index(database, f"public.i{number}", "t", "v")
    run_sql(dsn, "DROP VIEW i1")
    with closing(steps.session(dsn)) as other:
        sql(other, "ALTER VIEW i3 SET SCHEMA public")
        found = {one.index: one.warnings for one in assert_as_alone(database)}
    assert "can't be checked now" in found["public.i3"][0]
    assert "its view" in found["public.i1"][0]
    assert [found[f"public.i{n}"] for n in (0, 2, 4)] == [(), (), ()]


def test_looks_side_by_side_get_their_own_rows_in_order(database: Database) -> None:
    """With values of all types that looks send, one of them the same for all, and a look that asks for more."""
    query = """
SELECT n, %(text)s AS "a %% b", %(names)s::text[] AS names, %(flag)s AS flag FROM generate_series(1, %(many)s::int) n
 ORDER BY n DESC LIMIT %(most)s -- a comment at the end"""

    def look(connection: Connection, many: int, text: str | None, names: list[str], flag: bool) -> list[Any]:
        values = {"many": many, "text": text, "names": names, "flag": flag, "most": 3}
        rows = execute(connection, query, values).all()
        once = execute(connection, "SELECT 'x%y' AS plain").scalar_one()
        last = execute(connection, "SELECT %(n)s::int AS n", {"n": rows[0].n}).one().n if rows else None
        return [[(tuple(row), row.names, row._mapping["flag"]) for row in rows], once, last]

    cases = [(4, "a", ["x", "y"], True), (0, None, [], False), (1, "it's %s", [], True), (2**33 % 7, "a", ["x"], False)]
    with database.transaction() as connection:
        assert side_by_side(connection, [partial(look, many=m, text=t, names=n, flag=f) for m, t, n, f in cases]) == [
            look(connection, *case) for case in cases
        ]
        assert side_by_side(connection, []) == []


def test_an_error_of_one_look_is_that_of_all(database: Database) -> None:
    def look(connection: Connection, number: int) -> int:
        return int(execute(connection, "SELECT 6 / %(number)s", {"number": number}).scalar_one())

    with database.transaction() as connection:
        assert side_by_side(connection, [partial(look, number=n) for n in (1, 2, 3)]) == [6, 3, 2]
        with pytest.raises(DBAPIError, match="division by zero"):
            side_by_side(connection, [partial(look, number=n) for n in (1, 0, 3)])
