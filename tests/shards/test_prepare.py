"""Prepare over shards: planned in each, written down on the index server, captured in each; killed anywhere."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, event

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, clean_up, drop, dry_run, prepare
from airflow_roir.engine.forecast import objections
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.options import BuildOptions
from airflow_roir.shards.copy.survey import Survey
from servers.shards import Shards
from tests.engine.interposed import Killed, killed
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.test_build import bring_back, move_away
from tests.shards.test_lifecycle import left_behind, outboxes

pytestmark = pytest.mark.sample(3)

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
ROWS = "INSERT INTO t SELECT i, (i % 7)::text, i * 10 + {number} FROM generate_series(1, 100) i"


def definition(made: Shards, **given: Any) -> IndexDefinition:
    given = {"table": "t", "keys": "k", "include": "v", "shards": made.names} | given
    return IndexDefinition.parse(given.pop("index", "public.ix"), **given)


def nothing_is_left(made: Shards) -> None:
    assert left_behind(made) == []
    assert set(outboxes(made)) == {0}
    assert made.ask("SELECT count(*) FROM roir.feed WHERE removed_at IS NULL") == [(0,)]


@pytest.mark.parametrize("at", range(1, 200, 3))
@pytest.mark.sample(1)
@pytest.mark.parametrize("then", ["prepared again", "aborted"])
def test_killed_before_each_statement(shards: Make, at: int, then: str) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    with suppress(Killed), killed(Engine, at):
        prepare.prepare(made.database, definition(made), BuildOptions(), "test")
    exists = made.ask("SELECT count(*) FROM roir.operation") == [(1,)]
    if then == "aborted":
        if exists:
            abort.abort(made.database, "public.ix", "test")
        nothing_is_left(made)
        return
    prepared, run = apart.begin(made)
    assert prepared.adopted == exists
    assert outboxes(made) == [1, 1]
    apart.finish_all(made, run)
    apart.assert_exact(made, prepared.generation_id)
    drop.drop_index(made.database, "public.ix", "test")
    nothing_is_left(made)


def test_a_shard_that_is_away_is_captured_by_a_worker_later(shards: Make) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))

    # It goes away between the look at its table and its capture.
    def leave(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "INTO roir.feed" in statement:
            move_away(made, "s1")

    event.listen(Engine, "before_cursor_execute", leave)
    said: list[str] = []
    try:
        prepared = prepare.prepare(made.database, definition(made), BuildOptions(), "test", said.append)
    finally:
        event.remove(Engine, "before_cursor_execute", leave)
    assert any('shard "s1" isn\'t captured yet' in line for line in said)
    assert outboxes(made) == [1, 0]
    bring_back(made, "s1")
    run = prepare_run(made)
    apart.build_all(made, run)
    assert outboxes(made) == [1, 1]
    apart.assert_exact(made, prepared.generation_id)


def prepare_run(made: Shards) -> Any:
    from airflow_roir.engine.control.run import start_run

    return start_run(made.database, "public.ix", "test", take_over=True)


def test_what_is_left_in_a_shard_that_is_away_is_removed_later(shards: Make) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    apart.begin(made)
    move_away(made, "s1")
    said: list[str] = []
    abort.abort(made.database, "public.ix", "test", report=said.append)
    assert any('its capture in shard "s1" is left' in line for line in said)
    assert made.ask("SELECT status FROM roir.operation") == [("aborted",)]
    assert outboxes(made) == [0, 1]
    found = clean_up.clean_up(made.database)
    assert any('its capture in shard "s1" is left' in line for line in found.waiting)
    bring_back(made, "s1")
    assert not clean_up.clean_up(made.database).waiting
    nothing_is_left(made)
    # Writers of that shard meet nothing of it.
    made.run("UPDATE t SET v = 0")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such shard": ({"shards": ["s0", "s9"]}, {}, 'there is no shard "s9"'),
    "a shard in other case": ({"shards": ["s0", "S1"]}, {}, "Did you mean s1"),
    "no such column": ({"keys": "nothing"}, {}, "no column"),
    "a column in other case": ({"keys": '"K"'}, {}, "Did you mean k"),
    "a column that is called as the shard's": ({"shard_column": "v"}, {}, "--shard-column"),
    "blocks": ({}, {"scan": "block"}, "shards are read by key"),
    "no table": ({"table": "nothing"}, {}, "doesn't exist"),
    "types that differ": ({"table": "u"}, {}, "all shards must have the indexed columns alike"),
    "other primary keys": ({"table": "w"}, {}, "all shards must have the table alike"),
}


@pytest.mark.parametrize(("given", "options", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(shards: Make, given: dict[str, Any], options: dict[str, Any], says: str) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    made.run("CREATE TABLE u (id int PRIMARY KEY, k text, v int)", "CREATE TABLE w (id int PRIMARY KEY, k text, v int)")
    made.run("ALTER TABLE u ALTER v TYPE bigint", only="s1")
    made.run("ALTER TABLE w DROP CONSTRAINT w_pkey", "ALTER TABLE w ADD PRIMARY KEY (v)", only="s1")
    asked = definition(made, **given)
    with pytest.raises((InvalidInput, NotFound), match=says):
        prepare.prepare(made.database, asked, BuildOptions(**options), "test")
    # The plan says the same.
    assert any(says in line for line in objections.find(made.database, asked, BuildOptions(**options)).refused) or (
        given.get("shard_column")
    )
    nothing_is_left(made)


def test_a_plan_changes_nothing_and_says_what_each_shard_has(shards: Make) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS, "ANALYZE t"))
    made.run("DELETE FROM t WHERE id > 40", "ANALYZE t", only="s1")
    found = dry_run.run(made.database, definition(made), BuildOptions(ranges=8, segments=3))
    assert isinstance(found.survey, Survey)
    assert {one.shard.name: one.plan.rows for one in found.survey.shards} == {"s0": 100, "s1": 40}
    assert (found.plan.rows, found.plan.ranges) == (140, 8)
    assert found.plan.segments == 3
    assert {one.source for one in found.entry.columns} == {"k", "shard", "id", "v"}
    nothing_is_left(made)


def test_an_unfinished_operation_is_over_its_own_shards(shards: Make) -> None:
    made = apart.add_all(shards(2, TABLE, ROWS))
    apart.begin(made, shards="s0")
    with pytest.raises(InvalidInput, match='over the shards "s0"'):
        apart.begin(made)


def test_segments_are_cut_in_the_order_of_the_index_server(shards: Make) -> None:
    """By a sample of all shards, each with its share of the rows."""
    made = apart.add_all(shards(2, "CREATE TABLE t (id int PRIMARY KEY, k int, v int)"))
    made.run("INSERT INTO t SELECT i, i, 1 FROM generate_series(1, 900) i", only="s0")
    made.run("INSERT INTO t SELECT i, 10000 + i, 1 FROM generate_series(1, 100) i", only="s1")
    made.run("ANALYZE t")
    prepared, run = apart.begin(made, segments=4)
    bounds = [one for (one,) in made.ask("SELECT lower ->> 0 FROM roir.segment WHERE ordinal > 1 ORDER BY ordinal")]
    assert len(bounds) == 3
    assert bounds == sorted(bounds, key=int)
    assert 700 < int(bounds[-1]) < 900
    apart.build_all(made, run)
    apart.assert_exact(made, prepared.generation_id)
