-- The functions by which users act on an operation from SQL; the command line and Airflow call the same ones. They take
-- the index's name as in a statement: 'shop.orders_by_customer', '"Weird"."Index"'. Each UPDATE names the states that
-- it expects.

-- A name as an argument of a command, to be pasted into a shell.
CREATE FUNCTION roir.argument(name text) RETURNS text LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN name ~ '^[a-z0-9_.]+$' THEN name ELSE format('''%s''', replace(name, '''', '''"''"''')) END
$$;

-- How alike two names are, whatever their case: the share of pairs of neighbouring letters that they share, 0 to 1.
CREATE FUNCTION roir.likeness(a text, b text) RETURNS numeric
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT 2.0 * count(*) / greatest(length(a) + length(b) + 2, 1)
      FROM (SELECT substr(' ' || lower(a) || ' ', n, 2) FROM generate_series(1, length(a) + 1) n
            INTERSECT ALL
            SELECT substr(' ' || lower(b) || ' ', n, 2) FROM generate_series(1, length(b) + 1) n) shared
$$;

-- The index that a user probably meant by a name that none has, as SQL writes it: one whose name differs in case or
-- schema alone, else the most alike one; NULL if none is alike. It compares at most 1,000 indexes.
CREATE FUNCTION roir.nearest_index(schema text, name text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('%I.%I', c.schema_name, c.name)
      FROM (SELECT i.schema_name, i.name, roir.likeness(i.name, nearest_index.name) AS likeness,
                   lower(i.name) = lower(nearest_index.name) AS same,
                   coalesce(roir.likeness(i.schema_name, nearest_index.schema), 1) AS nearness
              FROM (SELECT x.* FROM roir.index x WHERE x.dropped_at IS NULL
                     ORDER BY lower(x.name) = lower(nearest_index.name) DESC, x.id DESC LIMIT 1000) i) c
     WHERE c.likeness >= 0.5
     ORDER BY c.same DESC, c.nearness = 1 DESC, c.likeness DESC, c.nearness DESC, 1 LIMIT 1
$$;

-- The latest operation of a live index. Its row is locked, so that two sessions change it one after the other.
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
        RAISE no_data_found USING MESSAGE = concat(
            format('there is no index %s; `roir status` lists all indexes', index),
            '. Did you mean ' || CASE WHEN cardinality(parts) <= 2 THEN roir.nearest_index(
                CASE cardinality(parts) WHEN 2 THEN parts[1] END, parts[cardinality(parts)]) END || '?');
    ELSIF cardinality(ids) > 1 THEN
        RAISE ambiguous_alias USING MESSAGE = format('index %s is ambiguous; name its schema too', index);
    END IF;
    SELECT o.* INTO found FROM roir.operation o WHERE o.index_id = ids[1] ORDER BY o.id DESC LIMIT 1 FOR UPDATE;
    IF found.id IS NULL THEN
        RAISE no_data_found USING MESSAGE = format('index %s has no operation yet', index);
    END IF;
    RETURN found;
END $$;

-- Adds the time since the last tick to the phase, and writes the run's heartbeat; false if the run is over. A gap
-- longer than `longest` seconds (a run that was killed, a machine that slept, a clock that jumped) counts as `longest`:
-- by default five heartbeats.
CREATE FUNCTION roir.tick(operation bigint, epoch bigint, longest numeric DEFAULT 10) RETURNS boolean
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

-- The epoch of the next run: greater than all before, and different from that of any run on any server. A replica that
-- is promoted may not know of the last run, which lives on and finds its operation there. If epochs were counted by
-- one, the next run would get that run's epoch and not fence it.
CREATE FUNCTION roir.next_epoch(epoch bigint) RETURNS bigint
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ((epoch >> 32) + 1 << 32) + floor(random() * 4294967296)::bigint
$$;

-- running -> paused, on behalf of a user, a run that fails, a window or the governor. False if the operation isn't
-- running any more, or another run than that of this epoch holds it; epoch NULL: any run may hold it. detail: the
-- event's.
CREATE FUNCTION roir.pause_operation(operation bigint, epoch bigint, actor text, reason text, detail text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation;
BEGIN
    SELECT x.* INTO o FROM roir.operation x WHERE x.id = pause_operation.operation FOR UPDATE;
    IF o.status IS DISTINCT FROM 'running' OR o.epoch <> pause_operation.epoch THEN
        RETURN false;
    END IF;
    -- The time up to the request counts as work, the batch that workers then finish doesn't. This tick must not count
    -- as a run's sign of life.
    PERFORM roir.tick(o.id, o.epoch);
    UPDATE roir.operation
       SET status = 'paused', paused_at = clock_timestamp(), paused_by = actor, pause_reason = reason, ticked_at = NULL,
           heartbeat_at = o.heartbeat_at, queued_at = NULL, queued_seen_at = NULL,
           notice = CASE WHEN queued_at IS NULL THEN notice END
     WHERE id = o.id AND status = 'running';
    BEGIN
        INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
        VALUES (o.index_id, o.id, actor, 'pause', detail);
    EXCEPTION WHEN insufficient_resources OR system_error THEN
        -- An event may need a page for which a full disk has no room; the pause itself doesn't.
        NULL;
    END;
    RETURN true;
END $$;

-- Pauses an operation: here at once, in the workers within one batch, since they commit their open batch.
CREATE FUNCTION roir.pause(index text, reason text DEFAULT 'on request', actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation := roir.latest_operation(index);
    percent numeric;
BEGIN
    SELECT r.percent_complete INTO percent FROM roir.resumable_operations r WHERE r.operation_id = o.id;
    -- A pause that would end automatically becomes the user's, which only a resume lifts. Airflow's switch is no user.
    IF o.status = 'paused' AND actor NOT LIKE 'airflow switch of DAG %' AND o.paused_by <> actor
       AND (o.paused_by IN ('window', 'governor') OR o.paused_by LIKE 'airflow switch of DAG %') THEN
        UPDATE roir.operation
           SET paused_by = actor, pause_reason = reason, queued_at = NULL, queued_seen_at = NULL,
               notice = CASE WHEN queued_at IS NULL THEN notice END
         WHERE id = o.id AND status = 'paused';
        INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
        VALUES (o.index_id, o.id, actor, 'pause',
                format('%s; it was paused by %s: %s', reason, o.paused_by, o.pause_reason));
        RETURN format('paused at %s %%; it was paused by %s before', percent, o.paused_by);
    END IF;
    IF o.status = 'paused' THEN
        -- An operation that a user pauses no longer waits for a place.
        UPDATE roir.operation SET queued_at = NULL, queued_seen_at = NULL, notice = NULL
         WHERE id = o.id AND queued_at IS NOT NULL;
        RETURN format('already paused at %s %%, since %s, by %s: %s', percent, date_trunc('second', o.paused_at),
                      o.paused_by, o.pause_reason);
    END IF;
    IF o.status <> 'running' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('index %s has no running operation to pause: its last one is %s', index, o.status);
    END IF;
    -- Open batches still commit.
    PERFORM roir.pause_operation(o.id, o.epoch, actor, reason, format('asked for at %s %%: %s', percent, reason));
    RETURN format('paused at %s %%', percent);
END $$;

-- Raises what is wrong with an input, all of it in one error; does nothing if nothing is.
CREATE FUNCTION roir.refuse(wrong text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF cardinality(wrong) = 1 THEN
        RAISE invalid_parameter_value USING MESSAGE = wrong[1];
    ELSIF cardinality(wrong) > 1 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format(E'%s errors:\n- %s', cardinality(wrong), array_to_string(wrong, E'\n- '));
    END IF;
END $$;

-- What is wrong with the wishes for an operation's live options, a text for each; o: NULL if it isn't known.
CREATE FUNCTION roir.wrong_options(wishes jsonb, o roir.operation) RETURNS text[]
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c record;
    others text;
    message text;
    hint text;
    wrong text[];
BEGIN
    SELECT string_agg(l.name, ', ' ORDER BY l.ordinal) INTO others FROM roir.live_options() l
     WHERE wishes ->> l.name IS NOT NULL AND l.of_builds AND o.kind IN ('verify', 'compact', 'reference');
    IF others IS NOT NULL THEN
        wrong := wrong || format('%s: a %s has no such option; the other options change', others,
                                 CASE o.kind WHEN 'verify' THEN 'verification' ELSE 'compaction' END);
    END IF;
    SELECT string_agg(l.name, ', ' ORDER BY l.ordinal) INTO others FROM roir.live_options() l
     WHERE wishes ->> l.name IS NOT NULL AND l.apart AND o.id IS NOT NULL
       AND NOT EXISTS (SELECT FROM roir.index i WHERE i.id = o.index_id AND i.shard_table IS NOT NULL);
    IF others IS NOT NULL THEN
        wrong := wrong || format('%s is for an index over shards, which this one is not', others);
    END IF;
    FOR c IN SELECT l.*, to_jsonb(o) ->> l.name AS old, wishes ->> l.name AS wish FROM roir.live_options() l
              WHERE wishes ->> l.name IS NOT NULL ORDER BY l.ordinal
    LOOP
        IF c.name = 'throttle' THEN
            BEGIN
                PERFORM roir.throttle_of(c.wish, o.throttle);
            EXCEPTION WHEN invalid_parameter_value THEN
                GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
                wrong := wrong || concat(message, '; ' || nullif(hint, ''));
            END;
        ELSIF c.name = 'windows' THEN
            IF btrim(c.wish) NOT IN ('', 'off')
               AND (length(btrim(c.wish)) > 2000 OR btrim(c.wish) !~ '^([^;]+ for [^;]+)(;[^;]+ for [^;]+)*$') THEN
                wrong := wrong || format('windows: %s is no window; write CRON for DURATION in ZONE: '
                                         '0 22 * * 1-5 for 8h in Europe/Berlin', left(c.wish, 200));
            END IF;
        ELSIF (c.nothing IS NULL OR c.wish <> '0') AND c.wish::numeric NOT BETWEEN c.lowest AND c.highest
              AND c.wish IS DISTINCT FROM c.old THEN
            wrong := wrong || format('%s is %s; it must be from %s to %s%s', c.name, c.wish, c.lowest, c.highest,
                                     ', or 0 for ' || c.nothing);
        END IF;
    END LOOP;
    RETURN wrong;
END $$;

-- Changes live options of an operation; no other code does. wishes: by their names; NULL keeps the present value, and
-- 0, or `off`, is none. Writes an event for each option that really changes; returns these, NULL if there are none. The
-- change takes effect when workers read the row, before each batch, and the governor, each second.
CREATE FUNCTION roir.change_options(operation bigint, wishes jsonb, actor text)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation;
    was jsonb;
    c record;
    limits jsonb;
    new jsonb := '{}';
    done text[];
BEGIN
    SELECT x.* INTO o FROM roir.operation x WHERE x.id = change_options.operation FOR UPDATE;
    was := to_jsonb(o) || jsonb_build_object('throttle', roir.throttle_text(o.throttle));
    wishes := jsonb_strip_nulls(wishes);
    PERFORM roir.refuse(roir.wrong_options(wishes, o));
    FOR c IN SELECT l.*, was ->> l.name AS old, wishes ->> l.name AS wish FROM roir.live_options() l
              WHERE wishes ? l.name ORDER BY l.ordinal
    LOOP
        IF c.name = 'throttle' THEN
            limits := roir.throttle_of(c.wish, o.throttle);
            c.wish := roir.throttle_text(limits);
        ELSIF c.name = 'windows' THEN
            c.wish := CASE WHEN btrim(c.wish) NOT IN ('', 'off') THEN btrim(c.wish) END;
        ELSIF c.nothing IS NOT NULL AND c.wish = '0' THEN
            c.wish := NULL;
        END IF;
        CONTINUE WHEN c.wish IS NOT DISTINCT FROM c.old OR o.status NOT IN ('running', 'paused');
        new := new || jsonb_build_object(c.name, CASE c.name WHEN 'throttle' THEN limits ELSE to_jsonb(c.wish) END);
        done := done || format('%s %s -> %s', c.name, coalesce(c.old, c.nothing), coalesce(c.wish, c.nothing));
        INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
        VALUES (o.index_id, o.id, change_options.actor, 'change ' || c.name,
                substr(done[cardinality(done)], length(c.name) + 2));
    END LOOP;
    IF done IS NOT NULL THEN
        o := jsonb_populate_record(o, new || '{"notice": null}');
        IF limits = '{}' THEN
            o.granted := NULL;
            o.granted_at := NULL;
        END IF;
        PERFORM roir.write_options(o);
    END IF;
    RETURN array_to_string(done, ', ');
END $$;

-- The operation that a user wants to change; an error that also says what is wrong with the wishes.
CREATE FUNCTION roir.operation_to_change(index text, wishes jsonb) RETURNS roir.operation
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    message text;
    wrong text[];
BEGIN
    RETURN roir.latest_operation(index);
EXCEPTION WHEN no_data_found OR ambiguous_alias OR invalid_parameter_value THEN
    wrong := roir.wrong_options(wishes, NULL);
    IF wrong IS NULL THEN
        RAISE;
    END IF;
    GET STACKED DIAGNOSTICS message = MESSAGE_TEXT;
    PERFORM roir.refuse(message || wrong);
END $$;

-- Does the work of roir.change (live_options.sql).
CREATE FUNCTION roir.request_change(index text, wishes jsonb, actor text)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation := roir.operation_to_change(index, wishes);
    done text;
BEGIN
    IF jsonb_strip_nulls(wishes) = '{}' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('nothing to change: give one of %s',
                             (SELECT string_agg(l.name, ', ' ORDER BY l.ordinal) FROM roir.live_options() l));
    END IF;
    done := roir.change_options(o.id, wishes, actor);
    IF o.status NOT IN ('running', 'paused') THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('index %s has no operation to change: its last one is %s', index, o.status);
    END IF;
    RETURN coalesce('changed: ' || done, 'nothing changes: these values are in effect already');
END $$;

-- Does the work of roir.resume (live_options.sql).
CREATE FUNCTION roir.request_resume(index text, wishes jsonb, actor text)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    o roir.operation := roir.operation_to_change(index, wishes);
BEGIN
    PERFORM roir.change_options(o.id, wishes, actor);
    IF o.status <> 'paused' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('index %s has no paused operation to resume: its last one is %s', index, o.status);
    END IF;
    -- Without a heartbeat, so that a command or a DAG run can take the operation up with a run of its own.
    UPDATE roir.operation
       SET status = 'running', paused_by = NULL, pause_reason = NULL, heartbeat_at = NULL, ticked_at = NULL,
           awaited_until = greatest(awaited_until, clock_timestamp()), run_ended_at = NULL,
           -- A task's next try after a failure belongs to the same stretch: max_duration_s counts on.
           working_since = CASE WHEN o.paused_by = o.owner AND actor = o.owner THEN working_since
                                ELSE clock_timestamp() END
     WHERE id = o.id AND status = 'paused';
    INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
    VALUES (o.index_id, o.id, actor, 'resume',
            (SELECT string_agg(w.key || ' ' || w.value, ', ') FROM jsonb_each_text(jsonb_strip_nulls(wishes)) w));
    RETURN 'resumed; a waiting DAG run continues automatically; if none waits: roir resume ' || roir.argument(index);
END $$;

-- running, paused, failed -> aborting: every worker of every run is fenced from here on, at its next commit. `roir
-- abort`, or the next clean-up, then removes the generation.
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
       SET status = 'aborting', epoch = roir.next_epoch(epoch), owner = actor, heartbeat_at = NULL, ticked_at = NULL
     WHERE id = o.id AND status IN ('running', 'paused', 'failed');
    INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
    VALUES (o.index_id, o.id, actor, 'abort', reason);
    RETURN 'aborting; the next clean-up removes the unfinished work';
END $$;
