-- Event triggers that refuse DDL on an indexed table which no capture sees, and name the supported way. Only a superuser
-- can install them: roir init does, where its role is one; any superuser may by SELECT roir.guard(). Without them the
-- same changes are detected (roir.partition_changes, roir.fingerprint).

-- A digest of all of a source's shape that a build depends on. Names, since the capture's statements use them; the
-- capture triggers, since without them nothing is exact. Partitions come and go: roir.partition_changes follows them.
CREATE FUNCTION roir.fingerprint(source oid, columns text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5(concat_ws('|',
        (SELECT concat_ws(',', c.oid, c.relkind, c.relrowsecurity, n.nspname, c.relname)
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = source),
        (SELECT string_agg(concat_ws(',', attnum, quote_ident(attname), atttypid, atttypmod, attcollation), ';'
                           ORDER BY attnum)
           FROM pg_attribute WHERE attrelid = source AND attname = ANY (columns) AND NOT attisdropped),
        (SELECT concat_ws(',', indexrelid, indkey, indclass, indisvalid, indimmediate)
           FROM pg_index WHERE indrelid = source AND indisprimary),
        (SELECT string_agg(concat_ws(',', tgname, tgfoid, tgenabled, tgtype), ';' ORDER BY tgname)
           FROM pg_trigger WHERE tgrelid = source AND tgname IN ('roir_capture', 'roir_capture_truncate')),
        -- 'A' is ENABLE ALWAYS: a partition's own capture triggers can be disabled one by one.
        (SELECT count(*) FROM pg_trigger
          WHERE tgfoid = to_regprocedure(format('roir_data.capture_%s()', source)) AND tgenabled <> 'A')))
$$;

-- What came or went since a generation's partitions were written down: partitions that are gone, the uppermost of those
-- that went together, and leaves that it doesn't know. Waits for no lock.
CREATE FUNCTION roir.partition_changes(generation bigint, source oid)
RETURNS TABLE (relation bigint, name text, gone boolean, link text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH tree AS MATERIALIZED (SELECT * FROM roir.partition_tree(partition_changes.source)),
         held AS (SELECT * FROM roir.source_partition p
                   WHERE p.generation_id = partition_changes.generation AND p.status = 'present'),
         gone AS (SELECT h.* FROM held h
                   WHERE NOT EXISTS (SELECT FROM tree t WHERE t.relation = h.relation AND t.link = h.link))
    SELECT g.relation, g.name, true AS gone, NULL FROM gone g
     WHERE NOT EXISTS (SELECT FROM gone p WHERE p.relation = g.parent)
    UNION ALL
    SELECT t.relation::bigint, t.relation::regclass::text, false, t.link FROM tree t
     WHERE t.leaf AND NOT EXISTS (SELECT FROM held h WHERE h.relation = t.relation AND h.link = t.link)
     ORDER BY gone DESC, 2
$$;

-- True where the transaction that wrote a row which we see hasn't ended: then it is ours, or one of its savepoints.
CREATE FUNCTION roir.is_mine(written_by xid) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN x.id BETWEEN 3 AND x.me + 1000000  -- else frozen, and long ago
                THEN coalesce(pg_xact_status(x.id::text::xid8) = 'in progress', false) ELSE false END
      FROM (SELECT n.me, n.me + CASE WHEN n.ahead < 2147483648 THEN n.ahead ELSE n.ahead - 4294967296 END AS id
              FROM (SELECT m.me, mod(4294967296 + written_by::text::numeric - mod(m.me, 4294967296), 4294967296) AS ahead
                      FROM (SELECT pg_current_xact_id()::text::numeric AS me) m) n) x
$$;

CREATE FUNCTION roir.detach_problem(partition text, source regclass, OUT problem text, OUT hint text)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('partition %s of %s would leave its entries behind in the roir indexes of that table', partition, source),
           format('Take it out by SELECT roir.detach_partition(%L), with and_drop => true to drop it as well.', partition)
$$;

-- What is wrong with DDL that has just been run on these relations; nothing where it is harmless. Follows partitions
-- that were created.
CREATE FUNCTION roir.ddl_problem(relations oid[], OUT problem text, OUT hint text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    g record;
    c record;
    has_rows boolean;
    missing text;
BEGIN
    FOR g IN
        SELECT x.id, x.entry, i.source_oid::oid::regclass AS source, quote_ident(i.schema_name) || '.' || quote_ident(i.name)
               AS index, o.id AS operation, o.fingerprint
          FROM roir.index i
          JOIN roir.generation x ON x.index_id = i.id AND x.status IN ('building', 'active', 'retired')
          LEFT JOIN roir.operation o ON o.generation_id = x.id AND o.status IN ('running', 'paused')
         WHERE i.dropped_at IS NULL
           AND i.source_oid IN (SELECT r.relation::bigint FROM unnest(relations) AS r (relation)
                                UNION SELECT a.relid::oid::bigint
                                        FROM unnest(relations) AS r (relation), pg_partition_ancestors(r.relation) a)
         ORDER BY x.id
    LOOP
        FOR c IN SELECT * FROM roir.partition_changes(g.id, g.source) LOOP
            IF c.gone THEN
                IF EXISTS (SELECT FROM pg_class k WHERE k.oid = c.relation::oid AND roir.is_mine(k.xmin)) THEN
                    SELECT * INTO problem, hint FROM roir.detach_problem(c.relation::oid::regclass::text, g.source);
                    RETURN;
                END IF;
                CONTINUE;
            END IF;
            CONTINUE WHEN NOT roir.is_mine(c.link::xid)
                OR EXISTS (SELECT FROM roir.source_partition p
                            WHERE p.generation_id = g.id AND p.relation = c.relation AND p.status = 'joining');
            EXECUTE format('SELECT EXISTS (SELECT FROM %s)', c.name) INTO has_rows;
            IF has_rows THEN
                problem := format('%s would bring rows into %s that its roir indexes don''t have', c.name, g.source);
                hint := 'Attach it by roir attach-partition, or empty, and insert the rows.';
                RETURN;
            END IF;
            PERFORM roir.adopt_partitions(g.id, g.source, ARRAY[c.relation::oid]);
        END LOOP;
        SELECT x.value ->> 'source' INTO missing
          FROM jsonb_array_elements(g.entry -> 'columns') x
         WHERE NOT EXISTS (SELECT FROM pg_attribute a
                            WHERE a.attrelid = g.source AND a.attname = x.value ->> 'source' AND NOT a.attisdropped)
         LIMIT 1;
        IF missing IS NOT NULL THEN
            problem := format('index %s needs column %I of %s', g.index, missing, g.source);
            hint := format('Drop the index first: roir drop %s.', g.index);
            RETURN;
        END IF;
        IF g.fingerprint <> roir.fingerprint(g.source, ARRAY(SELECT x.value ->> 'source'
                                                            FROM jsonb_array_elements(g.entry -> 'columns') x)) THEN
            problem := format('%s can''t be altered like this while index %s is being built (operation %s)', g.source,
                              g.index, g.operation);
            hint := format('Wait for its end, or abort it: SELECT roir.abort(%L).', g.index);
            RETURN;
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION roir.refuse_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    found record;
BEGIN
    -- Looking at all partitions after each of a thousand triggers took a minute, while writers waited.
    IF current_setting('roir.own_ddl', true) = 'on' THEN
        RETURN;
    END IF;
    BEGIN
        -- Too late: its first transaction has ended. roir.refuse_concurrent_detach refuses it in time.
        IF current_query() ~* '\mdetach\s+partition\M.*\m(concurrently|finalize)\M' THEN
            RETURN;
        END IF;
        SELECT p.* INTO found
          FROM roir.ddl_problem(ARRAY(SELECT c.objid FROM pg_event_trigger_ddl_commands() c
                                       WHERE c.classid = 'pg_class'::regclass)) p;
    EXCEPTION WHEN OTHERS THEN
        -- Nobody's DDL may fail because of us. What wasn't looked at is detected later.
        RAISE WARNING 'roir could not look at this statement: %', SQLERRM;
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

CREATE FUNCTION roir.refuse_drop() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found record;
    orphan record;
BEGIN
    BEGIN
        SELECT d.*, p.name AS partition INTO found
          FROM pg_event_trigger_dropped_objects() o
          JOIN roir.source_partition p ON p.relation = o.objid::bigint AND p.status = 'present'
          JOIN roir.generation g ON g.id = p.generation_id AND g.status IN ('building', 'active', 'retired')
          JOIN roir.index i ON i.id = g.index_id AND i.dropped_at IS NULL
          JOIN pg_class s ON s.oid = i.source_oid::oid  -- else all of the table goes
         CROSS JOIN LATERAL roir.detach_problem(p.name, s.oid) d
         WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0  -- not a column
         LIMIT 1;
        FOR orphan IN
            SELECT quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index, o.object_identity AS source
              FROM pg_event_trigger_dropped_objects() o JOIN roir.index i ON i.source_oid = o.objid::bigint
             WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0 AND i.dropped_at IS NULL
        LOOP
            RAISE WARNING 'index % has lost its table %', orphan.index, orphan.source
                USING HINT = format('Run: roir drop %s.', orphan.index);
        END LOOP;
    EXCEPTION WHEN OTHERS THEN
        RAISE WARNING 'roir could not look at this statement: %', SQLERRM;
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

-- DETACH … CONCURRENTLY commits before any other trigger hears of it. No search_path of its own, since the name is
-- looked up as the statement does; so no operator is used, and every function is qualified.
CREATE FUNCTION roir.refuse_concurrent_detach() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    name pg_catalog.text;
    found pg_catalog.record;
BEGIN
    BEGIN
        name := (pg_catalog.regexp_match(pg_catalog.current_query(),
            '\mdetach\s+partition\s+((?:"(?:[^"]|"")+"|[\w$])+(?:\s*\.\s*(?:"(?:[^"]|"")+"|[\w$])+)*)\s+concurrently', 'i'))[1];
        IF name IS NULL THEN
            RETURN;
        END IF;
        SELECT * INTO found FROM roir.detached_concurrently(pg_catalog.to_regclass(name));
    EXCEPTION WHEN OTHERS THEN
        RAISE WARNING 'roir could not look at this statement: %', SQLERRM;
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

CREATE FUNCTION roir.detached_concurrently(partition regclass, OUT problem text, OUT hint text)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT d.problem, d.hint
      FROM roir.source_partition p
      JOIN roir.generation g ON g.id = p.generation_id AND g.status IN ('building', 'active', 'retired')
      JOIN roir.index i ON i.id = g.index_id AND i.dropped_at IS NULL
     CROSS JOIN LATERAL roir.detach_problem(partition::text, i.source_oid::oid) d
     WHERE p.relation = partition::oid::bigint AND p.status = 'present'
     LIMIT 1
$$;

-- Installs the event triggers; false where the caller is no superuser and they aren't there.
CREATE FUNCTION roir.guard() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_event_trigger WHERE evtname = 'roir_refuse_ddl') THEN
        RETURN true;
    ELSIF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        RETURN false;
    END IF;
    CREATE EVENT TRIGGER roir_refuse_ddl ON ddl_command_end
        WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE') EXECUTE FUNCTION roir.refuse_ddl();
    CREATE EVENT TRIGGER roir_refuse_drop ON sql_drop EXECUTE FUNCTION roir.refuse_drop();
    CREATE EVENT TRIGGER roir_refuse_concurrent_detach ON ddl_command_start
        WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION roir.refuse_concurrent_detach();
    RETURN true;
END $$;

-- Takes them away again, where they are there. Only a superuser may.
CREATE FUNCTION roir.unguard() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DROP EVENT TRIGGER IF EXISTS roir_refuse_ddl;
    DROP EVENT TRIGGER IF EXISTS roir_refuse_drop;
    DROP EVENT TRIGGER IF EXISTS roir_refuse_concurrent_detach;
END $$;
