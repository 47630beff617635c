"""The options of operations: what they are, which change while an operation lives, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from airflow_roir.definition import Scan
from airflow_roir.errors import InvalidInput
from airflow_roir.windows import parse_windows

MAX_PARALLELISM = 256  # beyond it a server's connections, not our workers, are the limit
MAX_BATCH_ROWS = 10_000_000  # a batch is one transaction, which a crash undoes whole
MAX_ROWS_PER_SECOND = 1_000_000_000  # more than any server reads
# What users may ask for. The engine itself takes any, but a commit for every few rows makes a build last for days.
MIN_BATCH_ROWS = 1_000
MIN_ROWS_PER_SECOND = 100
MAX_SLICES = 10_000  # of a verification: an hour each, more than a year
MAX_RANGES = 100_000  # one row each in the control schema, which workers look through for the next one

# What can change while an operation lives: columns of its row, which nothing else repeats.
LIVE_NUMBERS = ("parallelism", "batch_rows", "max_rows_per_second")
WORK_OPTIONS = ("throttle", "windows", "max_duration_s", "priority", "warn_after_s", "abort_after_s")
# Of an index over shards alone.
LIVE_APART = ("shard_parallelism",)
LIVE_OPTIONS = (*LIVE_NUMBERS, *LIVE_APART, *WORK_OPTIONS)
COVERING = ("auto", "all", "none")
VERIFY = ("after", "before", "both", "none")
VERIFY_BEFORE = ("before", "both")
ON_DUPLICATE = ("pause", "stop")
AUTO, SOURCE = "auto", "source"
SCAN = (AUTO, SOURCE, *(scan.value for scan in Scan))


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """When, for how long and how hard an operation may work; None is the operation's own, or the default.

    throttle: limits of signals, `replica_lag=100MB commit_latency=20ms` (docs/operations.md#throttle); `off` is none.
        The server reads it, when the operation begins.
    windows: when it may work (`windows.parse_windows`); outside of them it pauses, inside it continues; `off` is none.
    max_duration_s: it pauses this many seconds after it began or was resumed; 0 is no limit.
    priority: of those that wait for others to end, the greatest goes first; by default 0.
    warn_after_s: a pause that has lasted for so long is warned of; by default a day, 0 is never.
    abort_after_s: a pause that has lasted for so long is ended by an abort; 0, the default, is never.
    """

    throttle: str | None = None
    windows: str | None = None
    max_duration_s: int | None = None
    priority: int | None = None
    warn_after_s: int | None = None
    abort_after_s: int | None = None

    def check_work(self) -> None:
        """Raise InvalidInput for a value that can't be used, but for the throttle's."""
        check_live_options({name: getattr(self, name) for name in WORK_OPTIONS})

    def fixed(self) -> dict[str, Any]:
        """The options that stay as they are while the operation lives, for JSON."""
        return {name: value for name, value in asdict(self).items() if name not in LIVE_OPTIONS}


@dataclass(frozen=True)
class BuildOptions(WorkOptions):
    """The options of one operation. Counts are numbers of things, durations carry their unit.

    parallelism: workers that build and seal at the same time.
    batch_rows: the most source rows per batch, the unit that commits (the paper's section 3.7 found 100,000 a good
        trade; fewer under a rate limit).
    batch_ms: target time per batch, in milliseconds; the size adapts.
    ranges, segments: pieces of the scan and of the base; None lets the plan choose.
    max_rows_per_second: a rate limit for the copy over all workers; None is none.
    scan: what the entries are copied from: the source in the order of its primary `key`; the source `block` by block;
        the `index` that is rebuilt. `auto` takes blocks if the key's order isn't that of the rows, and the index if it
        is narrower than the source and nothing casts doubt on it (docs/architecture.md#scan). `source` is the same, but
        never the index: so one scan does for several indexes.
    covering: which included columns the segments' unique indexes carry too, so that index-only scans work.
        `auto` takes those whose size is bounded by their type: a B-tree tuple holds about 2,700 bytes, and a
        user's INSERT must not fail because an included value is long. `all` and `none` say it outright.
    lock_timeout_ms: how long one attempt at a drain lock may keep writers waiting. Must stay below the server's
        deadlock_timeout, so that it is always the build that gives way (I6).
    lock_patience_s: how long to repeat attempts, with back-off, before the phase stops (and can be resumed).
    revert_window_s: how long a replaced generation is kept and maintained.
    ignore_row_security: index a table with row-level security all the same. The view then shows every row, also those
        that the table's policies hide, to all who may read the view.
    ignore_publications: build although a publication contains the index's own tables. A PostgreSQL subscriber that
        lacks them stops; others may skip them.
    verify: `after` compares the new generation with the source, and publishes it only if they match. `before` compares
        the index that a rebuild replaces, to know what the rebuild repairs. `both`, or `none`.
    on_duplicate: of a unique index. `pause` builds on, lists all duplicates, and pauses before the switch. `stop`
        pauses at the first one.
    census: list the duplicates of a unique index that doesn't exist, then remove all that was built.
    shard_parallelism: of an index apart, workers that read one shard at the same time; None is as many as there are.
    max_lag_s: of an index apart, in seconds: it is published if each shard was shipped up to that long ago.
    """

    parallelism: int = 2
    batch_rows: int = 100_000
    batch_ms: int = 1_000
    ranges: int | None = None
    segments: int | None = None
    max_rows_per_second: int | None = None
    scan: str = "auto"
    covering: str = "auto"
    lock_timeout_ms: int = 500
    lock_patience_s: int = 600
    revert_window_s: int = 3600
    ignore_row_security: bool = False
    ignore_publications: bool = False
    verify: str = "after"
    on_duplicate: str = "pause"
    census: bool = False
    shard_parallelism: int | None = None
    max_lag_s: int = 60

    def __post_init__(self) -> None:
        _in_range("parallelism", self.parallelism, 1, MAX_PARALLELISM)
        if self.shard_parallelism is not None:
            _in_range("shard_parallelism", self.shard_parallelism, 1, MAX_PARALLELISM)
        _in_range("max_lag_s", self.max_lag_s, 1, 365 * 86_400)
        _in_range("batch_rows", self.batch_rows, 1, MAX_BATCH_ROWS)
        _in_range("batch_ms", self.batch_ms, 1, 600_000)
        _in_range("lock_timeout_ms", self.lock_timeout_ms, 1, 60_000)
        _in_range("lock_patience_s", self.lock_patience_s, 0, 86_400)
        _in_range("revert_window_s", self.revert_window_s, 0, 365 * 86_400)
        if self.ranges is not None:
            _in_range("ranges", self.ranges, 1, MAX_RANGES)
        if self.segments is not None:
            _in_range("segments", self.segments, 1, 1_000)
        if self.max_rows_per_second is not None:
            _in_range("max_rows_per_second", self.max_rows_per_second, 1, MAX_ROWS_PER_SECOND)
        for name in ("ignore_row_security", "ignore_publications", "census"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidInput(f"{name} is {value!r}; it must be true or false")
        if self.verify not in VERIFY:
            raise InvalidInput(f"verify is {self.verify!r}; it must be one of {', '.join(VERIFY)}")
        if self.on_duplicate not in ON_DUPLICATE:
            raise InvalidInput(f"on_duplicate is {self.on_duplicate!r}; it must be one of {', '.join(ON_DUPLICATE)}")
        if self.scan not in SCAN:
            raise InvalidInput(f"scan is {self.scan!r}; it must be one of {', '.join(SCAN)}")
        if self.covering not in COVERING:
            raise InvalidInput(f"covering is {self.covering!r}; it must be one of {', '.join(COVERING)}")
        self.check_work()

    @classmethod
    def asked(cls, **given: Any) -> BuildOptions:
        """The options that a user gives, with the default for None; a limit of 0 is none.

        Raises InvalidInput, also for batches and rates below `MIN_BATCH_ROWS` and `MIN_ROWS_PER_SECOND`.
        """
        check_live_options({name: given.get(name) for name in LIVE_OPTIONS})
        found = {name: value for name, value in given.items() if value is not None}
        for name in ("max_rows_per_second", "shard_parallelism"):
            if found.get(name) == 0:
                del found[name]
        return cls(**found)


@dataclass(frozen=True)
class VerifyOptions(WorkOptions):
    """The options of one verification.

    parallelism: workers that compare at the same time.
    sample: a share of the index in per cent, chosen at random; None is all of it.
    max_seconds: stop after this many seconds of work; the rest is not compared. None is no limit.
    slices: compare the index in this many verifications; each continues where the last one stopped. None is one.
    repair: repair each discrepancy in a short transaction.
    amcheck: also check the structure of the index's B-trees; needs the extension of that name.
    """

    parallelism: int = 2
    sample: float | None = None
    max_seconds: int | None = None
    slices: int | None = None
    repair: bool = False
    amcheck: bool = False

    def __post_init__(self) -> None:
        _in_range("parallelism", self.parallelism, 1, MAX_PARALLELISM)
        if self.sample is not None and not (isinstance(self.sample, int | float) and 0 < self.sample <= 100):
            raise InvalidInput(f"sample is {self.sample!r}; it must be more than 0 and at most 100, in per cent")
        if self.max_seconds is not None:
            _in_range("max_seconds", self.max_seconds, 1, 365 * 86_400)
        if self.slices is not None:
            _in_range("slices", self.slices, 1, MAX_SLICES)
        if self.slices is not None and self.sample is not None:
            raise InvalidInput("give either sample or slices: slices together compare all of the index")
        self.check_work()

    @property
    def is_partial(self) -> bool:
        """True if only a part is compared, so that sums of both sides can't be."""
        return self.sample is not None or self.max_seconds is not None or self.slices is not None

    @property
    def in_parts(self) -> bool:
        """True if units must be small, to be chosen from."""
        return self.sample is not None or self.slices is not None


@dataclass(frozen=True)
class CompactOptions(WorkOptions):
    """The options of one compaction.

    parallelism: units at the same time. verify: each unit is compared with what it replaces, before its swap.
    lock_timeout_ms, lock_patience_s: as of a build, for each short lock.
    """

    parallelism: int = 2
    verify: bool = True
    lock_timeout_ms: int = 500
    lock_patience_s: float = 60.0

    def __post_init__(self) -> None:
        check_live_options({"parallelism": self.parallelism})
        if not self.lock_timeout_ms >= 1 or self.lock_patience_s < 0:
            raise InvalidInput("lock_timeout_ms must be at least 1, lock_patience_s at least 0")
        self.check_work()


def check_live_options(options: Mapping[str, int | str | None]) -> None:
    """Raise InvalidInput for a value that a user may not give to an operation; None is none given.

    Where 0 is a value it is none: no limit, never. `roir.change_options` checks the same, and reads the throttle.
    """
    for name, value in options.items():
        if name in ("throttle", "windows"):
            if not isinstance(value, str | None):
                raise InvalidInput(f"{name} is {value!r}; it must be text")
            if name == "windows":
                parse_windows(value)
        elif value is not None:
            least, most, none = _LIVE[name]
            if none is None or value != 0 or isinstance(value, bool):
                _in_range(name, value, least, most, "" if none is None else f", or 0 for {none}")


_LIVE: dict[str, tuple[int, int, str | None]] = {
    "parallelism": (1, MAX_PARALLELISM, None),
    "batch_rows": (MIN_BATCH_ROWS, MAX_BATCH_ROWS, None),
    "max_rows_per_second": (MIN_ROWS_PER_SECOND, MAX_ROWS_PER_SECOND, "no limit"),
    "shard_parallelism": (1, MAX_PARALLELISM, "no limit"),
    "max_duration_s": (1, 365 * 86_400, "no limit"),
    "priority": (-100, 100, None),
    "warn_after_s": (1, 365 * 86_400, "never"),
    "abort_after_s": (1, 365 * 86_400, "never"),
}


def _in_range(name: str, value: Any, low: int, high: int, besides: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(f"{name} is {value!r}; it must be a whole number from {low} to {high}{besides}")
