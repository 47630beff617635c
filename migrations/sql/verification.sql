-- The tables of verifications of an index against its source: what is compared, in which units, and what was found.

CREATE TABLE roir.verification (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    index_id bigint NOT NULL REFERENCES roir.index (id),
    -- The operation that it is, or, where it is a part of a build, that build.
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    mode text NOT NULL CONSTRAINT verification_mode CHECK (mode IN ('only', 'before', 'after')),
    options jsonb NOT NULL,
    -- Into how many buckets of primary keys both sides are summed; those whose sums differ, null: all, or not yet
    -- known.
    buckets integer NOT NULL,
    suspicious integer[],
    -- The snapshot that its workers share now.
    snapshot text,
    snapshot_at timestamptz,
    -- How many units it does at the most; the rest is for the next one of a walk in slices.
    quota integer,
    -- Source rows and entries that were looked at, and what was found, of the verifications that have ended.
    rows bigint NOT NULL DEFAULT '0',
    entries bigint NOT NULL DEFAULT '0',
    missing bigint NOT NULL DEFAULT '0',
    extra bigint NOT NULL DEFAULT '0',
    different bigint NOT NULL DEFAULT '0',
    corrupt bigint NOT NULL DEFAULT '0',
    mended bigint NOT NULL DEFAULT '0',
    -- False where a sample, a slice or a time limit left something out.
    complete boolean,
    started_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    damaged bigint NOT NULL DEFAULT '0',
    duplicate bigint NOT NULL DEFAULT '0',
    CONSTRAINT verification_complete CHECK ((complete IS NULL) = (finished_at IS NULL))
);
CREATE INDEX verification_index_id_idx ON roir.verification (index_id);
CREATE INDEX verification_operation_id_idx ON roir.verification (operation_id);

-- Side reach: what a segment's B-tree leads to, counted beside its heap. Stage whole, side both: all of either side, in
-- one statement.
CREATE TABLE roir.verification_unit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    ordinal integer NOT NULL,
    stage text NOT NULL CONSTRAINT verification_unit_stage CHECK (stage IN ('total', 'sum', 'check', 'whole')),
    side text NOT NULL CONSTRAINT verification_unit_side
        CHECK (side IN ('source', 'heap', 'entry', 'delta', 'tree', 'reach', 'both')),
    -- A leaf of the source, cut by primary key (source) or by blocks (heap); a segment, by blocks, or the delta.
    -- Half-open, null is unbounded.
    relation bigint NOT NULL,
    lower jsonb,
    upper jsonb,
    done boolean NOT NULL DEFAULT false,
    rows bigint NOT NULL DEFAULT '0',
    seconds numeric(14, 3) NOT NULL DEFAULT '0',
    -- The snapshot that they were read in, and the sums of both sides: in stage total of all, in stage sum by bucket.
    snapshot text,
    buckets integer[],
    counts bigint[],
    sums numeric[],
    claim_epoch bigint,
    claim_worker integer,
    claim_token bigint NOT NULL DEFAULT '0',
    -- Of an index apart from its source: whose rows it reads, or looks at; null: entries, or those of no lane.
    lane_id bigint,
    UNIQUE (verification_id, stage, ordinal)
);

-- Kind damaged: what heap and index of a table disagree about, so that lookups can't explain it; or, without a key and
-- of unit 0, a view that doesn't show what it must. Kind duplicate: a row that has no entry in a unique index, since
-- another row has its key; that one's entry is in entry_values.
CREATE TABLE roir.discrepancy (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    unit_id bigint NOT NULL,
    kind text NOT NULL CONSTRAINT discrepancy_kind
        CHECK (kind IN ('missing', 'extra', 'different', 'corrupt', 'damaged', 'duplicate')),
    -- Texts: the key and the primary key lossless, and all columns on either side, null where it has none.
    key jsonb NOT NULL,
    primary_key jsonb NOT NULL,
    source_values jsonb,
    entry_values jsonb,
    found_at timestamptz NOT NULL DEFAULT now(),
    -- mended: put right. gone: right by itself when it was looked at again, under a lock. Null: as it was.
    outcome text CONSTRAINT discrepancy_outcome CHECK (outcome IN ('mended', 'gone')),
    mended_at timestamptz,
    -- Of what is damaged, or a duplicate: what was seen, where, and what a person must do.
    detail text
);
CREATE INDEX discrepancy_unit ON roir.discrepancy (verification_id, unit_id);

-- Of an index apart from its source, while a verification lasts: rows and entries of the buckets whose sums differ.
CREATE TABLE roir.suspect (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    unit_id bigint NOT NULL,
    -- Null: of an entry whose shard the index doesn't have, or that is in another segment than its key's.
    lane_id bigint,
    of_source boolean NOT NULL,
    -- Texts of (key, pk), as the index server's entries have them.
    identity jsonb NOT NULL,
    hash bigint NOT NULL,
    -- How often it was looked at and was on its way.
    looks integer NOT NULL DEFAULT '0'
);
CREATE INDEX suspect_identity ON roir.suspect USING hash (identity);
CREATE INDEX suspect_verification_id_idx ON roir.suspect (verification_id, lane_id, looks, id);
CREATE INDEX suspect_unit_id_idx ON roir.suspect (unit_id);
