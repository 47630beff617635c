"""The metrics of `roir metrics`: their names, what they mean, their labels. docs/reference/metrics.md has them.

Each label has few values at a time: indexes that aren't dropped, the newest build, verification and compaction of each,
and words of this package. Names of replicas are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from airflow_roir.engine.snapshot.operation import OperationStatus
from airflow_roir.operation import BUILDS, Status

DATABASE = ("database",)
INDEX = (*DATABASE, "index")
SHARD = (*INDEX, "shard")
OPERATION = (*INDEX, "kind", "operation")
SIGNAL = (*OPERATION, "signal")


@dataclass(frozen=True)
class Family:
    """One metric. A counter's name ends in _total, and its value never falls for the same labels.

    read: takes the value from an operation's snapshot, None for no sample; None for a metric that needs more.
    """

    help: str
    labels: tuple[str, ...]
    read: Callable[[OperationStatus], float | None] | None = None

    @property
    def of(self) -> str:
        """The subject of the metric: database, index or operation."""
        return "operation" if "operation" in self.labels else "index" if "index" in self.labels else "database"


FAMILIES: dict[str, Family] = {
    "roir_up": Family("1: the database was read. 0: it wasn't, and there is nothing else but the reason.", DATABASE),
    "roir_problem": Family(
        "1: why the database, or a part of it, wasn't read. Metrics of that part are missing then.",
        (*INDEX, "part", "reason"),
    ),
    "roir_look_seconds": Family("How long it took to read these metrics.", DATABASE),
    "roir_running_operations": Family("Operations that a live run drives.", DATABASE),
    "roir_running_operations_limit": Family(
        "How many operations may run at the same time. Missing without a limit.", DATABASE
    ),
    "roir_lock_waits": Family("Sessions of roir that wait for a lock that another session holds.", DATABASE),
    "roir_index_published": Family("1: readers see the index. 0: its first build hasn't ended.", INDEX),
    "roir_index_unique": Family("1: no two rows may have the same key.", INDEX),
    "roir_index_unique_enforced": Family(
        "For a published unique index. 1: no two rows may have the same key, over all partitions or shards. 0: they "
        "may, and roir status says why.",
        INDEX,
    ),
    "roir_index_generation_age_seconds": Family("Since when readers see this generation.", INDEX),
    "roir_index_generations": Family("Generations that take room: published, being built, kept for a revert.", INDEX),
    "roir_index_ghosts": Family("Leftovers of the build in what readers see, until the next clean-up.", INDEX),
    "roir_index_verification_age_seconds": Family(
        "Since the last verification of what readers see. Missing if there was none.", INDEX
    ),
    "roir_index_discrepancies": Family(
        "Differences that the last verification found, less those that are repaired.", INDEX
    ),
    "roir_index_compaction_age_seconds": Family(
        "Since the last compaction of the index ended. Missing if there was none.", INDEX
    ),
    "roir_index_compacted_units_total": Family(
        "Units of compactions that are swapped in: new segments for old.", INDEX
    ),
    "roir_index_compacted_bytes_total": Family("The size of the old segments of these units.", INDEX),
    "roir_index_compaction_saved_bytes_total": Family(
        "How much less the new segments took at the swap; a unit that took more counts as 0.", INDEX
    ),
    "roir_capture_faults": Family(
        "Warnings of roir status for the index: changes that its capture may miss, or that make writes fail. Writes "
        "that failed aren't counted: the server's log has them.",
        INDEX,
    ),
    "roir_shard_lag_seconds": Family(
        "Commits of the shard that are at least this old are in the index. Missing before the shard was shipped to "
        "its end: in a first build, until the build ends.",
        SHARD,
    ),
    "roir_shard_pending_rows": Family(
        "Rows in the shard's outbox, about, when it was visited last. Missing before.", SHARD
    ),
    "roir_shard_pending_bytes": Family("The size of that outbox.", SHARD),
    "roir_shard_shipped_total": Family("Rows that were shipped from the shard to this generation.", SHARD),
    "roir_shard_shipper": Family(
        "1: a shipper has the shard now. 0: none has. Missing until the first publish: the build itself ships.", SHARD
    ),
    "roir_shard_away": Family("1: roir can't reach the shard, or can't work with it; roir status says why.", SHARD),
    "roir_shard_doubtful": Family("1: entries of the shard may be wrong. roir verify --repair ends it.", SHARD),
    "roir_operation_state": Family("1 for the state that it has, 0 for the others.", (*OPERATION, "state")),
    "roir_operation_phase": Family("1 for the phase that it is in, 0 for the others.", (*OPERATION, "phase")),
    "roir_operation_driven": Family(
        "1: a run drives it, and has given a sign of life lately.", OPERATION, lambda one: one.driven
    ),
    "roir_operation_percent": Family(
        "How much of the operation is done, 0 to 100.", OPERATION, lambda one: one.percent_complete
    ),
    "roir_operation_rows_total": Family(
        "Source rows that are copied, or compared, and committed.", OPERATION, lambda one: one.rows
    ),
    "roir_operation_rows_estimate": Family(
        "Source rows, as the plan estimated them.", OPERATION, lambda one: one.rows_estimate
    ),
    "roir_operation_rows_per_second": Family(
        "Rows per second of the last ten seconds, while it copies.", OPERATION, lambda one: one.rows_per_second_now
    ),
    "roir_operation_batches_total": Family(
        "Batches that are committed.", OPERATION, lambda one: one.batches if one.kind in BUILDS else None
    ),
    "roir_operation_worked_seconds_total": Family(
        "Seconds of work, without pauses and Spark's start.", OPERATION, lambda one: one.total_execution_time
    ),
    "roir_operation_left_seconds": Family("The likely time left.", OPERATION, lambda one: one.seconds_left),
    "roir_operation_parallelism": Family(
        "How many workers the user asked for.", OPERATION, lambda one: one.options["parallelism"]
    ),
    "roir_operation_granted_workers": Family(
        "How many workers the governor lets work now; 0: it holds all. Missing without a throttle.",
        OPERATION,
        lambda one: one.granted,
    ),
    "roir_operation_throttled": Family(
        "1: the governor holds workers back now.", OPERATION, lambda one: one.throttled is not None
    ),
    "roir_operation_throttled_seconds_total": Family(
        "Seconds lost to the throttle by its cause, a signal mostly, of all workers' work.", (*OPERATION, "cause")
    ),
    "roir_operation_workers": Family(
        "Workers of the live run that hold a range, a segment or a unit.",
        OPERATION,
        lambda one: one.holders if one.is_fresh else 0,
    ),
    "roir_operation_delta_rows": Family("Rows in the delta, about, by PostgreSQL's statistics.", OPERATION),
    "roir_operation_delta_bytes": Family("The size of the delta, without its B-tree.", OPERATION),
    "roir_operation_paused_seconds": Family(
        "How long it has been paused now; 0 if it isn't.",
        OPERATION,
        lambda one: max(0.0, one.seconds_since(one.paused_at)) if one.status == Status.PAUSED else 0,
    ),
    "roir_operation_abandoned_seconds": Family(
        "How long no run has driven it, and none will; 0 unless it is abandoned.",
        OPERATION,
        lambda one: max(0.0, one.seconds_since(one.abandoned_since)),
    ),
    "roir_operation_pause_warning_seconds": Family(
        "The length of a pause, or of a time without a run, after which roir warns.",
        OPERATION,
        lambda one: one.options["warn_after_s"],
    ),
    "roir_operation_queued_seconds": Family(
        "How long it has waited for others to end; 0: no wait.",
        OPERATION,
        lambda one: max(0.0, one.queued_seconds or 0.0),
    ),
    "roir_operation_started_timestamp_seconds": Family(
        "When it began.", OPERATION, lambda one: one.started_at.timestamp()
    ),
    "roir_operation_heartbeat_age_seconds": Family(
        "Since the last sign of life of its run.",
        OPERATION,
        lambda one: None if one.heartbeat_age is None else max(0.0, one.heartbeat_age),
    ),
    "roir_operation_duplicate_keys": Family(
        "Keys of a unique index that rows share now.", OPERATION, lambda one: one.duplicate_keys if one.unique else None
    ),
    "roir_operation_duplicate_rows": Family(
        "Rows that share a key of a unique index now.",
        OPERATION,
        lambda one: one.duplicate_rows if one.unique else None,
    ),
    "roir_signal_value": Family(
        "The governor's last reading of a signal, in its unit. of: the worst replica or slot. Missing if it can't be "
        "read.",
        (*SIGNAL, "of"),
    ),
    "roir_signal_limit": Family("The limit that the user gave the signal, in its unit.", SIGNAL),
    "roir_signal_load_ratio": Family("How much of its limit a signal uses: above 1 it is over.", (*SIGNAL, "of")),
    "roir_signal_unreadable": Family("1: the governor can't read the signal, and holds the work.", SIGNAL),
}


class Samples:
    """The samples of one look. A value of None is no sample."""

    def __init__(self, database: str) -> None:
        self._database = database
        # The text format allows the same labels only once.
        self._samples: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in FAMILIES}

    def add(self, name: str, value: float | bool | None, *labels: object) -> None:
        """Add one sample. labels: their values, in the family's order, without the database."""
        if value is not None:
            key = (self._database, *map(str, labels))
            self._samples[name][key] = float(value)

    def families(self) -> Iterator[Metric]:
        """The metrics that have a sample, for the text format."""
        for name, family in FAMILIES.items():
            found = self._samples[name]
            if not found:
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = kind(name, family.help, labels=family.labels)
            for labels, value in found.items():
                metric.add_metric(labels, value)
            yield metric
