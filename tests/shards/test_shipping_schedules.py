"""Random schedules of writers and shippers; and that the same search finds shippers that are wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from airflow_roir.engine.database import execute
from airflow_roir.shards.ship import apply as applying
from airflow_roir.shards.ship import poll as polling
from airflow_roir.shards.ship.feed import NOW, FeedShipper
from airflow_roir.shards.ship.poll import Acknowledged, Poll
from tests.shards.conftest import Make
from tests.shards.laid import lay
from tests.shards.schedule import Broken, Schedule

SEED = int(os.environ.get("ROIR_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
STEPS = 150


@pytest.mark.sample(0)
@pytest.mark.parametrize("number", range(60))
def test_whatever_order_the_base_is_the_union_and_fresh_at_is_true(shards: Make, number: int) -> None:
    made = shards(2)
    schedule = Schedule(lay(made), SEED + number)
    schedule.run(STEPS)
    assert made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL") == []


def _acknowledged_before(patch: pytest.MonkeyPatch) -> None:
    poll = FeedShipper.poll

    def early(self: FeedShipper) -> Poll:
        found = poll(self)
        if found.ticked:
            done = Acknowledged(found.tick, 0, found.versions)
            polling.acknowledge(self._in_shard(), self.route, done)
        return found

    patch.setattr(FeedShipper, "poll", early)


def _deleted_without_version(patch: pytest.MonkeyPatch) -> None:
    old = "x.version = ANY (%(acked)s::bigint[])"
    assert old in polling.ACKNOWLEDGE
    patch.setattr(polling, "ACKNOWLEDGE", polling.ACKNOWLEDGE.replace(old, "%(acked)s::bigint[] <> '{{}}'"))


def _token_not_checked(patch: pytest.MonkeyPatch) -> None:
    def unchecked(connection: Any, route: Any, claim: Any) -> Any:
        row = execute(connection, applying.HELD, {"feed": route.feed.id}).one()
        return type("Row", (), dict(row._mapping) | {"tick": 0})

    patch.setattr(applying, "check", unchecked)
    patch.setattr(applying, "APPLIED", applying.APPLIED.replace(" AND token = %(token)s", " AND %(token)s > 0"))


def _fresh_after_the_first_poll(patch: pytest.MonkeyPatch) -> None:
    poll = FeedShipper.poll

    def late(self: FeedShipper) -> Poll:
        begins = self.began is None
        found = poll(self)
        if begins:
            with self.database.transaction() as connection:
                self.began = _now(connection)
        return found

    apply = FeedShipper.apply

    def forgets(self: FeedShipper, found: Poll) -> Any:
        applied = apply(self, found)
        self.began = None if found.ended else self.began
        return applied

    def and_later(self: FeedShipper, found: Poll) -> Any:
        # As a slow shipper: what was committed since the poll is claimed, too.
        if found.ended:
            with self.database.transaction() as connection:
                self.began = _now(connection)
        return forgets(self, found)

    patch.setattr(FeedShipper, "poll", late)
    patch.setattr(FeedShipper, "apply", and_later)


def _now(connection: Any) -> datetime:
    found: datetime = execute(connection, NOW).scalar_one()
    return found


def _emptied_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(applying, "_empty", lambda connection, route: None)


def _fresh_before_the_end(patch: pytest.MonkeyPatch) -> None:
    poll = FeedShipper.poll
    patch.setattr(FeedShipper, "poll", lambda self: replace(poll(self), ended=True))


VARIANTS = [
    _acknowledged_before,
    _deleted_without_version,
    _token_not_checked,
    _fresh_after_the_first_poll,
    _emptied_is_not_looked_at,
    _fresh_before_the_end,
]


@pytest.mark.sample(0)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.__name__[1:])
def test_the_search_finds_what_is_wrong(
    shards: Make, monkeypatch: pytest.MonkeyPatch, variant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    variant(monkeypatch)
    made = shards(1)
    laid = lay(made)

    def search() -> None:
        for number in range(60):
            made.run("TRUNCATE t")
            laid.ship()
            Schedule(laid, SEED + number).run(STEPS)

    with pytest.raises(Broken):
        search()
