-- What SQL Server users know from sys.index_resumable_operations, and more. Every number is of committed rows and
-- never falls while an operation lives: a range counts its rows up to its share of the estimate made at prepare.

CREATE VIEW roir.resumable_operations AS
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
  -- Of a verification that is an operation itself. Its units are deleted when it ends.
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
