"""Random faults of the network between shippers, shards and the index server, by printed seeds."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from servers.shards import shard_servers
from tests.shards.conftest import TABLE, Make
from tests.shards.faults import Traffic
from tests.shards.laid import lay

SECONDS = 2.0


@pytest.mark.sample(2, 8)
@pytest.mark.parametrize("number", range(30))
def test_whatever_the_network_does_nothing_is_lost_and_no_bounded_read_lies(shards: Make, number: int) -> None:
    traffic = Traffic(lay(shards(2)), 1000 + number)
    traffic.run(SECONDS)
    print(f"seed {1000 + number}: {dict(traffic.happened)}")
    assert traffic.happened["applied"]
    assert traffic.happened["answer lost"] + traffic.happened["cut"]


@pytest.mark.soak
def test_it_holds_for_long_while_servers_are_killed() -> None:
    """`make soak-shards SECONDS=…`"""
    until = time.monotonic() + float(os.environ.get("ROIR_SOAK_SECONDS", "60"))
    rounds, happened = 0, Counter[str]()
    while time.monotonic() < until:
        seed = random.randrange(1_000_000)
        print(f"seed {seed}", flush=True)
        with shard_servers(2) as made:
            made.run(TABLE)
            traffic = Traffic(lay(made), seed, kills=True)
            traffic.run(20.0)
        rounds += 1
        happened += traffic.happened
        print(rounds, dict(happened), flush=True)
