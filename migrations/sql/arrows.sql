-- The state machines of the control tables, made from airflow_roir/operation.py and airflow_roir/generation_state.py by
-- `make arrows`: edit those. CHECKs hold the states that exist; these triggers hold which state may follow which, for
-- every writer. Users' statements change none of these columns. A test tries every pair of states. The other functions
-- about phases are here, too.

ALTER TABLE roir.operation
    ADD CONSTRAINT operation_phase
        CHECK (phase IN ('build', 'seal', 'fold', 'publish', 'sum', 'check', 'compact', 'fill', 'done')),
    ADD CONSTRAINT operation_phase_of_kind
        CHECK (phase = 'done' OR (kind, phase) IN (('create', 'build'),
                                                   ('create', 'seal'),
                                                   ('create', 'fold'),
                                                   ('create', 'publish'),
                                                   ('rebuild', 'build'),
                                                   ('rebuild', 'seal'),
                                                   ('rebuild', 'fold'),
                                                   ('rebuild', 'publish'),
                                                   ('verify', 'sum'),
                                                   ('verify', 'check'),
                                                   ('compact', 'compact'),
                                                   ('reference', 'fill')));

-- The phases of each kind in their order. copies: rows are copied or compared in it.
CREATE FUNCTION roir.phases() RETURNS TABLE (kind text, n integer, phase text, copies boolean)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    VALUES ('create', 0, 'build', true),
           ('create', 1, 'seal', false),
           ('create', 2, 'fold', false),
           ('create', 3, 'publish', false),
           ('rebuild', 0, 'build', true),
           ('rebuild', 1, 'seal', false),
           ('rebuild', 2, 'fold', false),
           ('rebuild', 3, 'publish', false),
           ('verify', 0, 'sum', true),
           ('verify', 1, 'check', true),
           ('compact', 0, 'compact', true),
           ('reference', 0, 'fill', true)
$$;

-- Which part of all work each phase is taken for. Only that it grows is promised: `seconds_left` is measured. A phase
-- that isn't known raises.
CREATE FUNCTION roir.percent_of(kind text, status text, phase text, copied double precision, sealed double precision,
                                compared double precision)
RETURNS numeric LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    percent double precision;
BEGIN
    IF status = 'completed' THEN
        RETURN 100.0;
    END IF;
    CASE phase
        WHEN 'build' THEN percent := 0 + 60 * copied;
        WHEN 'seal' THEN percent := 60 + 25 * sealed;
        WHEN 'fold' THEN percent := 85;
        WHEN 'publish' THEN percent := 87 + 12 * compared;
        WHEN 'sum' THEN percent := 0 + 99 * compared;
        WHEN 'check' THEN percent := 0 + 99 * compared;
        WHEN 'compact' THEN percent := 0 + 99 * compared;
        WHEN 'fill' THEN percent := 0 + 99 * copied;
    END CASE;
    RETURN trunc(percent::numeric, 1);
END $$;

CREATE FUNCTION roir.arrows() RETURNS TABLE (machine text, was text, becomes text)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT 'operation', concat_ws(' ', a.was, p.phase), concat_ws(' ', a.becomes, p.phase)
      FROM (VALUES ('paused', 'running'),
                   ('running', 'paused'),
                   ('running', 'failed'),
                   ('paused', 'failed'),
                   ('running', 'aborting'),
                   ('paused', 'aborting'),
                   ('failed', 'aborting'),
                   ('aborting', 'aborted')) AS a (was, becomes)
     CROSS JOIN unnest(ARRAY['build', 'seal', 'fold', 'publish', 'sum', 'check', 'compact', 'fill']) AS p (phase)
    UNION ALL
    VALUES ('operation', 'running build', 'running seal'),
           ('operation', 'running seal', 'running fold'),
           ('operation', 'running fold', 'running publish'),
           ('operation', 'running publish', 'completed done'),
           ('operation', 'running sum', 'running check'),
           ('operation', 'running check', 'completed done'),
           ('operation', 'running compact', 'completed done'),
           ('operation', 'running fill', 'completed done'),
           ('generation', 'building capture', 'building direct'),
           ('generation', 'building direct', 'active active'),
           ('generation', 'active active', 'retired active'),
           ('generation', 'retired active', 'active active'),
           ('generation', 'building capture', 'dropped none'),
           ('generation', 'building direct', 'dropped none'),
           ('generation', 'active active', 'dropped none'),
           ('generation', 'retired active', 'dropped none'),
           ('segment', 'loading', 'indexed'),
           ('segment', 'indexed', 'sealed'),
           ('source_partition', 'joining', 'leaving'),
           ('scan_range', 'false', 'true'),
           ('delta_part', 'false', 'true'),
           ('verification_unit', 'false', 'true'),
           ('compaction_unit', 'waiting', 'copying'),
           ('compaction_unit', 'copying', 'indexing'),
           ('compaction_unit', 'indexing', 'folding'),
           ('compaction_unit', 'folding', 'done'),
           ('compaction_unit', 'copying', 'waiting'),
           ('compaction_unit', 'indexing', 'waiting'),
           ('compaction_unit', 'folding', 'waiting'),
           ('compaction_unit', 'waiting', 'left')
$$;

-- Arguments: the columns that make the state.
CREATE FUNCTION roir.refuse_arrow() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    before jsonb := to_jsonb(OLD);
    after jsonb := to_jsonb(NEW);
    state text;
    next text;
BEGIN
    SELECT string_agg(before ->> c.name, ' ' ORDER BY c.n), string_agg(after ->> c.name, ' ' ORDER BY c.n)
      INTO state, next
      FROM unnest(TG_ARGV) WITH ORDINALITY AS c (name, n);
    IF NOT EXISTS (SELECT FROM roir.arrows() a
                    WHERE a.machine = TG_TABLE_NAME AND (a.was, a.becomes) = (state, next)) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('roir.%s %s can''t go from %s to %s', TG_TABLE_NAME, OLD.id, state, next);
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER arrows BEFORE UPDATE OF status, phase ON roir.operation FOR EACH ROW
WHEN (OLD.status <> NEW.status OR OLD.phase <> NEW.phase)
EXECUTE FUNCTION roir.refuse_arrow('status', 'phase');

CREATE TRIGGER arrows BEFORE UPDATE OF status, capture_mode ON roir.generation FOR EACH ROW
WHEN (OLD.status <> NEW.status OR OLD.capture_mode <> NEW.capture_mode)
EXECUTE FUNCTION roir.refuse_arrow('status', 'capture_mode');

CREATE TRIGGER arrows BEFORE UPDATE OF status ON roir.segment FOR EACH ROW
WHEN (OLD.status <> NEW.status)
EXECUTE FUNCTION roir.refuse_arrow('status');

CREATE TRIGGER arrows BEFORE UPDATE OF status ON roir.source_partition FOR EACH ROW
WHEN (OLD.status <> NEW.status)
EXECUTE FUNCTION roir.refuse_arrow('status');

CREATE TRIGGER arrows BEFORE UPDATE OF done ON roir.scan_range FOR EACH ROW
WHEN (OLD.done <> NEW.done)
EXECUTE FUNCTION roir.refuse_arrow('done');

CREATE TRIGGER arrows BEFORE UPDATE OF done ON roir.delta_part FOR EACH ROW
WHEN (OLD.done <> NEW.done)
EXECUTE FUNCTION roir.refuse_arrow('done');

CREATE TRIGGER arrows BEFORE UPDATE OF done ON roir.verification_unit FOR EACH ROW
WHEN (OLD.done <> NEW.done)
EXECUTE FUNCTION roir.refuse_arrow('done');

CREATE TRIGGER arrows BEFORE UPDATE OF status ON roir.compaction_unit FOR EACH ROW
WHEN (OLD.status <> NEW.status)
EXECUTE FUNCTION roir.refuse_arrow('status');
