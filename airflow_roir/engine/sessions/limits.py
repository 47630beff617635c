"""How long the engine waits, and how much it takes at once, where no option of an operation says it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection


@dataclass(frozen=True)
class Limits:
    """Given to `Database(dsn, limits=Limits(...))`; every session of it keeps to them. The defaults suit any server.

    Times end in `_ms` and `_s`, amounts of data in `_rows`, `_blocks` and `_bytes`.
    """

    # For a lock that somebody holds on a whole table (a TRUNCATE, an ALTER): whoever works gives up, to look for a
    # pause.
    table_lock_ms: int = 2_000
    # For an attempt at a lock outside an operation, which has its own `lock_timeout_ms`. Below the default
    # deadlock_timeout of a second, so that it is always we who give way.
    attempt_ms: int = 500
    # All attempts of a clean-up at one lock: it comes again by its schedule, so it doesn't insist.
    clean_up_s: float = 5.0
    # A server that restarts or fails over is back within this; a longer outage pauses the operation.
    outage_s: float = 60.0
    # Nothing that a session begins with waits for a lock. Without an answer the server hangs, or its pool is empty.
    first_answer_s: float = 60.0
    # What ran out (disk, memory, connections) comes back when somebody makes room: long enough for who is on call to do
    # that; a longer shortage pauses the operation.
    exhausted_s: float = 600.0
    # So often in a row a statement that somebody else has cancelled is sent again: who insists has a reason.
    cancels: int = 5
    # For so long a signal that can't be read holds the work; then the operation is paused.
    unreadable_s: float = 300.0
    # Often enough that a run isn't taken for dead (30 s) after a few lost beats.
    heartbeat_every_s: float = 2.0
    # How often a segment is begun again for those who wait for it. Then it is finished first: somebody who truncates
    # leaves all day long would else keep it from its end.
    seal_retreats: int = 8
    # A paused build's delta of this size is warned of however short the pause is: 1 GB.
    paused_delta_bytes: int = 1 << 30
    # How long a repair leaves a writer alone who holds what it is to repair.
    repair_rest_s: float = 0.1

    # A batch by blocks, or of wide rows, reads no more than this: 64 MB.
    batch_bytes: int = 64 << 20
    # Copied at once of a segment that is compacted: 16 MB, a fraction of a second.
    compaction_blocks: int = 2_048
    # Copied at once of a table that is attached as a partition.
    attach_rows: int = 10_000
    # Looked through at once for entries of a partition that left: some ten thousand, whose writers wait for that long
    # (some 100 ms) at the most.
    removal_blocks: int = 128
    # A source below this is read out of memory however it lies: 64 MB.
    small_source_bytes: int = 64 << 20
    # ANALYZE's own sample size at its default target: bounds from 30,000 rows are within a few per cent.
    sample_rows: int = 30_000
    # Fewer blocks than this would make a block sample of clustered rows too uneven.
    sample_blocks: int = 300
    # Hashes of keys that the run of a unique index keeps in memory, to tell duplicates early: of 32 million keys. What
    # is beyond is read again from the server. Besides, it holds one segment's hashes three times while it merges them.
    early_bytes: int = 256 << 20
    # How often it looks what came; of the time that the build takes, what it may spend on reading new hashes and
    # on looking duplicates up.
    early_every_s: float = 0.25
    early_reading_share: float = 0.3
    early_looking_share: float = 0.1
    # When all is copied, for what is left of both.
    early_last_share: float = 0.05
    # A scan that sees which groups are healed, once a resume, begins when it is no more than this of the run's time.
    early_healing_share: float = 0.03
    # Hashes that are looked up in one statement: an IN of so many is still a hash table of the server's.
    early_hashes: int = 10_000
    # A unit of a verification is one transaction; so many rows are read and summed in a tenth of a second.
    unit_rows: int = 200_000
    unit_blocks: int = 4_096
    # What a worker of a verification reads well within the time that a snapshot is shared.
    snapshot_rows: int = 10_000_000


DEFAULT = Limits()
_OPTION = "roir_limits"


def execution_options(limits: Limits) -> dict[str, Limits]:
    """For SQLAlchemy's engine, so that its sessions know them."""
    return {_OPTION: limits}


def limits_of(connection: Connection) -> Limits:
    """The limits of the database that a session belongs to; the defaults for one of somebody else's engine."""
    found: Limits = connection.get_execution_options().get(_OPTION, DEFAULT)
    return found
