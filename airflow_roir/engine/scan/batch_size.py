"""The number of rows of the next batch: as many as take about the target time, within bounds."""

from __future__ import annotations

from collections import deque

# The first batch is small, since nothing is known yet. The size then grows by this factor at most: no batch should take
# a minute by surprise.
FIRST_ROWS = 10_000
GROWTH = 4
# With fewer rows, the cost of a commit counts.
FEWEST_ROWS = 1_000
# The slowest of the last ten batches decides (Spirit takes the 90th percentile of ten), so that one fast batch from a
# warm cache doesn't lead to a long one.
REMEMBERED = 10


class BatchSize:
    """The size of one worker's batches. target_s: seconds that a batch should take."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._rows = FIRST_ROWS
        self._share = 1.0
        self._seconds_per_row: deque[float] = deque(maxlen=REMEMBERED)

    def rows(self, most: int, share: float = 1.0) -> int:
        """Rows of the next batch, at most `most` (the operation's `batch_rows`). share: the part of the target time."""
        self._share = share
        return max(1, min(int(self._rows * share), most))

    def took(self, rows: int, seconds: float) -> None:
        """Learn from a batch that was committed."""
        # The last batch of a range may have a handful of rows, whose time is all overhead.
        if rows < min(FEWEST_ROWS, self._rows) * self._share:
            return
        self._seconds_per_row.append(seconds / rows)
        wanted = round(self.target_s / max(self._seconds_per_row))
        # A paced batch is a part of a whole one, whose size sets the limit of the growth.
        whole = round(rows / self._share)
        self._rows = max(FEWEST_ROWS, min(wanted, max(whole, FIRST_ROWS) * GROWTH))
