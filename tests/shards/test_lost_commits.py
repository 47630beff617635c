"""A server that has lost its last commits, or was restored from a copy, is distinguished from one that hasn't.

The tests copy a database, and the copy takes its place: as after a cold backup, or a failover to a replica that was
behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import lifecycle
from airflow_roir.errors import Fenced, SourceChanged
from airflow_roir.shards.ship import poll as polling
from airflow_roir.shards.ship.feed import FeedShipper, InShard
from servers.shards import Shards, on_server, run_sql
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.laid import Laid, lay
from tests.shards.test_leaves import TABLE as PARTITIONED

pytestmark = pytest.mark.sample(1)

SEED = random.SystemRandom().randrange(1 << 30)


class Copies:
    """Copies of databases of one server."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def keep(self, dsn: str) -> str:
        """Copies a database, which has no session afterwards."""
        name = _name(dsn)
        copy = f"{name}_c{len(self.made)}"
        self._alone(dsn)
        run_sql(on_server(dsn, "postgres"), f"CREATE DATABASE {copy} TEMPLATE {name}")
        self.made.append(on_server(dsn, copy))
        return copy

    def restore(self, dsn: str, copy: str) -> None:
        """The copy, as it is, in place of the database."""
        name = _name(dsn)
        run_sql(
            on_server(dsn, "postgres"),
            f"DROP DATABASE {name} WITH (FORCE)",
            f"CREATE DATABASE {name} TEMPLATE {copy}",
        )

    def drop(self) -> None:
        for dsn in self.made:
            run_sql(on_server(dsn, "postgres"), f"DROP DATABASE IF EXISTS {_name(dsn)} WITH (FORCE)")

    def _alone(self, dsn: str) -> None:
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'"
        for _ in range(100):
            run_sql(on_server(dsn, "postgres"), end.format(_name(dsn)))


def _name(dsn: str) -> str:
    return urlsplit(dsn).path[1:]


@pytest.fixture
def copies() -> Iterator[Copies]:
    made = Copies()
    yield made
    made.drop()


def doubt(laid: Laid) -> str | None:
    found: str | None = laid.shards.ask("SELECT doubt FROM roir.feed ORDER BY id")[0][0]
    return found


def ship(laid: Laid, owner: str = "a") -> None:
    shipper = laid.shipper("s0", owner)
    assert shipper.claim(take_over=True)
    shipper.ship_pass()
    shipper.release()


def test_a_shard_that_lost_what_was_shipped_is_named(shards: Make, copies: Copies) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    ship(laid)
    before = copies.keep(made.dsns["s0"])
    made.run("INSERT INTO t VALUES (2, 'lost', 2)")
    ship(laid)
    assert doubt(laid) is None
    copies.restore(made.dsns["s0"], before)
    ship(laid)
    assert 'shard "s0" has lost its last commits' in str(doubt(laid))
    assert made.ask("SELECT action, detail FROM roir.event") == [("doubt", doubt(laid))]
    # Shipping continues all the same.
    made.run("INSERT INTO t VALUES (3, 'later', 3)")
    ship(laid)
    assert {row[0] for row in laid.base()} == {"a", "lost", "later"}


def test_a_shard_that_lost_nothing_that_was_shipped_is_not(shards: Make, copies: Copies) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    ship(laid)
    before = copies.keep(made.dsns["s0"])
    made.run("INSERT INTO t VALUES (2, 'lost', 2)")
    copies.restore(made.dsns["s0"], before)
    ship(laid)
    assert doubt(laid) is None
    laid.assert_exact()


def masked(made: Shards, copies: Copies, how: str) -> Laid:
    """A shard that lost a commit counts on, for one whose answer is lost, or for one that is cut off from the index
    server.
    """
    laid = lay(made)
    made.run("INSERT INTO t VALUES (0, 'z', 0)")
    zombie = laid.shipper("s0", "zombie")
    assert zombie.claim()
    before = copies.keep(made.dsns["s0"])
    zombie.close()
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    ship(laid)
    copies.restore(made.dsns["s0"], before)
    if how == "zombie":
        for _ in range(3):
            zombie.poll()
    else:
        for number in range(3):
            lost = laid.shipper("s0", f"lost {number}")
            assert lost.claim(take_over=True)
            lost.poll()
            lost.close()
    zombie.close()
    ship(laid, "b")
    return laid


@pytest.mark.parametrize("how", ["answer", "zombie"])
def test_a_lost_commit_is_not_masked_by_polls_that_were_never_applied(shards: Make, copies: Copies, how: str) -> None:
    assert "has lost its last commits" in str(doubt(masked(shards(1), copies, how)))


def test_a_shard_that_counts_although_it_has_lost_commits_masks_them(
    shards: Make, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken variant: a poll doesn't compare the shard's tick with the one that the index server knows."""
    for condition in ("o.tick >= %(known)s AND ",):
        assert polling.POLL.count(condition) == 2
        monkeypatch.setattr(polling, "POLL", polling.POLL.replace(condition, ""))
    laid = masked(shards(1), copies, "answer")
    assert doubt(laid) is None
    assert laid.base() != laid.projection()


def test_an_index_server_that_lost_what_was_cleared_away_is_named(shards: Make, copies: Copies) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    ship(laid)
    before = copies.keep(made.index)
    made.run("INSERT INTO t VALUES (2, 'b', 2)")
    ship(laid)
    copies.restore(made.index, before)
    ship(laid)
    assert "this server has lost its last commits" in str(doubt(laid))


@pytest.mark.sample(0)
def test_an_index_server_that_lost_what_is_still_in_the_outbox_ships_it_again(shards: Make, copies: Copies) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'a', 1)")
    ship(laid)
    before = copies.keep(made.index)
    made.run("INSERT INTO t VALUES (2, 'b', 2)", "TRUNCATE t", "INSERT INTO t VALUES (3, 'c', 3)")
    shipper = laid.shipper("s0", "dies")
    assert shipper.claim()
    shipper.apply(shipper.poll())
    shipper.close()
    copies.restore(made.index, before)
    ship(laid)
    assert doubt(laid) is None
    laid.assert_exact()


def late_acknowledgement(made: Shards, copies: Copies) -> Laid:
    """A shipper was cut off between an apply, which is lost, and the acknowledgement; another has polled since."""
    laid = lay(made)
    before = copies.keep(made.index)
    made.run("INSERT INTO t VALUES (1, 'a', 1), (2, 'b', 2)")
    old = laid.shipper("s0", "old")
    assert old.claim()
    old.apply(old.poll())
    copies.restore(made.index, before)
    new = laid.shipper("s0", "new", most=1)
    assert new.claim()
    polled = new.poll()
    # The same token was given again: the shard's tick is beyond its polls.
    assert not polled.ended
    new.apply(polled)
    found = new.poll()
    old.acknowledge()
    new.apply(found)
    new.ship_pass()
    new.release()
    old.close()
    return laid


@pytest.mark.sample(0)
def test_a_late_acknowledgement_of_what_the_index_server_lost_takes_nothing_away(shards: Make, copies: Copies) -> None:
    laid = late_acknowledgement(shards(1), copies)
    assert doubt(laid) is None
    laid.assert_exact()


@pytest.mark.sample(0)
def test_without_the_tick_it_takes_away_what_nobody_ships(
    shards: Make, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken variant: an acknowledgement deletes rows even if another shipper has polled since."""
    for condition in (" AND tick = %(mine)s", " AND o.tick = %(mine)s"):
        assert condition in polling.ACKNOWLEDGE
        monkeypatch.setattr(polling, "ACKNOWLEDGE", polling.ACKNOWLEDGE.replace(condition, ""))
    laid = late_acknowledgement(shards(1), copies)
    assert len(laid.base()) == 1
    assert len(laid.projection()) == 2


def test_another_database_is_not_polled_at_all(shards: Make) -> None:
    made = shards(2)
    laid = lay(made)
    made.ask("UPDATE roir.shard SET dsn = %s WHERE name = 's0'", made.dsns["s1"])
    shipper = laid.shipper("s0")
    assert shipper.claim()
    with pytest.raises(InShard, match="another database answers"):
        shipper.poll()
    shipper.release()


@pytest.mark.parametrize("moment", ["built", "sealed", "published"])
def test_a_shard_that_loses_what_was_copied_is_noticed_before_anything_was_shipped(
    shards: Make, copies: Copies, moment: str
) -> None:
    """From the end of the copies to the first poll that finds something: then, at the latest, it is named."""
    made = apart.add_all(shards(1))
    made.run("INSERT INTO t VALUES (1, 'a', 1)", "ANALYZE t")
    prepared, run = apart.begin(made, verify="none")
    before = copies.keep(made.dsns["s0"])
    made.run("INSERT INTO t VALUES (2, 'lost', 2)")
    apart.build_all(made, run)
    if moment != "built":
        apart.seal_all(made, run)
    if moment == "published":
        # Its row of the outbox goes, as if it had been touched before the capture.
        [(outbox,)] = made.ask("SELECT outbox FROM roir.feed")
        made.run(f"DELETE FROM roir_shard.{outbox} WHERE version > 0")
        lifecycle.run_phases(made.database, run)
    copies.restore(made.dsns["s0"], before)
    if moment == "published":
        apart.ship_all(made, prepared.generation_id)
        assert 'shard "s0" has lost its last commits' in str(made.ask("SELECT doubt FROM roir.feed")[0][0])
        return
    if moment == "built":
        apart.seal_all(made, run)
    with pytest.raises(SourceChanged, match=r'shard "s0" has lost its last commits.* Abort the operation'):
        lifecycle.run_phases(made.database, run)


def test_an_index_server_that_lost_the_end_of_a_partition_is_named(shards: Make, copies: Copies) -> None:
    """The entries that the end of a partition deletes are in no outbox."""
    made = apart.add_all(shards(1, *PARTITIONED))
    prepared, run = apart.begin(made)
    apart.finish_all(made, run)
    apart.ship_all(made, prepared.generation_id)
    before = copies.keep(made.index)
    made.run("ALTER TABLE t DETACH PARTITION t_1")
    apart.ship_all(made, prepared.generation_id)
    apart.assert_exact(made, prepared.generation_id)
    copies.restore(made.index, before)
    apart.ship_all(made, prepared.generation_id)
    [(doubt,)] = made.ask("SELECT doubt FROM roir.feed")
    assert "this server has lost its last commits" in str(doubt)


@pytest.mark.sample(0)
@pytest.mark.parametrize("number", range(30))
def test_whatever_is_lost_when_the_index_is_exact_or_in_doubt(shards: Make, copies: Copies, number: int) -> None:
    """At random: writes, steps of two shippers, and a database that is set back to an earlier moment."""
    rng = random.Random(SEED + number)
    told = [f"seed {SEED + number}"]
    made = shards(1)
    laid = lay(made)
    places = [made.dsns["s0"], made.index]
    kept: dict[str, str] = {}
    shippers = [laid.shipper("s0", f"shipper {n}", most=rng.choice((1, 3))) for n in range(2)]
    polls: dict[int, polling.Poll] = {}

    def write() -> None:
        number, key = rng.randrange(4), rng.choice("abc")
        made.run(
            rng.choice(
                (
                    f"INSERT INTO t VALUES ({number}, '{key}', 0) ON CONFLICT (id) DO UPDATE SET k = EXCLUDED.k",
                    f"DELETE FROM t WHERE id = {number}",
                    f"UPDATE t SET k = '{key}', v = v + 1 WHERE id = {number}",
                    *(["TRUNCATE t"] if rng.random() < 0.1 else []),
                )
            )
        )

    def step(n: int) -> None:
        shipper = shippers[n]
        if shipper.claimed is None:
            shipper.claim(take_over=True)
        elif n in polls:
            shipper.apply(polls.pop(n))
        elif rng.random() < 0.3:
            shipper.acknowledge()
        else:
            polls[n] = shipper.poll()

    def lose() -> None:
        place = rng.choice(places)
        if place not in kept:
            kept[place] = copies.keep(place)
            told.append(f"kept {place}")
        else:
            copies.restore(place, kept.pop(place))
            told.append(f"set back {place}")

    moments: list[Callable[[], None]] = [write] * 6 + [lambda: step(0)] * 8 + [lambda: step(1)] * 3 + [lose]
    for _ in range(80):
        told += [_tried(rng.choice(moments), shippers, polls) or "done"]
    for shipper in shippers:
        shipper.close()
    for _ in range(2):
        ship(laid, "rest")
    told.append(str(doubt(laid)))
    assert doubt(laid) is not None or laid.base() == laid.projection(), "\n".join(told)


def _tried(act: Callable[[], None], shippers: list[FeedShipper], polls: dict[int, polling.Poll]) -> str | None:
    try:
        act()
    except (Fenced, InShard, DBAPIError) as error:
        for n, shipper in enumerate(shippers):
            if isinstance(error, Fenced) and str(shipper.owner) not in str(error):
                continue
            # The service continues automatically, with a new claim.
            shipper.close()
            shipper.claimed = None
            polls.pop(n, None)
        return str(error).split("\n", 1)[0]
    return None
