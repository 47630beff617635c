-- What SQL Server users know from sys.index_resumable_operations, and more. Every number is of committed rows and
-- never falls while an operation lives: a range counts its rows up to its share of the estimate made at prepare.

-- The options that change while an operation lives, as they are now and as users write them.
CREATE FUNCTION roir.options_in_effect(o roir.operation) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_object_agg(l.name, CASE l.name WHEN 'throttle' THEN to_jsonb(roir.throttle_text(o.throttle))
                                                ELSE to_jsonb(o) -> l.name END)
      FROM roir.live_options() l
$$;

CREATE VIEW roir.resumable_operations AS
SELECT o.id AS operation_id,
       quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS name,
       o.kind,
       o.status AS state,
       o.phase,
       o.started_at AS start_time,
       o.paused_at AS last_pause_time,
       o.finished_at AS finish_time,
       (SELECT coalesce(sum(value::numeric), 0) FROM jsonb_each_text(o.phase_seconds)) AS total_execution_time,
       w.percent AS percent_complete,
       o.parallelism,
       o.batch_rows,
       o.max_rows_per_second,
       o.shard_parallelism,
       o.windows,
       o.max_duration_s,
       o.priority,
       w.rows,
       o.rows_estimate,
       round(CASE WHEN o.kind IN ('verify', 'compact') THEN w.rows / nullif(w.worked, 0)
                  ELSE w.rows / nullif(CASE o.phase WHEN 'build' THEN w.in_phase
                                                     ELSE (o.phase_seconds ->> 'build')::float8 END, 0)
             END) AS rows_per_second,
       round(t.rows_per_second::numeric) AS rows_per_second_now,
       round(t.likely::numeric, 1) AS seconds_left,
       round(t.low::numeric, 1) AS seconds_left_low,
       round(t.high::numeric, 1) AS seconds_left_high,
       o.phase_seconds,
       w.ranges_done,
       w.ranges,
       w.segments_sealed,
       w.segments,
       o.owner,
       o.heartbeat_at,
       o.pause_reason,
       o.paused_by,
       o.error,
       o.notice,
       i.is_unique,
       coalesce((o.options ->> 'census')::boolean, false) AS census,
       d.keys AS duplicate_keys,
       d.rows AS duplicate_rows,
       roir.throttle_text(o.throttle) AS throttle,
       roir.throttled(o) AS throttled,
       CASE WHEN roir.throttled(o) IS NOT NULL THEN o.throttled_since END AS throttled_since,
       CASE WHEN o.status = 'running' THEN roir.granted(o) END AS granted,
       coalesce((SELECT jsonb_object_agg(l.cause, round(l.seconds::numeric, 1)) FROM roir.throttle_time l
                  WHERE l.operation_id = o.id AND round(l.seconds::numeric, 1) > 0), '{}') AS throttle_seconds,
       roir.options_in_effect(o) AS live_options
  FROM roir.operation o
  JOIN roir.index i ON i.id = o.index_id
  JOIN roir.operation_work w ON w.operation_id = o.id
 CROSS JOIN LATERAL (
       SELECT count(DISTINCT u.key_hash) AS keys, count(*) AS rows FROM roir.duplicate u
        WHERE u.operation_id = o.id AND u.healed_at IS NULL AND i.is_unique) d
  LEFT JOIN LATERAL (
       SELECT x.rows_estimate, x.phase_seconds FROM roir.operation x
        WHERE x.index_id = o.index_id AND x.id < o.id AND x.kind IN ('create', 'rebuild') AND x.status = 'completed'
        ORDER BY x.id DESC LIMIT 1) e ON o.status IN ('running', 'paused')
 CROSS JOIN LATERAL roir.time_left(
       o, w, ARRAY(SELECT x FROM roir.progress_sample x WHERE x.operation_id = o.id AND x.phase = o.phase
                      AND o.status IN ('running', 'paused')),
       coalesce(pg_stat_get_live_tuples(to_regclass('roir_data.g' || o.generation_id || '_delta')), 0),
       e.rows_estimate, e.phase_seconds) t;
