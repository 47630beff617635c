-- The control tables (comments.sql describes each). CHECKs and partial unique indexes state the invariants, so that no
-- code path can break them; triggers enforce the arrows from state to state (arrows.sql).

-- The states of a delta's rows, described in airflow_roir/entry_state.py. A type, since each captured write would have
-- to evaluate a CHECK of the delta's column.
CREATE TYPE roir.entry_state AS ENUM ('regular', 'antimatter', 'ghost');
-- A column of this type in another role's table would prevent the DROP of the type.
REVOKE ALL ON TYPE roir.entry_state FROM PUBLIC;

CREATE TABLE roir.home (
    id smallint PRIMARY KEY CONSTRAINT home_one CHECK (id = 1),
    tables jsonb NOT NULL,
    schema_oid bigint NOT NULL,
    made_by text
);

CREATE TABLE roir.index (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schema_name text NOT NULL,
    name text NOT NULL,
    source_oid bigint NOT NULL,
    key_columns jsonb NOT NULL,
    included_columns jsonb NOT NULL,
    is_unique boolean NOT NULL DEFAULT false,
    nulls_not_distinct boolean NOT NULL DEFAULT false,
    dropped_at timestamptz,
    shard_table text,
    shard_column text,
    announced_by text CONSTRAINT index_announced_by CHECK (announced_by IN ('server', 'client')),
    rows_view jsonb,
    expressions jsonb NOT NULL DEFAULT '[]',
    condition text NOT NULL DEFAULT '',
    CONSTRAINT index_nulls_of_unique CHECK (is_unique OR NOT nulls_not_distinct),
    CONSTRAINT index_apart CHECK ((shard_table IS NULL) = (shard_column IS NULL)),
    CONSTRAINT index_announced_apart CHECK (announced_by IS NULL OR shard_table IS NOT NULL)
);
-- A dropped index keeps its row for the history; its name is free again.
CREATE UNIQUE INDEX index_live_name ON roir.index (schema_name, name) WHERE dropped_at IS NULL;
CREATE INDEX index_source_oid_idx ON roir.index (source_oid);

CREATE TABLE roir.generation (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    index_id bigint NOT NULL REFERENCES roir.index (id),
    status text NOT NULL CONSTRAINT generation_status CHECK (status IN ('building', 'active', 'retired', 'dropped')),
    capture_mode text NOT NULL
        CONSTRAINT generation_capture_mode CHECK (capture_mode IN ('capture', 'direct', 'active', 'none')),
    mode_xid text,
    layout integer NOT NULL DEFAULT '0',
    laid_out_at timestamptz,
    entry jsonb NOT NULL,
    published_at timestamptz,
    retired_at timestamptz,
    drop_after timestamptz,
    ghosts bigint NOT NULL DEFAULT '0',
    scan text NOT NULL DEFAULT 'key' CONSTRAINT generation_scan CHECK (scan IN ('key', 'block', 'index')),
    shape jsonb,
    looked_xid text,
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

CREATE TABLE roir.shard (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    dsn text,
    index_dsn text,
    home text,
    added_at timestamptz NOT NULL DEFAULT now(),
    removed_at timestamptz,
    away_until timestamptz,
    problem text,
    problem_at timestamptz,
    CONSTRAINT shard_reached CHECK (removed_at IS NOT NULL OR dsn IS NOT NULL)
);
CREATE UNIQUE INDEX shard_live_name ON roir.shard (name) WHERE removed_at IS NULL;

CREATE TABLE roir.feed (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    shard_id bigint NOT NULL REFERENCES roir.shard (id),
    outbox text NOT NULL UNIQUE,
    source_oid bigint NOT NULL,
    captured_at timestamptz,
    removed_at timestamptz,
    owner text,
    token bigint NOT NULL DEFAULT '0',
    heartbeat_at timestamptz,
    step bigint NOT NULL DEFAULT '0',
    tick bigint NOT NULL DEFAULT '0',
    emptied bigint NOT NULL DEFAULT '0',
    fresh_at timestamptz,
    announced_by text CONSTRAINT feed_announced_by CHECK (announced_by IN ('server', 'client')),
    strict_from timestamptz,
    strict_history text,
    strict_start timestamptz,
    evidence jsonb,
    pending bigint,
    pending_bytes bigint,
    oldest_at timestamptz,
    shipped bigint NOT NULL DEFAULT '0',
    doubtful_at timestamptz,
    doubt text,
    UNIQUE (generation_id, shard_id),
    CONSTRAINT feed_doubt CHECK ((doubtful_at IS NULL) = (doubt IS NULL))
);
CREATE INDEX feed_shard_id_idx ON roir.feed (shard_id);

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
    lower jsonb,
    upper jsonb,
    status text NOT NULL DEFAULT 'loading'
        CONSTRAINT segment_status CHECK (status IN ('loading', 'indexed', 'sealed')),
    claim_epoch bigint,
    claim_worker integer,
    claim_token bigint NOT NULL DEFAULT '0',
    refused_epoch bigint,
    sealed_at timestamptz,
    UNIQUE (generation_id, ordinal),
    CONSTRAINT segment_sealed_is_free CHECK (status <> 'sealed' OR claim_worker IS NULL),
    CONSTRAINT segment_sealed_at CHECK (sealed_at IS NULL OR status = 'sealed')
);

CREATE TABLE roir.source_partition (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    relation bigint NOT NULL,
    parent bigint NOT NULL,
    leaf boolean NOT NULL,
    link text,
    name text NOT NULL,
    condition text NOT NULL,
    bounds text,
    status text NOT NULL
        CONSTRAINT source_partition_status CHECK (status IN ('present', 'leaving', 'joining')),
    watermark jsonb,
    copied boolean NOT NULL DEFAULT false,
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
    kind text NOT NULL
        CONSTRAINT operation_kind CHECK (kind IN ('create', 'rebuild', 'verify', 'compact', 'reference')),
    status text NOT NULL CONSTRAINT operation_status
        CHECK (status IN ('running', 'paused', 'completed', 'failed', 'aborting', 'aborted')),
    phase text NOT NULL,
    epoch bigint NOT NULL DEFAULT '0',
    options jsonb NOT NULL,
    rows_estimate bigint NOT NULL,
    fingerprint text NOT NULL,
    format_version integer NOT NULL,
    owner text,
    heartbeat_at timestamptz,
    phase_seconds jsonb NOT NULL DEFAULT '{}',
    ticked_at timestamptz,
    created_by text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    paused_at timestamptz,
    pause_reason text,
    paused_by text,
    finished_at timestamptz,
    error text,
    notice text,
    worth text,
    spark_ui text,
    without_spark boolean NOT NULL DEFAULT 'false',
    granted double precision,
    granted_at timestamptz,
    throttled text,
    throttled_since timestamptz,
    working_since timestamptz,
    queued_at timestamptz,
    queued_seen_at timestamptz,
    awaited_by text,
    awaited_until timestamptz DEFAULT clock_timestamp(),
    grace_s integer NOT NULL DEFAULT '60',
    run_ended_at timestamptz,
    last_try boolean NOT NULL DEFAULT 'false',
    scan_of bigint,
    CONSTRAINT operation_grace CHECK (grace_s > 0),
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
    lower jsonb,
    upper jsonb,
    watermark jsonb,
    done boolean NOT NULL DEFAULT false,
    rows bigint NOT NULL DEFAULT '0',
    batches bigint NOT NULL DEFAULT '0',
    seconds numeric(14, 3) NOT NULL DEFAULT '0',
    claim_epoch bigint,
    claim_worker integer,
    claim_token bigint NOT NULL DEFAULT '0',
    relation bigint NOT NULL,
    filenode bigint,
    shard_id bigint REFERENCES roir.shard (id),
    mark bigint,
    moved_at timestamptz,
    UNIQUE (operation_id, ordinal),
    CONSTRAINT scan_range_counts CHECK (rows >= 0 AND batches >= 0)
);

CREATE TABLE roir.delta_part (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    pass integer NOT NULL,
    ordinal integer NOT NULL,
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

CREATE TABLE roir.setting (
    id smallint PRIMARY KEY DEFAULT '1' CONSTRAINT setting_one CHECK (id = 1),
    max_running_operations integer CONSTRAINT setting_max_running CHECK (max_running_operations > 0),
    guarded boolean NOT NULL DEFAULT 'true'
);
INSERT INTO roir.setting DEFAULT VALUES;

CREATE TABLE roir.throttle_time (
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    cause text NOT NULL,
    seconds double precision NOT NULL DEFAULT '0',
    last_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (operation_id, cause)
);

CREATE TABLE roir.signal_sample (
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    granted double precision NOT NULL,
    readings jsonb NOT NULL,
    PRIMARY KEY (operation_id, at)
);

CREATE TABLE roir.lock_wait (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    command text NOT NULL,
    index_name text,
    wanted text NOT NULL,
    blocked_by text NOT NULL,
    waiter text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE roir.event (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    index_id bigint NOT NULL REFERENCES roir.index (id),
    operation_id bigint REFERENCES roir.operation (id),
    actor text NOT NULL,
    action text NOT NULL,
    detail text
);
CREATE INDEX event_index_id_idx ON roir.event (index_id);
CREATE INDEX event_operation_id_idx ON roir.event (operation_id);

CREATE TABLE roir.duplicate (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    shared_key jsonb NOT NULL,
    key jsonb NOT NULL,
    primary_key jsonb NOT NULL,
    partition text,
    phase text NOT NULL,
    found_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    healed_at timestamptz,
    key_hash bigint NOT NULL GENERATED ALWAYS AS (jsonb_hash_extended(shared_key, 0)) STORED
);
CREATE INDEX duplicate_group ON roir.duplicate (operation_id, key_hash, id) INCLUDE (healed_at);
CREATE UNIQUE INDEX duplicate_one ON roir.duplicate (operation_id, key, primary_key) WHERE healed_at IS NULL;

CREATE TABLE roir.early_hashes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    segment integer NOT NULL,
    number integer NOT NULL,
    filenode bigint NOT NULL,
    end_block bigint NOT NULL,
    settled_block bigint NOT NULL,
    snapshot text NOT NULL,
    rows bigint NOT NULL,
    looked boolean NOT NULL DEFAULT false,
    hashes bytea NOT NULL,
    UNIQUE (generation_id, segment, number)
);
-- They don't compress.
ALTER TABLE roir.early_hashes ALTER COLUMN hashes SET STORAGE EXTERNAL;

CREATE TABLE roir.reference (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    index_id bigint NOT NULL REFERENCES roir.index (id),
    operation_id bigint REFERENCES roir.operation (id),
    name text NOT NULL,
    key_columns jsonb NOT NULL,
    added_columns jsonb NOT NULL,
    made_columns jsonb NOT NULL,
    on_delete text NOT NULL,
    on_update text NOT NULL,
    deferred boolean NOT NULL,
    status text NOT NULL DEFAULT 'filling' CONSTRAINT reference_status CHECK (status IN ('filling', 'active')),
    created_by text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX reference_index_id_idx ON roir.reference (index_id);
CREATE UNIQUE INDEX reference_operation ON roir.reference (operation_id);
