-- An operation for all displays and for users' queries. Every number is of committed rows and never falls while an
-- operation lives: a range counts its rows up to its share of the estimate made at prepare.

-- An operation's live options, with their present values as users write them.
CREATE FUNCTION roir.options_in_effect(o roir.operation) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_object_agg(l.name, CASE l.name WHEN 'throttle' THEN to_jsonb(roir.throttle_text(o.throttle))
                                                ELSE r.of -> l.name END)
      FROM (SELECT to_jsonb(o) AS of OFFSET 0) r, roir.live_options() l
$$;

-- Since when an operation is abandoned: its row says that it runs, but no run drives it, and none will. NULL: it isn't.
-- A run says how long its silence may last (grace_s); one that waits says until when it looks again. That time, and the
-- hours in which a run waits for its turn, count as driven.
CREATE FUNCTION roir.abandoned_since(o roir.operation) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN o.status = 'running'
                 AND NOT coalesce(abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) < 30, false)
                 AND (o.run_ended_at IS NOT NULL OR clock_timestamp() > s.seen + make_interval(secs => o.grace_s))
                THEN least(s.seen, o.run_ended_at) END
      FROM (SELECT greatest(o.heartbeat_at, o.awaited_until, o.queued_seen_at) AS seen) s
$$;

-- When the DAG run that will continue an operation looks again, or at the latest tries again. NULL: a run drives the
-- operation, or none is expected, since its task has no other try for example, or it waits for its turn.
CREATE FUNCTION roir.expected_at(o roir.operation) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN o.status NOT IN ('running', 'paused') OR o.run_ended_at IS NOT NULL OR NOT isfinite(s.seen)
                     OR coalesce(o.awaited_by, o.owner) NOT LIKE 'airflow %'
                     OR (o.status = 'running'
                         AND coalesce(abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) < 30, false))
                THEN NULL
                WHEN s.seen > clock_timestamp() THEN s.seen
                WHEN NOT o.last_try AND s.seen + make_interval(secs => o.grace_s) > clock_timestamp()
                THEN s.seen + make_interval(secs => o.grace_s) END
      FROM (SELECT greatest(o.heartbeat_at, o.awaited_until, o.queued_seen_at) AS seen) s
$$;

-- An operation with all columns that any display needs, by the names of its document (`engine/snapshot/operation.py`),
-- and those only for users' queries. A role that may read this view needs no right on the tables below. OFFSET 0: its
-- parts are planned separately. Otherwise PostgreSQL tries all orders of the joins, which takes four times as long as
-- the query itself.
CREATE VIEW roir.shown_operation AS
SELECT clock_timestamp() AS now,
       quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index,
       coalesce(i.shard_table || coalesce(' in ' || (
                    SELECT string_agg(s.name, ', ' ORDER BY s.name)
                      FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
                     WHERE l.generation_id = (SELECT max(x.id) FROM roir.generation x
                                               WHERE x.index_id = i.id AND x.status <> 'dropped')), ''),
                i.source_oid::oid::regclass::text) AS source,
       o.id AS operation_id, o.kind,
       CASE WHEN b.abandoned_since IS NULL THEN o.status ELSE 'abandoned' END AS status, o.phase,
       w.percent::float8 AS percent_complete, w.rows, o.rows_estimate,
       round(CASE WHEN o.kind IN ('verify', 'compact', 'reference') THEN w.rows / nullif(w.worked, 0)
                  ELSE w.rows / nullif(CASE o.phase WHEN 'build' THEN w.in_phase
                                                     ELSE (o.phase_seconds ->> 'build')::float8 END, 0)
             END) AS rows_per_second,
       round(t.rows_per_second::numeric)::float8 AS rows_per_second_now,
       CASE WHEN b.abandoned_since IS NULL THEN round(t.likely::numeric, 1)::float8 END AS seconds_left,
       CASE WHEN b.abandoned_since IS NULL THEN round(t.low::numeric, 1)::float8 END AS seconds_left_low,
       CASE WHEN b.abandoned_since IS NULL THEN round(t.high::numeric, 1)::float8 END AS seconds_left_high,
       (SELECT coalesce(sum(value::numeric), 0) FROM jsonb_each_text(o.phase_seconds))::float8
           AS total_execution_time,
       o.phase_seconds,
       roir.options_in_effect(o) AS options,
       w.ranges_done, w.ranges, w.segments_sealed, w.segments,
       o.owner, o.spark_ui,
       o.status = 'running' AND coalesce(abs(b.heartbeat_age) < 30, false) AS driven,
       -- A run that has left in order has no heartbeat; then the last event says why it left.
       coalesce(b.heartbeat_age, extract(epoch FROM clock_timestamp() - (
           SELECT max(e.at) FROM roir.event e WHERE e.operation_id = o.id)))::float8 AS silent_seconds,
       o.started_at, o.paused_at, b.abandoned_since, roir.expected_at(o) AS expected_at,
       o.status IN ('running', 'paused') AND o.last_try AS last_try, o.finished_at,
       o.pause_reason, o.paused_by,
       q.actor AS ended_by, q.detail AS end_reason,
       -- The notice of a run that is gone is void.
       o.error, CASE WHEN b.abandoned_since IS NULL THEN o.notice END AS notice,
       -- While the build can still be aborted.
       CASE WHEN o.status IN ('running', 'paused') THEN o.worth END AS worth,
       i.is_unique AS unique,
       coalesce((o.options ->> 'census')::boolean, false) AS census,
       EXISTS (SELECT FROM roir.duplicate d WHERE d.operation_id = o.id) AS has_duplicates,
       q.duplicate_keys, q.duplicate_rows, q.differences, q.differences_left,
       q.throttled,
       CASE WHEN q.throttled IS NOT NULL THEN o.throttled_since END AS throttled_since,
       CASE WHEN o.status = 'running' THEN roir.granted(o) END AS granted,
       coalesce((SELECT jsonb_object_agg(l.cause, round(l.seconds::numeric, 1)) FROM roir.throttle_time l
                  WHERE l.operation_id = o.id AND round(l.seconds::numeric, 1) > 0), '{}') AS throttle_seconds,
       -- Read to complete the document, or shown in metrics only.
       o.generation_id, o.epoch, b.heartbeat_age,
       o.ticked_at IS NOT NULL AS has_begun,
       coalesce(o.options ->> 'verify', 'after') IN ('after', 'both') AS compares,
       q.verification_id, q.is_compared, q.comparing,
       (SELECT count(*) FROM roir.verification_unit u WHERE u.verification_id = q.verification_id) AS units,
       (SELECT count(*) FROM roir.compaction_unit u WHERE u.operation_id = o.id) AS compactions,
       o.throttle AS limits,
       w.batches,
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
       b.delta_rows,
       CASE WHEN abs(extract(epoch FROM clock_timestamp() - o.queued_seen_at)) < 30
            THEN extract(epoch FROM clock_timestamp() - o.queued_at) ELSE 0 END::float8 AS queued_seconds,
       -- Only for users' queries.
       o.parallelism, o.batch_rows, o.max_rows_per_second, o.shard_parallelism, o.windows, o.max_duration_s,
       o.priority, o.heartbeat_at, roir.throttle_text(o.throttle) AS throttle
  FROM roir.operation o
  JOIN roir.index i ON i.id = o.index_id
  JOIN roir.operation_work w ON w.operation_id = o.id
 CROSS JOIN LATERAL (
       SELECT extract(epoch FROM clock_timestamp() - o.heartbeat_at)::float8 AS heartbeat_age,
              CASE WHEN o.status = 'running' THEN roir.abandoned_since(o) END AS abandoned_since,
              coalesce(pg_stat_get_live_tuples(to_regclass(format('roir_data.g%s_delta', o.generation_id))), 0)
                  AS delta_rows) b
 CROSS JOIN LATERAL (
       SELECT d.keys AS duplicate_keys, d.rows AS duplicate_rows, v.*, a.actor, a.detail,
              roir.throttled(o) AS throttled, e.rows_estimate AS earlier_rows, e.phase_seconds AS earlier_seconds
         FROM (SELECT count(DISTINCT u.key_hash) AS keys, count(*) AS rows FROM roir.duplicate u
                WHERE u.operation_id = o.id AND u.healed_at IS NULL AND i.is_unique) d
        CROSS JOIN (
              SELECT max(x.id) AS verification_id, bool_and(x.finished_at IS NOT NULL) AS is_compared,
                     (array_agg(x.missing + x.extra + x.different + x.corrupt + x.damaged + x.duplicate
                                ORDER BY x.id DESC) FILTER (WHERE x.finished_at IS NOT NULL))[1] AS differences,
                     (array_agg(x.missing + x.extra + x.different + x.corrupt + x.damaged + x.duplicate - x.repaired
                                ORDER BY x.id DESC) FILTER (WHERE x.finished_at IS NOT NULL))[1] AS differences_left,
                     sum(extract(epoch FROM coalesce(x.finished_at, clock_timestamp()) - x.started_at))::float8
                         AS comparing
                FROM roir.verification x WHERE x.operation_id = o.id) v
         LEFT JOIN (
              SELECT x.rows_estimate, x.phase_seconds FROM roir.operation x
               WHERE x.index_id = o.index_id AND x.id < o.id AND x.kind IN ('create', 'rebuild')
                 AND x.status = 'completed' AND o.status = 'running'
               ORDER BY x.id DESC LIMIT 1) e ON true
         LEFT JOIN (
              SELECT x.actor, x.detail FROM roir.event x
               WHERE x.operation_id = o.id AND x.action = 'abort' AND o.status IN ('aborting', 'aborted')
               ORDER BY x.id DESC LIMIT 1) a ON true
       OFFSET 0) q
 CROSS JOIN LATERAL roir.time_left(
       o, w, ARRAY(SELECT x FROM roir.progress_sample x WHERE x.operation_id = o.id AND x.phase = o.phase
                      AND o.status = 'running' AND b.abandoned_since IS NULL),
       b.delta_rows, q.earlier_rows, q.earlier_seconds) t;

-- The columns that SQL Server users know from sys.index_resumable_operations, and more.
CREATE VIEW roir.resumable_operations AS
SELECT operation_id,
       index AS name,
       kind,
       status AS state,
       phase,
       started_at AS start_time,
       paused_at AS last_pause_time,
       abandoned_since,
       finished_at AS finish_time,
       total_execution_time::numeric AS total_execution_time,
       round(percent_complete::numeric, 1) AS percent_complete,
       parallelism,
       batch_rows,
       max_rows_per_second,
       shard_parallelism,
       windows,
       max_duration_s,
       priority,
       rows,
       rows_estimate,
       rows_per_second,
       rows_per_second_now::numeric AS rows_per_second_now,
       round(seconds_left::numeric, 1) AS seconds_left,
       round(seconds_left_low::numeric, 1) AS seconds_left_low,
       round(seconds_left_high::numeric, 1) AS seconds_left_high,
       phase_seconds,
       ranges_done,
       ranges,
       segments_sealed,
       segments,
       owner,
       heartbeat_at,
       pause_reason,
       paused_by,
       error,
       notice,
       "unique" AS is_unique,
       census,
       duplicate_keys,
       duplicate_rows,
       throttle,
       throttled,
       throttled_since,
       granted,
       throttle_seconds,
       options AS live_options
  FROM roir.shown_operation;
