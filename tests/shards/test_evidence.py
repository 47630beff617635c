"""The next poll notices each change of the capture's objects in a shard, even one that was undone before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_roir.shards.capture import evidence
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(1)

PLAIN = ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)",)
PARTITIONED = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE t_2 PARTITION OF t FOR VALUES FROM (10) TO (20)",
)
MISSED = "INSERT INTO t VALUES (5, 'missed', 5)"
SWALLOW = (
    "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    "CREATE TRIGGER swallow BEFORE INSERT ON roir_shard.{o} FOR EACH ROW EXECUTE FUNCTION swallow()",
)
# Statements that lose writes, with such writes; `{o}` is the outbox.
DONE: dict[str, tuple[str, ...]] = {
    "a trigger on the outbox": (*SWALLOW, MISSED),
    "a rule on the outbox": ("CREATE RULE r AS ON INSERT TO roir_shard.{o} DO INSTEAD NOTHING", MISSED),
    "row security on the outbox": ("ALTER TABLE roir_shard.{o} ENABLE ROW LEVEL SECURITY",),
    "the outbox is unlogged": ("ALTER TABLE roir_shard.{o} SET UNLOGGED",),
    "the outbox is emptied": (MISSED, "TRUNCATE roir_shard.{o}"),
    "the outbox is deleted from": (MISSED, "DELETE FROM roir_shard.{o}"),
    "the trigger is off for a while": (
        "ALTER TABLE t DISABLE TRIGGER roir_{o}",
        MISSED,
        "ALTER TABLE t ENABLE ALWAYS TRIGGER roir_{o}",
    ),
    "the trigger of TRUNCATE is off for a while": (
        "ALTER TABLE {t} DISABLE TRIGGER roir_{o}_t",
        "TRUNCATE {t}",
        "ALTER TABLE {t} ENABLE ALWAYS TRIGGER roir_{o}_t",
    ),
    "the function is another one for a while": (
        "SELECT set_config('x.src', pg_get_functiondef('roir_shard.{o}_touch'::regproc), false)",
        "CREATE OR REPLACE FUNCTION roir_shard.{o}_touch() RETURNS trigger LANGUAGE plpgsql "
        "AS 'BEGIN RETURN NULL; END'",
        MISSED,
        "DO $$ BEGIN EXECUTE current_setting('x.src'); END $$",
    ),
    "the view is another one": (
        "DO $$ BEGIN EXECUTE replace(format('CREATE OR REPLACE VIEW roir_shard.{o}_source AS %s', "
        "pg_get_viewdef('roir_shard.{o}_source')), ';', ' WHERE s.id <> 5'); END $$",
        MISSED,
    ),
    "a leaf's trigger is off for a while": (
        "ALTER TABLE t_1 DISABLE TRIGGER roir_{o}",
        MISSED,
        "ALTER TABLE t_1 ENABLE ALWAYS TRIGGER roir_{o}",
    ),
}
# Statements that lose no write.
HARMLESS: dict[str, tuple[str, ...]] = {
    "a vacuum": ("VACUUM FULL roir_shard.{o}", "VACUUM FULL t", "REINDEX TABLE roir_shard.{o}"),
    "statistics": ("ANALYZE t", "ANALYZE roir_shard.{o}", "ALTER TABLE roir_shard.{o} SET (fillfactor = 50)"),
    "another owner": (
        "CREATE ROLE other_{o} SUPERUSER",
        "ALTER TABLE roir_shard.{o} OWNER TO other_{o}",
        "ALTER TABLE roir_shard.{o} OWNER TO CURRENT_USER",
        "DROP ROLE other_{o}",
    ),
    "other columns": ("ALTER TABLE t ADD w int DEFAULT 3", "ALTER TABLE t DROP w"),
    "a foreign trigger on the table": (
        "CREATE FUNCTION mine() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        "CREATE TRIGGER mine BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION mine()",
        "DROP TRIGGER mine ON t",
    ),
    "a partition": (
        "CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM (20) TO (30)",
        "ALTER TABLE t DETACH PARTITION t_3",
        "ALTER TABLE t ATTACH PARTITION t_3 FOR VALUES FROM (20) TO (30)",
        "DROP TABLE t_2",
    ),
}


def ready(shards: Make, table: tuple[str, ...]) -> tuple[Shards, int, Callable[[str], str]]:
    """An index over one shard, which was shipped; and what puts the outbox's name into a statement."""
    made = apart.add_all(shards(1, *table))
    made.run("INSERT INTO t VALUES (1, 'a', 1), (11, 'b', 1)")
    prepared, run = apart.begin(made)
    apart.finish_all(made, run)
    [(outbox,)] = made.ask("SELECT outbox FROM roir.feed")
    leaf = "t_1" if len(table) > 1 else "t"
    return made, prepared.generation_id, lambda text: text.replace("{o}", outbox).replace("{t}", leaf)


def doubts(made: Shards) -> list[str]:
    return [found for (found,) in made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL")]


def table_of(what: str) -> tuple[str, ...]:
    return PARTITIONED if "leaf" in what or "partition" in what else PLAIN


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("what", DONE)
def test_what_is_done_to_the_capture_of_a_shard_is_noticed(shards: Make, what: str) -> None:
    made, generation, named = ready(shards, table_of(what))
    made.run(*map(named, DONE[what]))
    apart.ship_all(made, generation)
    assert len(doubts(made)) == 1, what
    apart.ship_all(made, generation)
    assert len(doubts(made)) == 1


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("what", HARMLESS)
def test_what_loses_nothing_raises_no_doubt(shards: Make, what: str) -> None:
    made, generation, named = ready(shards, table_of(what))
    made.run(*map(named, HARMLESS[what]), "INSERT INTO t VALUES (7, 'x', 1)")
    apart.ship_all(made, generation)
    apart.ship_all(made, generation)
    assert doubts(made) == []
    apart.assert_exact(made, generation)


@pytest.mark.by_hand("sweeps")
def test_an_outbox_that_was_emptied_is_doubted_once(shards: Make) -> None:
    """After the verification that repairs it nothing is left to doubt."""
    made, generation, named = ready(shards, PLAIN)
    made.run(named(MISSED), named("TRUNCATE roir_shard.{o}"))
    apart.ship_all(made, generation)
    assert len(doubts(made)) == 1
    made.ask("UPDATE roir.feed SET doubtful_at = NULL, doubt = NULL")
    apart.ship_all(made, generation)
    apart.ship_all(made, generation)
    assert doubts(made) == []
    made.run(named("TRUNCATE roir_shard.{o}"))
    apart.ship_all(made, generation)
    assert len(doubts(made)) == 1


def test_labels_that_come_are_no_doubt_and_those_that_are_renamed_are(shards: Make) -> None:
    made = shards(1, "CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE t (id int PRIMARY KEY, k mood, v int)")
    made.ask("CREATE TYPE mood AS ENUM ('sad', 'ok', 'new')")
    prepared, run = apart.begin(apart.add_all(made))
    apart.finish_all(made, run)
    made.run("ALTER TYPE mood ADD VALUE 'new'", "INSERT INTO t VALUES (1, 'new', 1)")
    apart.ship_all(made, prepared.generation_id)
    assert doubts(made) == []
    made.run("ALTER TYPE mood RENAME VALUE 'sad' TO 'x'", "ALTER TYPE mood RENAME VALUE 'ok' TO 'sad'")
    apart.ship_all(made, prepared.generation_id)
    [doubt] = doubts(made)
    assert 'compares column "k" by other rules than before' in doubt


TOLD = ("1", "[]", "{}", '{"schema": "1"}', '{"schema": 1, "rules": {}}', '{"schema": "1", "rules": {"k": 1}}')


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("told", TOLD)
def test_a_shard_that_tells_anything_is_doubted(shards: Make, told: str) -> None:
    made, generation, _ = ready(shards, PLAIN)
    made.run(
        "CREATE OR REPLACE FUNCTION roir_shard.evidence(outbox text) RETURNS jsonb LANGUAGE sql "
        f"AS $$ SELECT '{told}'::jsonb $$"
    )
    apart.ship_all(made, generation)
    assert len(doubts(made)) == 1


def test_a_database_that_pg_upgrade_made_is_not_doubted() -> None:
    """pg_upgrade creates every object again, our schema too."""
    kept = {"schema": "1", "trigger 5//29": "7 700", "view": "8 700", "rules": {"k": ["C"]}}
    assert evidence.change(kept, kept | {"view": "8 701"}) is not None
    assert evidence.change(kept, {"schema": "2", "trigger 5//29": "9 3", "view": "9 3", "rules": {"k": ["C"]}}) is None
    assert evidence.change(None, kept) is None
