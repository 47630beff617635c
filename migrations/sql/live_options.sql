-- The options that change while an operation lives, made from airflow_roir/options.py by `make options`: edit that.

-- Each is a column of the operation's row.
ALTER TABLE roir.operation
    ADD parallelism integer NOT NULL CHECK (parallelism BETWEEN 1 AND 256),
    ADD batch_rows integer NOT NULL CHECK (batch_rows BETWEEN 1 AND 10000000),
    ADD max_rows_per_second integer CHECK (max_rows_per_second BETWEEN 1 AND 1000000000),
    ADD shard_parallelism integer CHECK (shard_parallelism BETWEEN 1 AND 256),
    ADD throttle jsonb NOT NULL DEFAULT '{}',
    ADD windows text,
    ADD max_duration_s integer CHECK (max_duration_s BETWEEN 1 AND 31536000),
    ADD priority integer NOT NULL DEFAULT 0 CHECK (priority BETWEEN -100 AND 100),
    ADD warn_after_s integer CHECK (warn_after_s BETWEEN 1 AND 31536000),
    ADD abort_after_s integer CHECK (abort_after_s BETWEEN 1 AND 31536000);

-- The options that users may change. nothing: the meaning of 0, or `off`, for which the column is NULL. of_builds: no
-- verification and no compaction has the option. apart: only an index over shards has it.
CREATE FUNCTION roir.live_options()
RETURNS TABLE (ordinal integer, name text, lowest integer, highest integer, nothing text,
               of_builds boolean, apart boolean)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    VALUES (1, 'parallelism', 1, 256, NULL, false, false),
           (2, 'batch_rows', 1000, 10000000, NULL, true, false),
           (3, 'max_rows_per_second', 100, 1000000000, 'no limit', true, false),
           (4, 'shard_parallelism', 1, 256, 'no limit', true, true),
           (5, 'throttle', NULL, NULL, 'off', false, false),
           (6, 'windows', NULL, NULL, 'off', false, false),
           (7, 'max_duration_s', 1, 31536000, 'no limit', false, false),
           (8, 'priority', -100, 100, NULL, false, false),
           (9, 'warn_after_s', 1, 31536000, 'never', false, false),
           (10, 'abort_after_s', 1, 31536000, 'never', false, false)
$$;

-- The options that are given and let workers do less than they could.
CREATE FUNCTION roir.slowed_by(o roir.operation) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object('max_rows_per_second', o.max_rows_per_second))
$$;

-- Writes the options of an operation's row as change_options has set them, with the governor's grant and the notice.
CREATE FUNCTION roir.write_options(o roir.operation) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.operation x
       SET parallelism = o.parallelism, batch_rows = o.batch_rows, max_rows_per_second = o.max_rows_per_second,
           shard_parallelism = o.shard_parallelism, throttle = o.throttle, windows = o.windows,
           max_duration_s = o.max_duration_s, priority = o.priority, warn_after_s = o.warn_after_s,
           abort_after_s = o.abort_after_s,
           granted = o.granted, granted_at = o.granted_at, notice = o.notice
     WHERE x.id = o.id AND x.status IN ('running', 'paused')
$$;

-- Changes the options of a running or paused operation, whatever run drives it.
CREATE FUNCTION roir.change(index text,
                            parallelism integer DEFAULT NULL, batch_rows integer DEFAULT NULL,
                            max_rows_per_second integer DEFAULT NULL, shard_parallelism integer DEFAULT NULL,
                            throttle text DEFAULT NULL, windows text DEFAULT NULL,
                            max_duration_s integer DEFAULT NULL, priority integer DEFAULT NULL,
                            warn_after_s integer DEFAULT NULL, abort_after_s integer DEFAULT NULL,
                            actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN roir.request_change(index, jsonb_build_object(
        'parallelism', parallelism, 'batch_rows', batch_rows, 'max_rows_per_second', max_rows_per_second,
        'shard_parallelism', shard_parallelism, 'throttle', throttle, 'windows', windows,
        'max_duration_s', max_duration_s, 'priority', priority, 'warn_after_s', warn_after_s,
        'abort_after_s', abort_after_s), actor);
END $$;

-- paused -> running, for a run that waits for it (a DAG run continues automatically), with new options if given.
CREATE FUNCTION roir.resume(index text,
                            parallelism integer DEFAULT NULL, batch_rows integer DEFAULT NULL,
                            max_rows_per_second integer DEFAULT NULL, shard_parallelism integer DEFAULT NULL,
                            throttle text DEFAULT NULL, windows text DEFAULT NULL,
                            max_duration_s integer DEFAULT NULL, priority integer DEFAULT NULL,
                            warn_after_s integer DEFAULT NULL, abort_after_s integer DEFAULT NULL,
                            actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN roir.request_resume(index, jsonb_build_object(
        'parallelism', parallelism, 'batch_rows', batch_rows, 'max_rows_per_second', max_rows_per_second,
        'shard_parallelism', shard_parallelism, 'throttle', throttle, 'windows', windows,
        'max_duration_s', max_duration_s, 'priority', priority, 'warn_after_s', warn_after_s,
        'abort_after_s', abort_after_s), actor);
END $$;
