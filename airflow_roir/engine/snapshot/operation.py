"""One operation as it is shown, read by one statement and frozen; every number is derived from committed rows (I9).

`operation_status` and `read` return one row of the view `roir.shown_operation`, with its index's definition;
`details.look` adds the details of a page or a live view. Each surface renders this document and reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.as_json import plain_fields
from airflow_roir.definition import parse_name
from airflow_roir.definition_text import defined, listed
from airflow_roir.engine.compact.progress import Standing, standings
from airflow_roir.engine.control import long_pause, operations, sign_of_life
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.health.in_passing import warnings_of_many
from airflow_roir.engine.partitions.remove_entries import still_hidden
from airflow_roir.engine.scan import sharing
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.snapshot.bars import Bars
from airflow_roir.engine.snapshot.parts import Delta, Error, Event, HeldUp, NextTask, Pause, PhaseOf, Throttle, Workers
from airflow_roir.engine.snapshot.shards import ShardStanding
from airflow_roir.one_line import one_line
from airflow_roir.operation import Kind, Phase, Status
from airflow_roir.options import LIVE_OPTIONS

# The status of a paused operation until its run and its workers have left.
PAUSING = "pausing"
# The status of an operation whose row says that it runs, but which no run drives, and none will.
ABANDONED = "abandoned"
# The values of `OperationStatus.status` for an operation that can still continue.
LIVE = (Status.RUNNING.value, ABANDONED, PAUSING, Status.PAUSED.value)
# The most characters of a database's text that are shown.
MOST_SAID = 500
# A killed task has five seconds left.
SOON_MS = 1_000


@dataclass(frozen=True)
class OperationStatus:
    """One operation.

    Durations are in seconds. docs/reference/status.md is made from this list.

    index, source, operation_id: the index, its source table, and the number of the operation.
    kind: `create`, `rebuild`, `verify`, `compact` or `reference`.
    status: `running`, `abandoned`, `paused`, `completed`, `failed`, `aborting`, `aborted`.
    phase: `build`, `seal`, `fold`, `publish`, `sum`, `check`, `compact`, `fill`, `done`.
    percent_complete: how much of the work is done, 0 to 100; never falls. In a build copying counts 60, sealing
        25, the comparison 12.
    rows, rows_estimate: source rows copied so far; source rows as estimated by the prepare.
    rows_per_second: rows divided by the seconds of building or comparing.
    rows_per_second_now: the rate of the last seconds; null unless the operation runs.
    seconds_left: the work that is left, from the recent rate and, for later phases, from the index's last build
        (docs/plan.md#what-a-build-will-take); null if nothing is known yet, or unless it runs.
    seconds_left_low, seconds_left_high: the bounds that contain the time left in most builds.
    total_execution_time, phase_seconds: seconds of work, in all and by phase, without pauses and Spark's start.
    options: the options in effect that can change while the operation lives.
    throttled, throttled_since: why the governor holds workers back, and since when; null if it doesn't.
    granted: how many workers may work now. 0 stops all, a fraction is a worker that rests; null: all may.
    throttle_seconds: seconds of work of all workers that were lost to each cause.
    ranges_done, ranges, segments_sealed, segments: the numbers of copied ranges, of all ranges, of sealed segments, and
        of all segments.
    spark_ui: the address of Spark's page, while it is known.
    owner: the run that drives the operation, or drove it last.
    driven: whether that run has given a sign of life in the last half minute.
    silent_seconds: how long ago the last sign of life was.
    started_at, paused_at, finished_at: when it began, was last paused, ended.
    abandoned_since: since when no run drives it, and none will; null unless it is abandoned.
    expected_at: when the DAG run that will continue it looks again, or at the latest tries again; null if a run drives
        it, or none is expected.
    last_try: whether the task that drives it, or did, has no other try.
    paused_by: the user or run that paused it; or `duplicates` (rows share keys of a unique index), `governor` (a signal
        can't be read), `window` or `max_duration` (docs/throttle.md#windows).
    pause_reason: why it is paused.
    long_pause: the warning of a pause that lasts too long (docs/operate.md#long-pauses); null: none.
    ended_by, end_reason: the user who aborted it, and why.
    error: why it failed.
    notice: what it waits for (`waiting for a lock …, blocked by …`, `queued: place …`), or the last option that was
        refused.
    key, include, where, definition: as of an index, above.
    unique, census: whether the index is unique; whether the build only lists duplicates.
    compaction: the units of a compaction: `units`, of which `done` and `left_out`, `bytes_before` and `bytes_after` of
        those that are done, `at_hand` in words; null of other kinds.
    shares_scan_of: the indexes that the same scan builds now.
    duplicate_keys, duplicate_rows: keys of a unique index that several rows share, and these rows, as far as they are
        found; healed ones aren't counted.
    differences, differences_left: what its last comparison of index and table found, and what of that isn't repaired;
        null until one has ended.
    has_duplicates: whether rows have shared a key, healed ones included.
    """

    now: datetime
    index: str
    source: str
    operation_id: int
    kind: str
    status: str
    phase: str
    percent_complete: float
    rows: int
    rows_estimate: int
    rows_per_second: float | None
    rows_per_second_now: float | None
    seconds_left: float | None
    seconds_left_low: float | None
    seconds_left_high: float | None
    total_execution_time: float
    phase_seconds: dict[str, float]
    options: dict[str, Any]
    ranges_done: int
    ranges: int
    segments_sealed: int
    segments: int
    owner: str | None
    spark_ui: str | None
    driven: bool
    silent_seconds: float | None
    started_at: datetime
    paused_at: datetime | None
    abandoned_since: datetime | None
    expected_at: datetime | None
    last_try: bool
    finished_at: datetime | None
    pause_reason: str | None
    paused_by: str | None
    ended_by: str | None
    end_reason: str | None
    error: str | None
    notice: str | None
    worth: str | None
    unique: bool
    census: bool
    has_duplicates: bool
    duplicate_keys: int
    duplicate_rows: int
    differences: int | None
    differences_left: int | None
    throttled: str | None
    throttled_since: datetime | None
    granted: float | None
    throttle_seconds: dict[str, float]

    # Fields by which the details are read, and fields for metrics alone. limits: of signals, as the governor reads
    # them; holders: workers that hold a piece; delta_rows: by PostgreSQL's statistics.
    generation_id: int
    epoch: int
    heartbeat_age: float | None
    has_begun: bool
    compares: bool
    verification_id: int | None
    is_compared: bool | None
    comparing: float | None
    units: int
    compactions: int
    limits: dict[str, float]
    batches: int
    holders: int
    delta_rows: int
    queued_seconds: float | None

    # Fields of the index's row.
    key: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    where: str = ""
    definition: str = ""

    # Fields that take statements of their own. warnings: of the published index (`health`); only `status` reads them.
    shares_scan_of: tuple[str, ...] = ()
    long_pause: str | None = None
    compaction: Standing | None = None
    warnings: tuple[str, ...] = ()

    # Given by a page, which can ask Airflow.
    next_task: NextTask | None = None

    # Fields that `details.look` reads, which also changes `paused` to `pausing` until run and workers have left.
    # phases: `verify` is the comparison before a publish. governor: None without limits, lost time and samples.
    # samples: unix seconds, rows, percent. shards: of an index over shards. queries: how to query what a build has
    # published.
    phases: tuple[PhaseOf, ...] = ()
    bars: Bars | None = None
    workers: Workers | None = None
    held_up: HeldUp | None = None
    delta: Delta | None = None
    governor: Throttle | None = None
    samples: tuple[tuple[float, int, float], ...] = ()
    pauses: tuple[Pause, ...] = ()
    errors: tuple[Error, ...] = ()
    events: tuple[Event, ...] = ()
    shards: tuple[ShardStanding, ...] = ()
    queries: tuple[str, ...] = ()

    @property
    def is_fresh(self) -> bool:
        """True if the operation's run, or that of a paused one, has given a recent sign of life."""
        return self.heartbeat_age is not None and abs(self.heartbeat_age) < sign_of_life.HEARTBEAT_FRESH_S

    @property
    def phase_shown(self) -> str:
        """The phase for people; with details `verify` for a publish that still compares."""
        return next((phase.name for phase in self.phases if phase.state == "now"), Phase(self.phase).shown)

    def seconds_since(self, moment: datetime | None) -> float:
        """The seconds since then by the server's clock; 0 for None."""
        return 0.0 if moment is None else (self.now - moment).total_seconds()

    def as_dict(self, whole: bool = False) -> dict[str, Any]:
        """For JSON: moments in ISO 8601, and each option by its name. whole: with the details of `details.progress`."""
        left_out = INTERNAL | (OF_LISTS if whole else DETAILS)
        facts = {name: value for name, value in plain_fields(self).items() if name not in left_out}
        options: dict[str, Any] = facts.pop("options")
        return facts | options


NAMES = [one.name for one in fields(OperationStatus)]
OF_ROW = NAMES[: NAMES.index("key")]
INTERNAL = frozenset([*OF_ROW[OF_ROW.index("generation_id") :], "next_task"])
OF_LISTS = frozenset(["shares_scan_of", "long_pause", "warnings"])
DETAILS = frozenset(["now", "worth", *NAMES[NAMES.index("phases") :]])

ROWS = f"""
SELECT {", ".join(f's."{name}"' for name in OF_ROW)},
       i.key_columns, i.included_columns, i.expressions, i.condition, i.is_unique, i.nulls_not_distinct
  FROM roir.shown_operation s JOIN roir.operation o ON o.id = s.operation_id JOIN roir.index i ON i.id = o.index_id
 WHERE s.operation_id = ANY (%(ids)s) ORDER BY s.index
"""
# The newest operation of an index, or of each.
NEWEST = """
SELECT max(o.id) FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE i.dropped_at IS NULL AND (%(index)s IS NULL OR i.id = %(index)s) GROUP BY i.id
"""

INDEX_OF = "SELECT id, index_id FROM roir.operation WHERE id = ANY (%(ids)s)"


def status(database: Database, index: str | None = None) -> list[OperationStatus]:
    """The latest operation of one index, or of each index that isn't dropped, with the warnings of published indexes.

    Raises NotFound, SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        check_schema(connection)
        found = newest(
            connection, None if index is None else operations.find_index(connection, parse_name(index, "index")).id
        )
        rows = execute(connection, INDEX_OF, {"ids": [one.operation_id for one in found]})
        index_of = {row.id: row.index_id for row in rows}
        asked = {index_of[one.operation_id]: (one.operation_id, one.index) for one in found}
        warnings = warnings_of_many(connection, asked, still_hidden)
        return [replace(one, warnings=tuple(warnings[index_of[one.operation_id]])) for one in found]


def operation_status(database: Database, operation_id: int) -> OperationStatus:
    """The status of one operation. Raises NotFound."""
    with database.transaction() as connection:
        operations.read_operation(connection, operation_id)
        return read(connection, [operation_id])[0]


def operation_soon(database: Database, operation_id: int) -> OperationStatus:
    """As `operation_status`, by one statement; raises the database's error instead of waiting for long."""
    with database.transaction() as connection:
        execute(connection, f"SET LOCAL statement_timeout = {SOON_MS}; SET LOCAL lock_timeout = {SOON_MS}")
        found = rows(connection, [operation_id])
        if not found:
            raise operations.no_operation(connection, operation_id)
    return found[0]


def newest(connection: Connection, index_id: int | None) -> list[OperationStatus]:
    """The newest operation of an index, or of each index."""
    ids = list(execute(connection, NEWEST, {"index": index_id}).scalars())
    return read(connection, ids) if ids else []


def read(connection: Connection, ids: Sequence[int]) -> list[OperationStatus]:
    """The operations with these ids, by the names of their indexes, without details; in the caller's transaction."""
    found = rows(connection, ids)
    building = [one.operation_id for one in found if one.status == Status.RUNNING and one.phase == Phase.BUILD]
    paused = [one.operation_id for one in found if one.status in (Status.PAUSED, ABANDONED)]
    compactions = [one.operation_id for one in found if one.kind == Kind.COMPACT]
    # Only for operations that can have them: a look at a build once a second must stay cheap.
    shared = sharing.others(connection, building) if building else {}
    pauses = long_pause.long_pauses(connection, paused[0] if len(paused) == 1 else None) if paused else []
    texts = {one.operation_id: one.text for one in pauses}
    swapped = standings(connection, compactions) if compactions else {}
    return [
        replace(
            one,
            shares_scan_of=shared.get(one.operation_id, ()),
            compaction=swapped.get(one.operation_id),
            long_pause=texts.get(one.operation_id),
        )
        for one in found
    ]


def rows(connection: Connection, ids: Sequence[int]) -> list[OperationStatus]:
    """As `read`, by one statement: only the fields of the view."""
    return [_of(row) for row in execute(connection, ROWS, {"ids": list(ids)})]


def _of(row: Row[Any]) -> OperationStatus:
    texts = dict(row.expressions)
    facts = {name: row._mapping[name] for name in OF_ROW} | {
        "key": listed(row.key_columns, texts),
        "include": listed(row.included_columns, texts),
        "where": row.condition,
        "definition": defined(row.source, row),
        # The name in roir's notation: the view quotes key words, too.
        "index": str(parse_name(row._mapping["index"], "index")),
        "options": {name: row.options[name] for name in LIVE_OPTIONS},
        "throttled": None if row.throttled is None else cut(row.throttled),
    }
    return OperationStatus(**facts)


def cut(text: str) -> str:
    """A text of the database as it can be shown: in one line, and cut."""
    return one_line(text, MOST_SAID)
