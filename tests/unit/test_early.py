"""The pure parts of the early detection of duplicates."""

from __future__ import annotations

import random
import struct
from collections import Counter

import numpy as np
import pytest

from airflow_roir.engine.early import store
from airflow_roir.engine.early.detector import Budget
from airflow_roir.engine.early.key_sets import (
    HASH,
    MOST_OF_ONE,
    PLACE_BLOCKS,
    PLACES,
    Kept,
    blocks_of,
    hashes_of,
    join,
    read,
    value_of_copy,
)
from airflow_roir.engine.early.store import Growth, Snapshot


@pytest.mark.parametrize("seed", range(5))
def test_what_comes_twice_is_found_by_the_part_that_brings_it(seed: int) -> None:
    chance = random.Random(seed)
    known, met = read(b""), Counter[int]()
    places: dict[int, set[int]] = {}
    for _ in range(10):
        new = {place: [chance.randrange(-300, 300) for _ in range(chance.randrange(20))] for place in chances(chance)}
        came = Counter(one for hashes in new.values() for one in hashes)
        twice = {one for one in came if met[one] or came[one] > 1}
        for place, hashes in new.items():
            for one in hashes:
                places.setdefault(one, set()).add(place)
        known, again = join(known, read(b"".join(sent(place, hashes) for place, hashes in new.items())))
        assert hashes_of(again) == sorted(one & HASH for one in twice)
        # Where they are: of those that were met before, too.
        assert blocks_of(again) == sorted({place * PLACE_BLOCKS for one in twice for place in places[one]})
        met.update(came)
        assert len(known) == met.total()
        assert hashes_of(known) == sorted(one & HASH for one in met)


def chances(chance: random.Random) -> list[int]:
    """Some places, the last one that there is among them."""
    return [*chance.sample(range(1000), chance.randrange(4)), PLACES]


def sent(place: int, hashes: list[int]) -> bytes:
    """As the server sends the hashes of one place."""
    return struct.pack(f">q{len(hashes)}q", place << 32 | len(hashes), *hashes)


def test_of_a_key_that_many_rows_have_some_are_looked_up() -> None:
    known, again = join(read(b""), read(b"".join(sent(place, [7, place + 100]) for place in range(200))))
    assert len(known) == 400
    assert hashes_of(again) == [7]
    assert len(again) == MOST_OF_ONE
    # Nothing new, nothing to look up.
    assert len(join(known, read(sent(1, [5])))[1]) == 0


def test_sets_are_forgotten_by_their_last_use() -> None:
    kept = Kept(bound=3 * 80)
    ten = np.arange(10, dtype=np.uint64)
    for segment in (1, 2, 3):
        kept.put(segment, ten)
    assert kept.get(1) is not None
    kept.put(4, ten)
    assert [kept.get(n) is not None for n in (1, 2, 3, 4)] == [True, False, True, True]
    kept.put(4, np.arange(31, dtype=np.uint64))  # alone above the bound
    assert kept.get(4) is None
    assert kept.bytes == 160
    kept.put(1, np.arange(20, dtype=np.uint64))
    assert (kept.bytes, kept.get(3) is not None) == (240, True)


def test_a_copy_in_binary_is_read() -> None:
    head = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
    row = struct.pack(">hi", 1, 3) + b"abc"
    null = struct.pack(">hi", 1, -1)
    end = struct.pack(">h", -1)
    assert value_of_copy(head + end) == b""
    assert value_of_copy(head + row + end) == b"abc"
    assert value_of_copy(head + row + null + row + end) == b"abcabc"


def test_a_budget_grows_with_the_time() -> None:
    now = 0.0
    budget = Budget(0.1, 1.0, lambda: now)
    assert budget.allows()
    with budget.spending():
        now += 3.0
    assert not budget.allows()
    now = 19.9
    assert not budget.allows()
    now = 20.0
    assert budget.allows()


def test_a_block_is_settled_once_all_have_ended_who_might_write_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MARGIN_BLOCKS", 3)
    seen = Growth()
    assert seen.settled(1, Snapshot.parse("100:100:")) == 0
    seen.look(Snapshot.parse("100:105:100,102"), {1: 50})
    # 100 may still write, and began before there were 50.
    assert seen.settled(1, Snapshot.parse("100:110:100,107")) == 0
    seen.look(Snapshot.parse("107:110:107"), {1: 80})
    assert seen.settled(1, Snapshot.parse("107:112:107")) == 47
    assert seen.settled(1, Snapshot.parse("110:112:111")) == 77
    assert seen.settled(2, Snapshot.parse("110:112:")) == 0


def test_what_a_snapshot_does_not_see() -> None:
    assert Snapshot.parse("7:7:").unseen() == "age(s.xmin) <= age('7'::xid)"
    far = 5 * (1 << 32)
    assert Snapshot.parse(f"{far + 7}:{far + 9}:{far + 7}").unseen() == (
        "(age(s.xmin) <= age('9'::xid) OR s.xmin = ANY ('{7}'::xid[]))"
    )
