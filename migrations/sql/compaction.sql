-- Segments of a published generation that are rebuilt while it is read and written (airflow_roir/engine/compact/).

CREATE TABLE roir.compaction_unit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    generation_id bigint NOT NULL REFERENCES roir.generation (id),
    ordinal integer NOT NULL,
    action text NOT NULL CONSTRAINT compaction_unit_action CHECK (action IN ('rewrite', 'split', 'merge')),
    segments integer[] NOT NULL,
    parts integer[] NOT NULL,
    cuts jsonb,
    files jsonb,
    status text NOT NULL DEFAULT 'waiting' CONSTRAINT compaction_unit_status
        CHECK (status IN ('waiting', 'copying', 'indexing', 'folding', 'done', 'left')),
    watermark jsonb,
    blocks bigint NOT NULL DEFAULT '0',
    blocks_done bigint NOT NULL DEFAULT '0',
    rows bigint NOT NULL DEFAULT '0',
    restarts integer NOT NULL DEFAULT '0',
    bytes_before bigint NOT NULL,
    bytes_after bigint,
    bytes_expected bigint,
    gain double precision,
    why text,
    note text,
    seconds numeric(14, 3) NOT NULL DEFAULT '0',
    claim_epoch bigint,
    claim_worker integer,
    claim_token bigint NOT NULL DEFAULT '0',
    UNIQUE (operation_id, ordinal),
    CONSTRAINT compaction_unit_segments CHECK (cardinality(segments) >= 1 AND cardinality(parts) >= 1),
    CONSTRAINT compaction_unit_shape CHECK (CASE action WHEN 'merge'
                                            THEN cardinality(segments) > 1 AND cardinality(parts) = 1
                                                        WHEN 'split' THEN cardinality(segments) = 1
                                                        ELSE cardinality(segments) = 1 AND cardinality(parts) = 1 END),
    CONSTRAINT compaction_unit_captured CHECK (status NOT IN ('copying', 'indexing', 'folding') OR files IS NOT NULL)
);
CREATE INDEX compaction_unit_generation_id_idx ON roir.compaction_unit (generation_id);

-- The share of a unit that is done, from 0 to 1.
CREATE FUNCTION roir.unit_share(u roir.compaction_unit) RETURNS double precision
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE u.status WHEN 'waiting' THEN 0
                         WHEN 'copying' THEN 0.5 * least(u.blocks_done::float8 / greatest(u.blocks, 1), 1)
                         WHEN 'indexing' THEN 0.5 WHEN 'folding' THEN 0.9 ELSE 1 END
$$;

-- The functions of units' triggers on segments, both in one snapshot: after a look-up by name, a function that a swap
-- has dropped meanwhile would be missing, and its trigger would count as one of others.
CREATE FUNCTION roir.touch_functions(generation bigint) RETURNS oid[]
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ARRAY(
               SELECT p.oid FROM roir.compaction_unit u
                 JOIN pg_proc p ON p.proname = format('g%s_u%s_touch', u.generation_id, u.id)
                               AND p.pronamespace = 'roir_data'::regnamespace
                WHERE u.generation_id = touch_functions.generation AND u.status IN ('copying', 'indexing', 'folding'))
$$;
