"""The output of `roir status` and the metrics about an index over shards: strict reads, who ships, shards that are
away."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_roir.cli.overview import overview_lines
from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.metrics import reading as looking
from airflow_roir.engine.snapshot.index import IndexFacts, indexes
from airflow_roir.engine.snapshot.overview import overview
from airflow_roir.shards.announce import announce
from airflow_roir.shards.ship import feeds
from airflow_roir.shards.ship.freshness import Alarm
from airflow_roir.shards.ship.shipping import Shipper
from servers.shards import Shards
from tests.shards import announced, apart
from tests.shards.announced import INDEX, Scene, fresh
from tests.shards.conftest import Make
from tests.shards.laid import lay

pytestmark = pytest.mark.sample(2)

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", "INSERT INTO t VALUES (1, 'k1', 1)")
NOWHERE = "UPDATE roir.shard SET dsn = 'host=/nowhere dbname=none' WHERE name = 's1'"
CLIENTS = "no strict reads now, though clients announce its writes: "


def scene(made: Shards, by: str | None = None) -> Scene:
    found = announced.scene(made, by)
    made.ask("UPDATE roir.generation SET published_at = now()")
    return found


def facts(database: Database) -> IndexFacts:
    [found] = indexes(database)
    return found


def note(database: Database) -> str:
    """The line of the status about strict reads, which JSON must have, too."""
    seen = overview(database)
    [line] = [line.strip() for line in overview_lines(seen) if "strict reads" in line]
    told = seen.as_dict()["indexes"][0]
    assert {"announced_by", "strict_problem"} < told.keys()
    assert (told["strict_problem"] is None) == line.startswith("strict reads are possible")
    return line


def test_the_status_says_who_announces_and_whether_strict_reads_are_possible(shards: Make) -> None:
    """In each state it names the reason that a strict read would be refused with."""
    found = scene(shards(2, *TABLE))
    database, made = found.database, found.made
    assert note(database) == "no strict reads: its writes aren't announced (roir announce public.t_by_k --by server)"
    announce.announce(database, INDEX, "client")
    states = [
        (None, CLIENTS + "not all that was written in shard s0 before its writers announced has come yet: roir ship"),
        ("fresh", "strict reads are possible: clients announce its writes"),
        ("UPDATE roir.feed SET doubtful_at = now(), doubt = 'x'", CLIENTS + "entries of shard s0 may be wrong: x"),
        (
            "UPDATE roir.feed SET doubtful_at = NULL, doubt = NULL, strict_history = 'other'",
            CLIENTS + "this server was promoted or recovered, and may have lost announcements: "
            "roir announce public.t_by_k --by client",
        ),
        (
            "UPDATE roir.feed SET strict_from = NULL WHERE id = (SELECT max(id) FROM roir.feed)",
            CLIENTS + "this server was promoted",
        ),
        (
            "UPDATE roir.feed SET strict_from = NULL",
            CLIENTS + "writers of shard s0 don't announce: roir",
        ),
    ]
    for statement, told in states:
        if statement == "fresh":
            fresh(found)
        elif statement is not None:
            made.ask(statement)
        assert note(database).startswith(told)
        with database.transaction() as connection:
            assert facts(database).strict_problem == announce.strict_problem(connection, found.generation_id)
    assert facts(database).announced_by == "client"


# --- turned off


def announcers(made: Shards, name: str) -> list[Any]:
    return [row[0] for row in made.ask("SELECT announced_by FROM roir_shard.outbox", shard=name)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("later", ["announce", "clean-up"])
def test_announcing_ends_though_a_shard_is_away_and_there_later(shards: Make, later: str) -> None:
    found = scene(shards(2, *TABLE), "client")
    database, made = found.database, found.made
    [(right,)] = made.ask("SELECT dsn FROM roir.shard WHERE name = 's1'")
    made.ask(NOWHERE)
    [left] = announce.announce(database, INDEX, None)
    assert left.startswith('index public.t_by_k: writers of shard "s1" still announce, ')
    assert "nowhere" in left
    assert note(database).startswith("no strict reads: its writes aren't announced")
    [warning] = facts(database).warnings
    assert warning.startswith('writers of shard "s1" still announce, and need this server. Once the shard is')
    assert (announcers(made, "s0"), announcers(made, "s1")) == ([None], ["client"])
    made.run("UPDATE t SET v = 2", only="s0")
    [waiting] = clean_up.clean_up(database).waiting
    assert waiting == left
    made.ask("UPDATE roir.shard SET dsn = %s WHERE name = 's1'", right)
    if later == "announce":
        assert announce.announce(database, INDEX, None) == []
    else:
        assert clean_up.clean_up(database).waiting == []
    assert announcers(made, "s1") == [None]
    assert facts(database).warnings == ()
    made.run("UPDATE t SET v = 3")


def test_announcing_is_not_ended_in_another_database(shards: Make) -> None:
    """The other database has no announcing, which says nothing about the right one."""
    found = scene(shards(2, *TABLE), "client")
    found.made.ask("UPDATE roir.shard SET dsn = (SELECT dsn FROM roir.shard WHERE name = 's0') WHERE name = 's1'")
    [left] = announce.announce(found.database, INDEX, None)
    assert "another database answers" in left
    assert announcers(found.made, "s1") == ["client"]


def test_announcing_ends_of_a_table_that_was_dropped(shards: Make) -> None:
    found = scene(shards(1, *TABLE), "client")
    found.made.run("DROP TABLE t CASCADE")
    assert announce.announce(found.database, INDEX, None) == []
    assert announcers(found.made, "s0") == [None]


def test_what_was_turned_on_again_is_not_ended(shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command turns announcing on again between the look at what is left and its end."""
    found = scene(shards(1, *TABLE), "client")
    database = found.database
    real = feeds.held

    def late(*given: Any) -> Any:
        found.made.ask("UPDATE roir.index SET announced_by = 'client'")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(feeds, "held", late)
        assert announce.announce(database, INDEX, None) == []
    assert announcers(found.made, "s0") == ["client"]


def test_what_was_turned_off_is_not_installed(shards: Make) -> None:
    found = scene(shards(1, *TABLE))
    announce.install(found.database, found.feed("s0"), "client")
    assert announcers(found.made, "s0") == [None]


# --- who ships


def test_a_shard_that_a_running_shipper_has_not_taken_yet_is_said_to_be_so(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    laid.ship()
    assert str(facts(laid.database).shards[0]).endswith("behind, and has no shipper: roir ship")
    # It is there, and looks at other shards.
    shipper = Shipper(laid.database, shards=["other"])
    shipper.look()
    [found] = facts(laid.database).shards
    assert str(found).endswith("behind, and no shipper that runs has taken it yet")
    assert (found.as_dict()["shipper"], found.as_dict()["shippers"]) == (None, 1)
    shipper.end()
    assert str(facts(laid.database).shards[0]).endswith("behind, and has no shipper: roir ship")
    made.ask("UPDATE roir.feed SET owner = 'x', heartbeat_at = clock_timestamp()")
    assert str(facts(laid.database).shards[0]).endswith("behind")


# --- metrics


def samples(database: Database) -> dict[str, dict[str, float]]:
    """For each metric of shards, the values by shard."""
    return {
        family.name: {one.labels["shard"]: one.value for one in family.samples}
        for family in looking.metrics(database)[0]
        if family.name.startswith("roir_shard_")
    }


def test_metrics_tell_of_shards_from_the_first_build_on(shards: Make) -> None:
    """A shard that is away isn't captured yet, and is reported. A shard that no shipper serves yet isn't called
    behind."""
    made = apart.add_all(shards(2, *TABLE))
    made.run("ANALYZE t")
    _, run = apart.begin(made, verify="none")
    made.ask("UPDATE roir.feed SET captured_at = NULL WHERE id = (SELECT max(id) FROM roir.feed)")
    made.ask("UPDATE roir.shard SET problem = 'away', problem_at = now() WHERE name = 's1'")
    found = samples(made.database)
    assert found["roir_shard_away"] == {"s0": 0, "s1": 1}
    assert found["roir_shard_doubtful"] == {"s0": 0, "s1": 0}
    for name in ("lag_seconds", "pending_rows", "shipper"):
        assert not found.get(f"roir_shard_{name}")
    assert facts(made.database).strict_problem == "it isn't published yet"
    alarm = Alarm(age_s=1)
    with made.database.transaction() as connection:
        assert alarm.look(connection, "test") == []
    made.ask("UPDATE roir.feed SET captured_at = now()")
    made.ask("UPDATE roir.shard SET problem = NULL, problem_at = NULL")
    apart.finish_all(made, run)
    found = samples(made.database)
    assert found["roir_shard_shipper"] == {"s0": 0, "s1": 0}
    assert found["roir_shard_lag_seconds"].keys() == {"s0", "s1"}
    # A rebuild over one more: of each label once, as readers see it, and the new shard's.
    made.ask("UPDATE roir.feed SET pending = 7")
    _, _ = apart.begin(made, None, None, None, verify="none")
    assert samples(made.database)["roir_shard_pending_rows"] == {"s0": 7, "s1": 7}
