"""The savings and the cost of an action on a segment: arithmetic alone (docs/architecture.md#compaction-the-choice).

The unit of both is the reading of one page in a sequence, PostgreSQL's `seq_page_cost`, 1.0. The model's sources:

- Kudu chooses its compactions by a model, not by thresholds: the most savings of reads under a budget of I/O, a 0-1
  knapsack (its docs/design-docs/compaction-policy.md). Its saving is the height: the row sets that a read must look
  into. Segments don't overlap, so ours is the pages that a scan touches. As in Kudu, a least improvement
  (`compaction_minimum_improvement`) keeps the server from endless work, and the merging of small neighbours has a value
  of its own (`compaction_small_rowset_tradeoff`).
- PostgreSQL's planner: `random_page_cost` for a page from outside of the cache, 50 `cpu_operator_cost` for a cached
  one. Its `btcostestimate` charges the latter for each level of a B-tree, so that a bloated one looks slower even if
  all of it is cached.
- A B-tree under random inserts settles at a fill of ln 2 = 69 % (Yao, On random 2-3 trees, 1978). A fresh one has 90 %.
  A smaller saving than this difference doesn't last.
- Write amplification, as for an LSM tree: each saved byte costs the bytes that are written for it, twice with WAL.
  A segment with little waste amplifies most, and comes last.

The model ignores that a segment bloats again, and so overestimates the gain over the horizon. It also ignores that
writes touch fewer pages, and how many scans continue into the next segment, and so underestimates the gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.compact.fresh_size import FANOUT, FILLED
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.quantity import counted, size

# A page from outside of shared_buffers, PostgreSQL's random_page_cost; one inside, 50 times its cpu_operator_cost.
MISS_PRICE = 4.0
HIT_PRICE = 0.125
# vacuum_cost_page_dirty to vacuum_cost_page_miss until PostgreSQL 13, 20 to 10. Since then it is 20 to 2, for scattered
# pages; ours are written in sequence.
WRITE_PRICE = 2.0
# A page of WAL is written here, sent or archived, and written there once more.
LOG_PRICE = 2.0
# Each page, each day: a nightly base backup reads it.
ROOM_PRICE = 1.0
# Each page beyond the size that segments should have, each day: a vacuum for the segment's busy part also walks through
# the B-tree of the rest. With one vacuum in four days a segment that is just too big pays for its split in a month.
SIZE_PRICE = 0.25
# Each segment, each day: its rows in the catalogs and statistics, its own vacuum and ANALYZE, its place in plans and in
# the caches of sessions.
SEGMENT_PRICE = 10.0
# Days for which a saving counts. After more days segments bloat again; with fewer days only reads could pay for an
# action.
HORIZON_DAYS = 30.0
# Counters of less than a day say nothing about the rest of the day: they count as those of a whole day.
LEAST_DAYS = 1.0
# A vacuum cleans the visibility map for less than a compaction, so dead entries count only until the next vacuum.
VACUUM_DAYS = 1.0
# The one rule for all advice to rebuild or compact. Waste below this share comes back (from 90 % to ln 2 is 23 %), or
# is an estimate's error.
LEAST_WASTE = 0.25
# Tables grow by whole blocks, and estimates err.
LEAST_WASTE_BYTES = 256 << 10
# A segment is too big beyond this multiple of its siblings' size, or of the requested size. Among siblings it must also
# exceed the absolute size: one worker rewrites a smaller segment in half a minute, so a split would win nothing.
TOO_BIG = 4
TOO_BIG_ASKED = 2
LEAST_TOO_BIG = 256 << 20
# More parts at once would be a rebuild.
MOST_PARTS = 64
# A segment is small below this share of its siblings' size: four small ones don't fill one.
SMALL = 0.25
# A merge holds locks on all its segments at once.
MOST_MERGED = 16
# WAL besides the entries themselves. ROW_WAL: the bytes of an insert's record beyond the row's room in its page, for
# wide and narrow rows, by `pg_current_wal_insert_lsn` around an INSERT … SELECT. SEGMENT_WAL: the catalogs' WAL for one
# segment, as in `forecast/space.py`. The build of a B-tree logs its pages without their free tenth; the model counts
# whole pages, the safe side.
ROW_WAL = 28
SEGMENT_WAL = 40 << 10
# Bytes that a worker reads, writes and logs in a second on a slow disk, if nothing was measured. If all is cached,
# builds are several times as fast: `make bench-curves ARGS="--curves size"`.
BYTES_PER_SECOND = 20 << 20
DAY_S = 86_400


@dataclass(frozen=True)
class Terms:
    """The figures besides the segments that a choice depends on.

    now: the server's clock. horizon_days: for how long savings count. segment_bytes: the size that segments should
    have, table and B-tree; None: that of their siblings. bytes_per_second: read, written and logged by one worker.
    page: bytes of a page. source_bytes: the bytes that a rebuild reads; None: unknown, then those of the index's own
    tables count. unsplit: ordinals of segments that have too few keys for a split.
    """

    now: datetime
    horizon_days: float = HORIZON_DAYS
    segment_bytes: int | None = None
    bytes_per_second: float = BYTES_PER_SECOND
    page: int = 8192
    source_bytes: int | None = None
    unsplit: frozenset[int] = frozenset()

    def at(self, bytes_per_second: float) -> Terms:
        """The same terms with a measured rate."""
        return replace(self, bytes_per_second=bytes_per_second)


@dataclass(frozen=True)
class Known:
    """A segment with all figures that the model needs.

    heap, tree, heap_needed, tree_needed: bytes. fill: how full the B-tree's leaves are, 1 as in a fresh B-tree. dead:
    entries. scans, the entries that they return, and the blocks that they visit: a day. miss: the share of blocks from
    outside of the cache.
    """

    ordinal: int
    rows: int
    heap: int
    tree: int
    heap_needed: int
    tree_needed: int
    fill: float
    dead: int
    scans: float
    entries: float
    blocks: float
    miss: float

    @classmethod
    def of(cls, segment: Segment, now: datetime) -> Known | None:
        """The figures of a segment; None if its rows, or the sizes that it needs, can't be known.

        If the start of its counters isn't known, its reads count as none.
        """
        if segment.rows is None or segment.heap_needed is None or segment.tree_needed is None:
            return None
        since = segment.since or segment.sealed_at
        days = math.inf if since is None else max(LEAST_DAYS, (now - since).total_seconds() / DAY_S)
        blocks = segment.blocks_read + segment.blocks_hit
        fill = segment.tree_needed / segment.tree_bytes if segment.tree_bytes else 1.0
        if segment.leaf_density is not None:
            # The leaves' density, since tree_bytes has pages that no scan visits any more. A B-tree of one leaf that
            # isn't full would be no fuller if rebuilt.
            fill = max(fill, segment.leaf_density / FILLED)
        return cls(
            ordinal=segment.ordinal,
            rows=segment.rows,
            heap=segment.heap_bytes,
            tree=segment.tree_bytes,
            # An estimate may be larger than the segment.
            heap_needed=min(segment.heap_needed, segment.heap_bytes),
            tree_needed=min(segment.tree_needed, segment.tree_bytes),
            fill=min(1.0, fill),
            dead=segment.dead_rows,
            scans=segment.scans / days,
            entries=segment.rows_read / days,
            blocks=blocks / days,
            miss=segment.blocks_read / blocks if blocks else 0.0,
        )

    @property
    def bytes(self) -> int:
        return self.heap + self.tree

    @property
    def needed(self) -> int:
        return self.heap_needed + self.tree_needed


def is_waste(now: int, needed: int) -> bool:
    """True if the waste matters, by its share and by its size."""
    return now - needed >= max(LEAST_WASTE * now, LEAST_WASTE_BYTES)


def levels(pages: float) -> int:
    """The number of levels above the leaves of a B-tree. pages: about how many leaves it has."""
    found, left = 0, math.ceil(pages)
    while left > 1:
        found, left = found + 1, -(-left // FANOUT)
    return found


def rewrite(one: Known, terms: Terms) -> Action | None:
    """Rewrites table and B-tree. None if they waste too little."""
    # Also for the waste of a B-tree alone: a B-tree can't be exchanged under writers.
    if not (is_waste(one.bytes, one.needed) or is_waste(one.tree, one.tree_needed)):
        return None
    saved, gain = _reading(one, one.needed, 1, terms)
    why = f"{size(one.bytes)} for {size(one.needed)} of entries, {_reads(one.scans)}"
    return _made(Kind.REWRITE, [one], 1, saved, gain, why, terms)


def split(one: Known, target: int | None, terms: Terms) -> Action | None:
    """Splits a segment into parts of about the target. None if it isn't too big, or has too few keys.

    The gain of a split is mostly that vacuum, later compactions and builds have bounded units: `SIZE_PRICE`.
    """
    if not target or one.rows < 2 or one.needed <= too_big(target, terms) or one.ordinal in terms.unsplit:
        return None
    parts = min(MOST_PARTS, one.rows, max(2, round(one.needed / target)))
    saved, gain = _reading(one, one.needed, parts, terms)
    gain += terms.horizon_days * SIZE_PRICE * (one.needed - target) / terms.page
    why = f"{size(one.bytes)} where segments have {size(target)}, {_reads(one.scans)}"
    return _made(Kind.SPLIT, [one], parts, saved, gain, why, terms)


def merge(run: Sequence[Known], target: int | None, terms: Terms) -> Action | None:
    """Merges neighbours into one segment. None if one of them isn't small, or all together exceed the target."""
    needed = sum(one.needed for one in run)
    if not target or len(run) < 2 or needed > target or any(one.needed >= SMALL * target for one in run):
        return None
    saved = gain = 0.0
    for one in run:
        less, worth = _reading(one, one.needed, 1, terms)
        saved, gain = saved + less, gain + worth
    gain += terms.horizon_days * SEGMENT_PRICE * (len(run) - 1)
    reads = _reads(sum(one.scans for one in run))
    why = f"{counted(len(run), 'neighbour')} with {size(needed)} of entries where segments have {size(target)}, {reads}"
    return _made(Kind.MERGE, run, 1, saved, gain, why, terms)


def too_big(target: int, terms: Terms) -> int:
    """The size beyond which a segment is too big."""
    return TOO_BIG_ASKED * target if terms.segment_bytes else max(TOO_BIG * target, LEAST_TOO_BIG)


def price(miss: float) -> float:
    """The price of one page, by the share of pages from outside of the cache."""
    return miss * MISS_PRICE + (1 - miss) * HIT_PRICE


def relief(miss: float, share: float) -> float:
    """The share of page visits that become cache hits if the pages shrink to `share` of their number.

    If visits are spread evenly, the cached part of n pages answers 1 - miss of them; for share * n pages it answers
    more.
    """
    return miss if share <= 0 else min(miss, max(0.0, (1 - miss) * (1 / share - 1)))


def _reading(one: Known, after: int, parts: int, terms: Terms, heap: bool = True) -> tuple[float, float]:
    """The pages that reads save a day, and the gain of this and of the room over the horizon, in page reads."""
    leaves = one.tree_needed / terms.page
    higher = max(0, levels(one.tree / terms.page) - levels(leaves / parts)) * one.scans
    spread = one.entries * leaves / one.rows * (1 / max(one.fill, 1 / FANOUT) - 1) if one.rows else 0.0
    visits = 0.0
    if heap and one.dead and one.heap_needed:
        # Index-only scans must visit each page of the table that has a dead entry.
        dead = one.dead / (one.rows + one.dead)
        visits = one.entries * (1 - (1 - dead) ** (one.rows * terms.page / one.heap_needed))
        visits *= min(1.0, VACUUM_DAYS / terms.horizon_days)
    # Scans can't save more than the blocks that they visit.
    touched = min(spread + visits, one.blocks)
    cached = max(0.0, one.blocks - touched) * relief(one.miss, after / one.bytes if one.bytes else 1.0)
    a_day = higher * HIT_PRICE + touched * price(one.miss) + cached * (MISS_PRICE - HIT_PRICE)
    a_day += ROOM_PRICE * max(0, one.bytes - after) / terms.page
    return higher + touched + cached, a_day * terms.horizon_days


def _made(kind: Kind, run: Sequence[Known], parts: int, saved: float, gain: float, why: str, terms: Terms) -> Action:
    """The action that writes and logs the run's tables and B-trees. Each part has a first page of its own."""
    needed = sum(one.needed for one in run) + (parts - 1) * terms.page
    logged = needed + ROW_WAL * sum(one.rows for one in run)
    return _action(kind, run, parts, needed, needed, logged, saved, gain, why, terms)


def _action(
    kind: Kind,
    run: Sequence[Known],
    parts: int,
    after: int,
    written: int,
    logged: int,
    saved: float,
    gain: float,
    why: str,
    terms: Terms,
) -> Action:
    read = sum(one.heap for one in run)
    logged += parts * SEGMENT_WAL
    return Action(
        kind=kind,
        ordinals=tuple(one.ordinal for one in run),
        parts=parts,
        bytes_now=sum(one.bytes for one in run),
        bytes_after=after,
        pages_read=-(-read // terms.page),
        bytes_written=written,
        bytes_logged=logged,
        seconds=(read + written + logged) / terms.bytes_per_second,
        reads_per_day=sum(one.scans for one in run),
        pages_saved_per_day=saved,
        gain=gain,
        cost=cost(read, written, logged, terms),
        why=why,
    )


def cost(read: int, written: int, logged: int, terms: Terms) -> float:
    """The cost of reading, writing and logging these bytes, in page reads."""
    return (read + WRITE_PRICE * written + LOG_PRICE * logged) / terms.page


def rebuild_bytes(known: Sequence[Known]) -> tuple[int, int]:
    """The bytes that a rebuild of these segments writes, and those that it logs."""
    written = sum(one.needed for one in known)
    return written, written + sum(ROW_WAL * one.rows + SEGMENT_WAL for one in known)


def _reads(a_day: float) -> str:
    return counted(round(a_day), "read") + " a day"
