-- Verifications of an index against its source: what is compared, in which units, and what was found.
ALTER TABLE roir.operation DROP CONSTRAINT operation_kind;
ALTER TABLE roir.operation ADD CONSTRAINT operation_kind CHECK (kind IN ('create', 'rebuild', 'verify'));
ALTER TABLE roir.operation DROP CONSTRAINT operation_phase;
ALTER TABLE roir.operation ADD CONSTRAINT operation_phase
    CHECK (phase IN ('build', 'seal', 'fold', 'publish', 'sum', 'check', 'done'));

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
    mended bigint NOT NULL DEFAULT '0',
    complete boolean,
    started_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    CONSTRAINT verification_complete CHECK ((complete IS NULL) = (finished_at IS NULL))
);
CREATE INDEX verification_index_id_idx ON roir.verification (index_id);
CREATE INDEX verification_operation_id_idx ON roir.verification (operation_id);

CREATE TABLE roir.verification_unit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    ordinal integer NOT NULL,
    stage text NOT NULL CONSTRAINT verification_unit_stage CHECK (stage IN ('total', 'sum', 'check')),
    side text NOT NULL CONSTRAINT verification_unit_side CHECK (side IN ('source', 'heap', 'entry', 'delta', 'tree')),
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
    UNIQUE (verification_id, stage, ordinal)
);

CREATE TABLE roir.discrepancy (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    verification_id bigint NOT NULL REFERENCES roir.verification (id),
    unit_id bigint NOT NULL,
    kind text NOT NULL CONSTRAINT discrepancy_kind CHECK (kind IN ('missing', 'extra', 'different', 'corrupt')),
    key jsonb NOT NULL,
    primary_key jsonb NOT NULL,
    source_values jsonb,
    entry_values jsonb,
    found_at timestamptz NOT NULL DEFAULT now(),
    outcome text CONSTRAINT discrepancy_outcome CHECK (outcome IN ('mended', 'gone')),
    mended_at timestamptz
);
CREATE INDEX discrepancy_unit ON roir.discrepancy (verification_id, unit_id);

-- As before, and with how far a verification is.
CREATE OR REPLACE VIEW roir.resumable_operations AS
SELECT o.id AS operation_id,
       quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS name,
       o.kind,
       o.status AS state,
       o.phase,
       o.started_at AS start_time,
       o.paused_at AS last_pause_time,
       o.finished_at AS finish_time,
       t.seconds AS total_execution_time,
       p.percent AS percent_complete,
       o.parallelism,
       o.batch_rows,
       o.max_rows_per_second,
       (r.rows + coalesce(v.rows, 0))::bigint AS rows,
       o.rows_estimate,
       round(CASE WHEN o.kind = 'verify' THEN v.rows / nullif(t.seconds, 0)
                  ELSE r.rows / nullif((o.phase_seconds ->> 'build')::numeric, 0) END) AS rows_per_second,
       CASE WHEN o.status IN ('running', 'paused')
            THEN round(t.seconds * (100 - p.percent) / nullif(p.percent, 0)) END AS seconds_left,
       o.phase_seconds,
       r.ranges_done,
       r.ranges,
       s.segments_sealed,
       s.segments,
       o.owner,
       o.heartbeat_at,
       o.pause_reason,
       o.paused_by,
       o.error,
       o.notice
  FROM roir.operation o
  JOIN roir.index i ON i.id = o.index_id
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(rows), 0)::bigint AS rows,
              count(*) AS ranges,
              count(*) FILTER (WHERE done) AS ranges_done,
              coalesce(avg(CASE WHEN done THEN 1
                                ELSE least(rows / greatest(o.rows_estimate::numeric / n.ranges, 1), 0.99) END),
                       0) AS fraction
         FROM roir.scan_range, LATERAL (
              SELECT count(*) AS ranges FROM roir.scan_range WHERE operation_id = o.id) n
        WHERE operation_id = o.id) r
  -- Of a verification that is an operation itself. Its units are gone once it has ended.
  LEFT JOIN LATERAL (
       SELECT x.suspicious,
              CASE WHEN x.finished_at IS NULL
                   THEN coalesce(sum(u.rows) FILTER (WHERE u.side IN ('source', 'heap') AND (u.stage = 'total' OR x.suspicious IS NULL AND u.stage = 'check')),
                                 0)
                   ELSE x.rows END AS rows,
              coalesce(avg(u.done::int) FILTER (WHERE u.stage = 'total'), 0) AS totals,
              coalesce(avg(u.done::int) FILTER (WHERE u.stage = 'sum'), 0) AS sums,
              coalesce(avg(u.done::int) FILTER (WHERE u.stage = 'check'), 0) AS checks
         FROM roir.verification x LEFT JOIN roir.verification_unit u ON u.verification_id = x.id
        WHERE x.operation_id = o.id AND o.kind = 'verify'
        GROUP BY x.id) v ON true
 CROSS JOIN LATERAL (
       SELECT count(*) AS segments,
              count(*) FILTER (WHERE status = 'sealed') AS segments_sealed
         FROM roir.segment WHERE generation_id = o.generation_id) s
 CROSS JOIN LATERAL (
       SELECT CASE o.phase
              WHEN 'build' THEN trunc(80 * r.fraction, 1)
              WHEN 'seal' THEN trunc(80 + 15 * s.segments_sealed::numeric / greatest(s.segments, 1), 1)
              WHEN 'fold' THEN 95.0
              WHEN 'publish' THEN 99.0
              WHEN 'sum' THEN trunc(50 * v.totals + 30 * v.sums, 1)
              WHEN 'check' THEN CASE WHEN v.suspicious IS NULL THEN trunc(99 * v.checks, 1)
                                     ELSE trunc(80 + 19 * v.checks, 1) END
              ELSE 100.0 END AS percent) p
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(value::numeric), 0) AS seconds FROM jsonb_each_text(o.phase_seconds)) t;
