"""How much of an index apart is explored: what `make test` takes samples of, and what `make model` adds."""

from __future__ import annotations

from tests.model.apart_state import Bounds

ONE, TWO = ((0, 1),), ((0, 1), (0, 1))
PAIR = (((1, "a"), (2, "a")),)
SHARDS = (((1, "a"),), ((1, "b"),))

# With the least number of states, and what must have been reached.
DEFAULT: dict[str, tuple[Bounds, int, str]] = {
    "two writers": (Bounds(TWO), 900, "fresh"),
    "two statements": (Bounds(((0, 2),)), 150, "fresh"),
    "two rows, one a poll": (Bounds(TWO, PAIR, (1, 2), limit=1, aborts=False), 4_000, "fresh"),
    "two shippers": (Bounds(ONE, shippers=2, claims=2), 500, "fenced"),
    "two shippers, one row a poll": (Bounds(ONE, shippers=2, claims=2, limit=1), 1_000, "fenced"),
    "answers are lost": (Bounds(TWO, claims=2, unanswered=1), 5_000, "fresh"),
    "a build": (Bounds(TWO, built=False), 1_300, "fresh"),
    "a build of two rows": (Bounds(ONE, PAIR, (1, 2), built=False), 240, "fresh"),
    "a truncate": (Bounds(ONE, truncates=1, claims=2, unanswered=1), 1_500, "fresh"),
    "strict": (Bounds(TWO, strict=True, readers=1, aborts=False), 19_000, "settled"),
    "strict, aborts": (Bounds(ONE, strict=True, readers=1), 500, "settled"),
    "strict, one row a poll": (Bounds(ONE, strict=True, readers=1, keys="b", limit=1), 500, "settled"),
    "strict, a read of all keys": (Bounds(ONE, strict=True, readers=1, keys="ab"), 500, "settled"),
    "a shard loses its last commits": (Bounds(ONE, saves=("shard",), claims=3, repairs=1), 2_000, "repaired"),
    "a shard loses its last commits, answers are lost": (
        Bounds(ONE, saves=("shard",), claims=2, unanswered=1, aborts=False), 2_000, "doubtful",
    ),
    "the index server loses its last commits": (
        Bounds(ONE, saves=("index",), claims=3, repairs=1, aborts=False), 2_000, "doubtful",
    ),
    "strict, a shard loses its last commits, each is asked": (
        Bounds(ONE, strict=True, readers=1, saves=("shard",), asks="every", aborts=False), 2_000, "doubtful",
    ),
    "strict, an older copy of the index server": (
        Bounds(ONE, strict=True, readers=1, keys="b", saves=("copy",), aborts=False), 1_000, "proved",
    ),
}  # fmt: skip
LARGE: dict[str, tuple[Bounds, int, str]] = {
    "strict, two shippers": (
        Bounds(ONE, strict=True, readers=1, shippers=2, claims=2, aborts=False), 40_000, "settled",
    ),
    "strict, a read of the other key": (Bounds(TWO, strict=True, readers=1, keys="b", aborts=False), 19_000, "settled"),
    "two shippers, two writers": (Bounds(TWO, shippers=2, claims=2, aborts=False), 60_000, "fenced"),
    "two shards": (Bounds(((0, 1), (1, 1)), SHARDS, claims=2, shippers=2, aborts=False), 10_000, "fresh"),
    "a shard loses its last commits, two shippers": (
        Bounds(ONE, saves=("shard",), claims=2, shippers=2, unanswered=1, aborts=False), 60_000, "doubtful",
    ),
    "the index server loses its last commits, two shippers": (
        Bounds(ONE, saves=("index",), claims=3, shippers=2, aborts=False), 60_000, "doubtful",
    ),
}  # fmt: skip
# What isn't promised: between a loss and the first contact. The model shows that it can be.
NOT_PROMISED: dict[str, Bounds] = {
    "a strict read that asks no shard, after one lost commits": Bounds(
        ONE, strict=True, readers=1, saves=("shard",), aborts=False
    ),
    "a strict read after the index server lost intents": Bounds(
        ONE, strict=True, readers=1, saves=("index",), keys="b", asks="every", aborts=False
    ),
}
