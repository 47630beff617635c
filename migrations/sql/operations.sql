-- What users may do to an operation from SQL; the command line and Airflow call the same functions. They act by index,
-- named as in a statement: 'public.flights_by_plane', '"Weird"."Index"'. Each UPDATE names the states that it expects.

-- The latest operation of a live index. Locked, so that two who want to change it come one after the other.
CREATE FUNCTION roir.latest_operation(index text) RETURNS roir.operation
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    parts text[] := parse_ident(index);
    ids bigint[];
    found roir.operation;
BEGIN
    SELECT array_agg(i.id) INTO ids
      FROM roir.index i
     WHERE i.dropped_at IS NULL AND i.name = parts[cardinality(parts)]
       AND (cardinality(parts) = 1 OR i.schema_name = parts[1]);
    IF ids IS NULL OR cardinality(parts) > 2 THEN
        RAISE no_data_found USING MESSAGE = format('there is no index %s; `roir status` lists all indexes', index);
    ELSIF cardinality(ids) > 1 THEN
        RAISE ambiguous_alias USING MESSAGE = format('index %s is ambiguous; name its schema too', index);
    END IF;
    SELECT o.* INTO found FROM roir.operation o WHERE o.index_id = ids[1] ORDER BY o.id DESC LIMIT 1 FOR UPDATE;
    IF found.id IS NULL THEN
        RAISE no_data_found USING MESSAGE = format('index %s has no operation yet', index);
    END IF;
    RETURN found;
END $$;

-- Counts the time since the last tick to the phase, and beats the run's heart; false where the run is over. A gap
-- longer than `longest` seconds (a machine that slept, a clock that jumped) counts as that at the most: by default after
-- so long a run is taken for dead.
CREATE FUNCTION roir.tick(operation bigint, epoch bigint, longest numeric DEFAULT 30) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH ticked AS (
        UPDATE roir.operation o
           SET phase_seconds = CASE WHEN o.ticked_at IS NULL THEN o.phase_seconds
                   ELSE jsonb_set(o.phase_seconds, ARRAY[o.phase], to_jsonb(round((
                       coalesce((o.phase_seconds ->> o.phase)::numeric, 0)
                       + greatest(least(extract(epoch FROM clock_timestamp() - o.ticked_at), tick.longest), 0)
                       )::numeric, 3))) END,
               ticked_at = CASE WHEN o.ticked_at IS NOT NULL THEN clock_timestamp() END,
               heartbeat_at = clock_timestamp()
         WHERE o.id = tick.operation AND o.epoch = tick.epoch AND o.status = 'running'
        RETURNING o.id)
    SELECT EXISTS (SELECT FROM ticked)
$$;

-- running -> paused. At once here; within one batch in the workers, which commit the batch that they are in.
CREATE FUNCTION roir.pause(index text, reason text DEFAULT 'on request', actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation := roir.latest_operation(index);
    percent numeric;
BEGIN
    SELECT r.percent_complete INTO percent FROM roir.resumable_operations r WHERE r.operation_id = o.id;
    IF o.status = 'paused' THEN
        RETURN format('already paused at %s %% by %s: %s', percent, o.paused_by, o.pause_reason);
    END IF;
    IF o.status <> 'running' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('index %s has no running operation to pause: its last one is %s', index, o.status);
    END IF;
    -- The time up to the request is work too; the batch that workers still finish then counts for nothing.
    PERFORM roir.tick(o.id, o.epoch);
    UPDATE roir.operation
       SET status = 'paused', paused_at = clock_timestamp(), paused_by = actor, pause_reason = reason, ticked_at = NULL
     WHERE id = o.id AND status = 'running';
    INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
    VALUES (o.index_id, o.id, actor, 'pause', format('at %s %%: %s', percent, reason));
    RETURN format('paused at %s %%', percent);
END $$;

-- The one place that changes the options which can change while an operation lives; NULL keeps what there is. An event
-- for each that really changes.
CREATE FUNCTION roir.change_options(operation bigint, parallelism integer, batch_rows integer, actor text)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation;
    broken text;
    changed boolean;
BEGIN
    SELECT x.* INTO o FROM roir.operation x WHERE x.id = change_options.operation FOR UPDATE;
    -- The limits are those of the table.
    BEGIN
        UPDATE roir.operation x
           SET parallelism = coalesce(change_options.parallelism, x.parallelism),
               batch_rows = coalesce(change_options.batch_rows, x.batch_rows), notice = NULL
         WHERE x.id = o.id AND x.status IN ('running', 'paused')
           AND (change_options.parallelism <> x.parallelism OR change_options.batch_rows <> x.batch_rows);
        changed := FOUND;
    EXCEPTION WHEN check_violation THEN
        GET STACKED DIAGNOSTICS broken = CONSTRAINT_NAME;
        RAISE invalid_parameter_value USING
            MESSAGE = format('%s must be from 1 to %s', replace(broken, 'operation_', ''),
                             (SELECT substring(pg_get_constraintdef(k.oid) FROM '<= (\d+)') FROM pg_constraint k
                               WHERE k.conrelid = 'roir.operation'::regclass AND k.conname = broken)),
            DETAIL = concat_ws(', ', 'parallelism ' || parallelism, 'batch_rows ' || batch_rows);
    END;
    IF changed THEN
        INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
        SELECT o.index_id, o.id, change_options.actor, 'change ' || c.name, format('%s -> %s', c.old, c.new)
          FROM (VALUES (1, 'parallelism', o.parallelism, change_options.parallelism),
                       (2, 'batch_rows', o.batch_rows, change_options.batch_rows)) c (ordinal, name, old, new)
         WHERE c.new <> c.old ORDER BY c.ordinal;
    END IF;
END $$;

-- paused -> running, for a run that waits for it (a DAG run goes on by itself), with other options where given.
CREATE FUNCTION roir.resume(index text, parallelism integer DEFAULT NULL, batch_rows integer DEFAULT NULL,
                            actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation := roir.latest_operation(index);
BEGIN
    PERFORM roir.change_options(o.id, parallelism, batch_rows, actor);
    IF o.status <> 'paused' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('index %s has no paused operation to resume: its last one is %s', index, o.status);
    END IF;
    -- Without a heartbeat: whoever takes it up starts a run of its own.
    UPDATE roir.operation
       SET status = 'running', paused_by = NULL, pause_reason = NULL, heartbeat_at = NULL, ticked_at = NULL
     WHERE id = o.id AND status = 'paused';
    INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
    VALUES (o.index_id, o.id, actor, 'resume',
            concat_ws(', ', 'parallelism ' || parallelism, 'batch_rows ' || batch_rows));
    RETURN 'resumed; a waiting DAG run continues automatically; if none waits: roir resume ' || index;
END $$;

-- running, paused, failed -> aborting: every worker of every run is fenced from here on, at its next commit. Whoever
-- calls `roir abort`, or the next clean-up, then takes the generation away.
CREATE FUNCTION roir.abort(index text, reason text DEFAULT 'on request', actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation := roir.latest_operation(index);
BEGIN
    IF o.status = 'aborting' THEN
        RETURN 'being aborted already';
    END IF;
    IF o.status NOT IN ('running', 'paused', 'failed') THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('index %s has no operation to abort: its last one is %s', index, o.status);
    END IF;
    PERFORM roir.tick(o.id, o.epoch);
    UPDATE roir.operation
       SET status = 'aborting', epoch = epoch + 1, owner = actor, heartbeat_at = NULL, ticked_at = NULL
     WHERE id = o.id AND status IN ('running', 'paused', 'failed');
    INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
    VALUES (o.index_id, o.id, actor, 'abort', reason);
    RETURN 'aborting; the next clean-up removes what was built';
END $$;
