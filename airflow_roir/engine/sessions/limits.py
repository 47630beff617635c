"""How long the engine waits, and how much it takes at once, unless an option of an operation says so."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection


@dataclass(frozen=True)
class Limits:
    """Limits for `Database(dsn, limits=Limits(...))` and all its sessions. The defaults suit any server.

    Times end in `_ms` and `_s`, amounts of data in `_rows`, `_blocks` and `_bytes`.
    """

    # How long a worker waits if another session locks a whole table (a TRUNCATE, an ALTER); then it looks for a pause.
    table_lock_ms: int = 2_000
    # For an attempt at a lock outside an operation, which has its own `lock_timeout_ms`. Below the default
    # deadlock_timeout of a second, so that roir always gives way.
    attempt_ms: int = 500
    # For all attempts of a clean-up at one lock: it runs again by its schedule, so it needn't insist.
    clean_up_s: float = 5.0
    # A server that restarts or fails over is back within this; a longer outage pauses the operation.
    outage_s: float = 60.0
    # A session's first statements wait for no lock: without an answer the server hangs, or its pool is empty.
    first_answer_s: float = 60.0
    # A shortage (of disk, memory, connections) ends when an administrator makes room: this is long enough for that; a
    # longer shortage pauses the operation.
    exhausted_s: float = 600.0
    # How often in a row a statement that another session cancelled is sent again: a user who insists has a reason.
    cancels: int = 5
    # How long a signal that can't be read holds the work; then the operation is paused.
    unreadable_s: float = 300.0
    # Often enough that a run isn't taken for dead (30 s) after a few lost beats.
    heartbeat_every_s: float = 2.0
    # How often the seal of a segment gives way to sessions that wait for it. Then the segment is finished first:
    # otherwise an application that truncates leaves all day would keep it from its end.
    seal_retreats: int = 8
    # If a paused build's delta reaches this size, 1 GB, roir warns, however short the pause is.
    paused_delta_bytes: int = 1 << 30
    # How long a repair waits before it tries again, if a writer holds a row that it must repair.
    repair_rest_s: float = 0.1

    # A batch by blocks, or of wide rows, reads no more than this: 64 MB.
    batch_bytes: int = 64 << 20
    # Blocks of a segment that a compaction copies at once: 16 MB, a fraction of a second.
    compaction_blocks: int = 2_048
    # Rows that are copied at once from a table that is attached as a partition.
    attach_rows: int = 10_000
    # Blocks that are searched at once for entries of a partition that left: some ten thousand entries, whose writers
    # wait at most for that time, some 100 ms.
    removal_blocks: int = 128
    # A source smaller than this, 64 MB, is read from memory, in whatever order its rows are.
    small_source_bytes: int = 64 << 20
    # ANALYZE's own sample size at its default target: bounds from 30,000 rows are within a few per cent.
    sample_rows: int = 30_000
    # Fewer blocks than this would make a block sample of clustered rows too uneven.
    sample_blocks: int = 300
    # Hashes of keys that the run of a unique index keeps in memory, to find duplicates early: of 32 million keys. More
    # hashes are read again from the server. A merge holds one segment's hashes three times besides.
    early_bytes: int = 256 << 20
    # How often it looks for new rows; the shares of the build's time that it may spend on reading new hashes, and on
    # looking duplicates up.
    early_every_s: float = 0.25
    early_reading_share: float = 0.3
    early_looking_share: float = 0.1
    # The share for the rest of both, once all is copied.
    early_last_share: float = 0.05
    # A scan for groups that are healed, once after a resume, begins when it takes no more than this share of the run.
    early_healing_share: float = 0.03
    # Hashes that are looked up in one statement: the server still makes a hash table of an IN list of this length.
    early_hashes: int = 10_000
    # A unit of a verification is one transaction, which reads and sums this many rows in a tenth of a second.
    unit_rows: int = 200_000
    unit_blocks: int = 4_096
    # Rows that a worker of a verification reads well within the time that a snapshot is shared.
    snapshot_rows: int = 10_000_000


DEFAULT = Limits()
_OPTION = "roir_limits"


def execution_options(limits: Limits) -> dict[str, Limits]:
    """The options of SQLAlchemy's engine by which its sessions know the limits."""
    return {_OPTION: limits}


def limits_of(connection: Connection) -> Limits:
    """The limits of the database that a session belongs to; the defaults for a session of another engine."""
    found: Limits = connection.get_execution_options().get(_OPTION, DEFAULT)
    return found
