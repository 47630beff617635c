"""The options of operations, each declared once: as a field of its operations' class, with all its texts.

From the fields come the options of commands (`cli/given.py`), of operators (`task/given.py`) and of the DAGs' forms
(`task/forms.py`), the live options in SQL (migrations/sql/live_options.sql), and the tables of
docs/reference/options.md; `make options` writes the last two. So a new option needs a field here, and the code that
uses it. The file is long because all options are one list: each is declared and looked up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from airflow_roir.definition import Scan
from airflow_roir.errors import Complaints, InvalidInput
from airflow_roir.option import Kind, Option, choice, number, option, span, truth

MAX_PARALLELISM = 256  # beyond it a server's connections, not our workers, are the limit
VERIFY_BEFORE = ("before", "both")
AUTO, SOURCE = "auto", "source"


Declared = TypeVar("Declared", bound="WorkOptions")


def _lock_timeout_ms() -> Any:
    return number(500, "How long an attempt at a lock may keep writers waiting", 1, 60_000, offered=False)


def _lock_patience_s(default: int) -> Any:
    return span(default, "How long attempts at a lock are repeated", 0, 86_400, offered=False)


def _parallelism(help: str) -> Any:
    return number(2, help, 1, MAX_PARALLELISM, empty="2", live=True, planned=True, title="Parallelism")


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """When, for how long and how hard an operation may work; None is the operation's own, or the default.

    throttle: limits of signals, `replica_lag=100MB commit_latency=20ms` (docs/throttle.md); `off` is none.
        The server reads it, when the operation begins.
    windows: when it may work (`windows.parse_windows`); outside them it pauses, inside it continues; `off` is none.
    max_duration_s: it pauses this many seconds after it began or was resumed; 0 is no limit.
    priority: of the operations that wait for others to end, the greatest priority goes first; by default 0.
    warn_after_s: a warning comes when a pause has lasted for this long; by default a day, 0 is never.
    abort_after_s: the operation is aborted when a pause has lasted for this long; 0, the default, is never.
    """

    throttle: str | None = option(
        Kind.LIMITS,
        None,
        "Limits of the server's signals, above which the operation slows down or waits",
        example="replica_lag=100MB commit_latency=20ms",
        zero="none",
        empty="none",
        live=True,
        title="Throttle",
    )
    windows: str | None = option(
        Kind.WINDOWS,
        None,
        "When the operation may work, as CRON for DURATION in ZONE, separated by semicolons; outside it pauses",
        example="0 22 * * 1-5 for 8h in Europe/Berlin",
        zero="always",
        empty="always",
        live=True,
        title="Windows",
    )
    max_duration_s: int | None = span(
        None,
        "Pause when this time has passed since the operation began or was resumed",
        example="6h, 90min",
        zero="no limit",
        empty="no limit",
        live=True,
        title="Longest duration",
    )
    priority: int | None = number(
        None,
        "Priority in the queue: the greatest goes first",
        -100,
        100,
        empty="0",
        live=True,
        begins=0,
        title="Priority",
    )
    warn_after_s: int | None = span(
        None,
        "Warn once a pause has lasted this long",
        example="12h, 2d",
        zero="never",
        empty="1d",
        live=True,
        begins=86_400,
        in_store=False,
        title="Warn of a pause after",
        form="Warn once a pause has lasted this long. A paused build still captures writes",
    )
    abort_after_s: int | None = span(
        None,
        "Abort once a pause has lasted this long, and remove the unfinished work",
        example="3d",
        zero="never",
        empty="never",
        live=True,
        in_store=False,
        title="Abort a paused operation after",
    )

    def __post_init__(self) -> None:
        checked(options_of(type(self)), lambda one: getattr(self, one.name), asked=False)

    @classmethod
    def asked(cls: type[Declared], **given: Any) -> Declared:
        """A user's options, with the default for None.

        Raises one InvalidInput for all values that are wrong, also for one below `Option.asked`.
        """
        checked(options_of(cls), lambda one: given.get(one.name))
        return cls(**{name: value for name, value in given.items() if value is not None})

    def live(self) -> dict[str, Any]:
        """The options that can change while the operation lives."""
        return {one.name: getattr(self, one.name) for one in options_of(type(self)) if one.live}

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
    max_rows_per_second: a rate limit for the copy over all workers; None and 0 are none.
    scan: the input of the copy: the source in the order of its primary `key`; the source `block` by block; the `index`
        that is rebuilt. `auto` takes blocks if the key's order isn't that of the rows, and the index if it is narrower
        than the source and nothing casts doubt on it (docs/architecture.md#scan). `source` is the same, but never the
        index, so that several indexes can share one scan.
    covering: the included columns that the segments' unique indexes contain too, so that index-only scans work.
        `auto` takes those whose size is bounded by their type: a B-tree tuple holds about 2,700 bytes, and a
        user's INSERT must not fail because an included value is long. `all` takes all, `none` none.
    lock_timeout_ms: the time that one attempt at a drain lock may keep writers waiting. Must stay below the server's
        deadlock_timeout, so that it is always the build that gives way (I6).
    lock_patience_s: the time to repeat attempts, with back-off, before the phase stops (and can be resumed).
    revert_window_s: the time that a replaced generation is kept and maintained.
    ignore_row_security: index a table with row-level security all the same. The view then shows every row, also those
        that the table's policies hide, to all who may read the view.
    ignore_publications: build although a publication contains the index's own tables. A PostgreSQL subscriber that
        lacks them stops; others may skip them.
    verify: `after` compares the new generation with the source, and publishes it only if they match. `before` compares
        the index that a rebuild replaces, to know what the rebuild repairs. `both`, or `none`.
    on_duplicate: for a unique index. `pause` builds on, lists all duplicates, and pauses before the switch. `stop`
        pauses at the first one.
    census: list the duplicates of a unique index that doesn't exist, then remove all that was built.
    rows_view: make the view `<index>_rows` at the publish, if there is none; it shows whole rows, and takes writes.
    shard_parallelism: for an index over shards: the most workers that read one shard at the same time; None and 0 are
        no limit.
    max_lag_s: for an index over shards, in seconds: it is published if each shard was shipped to its end no longer ago.
    """

    parallelism: int = _parallelism("Workers at the same time")
    batch_rows: int = number(
        100_000,
        "The most rows of the table in a batch, which is one transaction",
        1,
        10_000_000,  # a batch is one transaction, which a crash undoes whole
        asked=1_000,  # a commit for every few rows makes a build last for days
        empty="100,000",
        live=True,
        title="Most rows per batch",
        form="A batch is one transaction, and a pause takes effect at its end. The size adapts so that a batch takes "
        "about a second",
    )
    batch_ms: int = number(1_000, "Target time per batch, in ms, to which the batch's size adapts", 1, 600_000)
    ranges: int | None = number(
        None,
        "Pieces of the scan",
        1,
        100_000,  # one row each in the control schema, which workers look through for the next one
        empty="the plan chooses",
        planned=True,
        title="Ranges",
    )
    segments: int | None = number(
        None, "Pieces of the index, each sealed as one unit", 1, 1_000, empty="the plan chooses", planned=True
    )
    max_rows_per_second: int | None = number(
        None,
        "A rate limit for the copy, over all workers",
        1,
        1_000_000_000,  # more than any server reads
        asked=100,
        zero="no limit",
        empty="no limit",
        live=True,
        slows=True,
        planned=True,
        title="Rate limit, rows per second",
    )
    scan: str = choice(
        AUTO,
        "What to copy: the table by primary key or by block, or the index that is rebuilt; auto takes the fastest, "
        "source the fastest except the index",
        {
            AUTO: "the fastest",
            SOURCE: "the fastest, but not the index",
            Scan.KEY.value: "the table by primary key",
            Scan.BLOCK.value: "the table by block",
            Scan.INDEX.value: "the index that is rebuilt",
        },
        planned=True,
        title="Scan",
        form="What to copy, and in which order",
    )
    covering: str = choice(
        "auto",
        "Included columns that index-only scans see: auto (those of bounded size), all, none",
        {"auto": "those of bounded size", "all": "", "none": ""},
        planned=True,
    )
    lock_timeout_ms: int = _lock_timeout_ms()
    lock_patience_s: int = _lock_patience_s(600)
    revert_window_s: int = span(
        3600, "How long a replaced generation is kept and maintained", 0, example="2h, 90min", empty="1h"
    )
    ignore_row_security: bool = truth(
        False,
        "Allow the view to show rows that the table's policies hide",
        planned=True,
        title="Ignore row-level security",
    )
    ignore_publications: bool = truth(
        False,
        "Allow a publication that contains the index's own tables: its subscribers must skip unknown tables",
        planned=True,
        title="Ignore publications",
    )
    verify: str = choice(
        "after",
        "Compare index and table: after the build, and publish only if they match; before a rebuild; both; none",
        {
            "after": "the new index, which is published only if it matches",
            "before": "the index that a rebuild replaces, to count its errors",
            "both": "",
            "none": "",
        },
        title="Verify",
        form="Which index to compare with the table",
    )
    on_duplicate: str = choice(
        "pause",
        "If rows share a key of a unique index: pause once all are listed, or stop at the first",
        {"pause": "list all, then pause", "stop": "pause at the first"},
        planned=True,
        title="On duplicates",
        form="For a unique index. Resume the build once no two rows share a key",
    )
    census: bool = truth(
        False,
        "Only list the duplicates of a unique index, and keep nothing else",
        planned=True,
        title="Census",
    )
    rows_view: bool = truth(
        False,
        "Also make the view INDEX_rows, by which statements read and write whole rows",
        planned=True,
        title="View of whole rows",
    )
    shard_parallelism: int | None = number(
        None,
        "The most workers of an index over shards that read one shard at the same time",
        1,
        MAX_PARALLELISM,
        zero="no limit",
        empty="no limit",
        live=True,
        apart=True,
        title="Parallelism per shard",
    )
    max_lag_s: int = span(
        60,
        "Publish an index over shards only if each shard was shipped to its end within this time",
        example="60s, 10min",
        empty="60s",
        title="Longest lag at the publish",
    )

    def for_comparison(self) -> VerifyOptions:
        """The options of a verification before the build: the same number of workers, times and limits."""
        return VerifyOptions(parallelism=self.parallelism, **{name: getattr(self, name) for name in WORK_OPTIONS})


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

    parallelism: int = _parallelism("Workers at the same time")
    sample: float | None = option(
        Kind.SHARE,
        None,
        "Compare only this percentage of the index, chosen at random",
        example="1%, 0.5",
        empty="all of it",
        title="Sample, per cent",
    )
    max_seconds: int | None = span(
        None,
        "Stop after this much time of work; the rest isn't compared",
        example="2h, 90min",
        empty="no limit",
        flag="--max-duration",
        title="Longest duration",
    )
    slices: int | None = number(
        None,
        "Compare the index in this many verifications, each of which continues where the last one stopped",
        1,
        10_000,  # an hour each, more than a year
        empty="in one",
        title="Slices",
    )
    repair: bool = truth(False, "Repair each discrepancy, in a short transaction", title="Repair")
    amcheck: bool = truth(
        False, "Check the structure of the B-trees, too, by PostgreSQL's extension amcheck", title="Check the B-trees"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices is not None and self.sample is not None:
            raise InvalidInput("give either sample or slices: slices together compare all of the index")

    @property
    def is_partial(self) -> bool:
        """True if only a part is compared, so that sums of both sides can't be compared."""
        return self.sample is not None or self.max_seconds is not None or self.slices is not None

    @property
    def in_parts(self) -> bool:
        """True if units must be small, since only some of them are compared."""
        return self.sample is not None or self.slices is not None


@dataclass(frozen=True)
class CompactOptions(WorkOptions):
    """The options of one compaction.

    parallelism: units at the same time. verify: each unit is compared with the segments it replaces, before its swap.
    lock_timeout_ms, lock_patience_s: as of a build, for each short lock.
    """

    parallelism: int = _parallelism("Segments at the same time")
    verify: bool = truth(True, "Compare new segments with the old ones before they are swapped")
    lock_timeout_ms: int = _lock_timeout_ms()
    lock_patience_s: int = _lock_patience_s(60)


@dataclass(frozen=True)
class ReferenceOptions(WorkOptions):
    """The options of one reference, a foreign key to the key of a unique index.

    parallelism: ranges at the same time.
    lock_timeout_ms, lock_patience_s: as of a build, for the lock under which the foreign key is added.
    """

    parallelism: int = _parallelism("Ranges at the same time")
    lock_timeout_ms: int = _lock_timeout_ms()
    lock_patience_s: int = _lock_patience_s(60)


def options_of(declared: type[WorkOptions]) -> tuple[Option, ...]:
    """The options of a class, its own before those about when and how hard it may work."""
    found = [replace(one.metadata[Option], name=one.name) for one in fields(declared)]
    work = {one.name for one in fields(WorkOptions)}
    return tuple(sorted(found, key=lambda one: one.name in work))


def checked(
    options: Iterable[Option],
    value_of: Callable[[Option], Any],
    asked: bool = True,
    complaints: Complaints | None = None,
    called: Callable[[Option], str] = lambda option: option.name,
) -> dict[str, Any]:
    """The values of options by name, each read by `value_of` and checked. asked: by a user. called: its name in errors.

    Raises one InvalidInput for all values that are wrong; or adds them to `complaints`, and returns the others.
    """
    noting = Complaints() if complaints is None else complaints
    values: dict[str, Any] = {}
    for one in options:
        with noting.noted():
            value = value_of(one)
            one.check(value, asked=asked, called=called(one))
            values[one.name] = value
    if complaints is None:
        noting.settle()
    return values


WORK_OPTIONS = tuple(one.name for one in options_of(WorkOptions))
# The options that can change while an operation lives. A build has all of them.
LIVE = {one.name: one for one in options_of(BuildOptions) if one.live}
LIVE_OPTIONS = tuple(LIVE)


def check_live_options(options: Mapping[str, Any]) -> None:
    """Raises one InvalidInput for all values that a user may not give to an operation; None is none given.

    `roir.change_options` checks the same, and reads the throttle.
    """
    checked([LIVE[name] for name in options], lambda one: options[one.name])
