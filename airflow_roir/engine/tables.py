"""The control schema `roir` (docs/architecture.md#control-schema), declared; `migrations/` creates it.

CHECKs and partial unique indexes state the invariants, so that no code path can break them; triggers hold the arrows
from state to state (`migrations/sql/arrows.sql`).
"""

from __future__ import annotations

from enum import Enum

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from airflow_roir.definition import Scan
from airflow_roir.generation_state import CaptureMode, GenerationStatus, PartitionStatus, SegmentStatus, UnitStatus
from airflow_roir.operation import Kind, Phase, Status
from airflow_roir.options import LIVE, MAX_PARALLELISM

SCHEMA = "roir"
DATA_SCHEMA = "roir_data"

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "ck": "%(table_name)s_%(constraint_name)s",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
    },
)


def _id() -> Column[int]:
    return Column("id", BigInteger, Identity(always=True), primary_key=True)


def _now(name: str) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=False, server_default=func.now())


def _moment(name: str) -> Column[object]:
    return Column(name, DateTime(timezone=True))


def _one_of(column: str, values: type[Enum]) -> CheckConstraint:
    """A column that holds the value of an enum."""
    listed = ", ".join(f"'{one.value}'" for one in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


# The oids that this schema's own tables and the schema itself had when it was settled: one row. A dump and pg_upgrade
# change them (`restore.py`).
home = Table(
    "home",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("tables", JSONB, nullable=False),
    Column("schema_oid", BigInteger, nullable=False),
    _now("settled_at"),
    CheckConstraint("id = 1", name="one"),
)

index = Table(
    "index",
    metadata,
    _id(),
    Column("schema_name", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("source_oid", BigInteger, nullable=False),
    Column("key_columns", JSONB, nullable=False),
    Column("included_columns", JSONB, nullable=False),
    # No two rows may have the same key, and whether two NULLs are the same there.
    Column("is_unique", Boolean, nullable=False, server_default=text("false")),
    Column("nulls_not_distinct", Boolean, nullable=False, server_default=text("false")),
    _now("created_at"),
    _moment("dropped_at"),
    # Of an index apart from its source: the table in each shard, and the column that names the shard. Its source here
    # is the face, an empty table of the same columns.
    Column("shard_table", Text),
    Column("shard_column", Text),
    # Who puts intents before a commit: the shard's server or its clients; null: nobody, so no strict reads.
    Column("announced_by", Text),
    CheckConstraint("is_unique OR NOT nulls_not_distinct", name="nulls_of_unique"),
    CheckConstraint("announced_by IN ('server', 'client')", name="announced_by"),
    CheckConstraint("(shard_table IS NULL) = (shard_column IS NULL)", name="apart"),
    CheckConstraint("announced_by IS NULL OR shard_table IS NOT NULL", name="announced_apart"),
)
# A dropped index keeps its row for the history; its name is free again.
Index(
    "index_live_name",
    index.c.schema_name,
    index.c.name,
    unique=True,
    postgresql_where=text("dropped_at IS NULL"),
)

generation = Table(
    "generation",
    metadata,
    _id(),
    Column("index_id", BigInteger, ForeignKey(index.c.id), nullable=False, index=True),
    Column("status", Text, nullable=False),
    # capture: DML writes the delta. direct: it maintains the base, the delta shrinks. active: no delta any more.
    Column("capture_mode", Text, nullable=False),
    # The transaction that rendered this mode: an older snapshot may not see every entry.
    Column("mode_xid", Text),
    # Counts the swaps of its segments: to an older snapshot the new ones are empty (docs/architecture.md#compaction).
    Column("layout", Integer, nullable=False, server_default="0"),
    _moment("laid_out_at"),
    Column("entry", JSONB, nullable=False),
    # What it is built from, in which order (`scan/reader.py`).
    Column("scan", Text, nullable=False, server_default="key"),
    _now("created_at"),
    _moment("published_at"),
    _moment("retired_at"),
    _moment("drop_after"),
    Column("ghosts", BigInteger, nullable=False, server_default="0"),
    # What its entries depend on in the definition of the source (roir.source_shape), as it was at prepare.
    Column("shape", JSONB(none_as_null=True)),
    # Of a unique one: duplicates were looked for in all that transactions before this one wrote to the delta.
    Column("looked_xid", Text),
    # Of one that is unique over shards: what holders do (`holders.py`), since when they refuse, in which history of
    # this server, and why they do no more.
    Column("unique_mode", Text),
    _moment("unique_from"),
    Column("unique_history", Text),
    Column("unique_lost", Text),
    _one_of("status", GenerationStatus),
    _one_of("capture_mode", CaptureMode),
    _one_of("scan", Scan),
    CheckConstraint(
        "CASE status WHEN 'building' THEN capture_mode IN ('capture', 'direct') "
        "WHEN 'dropped' THEN capture_mode = 'none' ELSE capture_mode = 'active' END",
        name="mode_of_status",
    ),
    CheckConstraint("status <> 'retired' OR drop_after IS NOT NULL", name="retired_ends"),
    CheckConstraint("unique_mode IN ('off', 'count', 'refuse')", name="unique_mode"),
    CheckConstraint("(unique_mode IS NOT DISTINCT FROM 'refuse') = (unique_from IS NOT NULL)", name="unique_since"),
)
for _status in (GenerationStatus.BUILDING.value, GenerationStatus.ACTIVE.value):
    Index(
        f"generation_one_{_status}",
        generation.c.index_id,
        unique=True,
        postgresql_where=text(f"status = '{_status}'"),
    )

# The source, or a leaf, was truncated while a generation scans by blocks: what it planned for is gone. With generation
# 0: rows came into the bounds of a table that is being attached. Written by users' statements, so nothing is ever
# updated here, and no foreign key locks a row that we need.
shard = Table(
    "shard",
    metadata,
    _id(),
    Column("name", Text, nullable=False),
    # How workers and shippers reach it. Of an Airflow connection it is what a task has resolved last; no row says which
    # connection that is: whoever may write here could name any.
    Column("dsn", Text),
    # How the shard's server reaches the index server, to announce writes.
    Column("index_dsn", Text),
    # The token of the database that was added: another one that answers under this DSN is refused.
    Column("home", Text),
    _now("added_at"),
    _moment("removed_at"),
    # Nobody tries to reach it before, and why.
    _moment("away_until"),
    Column("problem", Text),
    _moment("problem_at"),
    CheckConstraint("removed_at IS NOT NULL OR dsn IS NOT NULL", name="reached"),
)
Index("shard_live_name", shard.c.name, unique=True, postgresql_where=text("removed_at IS NULL"))

lane = Table(
    "lane",
    metadata,
    _id(),
    Column("generation_id", BigInteger, ForeignKey(generation.c.id), nullable=False),
    Column("shard_id", BigInteger, ForeignKey(shard.c.id), nullable=False, index=True),
    # The table in the shard that the capture writes to, and the shard's table by oid.
    Column("outbox", Text, nullable=False, unique=True),
    Column("source_oid", BigInteger, nullable=False),
    # When the capture was committed there with its writers drained; when all of it was removed.
    _moment("captured_at"),
    _moment("removed_at"),
    # The shipper, and its fencing token: what isn't shipped under the present token changes nothing (I4).
    Column("owner", Text),
    Column("token", BigInteger, nullable=False, server_default="0"),
    _moment("heartbeat_at"),
    # Counts what was applied here; the shard writes down the step that it has cleared away.
    Column("step", BigInteger, nullable=False, server_default="0"),
    # Counts visits in the shard, as far as they were applied here. A shard that counts less has lost commits.
    Column("tick", BigInteger, nullable=False, server_default="0"),
    # The version of the shard's last TRUNCATE that was applied.
    Column("emptied", BigInteger, nullable=False, server_default="0"),
    # All that was committed in the shard before this moment, by the clock of this server, is in the generation.
    _moment("fresh_at"),
    # Who announces there, as far as is known: written down before the trigger is made, taken back after it is gone.
    Column("announced_by", Text),
    # Since when each writer there announces; strict reads need fresh_at to be later.
    _moment("strict_from"),
    # In which history of this server; another one may have lost what was announced (`roir.server_history`).
    Column("strict_history", Text),
    # The start of this server since which visits have found that it lost nothing of the shard's.
    _moment("strict_start"),
    # What tells that the capture there is what it was, and how values are compared there (`roir_shard.evidence`).
    Column("evidence", JSONB),
    # As the last visit found the outbox.
    Column("pending", BigInteger),
    Column("pending_bytes", BigInteger),
    _moment("oldest_at"),
    Column("shipped", BigInteger, nullable=False, server_default="0"),
    # Since when the entries of the shard may be wrong, and why; only a verification that repairs ends it.
    _moment("doubtful_at"),
    Column("doubt", Text),
    UniqueConstraint("generation_id", "shard_id"),
    CheckConstraint("(doubtful_at IS NULL) = (doubt IS NULL)", name="doubt"),
    CheckConstraint("announced_by IN ('server', 'client')", name="announced_by"),
)

emptied = Table(
    "emptied",
    metadata,
    _id(),
    Column("generation_id", BigInteger, nullable=False),
    Column("relation", BigInteger, nullable=False),
)
Index("emptied_relation", emptied.c.generation_id, emptied.c.relation)

segment = Table(
    "segment",
    metadata,
    _id(),
    Column("generation_id", BigInteger, ForeignKey(generation.c.id), nullable=False),
    Column("ordinal", Integer, nullable=False),
    # Partition bounds as text values; null and null is the default segment, where NULL keys live.
    Column("lower", JSONB),
    Column("upper", JSONB),
    Column("status", Text, nullable=False, server_default="loading"),
    Column("claim_epoch", BigInteger),
    Column("claim_worker", Integer),
    Column("claim_token", BigInteger, nullable=False, server_default="0"),
    # The run that found duplicates in it: only a later one tries again.
    Column("refused_epoch", BigInteger),
    # When it became sealed: how old its B-tree is, about.
    _moment("sealed_at"),
    UniqueConstraint("generation_id", "ordinal"),
    # loading: no index yet. indexed: unique index built and attached. sealed: vacuumed and analysed too.
    _one_of("status", SegmentStatus),
    CheckConstraint("status <> 'sealed' OR claim_worker IS NULL", name="sealed_is_free"),
    CheckConstraint("sealed_at IS NULL OR status = 'sealed'", name="sealed_at"),
)

source_partition = Table(
    "source_partition",
    metadata,
    _id(),
    Column("generation_id", BigInteger, ForeignKey(generation.c.id), nullable=False),
    # oids, of the partition and of what it is, or was, a partition of
    Column("relation", BigInteger, nullable=False),
    Column("parent", BigInteger, nullable=False),
    Column("leaf", Boolean, nullable=False),
    # The transaction that made it a partition: another one means that it was out meanwhile. Where it is joining and has
    # bounds, what the copied entries stand on (roir.joins_as).
    Column("link", Text),
    Column("name", Text, nullable=False),
    # Its partition constraint, over the source's columns: tells its entries when the partition itself is gone.
    Column("condition", Text, nullable=False),
    # Where it is being attached: as in ATTACH PARTITION, as the server writes them. Without them a sync takes it in.
    Column("bounds", Text),
    Column("status", Text, nullable=False),
    # Where it is joining: the primary key of the last row that was brought in.
    Column("watermark", JSONB(none_as_null=True)),
    # Where it is joining: there was no row after the watermark, so its last step may come.
    Column("copied", Boolean, nullable=False, server_default=text("false")),
    # Where it is leaving and its entries are removed: a transaction that is younger than all that removed some. They
    # stay hidden while a snapshot may be older.
    Column("removed_xid", Text),
    Column("removed_at", DateTime(timezone=True)),
    # present: its rows have their entries. leaving: its rows are gone, their entries are hidden, then removed.
    # joining: its rows are being brought in; their entries are hidden until it is a partition.
    _one_of("status", PartitionStatus),
    CheckConstraint("removed_xid IS NULL OR status = 'leaving' AND removed_at IS NOT NULL", name="removed"),
)
# A partition can come back while its old entries are still being removed.
Index(
    "source_partition_one",
    source_partition.c.generation_id,
    source_partition.c.relation,
    unique=True,
    postgresql_where=text("status <> 'leaving'"),
)
Index("source_partition_relation", source_partition.c.relation)

operation = Table(
    "operation",
    metadata,
    _id(),
    Column("index_id", BigInteger, ForeignKey(index.c.id), nullable=False),
    Column("generation_id", BigInteger, ForeignKey(generation.c.id), nullable=False),
    Column("kind", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("phase", Text, nullable=False),
    # Starting a run bumps it; every worker of an older run is fenced by that (docs/architecture.md#lifecycle).
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("parallelism", Integer, nullable=False),
    Column("batch_rows", Integer, nullable=False),
    Column("max_rows_per_second", Integer),
    # Of an index apart: the most workers that read one shard.
    Column("shard_parallelism", Integer),
    Column("options", JSONB, nullable=False),
    Column("rows_estimate", BigInteger, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("format_version", Integer, nullable=False),
    # The run that drives it: null heartbeat = nobody does.
    Column("owner", Text),
    _moment("heartbeat_at"),
    # Committed seconds of work per phase, without pauses and without Spark's start-up.
    Column("phase_seconds", JSONB, nullable=False, server_default="{}"),
    _moment("ticked_at"),
    Column("created_by", Text, nullable=False),
    _now("started_at"),
    _moment("paused_at"),
    Column("pause_reason", Text),
    Column("paused_by", Text),
    _moment("finished_at"),
    Column("error", Text),
    # Whom the run waits for, or the last option that was refused, until one is accepted.
    Column("notice", Text),
    # Where the driver shows its jobs, while it runs.
    Column("spark_ui", Text),
    # Limits of signals by their names, in bytes, seconds and counts; the governor keeps to them.
    Column("throttle", JSONB, nullable=False, server_default=text("'{}'")),
    # How many workers the governor lets work, 0 is a hold; null: as many as there are. An old one is a hold.
    Column("granted", Double),
    _moment("granted_at"),
    # Why fewer work than could.
    Column("throttled", Text),
    _moment("throttled_since"),
    # When it may work, and for how long at a stretch, which began with the last resume.
    Column("windows", Text),
    Column("max_duration_s", Integer),
    _moment("working_since"),
    # After so long a pause it warns; after so long it is aborted.
    Column("warn_after_s", Integer),
    Column("abort_after_s", Integer),
    # Who waits for others of the database to end: the greatest first, then who has waited longest.
    Column("priority", Integer, nullable=False, server_default="0"),
    _moment("queued_at"),
    _moment("queued_seen_at"),
    # The operation whose ranges these are a copy of: one scan does for both.
    Column("scan_of", BigInteger),
    _one_of("kind", Kind),
    _one_of("status", Status),
    _one_of("phase", Phase),
    CheckConstraint("(status = 'completed') = (phase = 'done')", name="completed_is_done"),
    CheckConstraint("(status IN ('completed', 'aborted')) = (finished_at IS NOT NULL)", name="finished"),
    CheckConstraint(
        "phase = 'done' OR (kind = 'verify') = (phase IN ('sum', 'check')) "
        "AND (kind = 'compact') = (phase = 'compact')",
        name="phase_of_kind",
    ),
    CheckConstraint("status <> 'failed' OR error IS NOT NULL", name="failed_says_why"),
    *(
        CheckConstraint(f"{one.name} BETWEEN {one.least} AND {one.most}", name=f"{one.name}_check")
        for one in LIVE.values()
        if not one.kind.is_text
    ),
    CheckConstraint(
        "jsonb_typeof(throttle) = 'object'"
        """ AND NOT throttle @? '$.keyvalue() ? ((@.key == "replicas" && @.value.type() != "array") """
        """|| (@.key != "replicas" && @.value.type() != "number"))'"""
        """ AND NOT throttle @? 'strict $.replicas[*] ? (@.type() != "string")'""",
        name="throttle",
    ),
    CheckConstraint(f"granted BETWEEN 0 AND {MAX_PARALLELISM}", name="granted"),
)
Index(
    "operation_one_live",
    operation.c.index_id,
    unique=True,
    postgresql_where=text("status IN ('running', 'paused', 'failed', 'aborting')"),
)
Index("operation_one_scan", operation.c.scan_of, postgresql_where=text("scan_of IS NOT NULL"))

scan_range = Table(
    "scan_range",
    metadata,
    _id(),
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), nullable=False),
    Column("ordinal", Integer, nullable=False),
    # The leaf of the source that it scans, by oid; the source itself where that isn't partitioned. In a rebuild from
    # the index a segment of the generation that readers see.
    Column("relation", BigInteger, nullable=False),
    # Half-open [lower, upper) in scan-key order; null is unbounded. Or block numbers of this file.
    Column("lower", JSONB(none_as_null=True)),
    Column("upper", JSONB(none_as_null=True)),
    Column("filenode", BigInteger),
    # The server that the relation is in; null: this one.
    Column("shard_id", BigInteger, ForeignKey(shard.c.id)),
    # Of the last committed batch, as the shard has it: a shard that has it no more has lost commits that were copied.
    Column("mark", BigInteger),
    # The scan key of the last source row of the last committed batch: what was done. Resume after it.
    Column("watermark", JSONB(none_as_null=True)),
    Column("done", Boolean, nullable=False, server_default=text("false")),
    Column("rows", BigInteger, nullable=False, server_default="0"),
    Column("batches", BigInteger, nullable=False, server_default="0"),
    Column("seconds", Numeric(14, 3), nullable=False, server_default="0"),
    Column("claim_epoch", BigInteger),
    Column("claim_worker", Integer),
    # Grows with every claim: the fencing token of the worker that holds the range (I4).
    Column("claim_token", BigInteger, nullable=False, server_default="0"),
    # The last claim or batch: who holds a range and does nothing holds no other operation up.
    _moment("moved_at"),
    UniqueConstraint("operation_id", "ordinal"),
    CheckConstraint("rows >= 0 AND batches >= 0", name="counts"),
)

# What was seen at the beats of an operation (migrations/sql/progress.sql): a few hundred rows of each.
progress_sample = Table(
    "progress_sample",
    metadata,
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), primary_key=True),
    Column("at", DateTime(timezone=True), primary_key=True, server_default=func.clock_timestamp()),
    Column("phase", Text, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("percent", Numeric(4, 1), nullable=False),
    # Of all rows, the part that is copied; seconds of work, without pauses; the options that were in effect.
    Column("share", Double, nullable=False),
    Column("worked", Double, nullable=False),
    Column("parallelism", Integer, nullable=False),
    Column("max_rows_per_second", Integer),
)

# One row: what counts for all operations of the database.
setting = Table(
    "setting",
    metadata,
    Column("id", SmallInteger, primary_key=True, autoincrement=False, server_default="1"),
    Column("max_running_operations", Integer),
    # False: somebody has removed the DDL guard, and `roir init` leaves it away.
    Column("guarded", Boolean, nullable=False, server_default="true"),
    CheckConstraint("id = 1", name="one"),
    CheckConstraint("max_running_operations > 0", name="max_running"),
)

# Time that an operation has lost to its throttle, by the signal that held it, in seconds of all its workers' work.
throttle_time = Table(
    "throttle_time",
    metadata,
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), primary_key=True),
    Column("cause", Text, primary_key=True),
    Column("seconds", Double, nullable=False, server_default="0"),
    Column("last_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
)

# What the governor read and granted (migrations/sql/governor.sql): a few hundred rows of each operation. readings: by
# the signals' names, with limit, value, of whom, and why there is no value.
signal_sample = Table(
    "signal_sample",
    metadata,
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), primary_key=True),
    Column("at", DateTime(timezone=True), primary_key=True, server_default=func.clock_timestamp()),
    Column("granted", Double, nullable=False),
    Column("readings", JSONB, nullable=False),
)

lock_wait = Table(
    "lock_wait",
    metadata,
    _id(),
    Column("command", Text, nullable=False),
    # As users name it: a create has no row in `index` yet.
    Column("index_name", Text),
    Column("wanted", Text, nullable=False),
    Column("blocked_by", Text, nullable=False),
    Column("waiter", Text, nullable=False),
    Column("since", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
)

event = Table(
    "event",
    metadata,
    _id(),
    # clock_timestamp: several events of one transaction keep their order.
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("index_id", BigInteger, ForeignKey(index.c.id), nullable=False, index=True),
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), index=True),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("detail", Text),
)

verification = Table(
    "verification",
    metadata,
    _id(),
    Column("index_id", BigInteger, ForeignKey(index.c.id), nullable=False, index=True),
    # The operation that it is, or, where it is a part of a build, that build.
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), nullable=False, index=True),
    Column("generation_id", BigInteger, ForeignKey(generation.c.id), nullable=False),
    Column("mode", Text, nullable=False),
    Column("options", JSONB, nullable=False),
    # Into how many buckets of primary keys both sides are summed; those whose sums differ, null: all, or not yet known.
    Column("buckets", Integer, nullable=False),
    Column("suspicious", ARRAY(Integer)),
    # The snapshot that its workers share now.
    Column("snapshot", Text),
    _moment("snapshot_at"),
    # How many units it does at the most; the rest is for the next one of a walk in slices.
    Column("quota", Integer),
    # Source rows and entries that were looked at, and what was found, of the verifications that have ended.
    Column("rows", BigInteger, nullable=False, server_default="0"),
    Column("entries", BigInteger, nullable=False, server_default="0"),
    Column("missing", BigInteger, nullable=False, server_default="0"),
    Column("extra", BigInteger, nullable=False, server_default="0"),
    Column("different", BigInteger, nullable=False, server_default="0"),
    Column("corrupt", BigInteger, nullable=False, server_default="0"),
    Column("mended", BigInteger, nullable=False, server_default="0"),
    # False where a sample, a slice or a time limit left something out.
    Column("complete", Boolean),
    _now("started_at"),
    _moment("finished_at"),
    Column("damaged", BigInteger, nullable=False, server_default="0"),
    Column("duplicate", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("mode IN ('only', 'before', 'after')", name="mode"),
    CheckConstraint("(complete IS NULL) = (finished_at IS NULL)", name="complete"),
)

verification_unit = Table(
    "verification_unit",
    metadata,
    _id(),
    Column("verification_id", BigInteger, ForeignKey(verification.c.id), nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("stage", Text, nullable=False),
    Column("side", Text, nullable=False),
    # A leaf of the source, cut by primary key (source) or by blocks (heap); a segment, by blocks, or the delta.
    # Half-open, null is unbounded.
    Column("relation", BigInteger, nullable=False),
    Column("lower", JSONB(none_as_null=True)),
    Column("upper", JSONB(none_as_null=True)),
    Column("done", Boolean, nullable=False, server_default=text("false")),
    Column("rows", BigInteger, nullable=False, server_default="0"),
    Column("seconds", Numeric(14, 3), nullable=False, server_default="0"),
    # The snapshot that they were read in, and the sums of both sides: in stage total of all, in stage sum by bucket.
    Column("snapshot", Text),
    Column("buckets", ARRAY(Integer)),
    Column("counts", ARRAY(BigInteger)),
    Column("sums", ARRAY(Numeric)),
    Column("claim_epoch", BigInteger),
    Column("claim_worker", Integer),
    Column("claim_token", BigInteger, nullable=False, server_default="0"),
    # Of an index apart from its source: whose rows it reads, or looks at; null: entries, or those of no lane.
    Column("lane_id", BigInteger),
    UniqueConstraint("verification_id", "stage", "ordinal"),
    CheckConstraint("stage IN ('total', 'sum', 'check', 'whole')", name="stage"),
    CheckConstraint("side IN ('source', 'heap', 'entry', 'delta', 'tree', 'reach', 'both')", name="side"),
)

# One step of a compaction: neighbouring segments that are replaced by others in one transaction.
compaction_unit = Table(
    "compaction_unit",
    metadata,
    _id(),
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), nullable=False),
    Column("generation_id", BigInteger, ForeignKey(generation.c.id), nullable=False, index=True),
    Column("ordinal", Integer, nullable=False),
    Column("action", Text, nullable=False),
    # By their ordinals, in the order of keys: those that go, and those that come. The default one keeps its own.
    Column("segments", ARRAY(Integer), nullable=False),
    Column("parts", ARRAY(Integer), nullable=False),
    # The bounds between the parts, as texts; null until they are made.
    Column("cuts", JSONB(none_as_null=True)),
    # Of each segment its oid, its file and how many blocks it had when it was captured.
    Column("files", JSONB(none_as_null=True)),
    Column("status", Text, nullable=False, server_default="waiting"),
    # The segment, by its place in `files`, and the next block.
    Column("watermark", JSONB(none_as_null=True)),
    Column("blocks", BigInteger, nullable=False, server_default="0"),
    Column("blocks_done", BigInteger, nullable=False, server_default="0"),
    Column("rows", BigInteger, nullable=False, server_default="0"),
    # How often it began again, since a segment was emptied or rewritten.
    Column("restarts", Integer, nullable=False, server_default="0"),
    Column("bytes_before", BigInteger, nullable=False),
    Column("bytes_after", BigInteger),
    Column("bytes_expected", BigInteger),
    # Why it was chosen, as the model has it; what came in between.
    Column("gain", Double),
    Column("why", Text),
    Column("note", Text),
    Column("seconds", Numeric(14, 3), nullable=False, server_default="0"),
    Column("claim_epoch", BigInteger),
    Column("claim_worker", Integer),
    Column("claim_token", BigInteger, nullable=False, server_default="0"),
    UniqueConstraint("operation_id", "ordinal"),
    CheckConstraint("action IN ('rewrite', 'split', 'merge')", name="action"),
    _one_of("status", UnitStatus),
    CheckConstraint("cardinality(segments) >= 1 AND cardinality(parts) >= 1", name="segments"),
    CheckConstraint(
        "CASE action WHEN 'merge' THEN cardinality(segments) > 1 AND cardinality(parts) = 1 "
        "WHEN 'split' THEN cardinality(segments) = 1 "
        "ELSE cardinality(segments) = 1 AND cardinality(parts) = 1 END",
        name="shape",
    ),
    CheckConstraint("status NOT IN ('copying', 'indexing', 'folding') OR files IS NOT NULL", name="captured"),
)

discrepancy = Table(
    "discrepancy",
    metadata,
    _id(),
    Column("verification_id", BigInteger, ForeignKey(verification.c.id), nullable=False),
    Column("unit_id", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    # Texts: the key and the primary key lossless, and all columns on either side, null where it has none.
    Column("key", JSONB, nullable=False),
    Column("primary_key", JSONB, nullable=False),
    Column("source_values", JSONB(none_as_null=True)),
    Column("entry_values", JSONB(none_as_null=True)),
    _now("found_at"),
    # mended: put right. gone: right by itself when it was looked at again, under a lock. Null: as it was.
    Column("outcome", Text),
    _moment("mended_at"),
    # Of what is damaged, or a duplicate: what was seen, where, and what a person must do.
    Column("detail", Text),
    CheckConstraint("kind IN ('missing', 'extra', 'different', 'corrupt', 'damaged', 'duplicate')", name="kind"),
    CheckConstraint("outcome IN ('mended', 'gone')", name="outcome"),
)
Index("discrepancy_unit", discrepancy.c.verification_id, discrepancy.c.unit_id)
suspect = Table(
    "suspect",
    metadata,
    _id(),
    Column("verification_id", BigInteger, ForeignKey(verification.c.id), nullable=False),
    Column("unit_id", BigInteger, nullable=False),
    # Null: of an entry whose shard the index doesn't have, or that is in another segment than its key's.
    Column("lane_id", BigInteger),
    Column("of_source", Boolean, nullable=False),
    # Texts of (key, pk), as the index server's entries have them.
    Column("identity", JSONB, nullable=False),
    Column("hash", BigInteger, nullable=False),
    # How often it was looked at and was on its way.
    Column("looks", Integer, nullable=False, server_default="0"),
)
Index("suspect_identity", suspect.c.identity, postgresql_using="hash")
Index("suspect_verification_id_idx", suspect.c.verification_id, suspect.c.lane_id, suspect.c.looks, suspect.c.id)
Index("suspect_unit_id_idx", suspect.c.unit_id)

# A row that shares its key with another one, in a unique index that is being built: one snapshot showed both.
duplicate = Table(
    "duplicate",
    metadata,
    _id(),
    Column("operation_id", BigInteger, ForeignKey(operation.c.id), nullable=False),
    # Texts, lossless. The key as its row has it, and as the group is called: equal values may differ.
    Column("shared_key", JSONB, nullable=False),
    Column("key", JSONB, nullable=False),
    Column("primary_key", JSONB, nullable=False),
    # Where the row is, once that was looked up; null where it has gone since, too.
    Column("partition", Text),
    Column("phase", Text, nullable=False),
    Column("found_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    _moment("healed_at"),
    # A group is found by it: the key itself may be longer than an index takes.
    Column("key_hash", BigInteger, Computed("jsonb_hash_extended(shared_key, 0)", persisted=True), nullable=False),
)
Index(
    "duplicate_group",
    duplicate.c.operation_id,
    duplicate.c.key_hash,
    duplicate.c.id,
    postgresql_include=["healed_at"],
)
Index(
    "duplicate_one",
    duplicate.c.operation_id,
    duplicate.c.key,
    duplicate.c.primary_key,
    unique=True,
    postgresql_where=text("healed_at IS NULL"),
)

# The hashes of the keys in a segment that is being built, as far as they are read (docs/architecture.md#early).
early_hashes = Table(
    "early_hashes",
    metadata,
    _id(),
    Column("generation_id", BigInteger, ForeignKey(generation.c.id), nullable=False),
    Column("segment", Integer, nullable=False),
    # Of the parts of a segment, in the order in which they were read. Two readers can't have the same.
    Column("number", Integer, nullable=False),
    # Of this file all rows before the settled block are in these parts; of those before its end what the snapshot sees.
    Column("filenode", BigInteger, nullable=False),
    Column("end_block", BigInteger, nullable=False),
    Column("settled_block", BigInteger, nullable=False),
    Column("snapshot", Text, nullable=False),
    Column("rows", BigInteger, nullable=False),
    # The duplicates that this part made are written down.
    Column("looked", Boolean, nullable=False, server_default=text("false")),
    # Eight bytes each, as the server sends an int8.
    Column("hashes", LargeBinary, nullable=False),
    UniqueConstraint("generation_id", "segment", "number"),
)
