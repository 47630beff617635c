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

-- An operation with all that any surface shows of it, by the names of its document (`engine/snapshot/operation.py`). A
-- role that may read this view needs no right on the tables below.
CREATE VIEW roir.shown_operation AS
SELECT clock_timestamp() AS now,
       r.name AS index,
       coalesce(i.shard_table || coalesce(' in ' || (
                    SELECT string_agg(s.name, ', ' ORDER BY s.name)
                      FROM roir.lane l JOIN roir.shard s ON s.id = l.shard_id
                     WHERE l.generation_id = (SELECT max(x.id) FROM roir.generation x
                                               WHERE x.index_id = i.id AND x.status <> 'dropped')), ''),
                i.source_oid::oid::regclass::text) AS source,
       r.operation_id, r.kind, r.state AS status, r.phase,
       r.percent_complete::float8, r.rows, r.rows_estimate,
       r.rows_per_second::float8, r.rows_per_second_now::float8,
       r.seconds_left::float8, r.seconds_left_low::float8, r.seconds_left_high::float8,
       r.total_execution_time::float8, r.phase_seconds,
       r.live_options AS options,
       r.ranges_done, r.ranges, r.segments_sealed, r.segments,
       r.owner, o.spark_ui,
       r.state = 'running' AND coalesce(abs(b.heartbeat_age) < 30, false) AS driven,
       -- A run that has left in order has no heartbeat, and the last event tells.
       coalesce(b.heartbeat_age, extract(epoch FROM clock_timestamp() - (
           SELECT max(e.at) FROM roir.event e WHERE e.operation_id = o.id)))::float8 AS silent_seconds,
       r.start_time AS started_at, r.last_pause_time AS paused_at, r.finish_time AS finished_at,
       r.pause_reason, r.paused_by,
       a.actor AS ended_by, a.detail AS end_reason,
       r.error, r.notice,
       r.is_unique AS unique, r.census,
       EXISTS (SELECT FROM roir.duplicate d WHERE d.operation_id = o.id) AS has_duplicates,
       r.duplicate_keys, r.duplicate_rows,
       r.throttled, r.throttled_since, r.granted, r.throttle_seconds,
       -- What the rest of the document is read by, and what metrics alone show.
       o.generation_id, o.epoch, b.heartbeat_age,
       o.ticked_at IS NOT NULL AS has_begun,
       coalesce(o.options ->> 'verify', 'after') IN ('after', 'both') AS compares,
       v.verification_id, v.is_compared, v.comparing,
       (SELECT count(*) FROM roir.verification_unit u WHERE u.verification_id = v.verification_id) AS units,
       (SELECT count(*) FROM roir.compaction_unit u WHERE u.operation_id = o.id) AS compactions,
       o.throttle AS limits,
       (SELECT coalesce(sum(x.batches), 0)::bigint FROM roir.scan_range x WHERE x.operation_id = o.id) AS batches,
       (SELECT count(DISTINCT y.worker)
          FROM (SELECT claim_worker AS worker, claim_epoch AS epoch FROM roir.scan_range WHERE operation_id = o.id
                UNION ALL
                SELECT claim_worker, claim_epoch FROM roir.segment
                 WHERE generation_id = o.generation_id AND o.kind IN ('create', 'rebuild')
                UNION ALL
                SELECT u.claim_worker, u.claim_epoch FROM roir.verification z
                  JOIN roir.verification_unit u ON u.verification_id = z.id WHERE z.operation_id = o.id
                UNION ALL
                SELECT claim_worker, claim_epoch FROM roir.compaction_unit WHERE operation_id = o.id) y
         WHERE y.epoch = o.epoch) AS holders,
       coalesce(pg_stat_get_live_tuples(to_regclass(format('roir_data.g%s_delta', o.generation_id))), 0) AS delta_rows,
       CASE WHEN abs(extract(epoch FROM clock_timestamp() - o.queued_seen_at)) < 30
            THEN extract(epoch FROM clock_timestamp() - o.queued_at) ELSE 0 END::float8 AS queued_seconds
  FROM roir.resumable_operations r
  JOIN roir.operation o ON o.id = r.operation_id
  JOIN roir.index i ON i.id = o.index_id
 CROSS JOIN LATERAL (
       SELECT extract(epoch FROM clock_timestamp() - o.heartbeat_at)::float8 AS heartbeat_age) b
 CROSS JOIN LATERAL (
       SELECT max(x.id) AS verification_id, bool_and(x.finished_at IS NOT NULL) AS is_compared,
              sum(extract(epoch FROM coalesce(x.finished_at, clock_timestamp()) - x.started_at))::float8 AS comparing
         FROM roir.verification x WHERE x.operation_id = o.id) v
  LEFT JOIN LATERAL (
       SELECT e.actor, e.detail FROM roir.event e
        WHERE e.operation_id = o.id AND e.action = 'abort' AND o.status IN ('aborting', 'aborted')
        ORDER BY e.id DESC LIMIT 1) a ON true;
