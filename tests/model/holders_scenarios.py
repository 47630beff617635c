"""How much of an index that is unique over shards is explored: by `make test` in samples, by `make model` beyond it."""

from __future__ import annotations

from tests.model.holders_losses import INDEX
from tests.model.holders_state import NULL, Bounds

APART, TOGETHER = ((0, 1), (1, 1)), ((0, 1), (0, 1))
THREE = ((0, 1), (0, 1), (1, 1))
BOTH = ((("a", 1),), (("a", 1),))
NULLS = (((NULL, 1),), ((NULL, 1),))
NEW = ((), ())
SWAPPED = ((("a", 1), ("b", 2)), ())

# With the least number of states, and what must have been reached.
DEFAULT: dict[str, tuple[Bounds, int, set[str]]] = {
    "two shards": (Bounds(APART), 250, {"23505", "40001", "freed", "left", "gives up"}),
    "one snapshot": (Bounds(APART, repeatable=True), 400, {"23505", "40001", "freed", "left"}),
    "one shard": (Bounds(TOGETHER), 500, {"freed", "left"}),
    "two writers of one shard": (Bounds(THREE), 5_000, {"23505", "40001", "freed", "left"}),
    "two rows": (Bounds(TOGETHER, primary_keys=(1, 2)), 900, {"freed", "left"}),
    "a key that moves on": (Bounds(((0, 2), (1, 1)), rows=NEW, limit=1), 200, {"23505", "freed"}),
    "announced midway": (
        Bounds(((0, 2), (1, 1)), midway=True, repeatable=True), 600, {"23505", "40001", "freed", "left"},
    ),
    "swapped": (
        Bounds(APART, SWAPPED, (1, 2), ("a", "b", ""), swaps=True), 1_800, {"23505", "freed", "gives up"},
    ),
    "null": (Bounds(APART, NULLS, values=("a", NULL, "")), 2_000, {"23505", "freed", "left"}),
    "shippers die": (Bounds(APART, deaths=1), 600, {"23505", "freed", "left"}),
    "filled": (Bounds(APART, enforced=False, fills=1, aborts=False), 4_000, {"contested", "enforced", "23505"}),
    "filled, one snapshot": (
        Bounds(APART, enforced=False, fills=1, aborts=False, repeatable=True), 7_000, {"contested", "enforced"},
    ),
    "filled with duplicates": (
        Bounds(APART, BOTH, enforced=False, fills=2, aborts=False), 2_000, {"refused for", "enforced"},
    ),
    "a shard loses its last commits": (
        Bounds(APART, fills=1, lossy=0, aborts=False), 4_000, {"lose", "enforced", "refused for"},
    ),
}  # fmt: skip
LARGE: dict[str, tuple[Bounds, int, set[str]]] = {
    "three writers, one snapshot": (Bounds(THREE, repeatable=True), 20_000, {"23505", "40001", "left"}),
    "two writers of one shard, filled": (
        Bounds(THREE, enforced=False, fills=1, aborts=False), 50_000, {"contested", "enforced"},
    ),
    "keys in both orders": (
        Bounds(((0, 2), (1, 2)), NEW, (1, 2), ("a", "b")), 9_000, {"23505", "gives up", "left"},
    ),
    "three shards": (Bounds(((0, 1), (1, 1), (2, 1)), ((("a", 1),), (), ())), 2_900, {"23505", "40001", "freed"}),
    "filled, all die": (
        Bounds(APART, BOTH, enforced=False, fills=2, deaths=2), 30_000, {"refused for", "enforced"},
    ),
    "a shard loses its last commits, three writers": (
        Bounds(((0, 1), (1, 1), (0, 1)), fills=1, lossy=0, aborts=False), 150_000, {"lose", "enforced", "refused for"},
    ),
    "the index server loses its last commits": (
        Bounds(APART, fills=1, lossy=INDEX, aborts=False), 40_000, {"lose", "enforced"},
    ),
}  # fmt: skip
