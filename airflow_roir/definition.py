"""What an index is: names, key columns, included columns, and the options of a build. Validated once, here."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from airflow_roir.errors import InvalidInput
from airflow_roir.windows import parse_windows

MAX_IDENTIFIER_BYTES = 63  # PostgreSQL's NAMEDATALEN - 1
MAX_KEY_COLUMNS = 32  # PostgreSQL's INDEX_MAX_KEYS, which counts key and primary key columns together
MAX_PARALLELISM = 256  # beyond it a server's connections, not our workers, are the limit
MAX_BATCH_ROWS = 10_000_000  # a batch is one transaction, which a crash undoes whole
MAX_ROWS_PER_SECOND = 1_000_000_000  # more than any server reads
# What users may ask for. The engine itself takes any, but a commit for every few rows makes a build last for days.
MIN_BATCH_ROWS = 1_000
MIN_ROWS_PER_SECOND = 100
MAX_SLICES = 10_000  # of a verification: an hour each, more than a year
MAX_RANGES = 100_000  # one row each in the control schema, which workers look through for the next one


_PLAIN = re.compile(r"[a-z_][a-z0-9_$]*")
# PostgreSQL's own: it folds ASCII letters only, and knows no other white space.
_FOLDED = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_SPACE = " \t\n\r\f\v"


def quote(name: str) -> str:
    """Quote one SQL identifier. The only function that does; every name in a statement passes through it.

    Raises InvalidInput for a name that PostgreSQL can't have.
    """
    if not name or "\0" in name:
        raise InvalidInput(f"{name!r} is not an SQL identifier: it is empty or contains a NUL character")
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True)
class QualifiedName:
    """A table's or view's name as SQL knows it; `schema` is None if it was not given."""

    schema: str | None
    name: str

    @property
    def sql(self) -> str:
        """For statements: quoted, always."""
        return quote(self.name) if self.schema is None else f"{quote(self.schema)}.{quote(self.name)}"

    def __str__(self) -> str:
        """For people, and readable by `parse_name`: quoted where it must be."""
        return ".".join(
            part if _PLAIN.fullmatch(part) else quote(part) for part in (self.schema, self.name) if part is not None
        )


def argument(name: QualifiedName | str) -> str:
    """A name as an argument of a command, to be pasted into a shell: it is quoted, where it must be.

    A name with control characters is written as bash and zsh read it, `$'\\x1b'`, so that it is one line that does
    nothing to a terminal.
    """
    text = str(name)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(sign: str) -> str:
    if sign in "'\\":
        return f"\\{sign}"
    if sign.isprintable():
        return sign
    code = ord(sign)
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _parse_identifiers(text: str, separator: str, what: str) -> list[str]:
    """Split `text` at `separator` as psql does: unquoted names fold to lower case, `""` is a quote."""
    if not isinstance(text, str):
        # A template's native value, or a form's.
        raise InvalidInput(f"{what} is {text!r}; it must be text")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidInput(f"{what} {text!r} contains a character that PostgreSQL can't have in a name")
    names: list[str] = []
    position, length = 0, len(text)
    while True:
        while position < length and text[position] in _SPACE:
            position += 1
        if position < length and text[position] == '"':
            part, position = _quoted_identifier(text, position, what)
        else:
            start = position
            while position < length and text[position] != separator and text[position] not in _SPACE:
                position += 1
            part = text[start:position]
            if '"' in part:
                raise InvalidInput(f"{what} {text!r}: quote the whole name, with inner quotes doubled")
            part = part.translate(_FOLDED)
        if not part:
            raise InvalidInput(f"{what} {text!r}: a name is empty")
        if len(part.encode()) > MAX_IDENTIFIER_BYTES:
            raise InvalidInput(f"{what} {part!r} is longer than PostgreSQL's {MAX_IDENTIFIER_BYTES} bytes")
        names.append(part)
        while position < length and text[position] in _SPACE:
            position += 1
        if position == length:
            return names
        if text[position] != separator:
            raise InvalidInput(f"{what} {text!r}: expected {separator!r} at position {position + 1}")
        position += 1


def _quoted_identifier(text: str, start: int, what: str) -> tuple[str, int]:
    position, part = start + 1, ""
    while position < len(text):
        if text[position] != '"':
            part += text[position]
            position += 1
        elif text[position + 1 : position + 2] == '"':
            part += '"'
            position += 2
        else:
            return part, position + 1
    raise InvalidInput(f"{what} {text!r}: a quoted name has no closing quote")


def parse_name(text: str, what: str = "name") -> QualifiedName:
    """Read `schema.name` or `name`, quoted or not, as `psql` does. Raises InvalidInput."""
    parts = _parse_identifiers(text, ".", what)
    if len(parts) > 2:
        raise InvalidInput(f"{what} {text!r}: at most a schema and a name, found {len(parts)} parts")
    return QualifiedName(parts[0] if len(parts) == 2 else None, parts[-1])


def parse_columns(text: str | Sequence[str] | None, what: str = "columns") -> tuple[str, ...]:
    """Read a comma-separated list of column names, quoted or not. None and '' give ().

    A sequence is taken as a list of names that are already separated; each may still be quoted.
    """
    if not text:
        return ()
    if isinstance(text, str):
        return tuple(_parse_identifiers(text, ",", what)) if text.strip() else ()
    if not isinstance(text, Sequence):
        raise InvalidInput(f"{what}: {text!r} is no list of names")
    names: list[str] = []
    for item in text:
        names += _parse_identifiers(item, ",", what)
    return tuple(names)


def parse_shards(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """Read a comma-separated list of shards' names, as they were added. None and '' give ()."""
    names = text.split(",") if isinstance(text, str) else text or ()
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"shards: {text!r} is no list of names")
    return tuple(name.strip() for name in names if name.strip())


@dataclass(frozen=True)
class IndexDefinition:
    """A named index: its source, key columns in order, and included columns (docs/architecture.md#words).

    unique: no two rows of the source may have the same key, over all its partitions, or shards. nulls_not_distinct: nor
    the same NULLs (docs/architecture.md#uniqueness). In a rebuild both may be left out: the index knows them itself.

    shards: the servers that have the table, of an index apart from it (docs/architecture.md#apart); a rebuild keeps
    those that it has, unless it names others. shard_column: the view's column that tells the shard; None is `shard`.

    `source` and `key` are empty for the rebuild of an index that exists: it knows them itself.
    """

    name: QualifiedName
    source: QualifiedName | None = None
    key: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    unique: bool = False
    nulls_not_distinct: bool = False
    shards: tuple[str, ...] = ()
    shard_column: str | None = None

    def __post_init__(self) -> None:
        repeated = sorted({shard for shard in self.shards if self.shards.count(shard) > 1})
        if repeated:
            raise InvalidInput(f"index {self.name}: shard {quote(repeated[0])} is repeated; name it only once")
        if self.shard_column is not None and not self.shards:
            raise InvalidInput(
                f"index {self.name}: shard_column names the column that tells the shard: give shards, too"
            )
        for name in ("unique", "nulls_not_distinct"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidInput(f"index {self.name}: {name} is {value!r}; it must be true or false")
        if self.nulls_not_distinct and not self.unique:
            raise InvalidInput(
                f"index {self.name}: only a unique index tells NULLs apart or not; give unique, too, or leave "
                "nulls_not_distinct out"
            )
        if self.nulls_not_distinct and self.shards:
            raise InvalidInput(
                f"index {self.name}: over shards NULLs are distinct, and several rows may have them; leave "
                "nulls_not_distinct out"
            )
        if (self.source is None) != (not self.key):
            raise InvalidInput(
                f"index {self.name}: give the table and the key columns together, "
                "or neither of them to rebuild an index that exists"
            )
        if self.include and self.source is None:
            raise InvalidInput(
                f"index {self.name}: included columns need a table and key columns; a rebuild keeps those the index has"
            )
        for kind, columns in (("key", self.key), ("included", self.include)):
            repeated = sorted({column for column in columns if columns.count(column) > 1})
            if repeated:
                raise InvalidInput(
                    f"index {self.name}: {kind} column {quote(repeated[0])} is repeated; name it only once"
                )
        both = [column for column in self.include if column in self.key]
        if both:
            raise InvalidInput(
                f"index {self.name}: column {quote(both[0])} is a key column already; don't include it again"
            )

    @property
    def unique_here(self) -> bool:
        """True if the entries' own table has each key once. Over shards it can't: it tells what they have committed."""
        return self.unique and not self.shards

    @classmethod
    def parse(
        cls,
        index: str,
        table: str | None = None,
        keys: str | Sequence[str] | None = None,
        include: str | Sequence[str] | None = None,
        unique: bool = False,
        nulls_not_distinct: bool = False,
        shards: str | Sequence[str] | None = None,
        shard_column: str | None = None,
    ) -> IndexDefinition:
        """Read a definition from SQL identifiers as a user types them. Raises InvalidInput."""
        return cls(
            name=parse_name(index, "index"),
            source=parse_name(table, "table") if table else None,
            key=parse_columns(keys, "key columns"),
            include=parse_columns(include, "included columns"),
            unique=unique,
            nulls_not_distinct=nulls_not_distinct,
            shards=parse_shards(shards),
            shard_column=parse_name(shard_column, "shard column").name if shard_column else None,
        )


_NAME = r'(?:"(?:[^"]|"")*"|[^"()\s])+'
_COLUMNS = r'(?:"(?:[^"]|"")*"|[^"()])+'
_BESIDE = re.compile(
    rf"\s*(?P<unique>unique\s+)?(?P<name>{_NAME})\s*\((?P<keys>{_COLUMNS})\)"
    rf"(?:\s*include\s*\((?P<include>{_COLUMNS})\))?(?P<nulls>\s+nulls\s+not\s+distinct)?\s*",
    re.IGNORECASE,
)


def parse_beside(text: str, table: str | None) -> IndexDefinition:
    """Read `[UNIQUE] name (keys) [INCLUDE (columns)] [NULLS NOT DISTINCT]`, of an index of that table.

    Raises InvalidInput.
    """
    if not table:
        raise InvalidInput(f"{text!r}: an index beside another one needs the table of both: give --table, too")
    found = _BESIDE.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is no index; write it as 'public.by_day (day, id) INCLUDE (amount)'")
    unique, nulls = found["unique"] is not None, found["nulls"] is not None
    return IndexDefinition.parse(found["name"], table, found["keys"], found["include"], unique, nulls)


class Scan(str, Enum):
    """What a generation is built from: the source in the order of its primary key, the source as it lies in its
    blocks, or, in a rebuild, the blocks of the generation that readers see.
    """

    KEY = "key"
    BLOCK = "block"
    INDEX = "index"

    @property
    def by_blocks(self) -> bool:
        """True if ranges are pieces of files; else they are pieces of the primary key's order."""
        return self is not Scan.KEY


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
