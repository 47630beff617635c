-- The tables that an operation is made of (docs/architecture.md#control-schema). CHECKs and partial unique indexes
-- state the invariants, so that no code path can break them; triggers hold the arrows from state to state (arrows.sql).

-- The states of a delta's rows: airflow_roir/entry_state.py says what each is. A type, since a CHECK of the delta's
-- column would be evaluated by each captured write.
CREATE TYPE roir.entry_state AS ENUM ('regular', 'antimatter', 'ghost');
-- A column of it in another's table would keep the type.
REVOKE ALL ON TYPE roir.entry_state FROM PUBLIC;

-- The oids that this schema's own tables and the schema itself had when it was settled: one row. A dump and pg_upgrade
-- change them (`restore.py`).
CREATE TABLE roir.home (
    id smallint PRIMARY KEY CONSTRAINT home_one CHECK (id = 1),
    tables jsonb NOT NULL,
    schema_oid bigint NOT NULL,
    settled_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE roir.index (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schema_name text NOT NULL,
    name text NOT NULL,
    source_oid bigint NOT NULL,
    key_columns jsonb NOT NULL,
    included_columns jsonb NOT NULL,
    -- No two rows may have the same key, and whether two NULLs are the same there.
    is_unique boolean NOT NULL DEFAULT false,
    nulls_not_distinct boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    dropped_at timestamptz,
    -- Of an index apart from its source: the table in each shard, and the column that names the shard. Its source here
    -- is the shape table, an empty table of the same columns.
    shard_table text,
    shard_column text,
    -- Who puts intents before a commit: the shard's server or its clients; null: nobody, so no strict reads.
    announced_by text CONSTRAINT index_announced_by CHECK (announced_by IN ('server', 'client')),
    CONSTRAINT index_nulls_of_unique CHECK (is_unique OR NOT nulls_not_distinct),
    CONSTRAINT index_apart CHECK ((shard_table IS NULL) = (shard_column IS NULL)),
    CONSTRAINT index_announced_apart CHECK (announced_by IS NULL OR shard_table IS NOT NULL)
);
-- A dropped index keeps its row for the history; its name is free again.
CREATE UNIQUE INDEX index_live_name ON roir.index (schema_name, name) WHERE dropped_at IS NULL;

CREATE TABLE roir.generation (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    index_id bigint NOT NULL REFERENCES roir.index (id),
    status text NOT NULL CONSTRAINT generation_status CHECK (status IN ('building', 'active', 'retired', 'dropped')),
    -- capture: DML writes the delta. direct: it maintains the base, the delta shrinks. active: no delta any more.
    capture_mode text NOT NULL
        CONSTRAINT generation_capture_mode CHECK (capture_mode IN ('capture', 'direct', 'active', 'none')),
    -- The transaction that rendered this mode: an older snapshot may not see every entry.
    mode_xid text,
    -- Counts the swaps of its segments: to an older snapshot the new ones are empty (docs/architecture.md#compaction).
    layout integer NOT NULL DEFAULT '0',
    laid_out_at timestamptz,
    entry jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    published_at timestamptz,
    retired_at timestamptz,
    drop_after timestamptz,
    ghosts bigint NOT NULL DEFAULT '0',
    -- What it is built from, in which order (`scan/reader.py`).
    scan text NOT NULL DEFAULT 'key' CONSTRAINT generation_scan CHECK (scan IN ('key', 'block', 'index')),
    -- What its entries depend on in the definition of the source (roir.source_shape), as it was at prepare.
    shape jsonb,
    -- Of a unique one: duplicates were looked for in all that transactions before this one wrote to the delta.
    looked_xid text,
    -- Of one that is unique over shards: what holders do (`holders.py`), since when they refuse, in which history of
    -- this server, and why they do no more.
    unique_mode text CONSTRAINT generation_unique_mode CHECK (unique_mode IN ('off', 'count', 'refuse')),
    unique_from timestamptz,
    unique_history text,
    unique_lost text,
    CONSTRAINT generation_unique_since CHECK ((unique_mode IS NOT DISTINCT FROM 'refuse') = (unique_from IS NOT NULL)),
    CONSTRAINT generation_mode_of_status CHECK (CASE status WHEN 'building' THEN capture_mode IN ('capture', 'direct')
                                                            WHEN 'dropped' THEN capture_mode = 'none'
                                                            ELSE capture_mode = 'active' END),
    CONSTRAINT generation_retired_ends CHECK (status <> 'retired' OR drop_after IS NOT NULL)
);
CREATE INDEX generation_index_id_idx ON roir.generation (index_id);
CREATE UNIQUE INDEX generation_one_active ON roir.generation (index_id) WHERE status = 'active';
CREATE UNIQUE INDEX generation_one_building ON roir.generation (index_id) WHERE status = 'building';

-- The servers that have the tables of indexes apart from their source.
CREATE TABLE roir.shard (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    -- How workers and shippers reach it. Of an Airflow connection it is what a task has resolved last; no row says
    -- which connection that is: whoever may write here could name any.
    dsn text,
    -- How the shard's server reaches the index server, to announce writes.
    index_dsn text,
    -- The token of the database that was added: another one that answers under this DSN is refused.
    home text,
    added_at timestamptz NOT NULL DEFAULT now(),
    removed_at timestamptz,
    -- Nobody tries to reach it before, and why.
    away_until timestamptz,
    problem text,
    problem_at timestamptz,
    CONSTRAINT shard_reached CHECK (removed_at IS NOT NULL OR dsn IS NOT NULL)
);
CREATE UNIQUE INDEX shard_live_name ON roir.shard (name) WHERE removed_at IS NULL;

-- What is shipped from one shard to one generation.
CREATE TABLE roir.lane (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    shard_id bigint NOT NULL REFERENCES roir.shard (id),
    -- The table in the shard that the capture writes to, and the shard's table by oid.
    outbox text NOT NULL UNIQUE,
    source_oid bigint NOT NULL,
    -- When the capture was committed there with its writers drained; when all of it was removed.
    captured_at timestamptz,
    removed_at timestamptz,
    -- The shipper, and its fencing token: what isn't shipped under the present token changes nothing (I4).
    owner text,
    token bigint NOT NULL DEFAULT '0',
    heartbeat_at timestamptz,
    -- Counts what was applied here; the shard writes down the step that it has cleared away.
    step bigint NOT NULL DEFAULT '0',
    -- Counts visits in the shard, as far as they were applied here. A shard that counts less has lost commits.
    tick bigint NOT NULL DEFAULT '0',
    -- The version of the shard's last TRUNCATE that was applied.
    emptied bigint NOT NULL DEFAULT '0',
    -- All that was committed in the shard before this moment, by the clock of this server, is in the generation.
    fresh_at timestamptz,
    -- Who announces there, as far as is known: written down before the trigger is made, taken back after it is gone.
    announced_by text CONSTRAINT lane_announced_by CHECK (announced_by IN ('server', 'client')),
    -- Since when each writer there announces; strict reads need fresh_at to be later.
    strict_from timestamptz,
    -- In which history of this server; another one may have lost what was announced (`roir.server_history`).
    strict_history text,
    -- The start of this server since which visits have found that it lost nothing of the shard's.
    strict_start timestamptz,
    -- What tells that the capture there is what it was, and how values are compared there (`roir_shard.evidence`).
    evidence jsonb,
    -- As the last visit found the outbox.
    pending bigint,
    pending_bytes bigint,
    oldest_at timestamptz,
    shipped bigint NOT NULL DEFAULT '0',
    -- Since when the entries of the shard may be wrong, and why; only a verification that repairs ends it.
    doubtful_at timestamptz,
    doubt text,
    UNIQUE (generation_id, shard_id),
    CONSTRAINT lane_doubt CHECK ((doubtful_at IS NULL) = (doubt IS NULL))
);
CREATE INDEX lane_shard_id_idx ON roir.lane (shard_id);

-- The source, or a leaf, was truncated while a generation scans by blocks: what it planned for is gone. With generation
-- 0: rows came into the bounds of a table that is being attached. Written by users' statements, so nothing is ever
-- updated here, and no foreign key locks a row that we need.
CREATE TABLE roir.emptied (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL,
    relation bigint NOT NULL
);
CREATE INDEX emptied_relation ON roir.emptied (generation_id, relation);

CREATE TABLE roir.segment (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    ordinal integer NOT NULL,
    -- Partition bounds as text values; null and null is the default segment, where NULL keys live.
    lower jsonb,
    upper jsonb,
    -- loading: no index yet. indexed: unique index built and attached. sealed: vacuumed and analysed too.
    status text NOT NULL DEFAULT 'loading'
        CONSTRAINT segment_status CHECK (status IN ('loading', 'indexed', 'sealed')),
    claim_epoch bigint,
    claim_worker integer,
    claim_token bigint NOT NULL DEFAULT '0',
    -- The run that found duplicates in it: only a later one tries again.
    refused_epoch bigint,
    -- When it became sealed: how old its B-tree is, about.
    sealed_at timestamptz,
    UNIQUE (generation_id, ordinal),
    CONSTRAINT segment_sealed_is_free CHECK (status <> 'sealed' OR claim_worker IS NULL),
    CONSTRAINT segment_sealed_at CHECK (sealed_at IS NULL OR status = 'sealed')
);

CREATE TABLE roir.source_partition (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    -- oids, of the partition and of what it is, or was, a partition of
    relation bigint NOT NULL,
    parent bigint NOT NULL,
    leaf boolean NOT NULL,
    -- The transaction that made it a partition: another one means that it was out meanwhile. Where it is joining and
    -- has bounds, what the copied entries stand on (roir.joins_as).
    link text,
    name text NOT NULL,
    -- Its partition constraint, over the source's columns: tells its entries when the partition itself is gone.
    condition text NOT NULL,
    -- Where it is being attached: as in ATTACH PARTITION, as the server writes them. Without them a sync takes it in.
    bounds text,
    -- present: its rows have their entries. leaving: its rows are gone, their entries are hidden, then removed.
    -- joining: its rows are being brought in; their entries are hidden until it is a partition.
    status text NOT NULL
        CONSTRAINT source_partition_status CHECK (status IN ('present', 'leaving', 'joining')),
    -- Where it is joining: the primary key of the last row that was brought in.
    watermark jsonb,
    -- Where it is joining: there was no row after the watermark, so its last step may come.
    copied boolean NOT NULL DEFAULT false,
    -- Where it is leaving and its entries are removed: a transaction that is younger than all that removed some. They
    -- stay hidden while a snapshot may be older.
    removed_xid text,
    removed_at timestamptz,
    CONSTRAINT source_partition_removed CHECK (removed_xid IS NULL OR status = 'leaving' AND removed_at IS NOT NULL)
);
-- A partition can come back while its old entries are still being removed.
CREATE UNIQUE INDEX source_partition_one ON roir.source_partition (generation_id, relation) WHERE status <> 'leaving';
CREATE INDEX source_partition_relation ON roir.source_partition (relation);

CREATE TABLE roir.operation (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    index_id bigint NOT NULL REFERENCES roir.index (id),
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    kind text NOT NULL CONSTRAINT operation_kind CHECK (kind IN ('create', 'rebuild', 'verify', 'compact')),
    status text NOT NULL CONSTRAINT operation_status
        CHECK (status IN ('running', 'paused', 'completed', 'failed', 'aborting', 'aborted')),
    -- arrows.sql says which there are.
    phase text NOT NULL,
    -- Starting a run bumps it; every worker of an older run is fenced by that (docs/architecture.md#lifecycle).
    epoch bigint NOT NULL DEFAULT '0',
    -- Those that stay as they are; live_options.sql adds a column for each that may change.
    options jsonb NOT NULL,
    rows_estimate bigint NOT NULL,
    fingerprint text NOT NULL,
    format_version integer NOT NULL,
    -- The run that drives it: null heartbeat = nobody does.
    owner text,
    heartbeat_at timestamptz,
    -- Committed seconds of work per phase, without pauses and without Spark's start-up.
    phase_seconds jsonb NOT NULL DEFAULT '{}',
    ticked_at timestamptz,
    created_by text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    paused_at timestamptz,
    pause_reason text,
    paused_by text,
    finished_at timestamptz,
    error text,
    -- Whom the run waits for, or the last option that was refused, until one is accepted.
    notice text,
    -- Where the driver shows its jobs, while it runs.
    spark_ui text,
    -- How many workers the governor lets work, 0 is a hold; null: as many as there are. An old one is a hold.
    granted double precision,
    granted_at timestamptz,
    -- Why fewer work than could.
    throttled text,
    throttled_since timestamptz,
    -- When its time at a stretch began: with the last resume.
    working_since timestamptz,
    queued_at timestamptz,
    queued_seen_at timestamptz,
    -- The operation whose ranges these are a copy of: one scan does for both.
    scan_of bigint,
    CONSTRAINT operation_granted CHECK (granted BETWEEN 0 AND 256),
    CONSTRAINT operation_completed_is_done CHECK ((status = 'completed') = (phase = 'done')),
    CONSTRAINT operation_finished CHECK ((status IN ('completed', 'aborted')) = (finished_at IS NOT NULL)),
    CONSTRAINT operation_failed_says_why CHECK (status <> 'failed' OR error IS NOT NULL)
);
CREATE UNIQUE INDEX operation_one_live ON roir.operation (index_id)
    WHERE status IN ('running', 'paused', 'failed', 'aborting');
CREATE INDEX operation_one_scan ON roir.operation (scan_of) WHERE scan_of IS NOT NULL;

CREATE TABLE roir.scan_range (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    ordinal integer NOT NULL,
    -- Half-open [lower, upper) in scan-key order; null is unbounded. Or block numbers of this file.
    lower jsonb,
    upper jsonb,
    -- The scan key of the last source row of the last committed batch: what was done. Resume after it.
    watermark jsonb,
    done boolean NOT NULL DEFAULT false,
    rows bigint NOT NULL DEFAULT '0',
    batches bigint NOT NULL DEFAULT '0',
    seconds numeric(14, 3) NOT NULL DEFAULT '0',
    claim_epoch bigint,
    claim_worker integer,
    -- Grows with every claim: the fencing token of the worker that holds the range (I4).
    claim_token bigint NOT NULL DEFAULT '0',
    -- The leaf of the source that it scans, by oid; the source itself where that isn't partitioned. In a rebuild from
    -- the index a segment of the generation that readers see.
    relation bigint NOT NULL,
    filenode bigint,
    -- The server that the relation is in; null: this one.
    shard_id bigint REFERENCES roir.shard (id),
    -- Of the last committed batch, as the shard has it: a shard that has it no more has lost commits that were copied.
    mark bigint,
    -- The last claim or batch: who holds a range and does nothing holds no other operation up.
    moved_at timestamptz,
    UNIQUE (operation_id, ordinal),
    CONSTRAINT scan_range_counts CHECK (rows >= 0 AND batches >= 0)
);

-- A pass of a fold over the delta's blocks, in parts. The next pass begins once all parts of the last one are done.
CREATE TABLE roir.delta_part (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    pass integer NOT NULL,
    ordinal integer NOT NULL,
    -- Blocks before this one are folded.
    next_block bigint NOT NULL,
    end_block bigint NOT NULL,
    done boolean NOT NULL DEFAULT false,
    upserted bigint NOT NULL DEFAULT '0',
    annihilated bigint NOT NULL DEFAULT '0',
    ghosts bigint NOT NULL DEFAULT '0',
    seconds numeric(14, 3) NOT NULL DEFAULT '0',
    claim_epoch bigint,
    claim_worker integer,
    claim_token bigint NOT NULL DEFAULT '0',
    UNIQUE (operation_id, ordinal),
    CONSTRAINT delta_part_blocks CHECK (next_block <= end_block)
);

-- One row: what counts for all operations of the database.
CREATE TABLE roir.setting (
    id smallint PRIMARY KEY DEFAULT '1' CONSTRAINT setting_one CHECK (id = 1),
    max_running_operations integer CONSTRAINT setting_max_running CHECK (max_running_operations > 0),
    -- False: somebody has removed the DDL guard, and `roir init` leaves it away.
    guarded boolean NOT NULL DEFAULT 'true'
);
INSERT INTO roir.setting DEFAULT VALUES;

-- Time that an operation has lost to its throttle, by the signal that held it, in seconds of all its workers' work.
CREATE TABLE roir.throttle_time (
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    cause text NOT NULL,
    seconds double precision NOT NULL DEFAULT '0',
    last_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (operation_id, cause)
);

-- What the governor read and granted (migrations/sql/governor.sql): a few hundred rows of each operation. readings: by
-- the signals' names, with limit, value, of whom, and why there is no value.
CREATE TABLE roir.signal_sample (
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    granted double precision NOT NULL,
    readings jsonb NOT NULL,
    PRIMARY KEY (operation_id, at)
);

-- Who of us waits for a lock, and who holds it, while no operation's row says so. A row that isn't seen any more counts
-- for nothing: its process was killed.
CREATE TABLE roir.lock_wait (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    command text NOT NULL,
    -- As users name it: a create has no row in `index` yet.
    index_name text,
    wanted text NOT NULL,
    blocked_by text NOT NULL,
    waiter text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE roir.event (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- clock_timestamp: several events of one transaction keep their order.
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    index_id bigint NOT NULL REFERENCES roir.index (id),
    operation_id bigint REFERENCES roir.operation (id),
    actor text NOT NULL,
    action text NOT NULL,
    detail text
);
CREATE INDEX event_index_id_idx ON roir.event (index_id);
CREATE INDEX event_operation_id_idx ON roir.event (operation_id);

-- A row that shares its key with another one, in a unique index that is being built: one snapshot showed both.
CREATE TABLE roir.duplicate (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    -- Texts, lossless. The key as its row has it, and as the group is called: equal values may differ.
    shared_key jsonb NOT NULL,
    key jsonb NOT NULL,
    primary_key jsonb NOT NULL,
    -- Where the row is, once that was looked up; null where it has gone since, too.
    partition text,
    phase text NOT NULL,
    found_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    healed_at timestamptz,
    -- A group is found by it: the key itself may be longer than an index takes.
    key_hash bigint NOT NULL GENERATED ALWAYS AS (jsonb_hash_extended(shared_key, 0)) STORED
);
CREATE INDEX duplicate_group ON roir.duplicate (operation_id, key_hash, id) INCLUDE (healed_at);
CREATE UNIQUE INDEX duplicate_one ON roir.duplicate (operation_id, key, primary_key) WHERE healed_at IS NULL;

-- The hashes of the keys in a segment that is being built, as far as they are read (docs/architecture.md#early).
CREATE TABLE roir.early_hashes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    segment integer NOT NULL,
    -- Of the parts of a segment, in the order in which they were read. Two readers can't have the same.
    number integer NOT NULL,
    -- Of this file all rows before the settled block are in these parts; of those before its end what the snapshot
    -- sees.
    filenode bigint NOT NULL,
    end_block bigint NOT NULL,
    settled_block bigint NOT NULL,
    snapshot text NOT NULL,
    rows bigint NOT NULL,
    -- The duplicates that this part made are written down.
    looked boolean NOT NULL DEFAULT false,
    -- Eight bytes each, as the server sends an int8.
    hashes bytea NOT NULL,
    UNIQUE (generation_id, segment, number)
);
-- They don't compress.
ALTER TABLE roir.early_hashes ALTER COLUMN hashes SET STORAGE EXTERNAL;
