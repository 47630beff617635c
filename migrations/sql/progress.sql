-- An operation's progress, and the time that it will take, for roir.resumable_operations and the page
-- (`engine/snapshot/`). Everything is derived from committed rows, so that it can't fall. After rows are deleted (the
-- units of a verification that ended), the samples keep it: the greatest percentage in them is never undercut.

CREATE TABLE roir.progress_sample (
    operation_id bigint NOT NULL REFERENCES roir.operation (id),
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    phase text NOT NULL,
    rows bigint NOT NULL,
    percent numeric(4, 1) NOT NULL,
    share double precision NOT NULL,
    worked double precision NOT NULL,
    parallelism integer NOT NULL,
    slowed_by jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (operation_id, at)
);

-- One row per verification. compared: the share of its work that is done; comparing: the share under way.
CREATE VIEW roir.verification_work AS
SELECT y.operation_id,
       y.finished_at IS NOT NULL AS ended,
       -- Units are deleted when a verification ends.
       CASE WHEN y.finished_at IS NULL THEN unit.rows ELSE y.rows END AS rows,
       CASE WHEN unit.totals IS NULL THEN 0.99 * unit.checks
            WHEN y.suspicious IS NULL THEN part.totals * unit.totals + part.sums * coalesce(unit.sums, 0)
            ELSE part.totals + part.sums + (0.99 - part.totals - part.sums) * coalesce(unit.checks, 1) END AS compared,
       part.totals * unit.held / greatest(unit.units, 1) AS comparing
  FROM roir.verification y
 CROSS JOIN LATERAL (
       SELECT count(*) AS units, count(x.claim_worker) AS held,
              coalesce(sum(x.rows) FILTER (WHERE x.side IN ('source', 'heap')
                  AND (x.stage = 'total' OR y.suspicious IS NULL AND x.stage = 'check')), 0) AS rows,
              bool_or(x.side = 'heap' AND x.stage = 'total') AS by_block,
              avg(x.done::int) FILTER (WHERE x.stage = 'total')::float8 AS totals,
              avg(x.done::int) FILTER (WHERE x.stage = 'sum')::float8 AS sums,
              avg(x.done::int) FILTER (WHERE x.stage = 'check')::float8 AS checks
         FROM roir.verification_unit x WHERE x.verification_id = y.id) unit
  -- Sums over a heap's blocks are of one snapshot and mostly decide: no write came in between.
 CROSS JOIN LATERAL (
       SELECT CASE WHEN unit.by_block THEN 0.97 ELSE 0.5 END AS totals,
              CASE WHEN unit.by_block THEN 0.01 ELSE 0.3 END AS sums) part;

-- One row per operation, with its progress. copied, sealed, compared: shares, from 0 to 1; sealing, comparing: the
-- shares under way. OFFSET 0: its parts are planned apart from relations that the view is joined to.
CREATE VIEW roir.operation_work AS
SELECT o.id AS operation_id,
       p.ranges, p.ranges_done, p.batches, p.batch_seconds, p.copied,
       p.segments, p.segments_sealed, p.sealed, p.sealing,
       p.compared, p.comparing,
       p.rows,
       p.worked + p.since AS worked,
       coalesce((o.phase_seconds ->> o.phase)::float8, 0) + p.since AS in_phase,
       greatest(roir.percent_of(o.kind, o.status, o.phase, p.copied, p.sealed, coalesce(p.share, p.compared, 0)),
                p.shown) AS percent
  FROM roir.operation o
 CROSS JOIN LATERAL (
       SELECT copy.ranges, copy.ranges_done, copy.batches, copy.batch_seconds, copy.copied, seal.*,
              verified.compared, verified.comparing, compaction.share, clock.*, mark.shown,
              (copy.rows + coalesce(verified.rows, 0) + compaction.rows)::bigint AS rows
         -- A range counts its rows up to its share of the estimate made at prepare.
         FROM (SELECT coalesce(sum(x.rows), 0) AS rows,
                      count(*) AS ranges, count(*) FILTER (WHERE x.done) AS ranges_done,
                      coalesce(sum(x.batches), 0)::bigint AS batches,
                      coalesce(sum(x.seconds), 0)::float8 AS batch_seconds,
                      coalesce(avg(CASE WHEN x.done THEN 1
                                        ELSE least(x.rows::float8 / n.rows_per_range, 0.99) END), 0)::float8 AS copied
                 -- They are numbered from 0; to count them would read them all once more.
                 FROM (SELECT greatest(o.rows_estimate::float8 / (max(y.ordinal) + 1), 1) AS rows_per_range
                         FROM roir.scan_range y WHERE y.operation_id = o.id) n
                 JOIN roir.scan_range x ON x.operation_id = o.id) copy

         -- The first segment, of NULL keys, is mostly empty.
        CROSS JOIN (
              SELECT count(*) AS segments, count(*) FILTER (WHERE status = 'sealed') AS segments_sealed,
                     count(claim_worker)::float8 / greatest(count(*) - 1, 1) AS sealing,
                     coalesce(avg(CASE status WHEN 'sealed' THEN 1 WHEN 'indexed' THEN 0.7 ELSE 0 END)
                              FILTER (WHERE ordinal > 0), 0)::float8 AS sealed
                FROM roir.segment WHERE generation_id = o.generation_id AND o.kind IN ('create', 'rebuild')) seal

         -- For a verification that is an operation itself, and for the comparisons before a publish. After a comparison
         -- that found something, the next one begins at 0. One that was given up with its operation doesn't count as
         -- done.
        CROSS JOIN (
              SELECT max(w.rows) FILTER (WHERE o.kind = 'verify') AS rows,
                     max(w.comparing) FILTER (WHERE NOT w.ended) AS comparing,
                     max(CASE WHEN NOT w.ended THEN w.compared WHEN o.status IN ('aborting', 'aborted') THEN 0
                              ELSE 1 END) AS compared
                FROM roir.verification_work w WHERE w.operation_id = o.id) verified

         -- Units count by their blocks; those that are left out were no work.
        CROSS JOIN (
              SELECT coalesce(sum(x.rows), 0) AS rows,
                     sum(roir.unit_share(x) * greatest(x.blocks, 1)) / sum(greatest(x.blocks, 1))::float8 AS share
                FROM roir.compaction_unit x WHERE x.operation_id = o.id) compaction

         -- Seconds of work: those of the phases, and since the last tick. least() leaves a NULL out.
        CROSS JOIN (
              SELECT coalesce(sum(value::float8), 0) AS worked,
                     CASE WHEN o.status = 'running' AND o.ticked_at IS NOT NULL
                          THEN greatest(least(extract(epoch FROM clock_timestamp() - o.ticked_at), 10), 0)
                          ELSE 0 END::float8 AS since
                FROM jsonb_each_text(o.phase_seconds)) clock

         -- The greatest percentage that was shown.
        CROSS JOIN (
              SELECT max(x.percent) AS shown FROM roir.progress_sample x WHERE x.operation_id = o.id) mark
       OFFSET 0) p;

-- The seconds that the rest of the operation will take, and the rows copied per second now; NULL if there is nothing to
-- derive them from. It reads no table, so each role that may read the view may call it. earlier_…: the rows and the
-- seconds of the last completed build of the same index.
CREATE FUNCTION roir.time_left(o roir.operation, w roir.operation_work, samples roir.progress_sample[],
                               delta_rows bigint, earlier_rows bigint, earlier_seconds jsonb,
                               OUT likely double precision, OUT low double precision, OUT high double precision,
                               OUT rows_per_second double precision)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    compares boolean := coalesce(o.options ->> 'verify', 'after') IN ('after', 'both');
    -- The seconds to copy all rows, without the rests of a rate limit; the other phases are estimated from it.
    copying double precision := w.batch_seconds / greatest(w.copied, 0.001) / o.parallelism;
    scale double precision := o.rows_estimate / nullif(earlier_rows, 0)::float8;
    slowing jsonb := roir.slowed_by(o);
    recent record;
    rate double precision;
    taken double precision;
    part double precision;
    predicted double precision;
    sealing double precision;
    doubt double precision;
    variance double precision := 0;
    p text;
BEGIN
    -- While an operation waits for its user, no time is left that passes.
    IF o.status <> 'running' THEN
        RETURN;
    END IF;
    -- Rows, shares and seconds all grow, so that their minima are of one sample.
    SELECT w.rows - min(s.rows) FILTER (WHERE s.worked > w.worked - 10.5) AS rows,
           w.worked - min(s.worked) FILTER (WHERE s.worked > w.worked - 10.5) AS seconds,
           w.copied - min(s.share) FILTER (WHERE s.fits) AS share,
           w.worked - min(s.worked) FILTER (WHERE s.fits) AS share_seconds
      INTO recent
      FROM (SELECT x.*, x.parallelism = o.parallelism
                        AND x.slowed_by = slowing
                        AND x.worked > w.worked - greatest(10, 0.35 * w.in_phase) AS fits
              FROM unnest(samples) x WHERE x.phase = o.phase) s;
    IF EXISTS (SELECT FROM roir.phases() x WHERE x.phase = o.phase AND x.copies) THEN
        rows_per_second := recent.rows / nullif(recent.seconds, 0);
    END IF;
    IF o.kind IN ('verify', 'compact', 'reference') THEN
        IF w.percent > 0 THEN
            likely := w.worked * (100 - w.percent) / w.percent;
            low := likely * 0.6;
            high := likely * 1.6;
        END IF;
        RETURN;
    END IF;
    sealing := coalesce((o.phase_seconds ->> 'seal')::float8, 0);
    FOR p IN SELECT x.phase FROM roir.phases() x WHERE x.kind = o.kind ORDER BY x.n LOOP
        CONTINUE WHEN likely IS NULL AND p <> o.phase;
        taken := CASE WHEN p = o.phase THEN w.in_phase ELSE 0 END;
        IF p = 'build' THEN
            rate := recent.share / nullif(recent.share_seconds, 0);
            IF coalesce(recent.share_seconds, 0) < 1 OR coalesce(rate, 0) <= 0 THEN
                rate := w.copied / nullif(w.in_phase, 0);
            END IF;
            IF coalesce(rate, 0) <= 0 THEN
                RETURN;
            END IF;
            IF o.max_rows_per_second IS NOT NULL THEN
                rate := least(rate, o.max_rows_per_second / greatest(o.rows_estimate, 1)::float8);
            END IF;
            predicted := (1 - w.copied) / rate;
            doubt := 0.12 + 0.2 / (1 + coalesce(recent.share_seconds, 0) / 5);
        ELSE
            -- The whole phase, before any of it is measured.
            predicted := coalesce((earlier_seconds ->> p)::float8 * scale,
                                  CASE p WHEN 'seal' THEN 1.05 * copying
                                         WHEN 'fold' THEN 0.3 + delta_rows / 30000.0
                                         WHEN 'publish' THEN 0.3 + CASE WHEN compares
                                                                        THEN 0.25 * copying + 0.2 * sealing
                                                                        ELSE 0 END
                                         ELSE 0.3 END);
            -- At least this, for an empty table too.
            predicted := greatest(predicted, 0.1);
            doubt := CASE WHEN earlier_seconds ? p THEN 0.25 ELSE 0.4 END;
            part := 0;
            IF p = o.phase AND p IN ('seal', 'publish') THEN
                part := CASE p WHEN 'seal' THEN w.sealed ELSE coalesce(w.compared, 0) END;
                -- Work under way counts half, at most as much as was expected to be done by now.
                part := part + least(CASE p WHEN 'seal' THEN w.sealing ELSE coalesce(w.comparing, 0) END / 2,
                                     greatest(taken / predicted - part, 0));
                -- The first tenth of a publish compares nothing.
                taken := CASE p WHEN 'seal' THEN taken ELSE greatest(taken - 0.1 * predicted, 0) END;
                -- The measured rate, and the expected one with the weight of a quarter of the phase.
                predicted := (taken + 0.25 * predicted) / (part + 0.25);
            END IF;
            IF p = 'seal' THEN
                sealing := predicted;
            END IF;
            predicted := CASE WHEN part >= 1 THEN 0.2
                              WHEN part > 0 THEN predicted * (1 - part)
                              ELSE greatest(predicted - taken, 0.1 * predicted) END;
        END IF;
        likely := coalesce(likely, 0) + predicted;
        variance := variance + (doubt * predicted) ^ 2;
    END LOOP;
    low := greatest(likely - sqrt(variance), 0);
    high := likely + sqrt(variance) + 0.5;
END $$;

-- Keeps a sample of an operation at each heartbeat and each change of its status or phase. SECURITY DEFINER, so that a
-- role that may pause an operation needs no rights on its samples.
CREATE FUNCTION roir.take_sample() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    last roir.progress_sample;
    samples bigint;
    first timestamptz;
BEGIN
    SELECT * INTO last FROM roir.progress_sample s WHERE s.operation_id = NEW.id ORDER BY s.at DESC LIMIT 1;
    IF NEW.status = OLD.status AND NEW.phase = OLD.phase
       AND abs(extract(epoch FROM clock_timestamp() - last.at)) < 1 THEN
        RETURN NULL;
    END IF;
    INSERT INTO roir.progress_sample (operation_id, phase, rows, percent, share, worked, parallelism,
                                      slowed_by)
    SELECT NEW.id, NEW.phase, w.rows, w.percent, w.copied, w.worked, NEW.parallelism, roir.slowed_by(NEW)
      FROM roir.operation_work w WHERE w.operation_id = NEW.id
    ON CONFLICT DO NOTHING;
    SELECT count(*), min(s.at) INTO samples, first FROM roir.progress_sample s WHERE s.operation_id = NEW.id;
    IF samples >= 240 THEN
        -- All samples of the last minute stay; of older ones the last of each hundredth of the time.
        DELETE FROM roir.progress_sample s
         USING (SELECT x.at, row_number() OVER (PARTITION BY floor(extract(epoch FROM x.at - first)
                    / greatest(extract(epoch FROM clock_timestamp() - first) / 100, 1)) ORDER BY x.at DESC) AS n
                  FROM roir.progress_sample x WHERE x.operation_id = NEW.id) thick
         WHERE s.operation_id = NEW.id AND s.at = thick.at AND thick.n > 1
           AND s.at < clock_timestamp() - interval '1 minute';
    END IF;
    RETURN NULL;
END $$;
-- A trigger on another role's table must not call it.
REVOKE ALL ON FUNCTION roir.take_sample() FROM PUBLIC;

CREATE TRIGGER sample AFTER UPDATE OF heartbeat_at, status, phase ON roir.operation FOR EACH ROW
WHEN (NEW.heartbeat_at IS NOT NULL OR OLD.status <> NEW.status OR OLD.phase <> NEW.phase)
EXECUTE FUNCTION roir.take_sample();
