-- The tables of verifications of an index against its source: the options, the units, the findings.

CREATE TABLE roir.verification (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    index_id bigint NOT NULL REFERENCES roir.index (id),
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    mode text NOT NULL CONSTRAINT verification_mode CHECK (mode IN ('only', 'before', 'after')),
    options jsonb NOT NULL,
    buckets integer NOT NULL,
    suspicious integer[],
    snapshot text,
    snapshot_at timestamptz,
    quota integer,
    rows bigint NOT NULL DEFAULT '0',
    entries bigint NOT NULL DEFAULT '0',
    missing bigint NOT NULL DEFAULT '0',
    extra bigint NOT NULL DEFAULT '0',
    different bigint NOT NULL DEFAULT '0',
    corrupt bigint NOT NULL DEFAULT '0',
    repaired bigint NOT NULL DEFAULT '0',
    complete boolean,
    started_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    damaged bigint NOT NULL DEFAULT '0',
    duplicate bigint NOT NULL DEFAULT '0',
    CONSTRAINT verification_complete CHECK ((complete IS NULL) = (finished_at IS NULL))
);
CREATE INDEX verification_index_id_idx ON roir.verification (index_id);
CREATE INDEX verification_operation_id_idx ON roir.verification (operation_id);

CREATE TABLE roir.verification_unit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    ordinal integer NOT NULL,
    stage text NOT NULL CONSTRAINT verification_unit_stage CHECK (stage IN ('total', 'sum', 'check', 'whole')),
    side text NOT NULL CONSTRAINT verification_unit_side
        CHECK (side IN ('source', 'heap', 'entry', 'delta', 'tree', 'reach', 'both')),
    relation bigint NOT NULL,
    lower jsonb,
    upper jsonb,
    done boolean NOT NULL DEFAULT false,
    rows bigint NOT NULL DEFAULT '0',
    seconds numeric(14, 3) NOT NULL DEFAULT '0',
    snapshot text,
    buckets integer[],
    counts bigint[],
    sums numeric[],
    claim_epoch bigint,
    claim_worker integer,
    claim_token bigint NOT NULL DEFAULT '0',
    feed_id bigint,
    UNIQUE (verification_id, stage, ordinal)
);

CREATE TABLE roir.discrepancy (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    unit_id bigint NOT NULL,
    kind text NOT NULL CONSTRAINT discrepancy_kind
        CHECK (kind IN ('missing', 'extra', 'different', 'corrupt', 'damaged', 'duplicate')),
    key jsonb NOT NULL,
    primary_key jsonb NOT NULL,
    source_values jsonb,
    entry_values jsonb,
    found_at timestamptz NOT NULL DEFAULT now(),
    outcome text CONSTRAINT discrepancy_outcome CHECK (outcome IN ('repaired', 'gone')),
    repaired_at timestamptz,
    detail text
);
CREATE INDEX discrepancy_unit ON roir.discrepancy (verification_id, unit_id);

CREATE TABLE roir.suspect (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    unit_id bigint NOT NULL,
    feed_id bigint,
    of_source boolean NOT NULL,
    identity jsonb NOT NULL,
    hash bigint NOT NULL,
    looks integer NOT NULL DEFAULT '0'
);
CREATE INDEX suspect_identity ON roir.suspect USING hash (identity);
CREATE INDEX suspect_verification_id_idx ON roir.suspect (verification_id, feed_id, looks, id);
CREATE INDEX suspect_unit_id_idx ON roir.suspect (unit_id);
