"""Random faults of the network between applications, shippers, shards and the index server, by printed seeds."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from servers import contrib as contribs
from servers.shards import shard_servers
from tests.shards.conftest import Make
from tests.shards.faults import TABLE, Traffic

SECONDS = 2.0


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("number", range(30))
@pytest.mark.parametrize("by", ["server", "client"])
def test_whatever_the_network_does_nothing_is_lost_and_no_read_lies(contrib_shards: Make, by: str, number: int) -> None:
    traffic = Traffic(contrib_shards(2, *TABLE), 1000 + number, by)
    traffic.run(SECONDS)
    print(f"seed {1000 + number}: {dict(traffic.happened)}")
    assert traffic.happened["applied"]
    assert traffic.happened["kept"]
    assert traffic.happened["strict reads"]
    assert traffic.happened["answer lost"] + traffic.happened["cut"]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("by", ["server", "client"])
def test_nor_while_servers_die_and_the_index_is_verified_and_rebuilt(pg: int, by: str) -> None:
    traffic = _everything(pg, random.randrange(1_000_000), by, 10.0)
    assert traffic.happened["strict reads"]


@pytest.mark.by_hand("soak")
def test_it_holds_for_long_while_servers_are_killed(pg: int) -> None:
    """`make soak-shards SECONDS=…`"""
    until = time.monotonic() + float(os.environ.get("ROIR_SOAK_SECONDS", "60"))
    rounds, happened = 0, Counter[str]()
    while time.monotonic() < until:
        rounds += 1
        happened += _everything(pg, random.randrange(1_000_000), "server" if rounds % 2 else "client", 20.0).happened
        print(f"{rounds} schedules: {dict(sorted(happened.items()))}", flush=True)


def _everything(pg: int, seed: int, by: str, seconds: float) -> Traffic:
    print(f"seed {seed}, by {by}", flush=True)
    version = contribs.find(pg) or contribs.ensure(pg)
    with shard_servers(2, version) as made:
        made.run(*TABLE)
        traffic = Traffic(made, seed, by, kills=True, hands=True, service=True)
        traffic.run(seconds)
    print(dict(sorted(traffic.happened.items())), *sorted(set(traffic.said)), sep="\n", flush=True)
    return traffic
