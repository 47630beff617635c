-- The governor's limits of signals, as users write them, and its grant (airflow_roir/engine/governor/).

-- The signals (airflow_roir/signals.py). A function, so that each role that may change an operation can call it.
CREATE FUNCTION roir.signals(OUT name text, OUT unit text) RETURNS SETOF record
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    VALUES ('replica_lag', 'bytes'), ('replica_delay', 'seconds'), ('slot_wal', 'bytes'), ('slot_room', 'bytes'),
           ('oldest_transaction', 'seconds'), ('free_space', 'bytes'), ('shard_lag', 'seconds'), ('outbox', 'bytes'),
           ('query', 'number'),
           ('commit_latency', 'seconds'), ('active_sessions', 'number'), ('lock_waits', 'number'),
           ('wal_rate', 'bytes'), ('checkpoints', 'number')
$$;

-- A value that is no limit would make each query of the view of all operations fail.
ALTER TABLE roir.operation
    ADD CONSTRAINT operation_throttle CHECK (jsonb_typeof(throttle) = 'object'
        AND NOT throttle @? '$.keyvalue() ? ((@.key == "replicas" && @.value.type() != "array")
                                             || (@.key != "replicas" && @.value.type() != "number"))'
        AND NOT throttle @? 'strict $.replicas[*] ? (@.type() != "string")');

-- Merges limits as users write them, `replica_lag=100MB commit_latency=20ms replicas=r1,r2`, into the present ones.
-- `name=off` removes one, `off` all. Bytes and seconds are written as PostgreSQL reads them: 100MB, 1.5s, 10min.
CREATE FUNCTION roir.throttle_of(wish text, present jsonb DEFAULT '{}') RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    item text;
    parts text[];
    s record;
    value numeric;
    found jsonb := coalesce(present, '{}');
BEGIN
    -- The limits are read each second, and a reading is kept for each replica.
    IF length(wish) > 2000 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('throttle: the text has %s characters, and may have 2000', length(wish));
    END IF;
    FOR item IN SELECT x FROM regexp_split_to_table(coalesce(wish, ''), '[[:space:];]+') x WHERE x <> '' LOOP
        IF item = 'off' THEN
            found := '{}';
            CONTINUE;
        END IF;
        parts := regexp_match(item, '^([a-z_]+)=(.+)$');
        IF parts IS NULL THEN
            RAISE invalid_parameter_value USING MESSAGE = format('throttle: %s is no limit; write name=value', item),
                HINT = 'for example: replica_lag=100MB commit_latency=20ms';
        END IF;
        SELECT x.* INTO s FROM roir.signals() x WHERE x.name = parts[1];
        IF parts[1] NOT IN ('replicas') AND s.name IS NULL THEN
            RAISE invalid_parameter_value USING MESSAGE = format('throttle: there is no signal %s', parts[1]),
                HINT = format('there are %s, and replicas', (SELECT string_agg(x.name, ', ') FROM roir.signals() x));
        ELSIF parts[2] = 'off' THEN
            found := found - parts[1];
        ELSIF parts[1] = 'replicas' THEN
            IF parts[2] ~ '^,|,,|,$' THEN
                RAISE invalid_parameter_value USING
                    MESSAGE = format('throttle: a name is empty in replicas=%s', parts[2]),
                    HINT = 'write it as replicas=r1,r2, or replicas=all';
            END IF;
            found := CASE parts[2] WHEN 'all' THEN found - 'replicas'
                     ELSE found || jsonb_build_object('replicas', to_jsonb(string_to_array(parts[2], ','))) END;
        ELSE
            BEGIN
                value := CASE s.unit
                         WHEN 'bytes' THEN pg_size_bytes(regexp_replace(parts[2], '/s$', ''))
                         WHEN 'seconds' THEN extract(epoch FROM parts[2]::interval)
                         ELSE parts[2]::numeric END;
            EXCEPTION WHEN data_exception OR invalid_text_representation THEN
                value := NULL;
            END;
            -- Neither infinity nor NaN is a limit; JSON can't contain them.
            IF value IS NULL OR value < 0 OR (value = 0 AND s.name <> 'query') OR value >= 1e18 OR value = 'NaN' THEN
                RAISE invalid_parameter_value USING
                    MESSAGE = format('throttle: %s is %s, which is no number of %s', parts[1], parts[2], s.unit),
                    HINT = CASE s.unit WHEN 'bytes' THEN 'write it as 100MB'
                                       WHEN 'seconds' THEN 'write it as 20ms or 10min'
                           ELSE 'write it as 4' END;
            END IF;
            found := found || jsonb_build_object(s.name, value);
        END IF;
    END LOOP;
    RETURN found;
END $$;

-- Limits as text, which roir.throttle_of reads back as the same limits.
CREATE FUNCTION roir.throttle_text(throttle jsonb) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT string_agg(e.key || '=' || CASE
               WHEN e.key = 'replicas' THEN (SELECT string_agg(r, ',') FROM jsonb_array_elements_text(e.value) r)
               WHEN s.unit = 'bytes' THEN (SELECT (e.value::numeric / u.size)::bigint || u.name
                   FROM (VALUES (1099511627776, 'TB'), (1073741824, 'GB'), (1048576, 'MB'), (1024, 'kB'), (1, 'B'))
                        u (size, name)
                  WHERE e.value::numeric % u.size = 0 ORDER BY u.size DESC LIMIT 1)
               WHEN s.unit = 'seconds' THEN CASE WHEN e.value::numeric < 1
                                                 THEN trim_scale(e.value::numeric * 1000) || 'ms'
                                                 ELSE trim_scale(e.value::numeric) || 's' END
               ELSE trim_scale(e.value::numeric)::text END, ' ' ORDER BY e.key)
      FROM jsonb_each(throttle) e LEFT JOIN roir.signals() s ON s.name = e.key
$$;

-- The number of workers that may work now; 0: a hold; NULL: all. A grant that isn't renewed for 15 s is a hold: the run
-- that gave it is gone, and no run reads the signals.
CREATE FUNCTION roir.granted(o roir.operation) RETURNS double precision
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN o.throttle = '{}' AND o.granted_at IS NULL THEN NULL  -- a query of a run's own needs no limit
                WHEN abs(extract(epoch FROM clock_timestamp() - o.granted_at)) < 15 THEN o.granted
                ELSE 0 END
$$;

-- The reason why an operation waits or works less, for people; NULL: nothing holds it. Only the run that drives it now
-- counts: a grant that an earlier run has left says nothing.
CREATE FUNCTION roir.throttled(o roir.operation) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN o.status <> 'running' OR o.heartbeat_at IS NULL
                     OR abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) >= 30 THEN NULL
                WHEN o.throttle = '{}' THEN o.throttled
                WHEN o.granted_at IS NULL THEN coalesce(o.throttled, 'throttled: no governor has read the signals yet')
                WHEN abs(extract(epoch FROM clock_timestamp() - o.granted_at)) < 15 THEN o.throttled
                ELSE format('throttled: no governor has read the signals for %s s',
                            round(extract(epoch FROM clock_timestamp() - o.granted_at)))
           END
$$;

-- Keeps the governor's readings: all of the last minutes; of older ones the last of each hundredth of the time.
CREATE FUNCTION roir.keep_signals(operation bigint, granted double precision, readings jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    samples bigint;
    first timestamptz;
BEGIN
    INSERT INTO roir.signal_sample (operation_id, granted, readings)
    VALUES (keep_signals.operation, keep_signals.granted, keep_signals.readings) ON CONFLICT DO NOTHING;
    SELECT count(*), min(s.at) INTO samples, first
      FROM roir.signal_sample s WHERE s.operation_id = keep_signals.operation;
    IF samples >= 360 THEN
        DELETE FROM roir.signal_sample s
         USING (SELECT x.at, row_number() OVER (PARTITION BY floor(extract(epoch FROM x.at - first)
                    / greatest(extract(epoch FROM clock_timestamp() - first) / 100, 1)) ORDER BY x.at DESC) AS n
                  FROM roir.signal_sample x WHERE x.operation_id = keep_signals.operation) thick
         WHERE s.operation_id = keep_signals.operation AND s.at = thick.at AND thick.n > 1
           AND s.at < clock_timestamp() - interval '3 minutes';
    END IF;
END $$;
