-- Event triggers that refuse DDL on an indexed table that no capture sees, and name the supported way. Only a superuser
-- can install them: roir init does if its role is one; any superuser can by SELECT roir.guard(). Without them the same
-- changes are detected (roir.partition_changes, roir.fingerprint, roir.shape_changes).

-- True if roir.own_ddl is set by a role that works for indexes. Any user can set it; then it counts for nothing.
CREATE FUNCTION roir.is_own_ddl() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(current_setting('roir.own_ddl', true), '') = 'on'
           AND has_schema_privilege(roir.outer_role(), 'roir_data', 'CREATE')
$$;

-- The message why a partition can't simply leave, with a hint.
CREATE FUNCTION roir.detach_problem(partition text, source regclass, reason text, OUT problem text, OUT hint text)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('partition %s of %s would leave its entries behind in the roir indexes of that table: %s',
                  partition, source, reason),
           format('Use SELECT roir.detach_partition(%L), with and_drop => true to drop the partition, too.', partition)
$$;

-- True if a session that has a lock on one of these relations waits for the caller, directly or through others.
CREATE FUNCTION roir.is_waited_for(relations oid[]) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE holder AS (
        SELECT l.pid FROM pg_locks l
         WHERE l.locktype = 'relation' AND l.relation = ANY (relations) AND l.granted AND l.pid <> pg_backend_pid()
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        UNION
        SELECT b.pid FROM holder h CROSS JOIN LATERAL unnest(pg_blocking_pids(h.pid)) AS b (pid))
    SELECT EXISTS (SELECT FROM holder h WHERE h.pid = pg_backend_pid())
$$;

-- Follows a plain DETACH or DROP of a partition of an indexed source, as roir.detach_partition does: hides its entries
-- in the same transaction. The statement has its locks on the source already. So this waits for the view's lock in
-- slices that are shorter than deadlock_timeout, and gives way if a reader of the view waits for the source: otherwise
-- the server might end the reader's statement. patience_ms: 0 is half a minute.
CREATE FUNCTION roir.take_over(generation bigint, partition oid, patience_ms integer) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
DECLARE
    until timestamptz := clock_timestamp() + coalesce(nullif(patience_ms, 0), 30000) * interval '1 millisecond';
    -- As registered: the partitions below may have been dropped with it.
    below oid[] := ARRAY(WITH RECURSIVE tree AS (
        SELECT partition AS relation
        UNION
        SELECT p.relation::oid FROM tree t JOIN roir.source_partition p
            ON p.parent = t.relation AND p.generation_id = take_over.generation AND p.status = 'present')
        SELECT t.relation FROM tree t);
BEGIN
    IF EXISTS (SELECT FROM roir.source_partition p WHERE p.status = 'joining' AND p.parent = ANY (below)) THEN
        RAISE object_in_use USING MESSAGE = 'a table is being attached to it';
    END IF;
    PERFORM set_config('lock_timeout',
                       greatest(1, least(s.setting::integer / 2, 500, nullif(patience_ms, 0))) || 'ms', true)
       FROM pg_settings s WHERE s.name = 'deadlock_timeout';
    LOOP
        BEGIN
            PERFORM roir.forget_gone(generation, partition);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            IF clock_timestamp() > until THEN
                RAISE lock_not_available USING MESSAGE = 'readers lock the view of an index';
            ELSIF roir.is_waited_for(ARRAY[roir.view_of(generation)::oid, 'roir.index'::regclass]) THEN
                RAISE lock_not_available USING MESSAGE = 'a reader of the index waits for this statement';
            END IF;
        END;
    END LOOP;
END $$;

-- Follows these partitions of a generation if they are gone; returns the problem if that isn't possible.
CREATE FUNCTION roir.take_over_gone(generation bigint, source regclass, relations oid[], OUT problem text,
                                    OUT hint text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c record;
BEGIN
    -- Most DDL concerns no registered partition, and to look at all of them takes time.
    IF relations = '{}' THEN
        RETURN;
    END IF;
    FOR c IN SELECT * FROM roir.partition_changes(generation, source) x
              WHERE x.gone AND x.relation::oid = ANY (relations) LOOP
        BEGIN
            PERFORM roir.take_over(generation, c.relation::oid,
                                   (SELECT s.setting::integer FROM pg_settings s WHERE s.name = 'lock_timeout'));
            BEGIN
                PERFORM roir.unwatch_leaves(ARRAY[source::oid], array_agg(t.oid))
                   FROM (SELECT c.relation::oid UNION
                         SELECT t.relation FROM roir.partition_tree(c.relation::oid) t) t (oid);
            EXCEPTION WHEN insufficient_privilege THEN
                -- Only the owner may run this DDL. Nothing is revealed about a table that is no partition.
                NULL;
            END;
            INSERT INTO roir.event (index_id, actor, action, detail)
            SELECT x.index_id, roir.outer_role(), 'detach partition', c.name
              FROM roir.generation x WHERE x.id = generation;
        EXCEPTION WHEN OTHERS THEN
            SELECT * INTO problem, hint FROM roir.detach_problem(c.name, source, SQLERRM);
            RETURN;
        END;
    END LOOP;
END $$;

-- Makes the view hide leaving entries in the transaction of the user's own DDL, if no reader locks the view. If one
-- does, the clean-up does it later, and status warns until then: a user's statement waits for 50 ms at most.
CREATE FUNCTION roir.hide_if_free(generation bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
BEGIN
    PERFORM roir.refresh_view(generation);
EXCEPTION WHEN lock_not_available THEN
    NULL;
END $$;

-- The problem with the DDL that has just been run on these relations; NULL if it is harmless. Registers partitions that
-- the DDL created. Only this transaction's changes count, not what was wrong before.
CREATE FUNCTION roir.ddl_problem(relations oid[], OUT problem text, OUT hint text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    g record;
    c record;
    attached regclass;
BEGIN
    FOR g IN
        SELECT x.id, x.entry, i.source_oid::oid::regclass AS source,
               quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index, o.id AS operation, o.fingerprint
          FROM roir.index i
          JOIN roir.generation x ON x.index_id = i.id AND x.status IN ('building', 'active', 'retired')
          LEFT JOIN roir.operation o ON o.generation_id = x.id AND o.status IN ('running', 'paused')
         WHERE i.dropped_at IS NULL
           AND i.source_oid IN (SELECT r.relation::bigint FROM unnest(relations) AS r (relation)
                                UNION SELECT a.relid::oid::bigint
                                        FROM unnest(relations) AS r (relation), pg_partition_ancestors(r.relation) a)
         ORDER BY i.id, x.id
    LOOP
        SELECT t.problem, t.hint INTO problem, hint
          FROM roir.take_over_gone(g.id, g.source,
                   ARRAY(SELECT p.relation::oid FROM roir.source_partition p JOIN pg_class k ON k.oid = p.relation::oid
                          WHERE p.generation_id = g.id AND p.status = 'present' AND roir.is_mine(k.xmin))) t;
        IF problem IS NOT NULL THEN
            RETURN;
        END IF;
        FOR c IN SELECT * FROM roir.partition_changes(g.id, g.source) LOOP
            -- The relation that this transaction attached: the leaf, or the uppermost level with which it came.
            SELECT a.relid INTO attached
              FROM pg_partition_ancestors(c.relation::oid) WITH ORDINALITY a (relid, n)
              JOIN pg_inherits h ON h.inhrelid = a.relid
             WHERE roir.is_mine(h.xmin) ORDER BY a.n DESC LIMIT 1;
            CONTINUE WHEN c.gone OR attached IS NULL
                OR EXISTS (SELECT FROM roir.source_partition p
                            WHERE p.generation_id = g.id AND p.relation = c.relation AND p.status = 'joining');
            -- By the size of its file: to read the leaf would run its owner's code as the role that attaches it. A
            -- foreign table has no file.
            IF pg_relation_size(c.relation::oid) > 0
               OR EXISTS (SELECT FROM pg_class k WHERE k.oid = c.relation::oid AND k.relkind = 'f') THEN
                problem := format('%s would bring rows into %s that its roir indexes don''t have', c.name, g.source);
                hint := CASE WHEN attached::oid = c.relation::oid
                    THEN 'Attach it by roir attach-partition, or empty it by TRUNCATE, attach it and insert the rows.'
                    ELSE format('Attach %s without it, then attach it by roir attach-partition; '
                                'or empty it by TRUNCATE first.',
                                attached) END;
                RETURN;
            END IF;
            PERFORM roir.adopt_partitions(g.id, g.source, ARRAY[c.relation::oid],
                EXISTS (SELECT FROM pg_partition_ancestors(c.relation::oid) a WHERE a.relid::oid = ANY (relations)));
            -- It was emptied before, by an unknown writer: entries within its bounds are hidden as when one leaves.
            IF EXISTS (SELECT FROM roir.source_partition p
                        WHERE p.generation_id = g.id AND p.relation = c.relation AND p.status = 'leaving') THEN
                PERFORM roir.hide_if_free(g.id);
            END IF;
        END LOOP;
        SELECT s.* INTO c FROM roir.shape_changes(g.id) s
         WHERE EXISTS (SELECT FROM unnest(s.written_by) w WHERE roir.is_mine(w)) LIMIT 1;
        IF FOUND THEN
            problem := CASE c.kind
                WHEN 'column' THEN format('index %s needs column %I of %s', g.index, c.name, g.source)
                ELSE format('index %s contains column %I of %s as its present expression generates it',
                            g.index, c.name, g.source) END;
            hint := format('Drop the index first: roir drop %s', roir.argument(g.index));
            RETURN;
        END IF;
        IF g.fingerprint <> roir.fingerprint(g.source, roir.entry_columns(g.entry)) THEN
            problem := format('%s can''t be altered like this while index %s is being built (operation %s)', g.source,
                              g.index, g.operation);
            hint := format('Wait for the end of the build, or abort it: SELECT roir.abort(%L).', g.index);
            RETURN;
        END IF;
    END LOOP;
END $$;

-- Called at the end of each ALTER TABLE, CREATE TABLE and CREATE SCHEMA.
CREATE FUNCTION roir.refuse_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found record;
BEGIN
    BEGIN
        -- To look at all partitions after each of a thousand CREATE TRIGGERs took a minute, while writers waited.
        IF roir.is_own_ddl() THEN
            RETURN;
        END IF;
        BEGIN
            PERFORM roir.follow_owners(ARRAY(SELECT c.objid FROM pg_event_trigger_ddl_commands() c
                                              WHERE c.classid = 'pg_class'::regclass));
        EXCEPTION WHEN OTHERS THEN
            -- The next clean-up does it, and status reports it.
            NULL;
        END;
        -- Too late here: its first transaction has ended. roir.refuse_concurrent_detach refuses it in time.
        IF (roir.detached_in_two(current_query())).how IS NOT NULL THEN
            RETURN;
        END IF;
        SELECT p.* INTO found
          FROM roir.ddl_problem(ARRAY(SELECT c.objid FROM pg_event_trigger_ddl_commands() c
                                       WHERE c.classid = 'pg_class'::regclass)) p;
        IF found.problem IS NULL THEN
            PERFORM roir.follow_tables(ARRAY(SELECT c.objid FROM pg_event_trigger_ddl_commands() c
                                              WHERE c.classid = 'pg_class'::regclass));
        END IF;
    EXCEPTION WHEN OTHERS THEN
        -- No user's DDL may fail because of us. A change that this check has missed is detected later.
        RAISE WARNING 'roir could not check this statement: %', SQLERRM
            USING HINT = 'The statement runs all the same. `roir status` shows whether an index lacks a change.';
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

-- Called after each drop.
CREATE FUNCTION roir.refuse_drop() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    gone oid[];
    g record;
    found record;
    orphan record;
BEGIN
    SELECT NULL AS problem, NULL AS hint INTO found;
    BEGIN
        SELECT array_agg(o.objid) INTO gone FROM pg_event_trigger_dropped_objects() o
         WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0;  -- not a column
        FOR g IN
            SELECT x.id, s.oid::regclass AS source FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
              JOIN pg_class s ON s.oid = i.source_oid::oid  -- else all of the table goes
             WHERE x.status IN ('building', 'active', 'retired') AND i.dropped_at IS NULL
               AND EXISTS (SELECT FROM roir.source_partition p
                            WHERE p.generation_id = x.id AND p.status = 'present' AND p.relation::oid = ANY (gone))
             ORDER BY x.index_id, x.id
        LOOP
            SELECT * INTO found FROM roir.take_over_gone(g.id, g.source, gone);
            EXIT WHEN found.problem IS NOT NULL;
        END LOOP;
        FOR orphan IN
            SELECT quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index, o.object_identity AS source
              FROM pg_event_trigger_dropped_objects() o JOIN roir.index i ON i.source_oid = o.objid::bigint
             WHERE o.classid = 'pg_class'::regclass AND o.objsubid = 0 AND i.dropped_at IS NULL
        LOOP
            RAISE WARNING 'index % has lost its table %', orphan.index, orphan.source
                USING HINT = format('Run: roir drop %s', roir.argument(orphan.index));
        END LOOP;
    EXCEPTION WHEN OTHERS THEN
        RAISE WARNING 'roir could not check this statement: %', SQLERRM
            USING HINT = 'The statement runs all the same. `roir status` shows whether an index lacks a change.';
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

-- The same for a partition that is about to be detached.
CREATE FUNCTION roir.detached_concurrently(partition regclass, OUT problem text, OUT hint text)
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT d.problem, d.hint
      FROM roir.source_partition p
      JOIN roir.generation g ON g.id = p.generation_id AND g.status IN ('building', 'active', 'retired')
      JOIN roir.index i ON i.id = g.index_id AND i.dropped_at IS NULL
     CROSS JOIN LATERAL roir.detach_problem(partition::text, i.source_oid::oid, 'it leaves in two transactions') d
     WHERE p.relation = partition::oid::bigint AND p.status = 'present'
     LIMIT 1
$$;

-- DETACH … CONCURRENTLY commits before any other event trigger fires. No search_path of its own, since the name must be
-- looked up as the statement does; so no operator is used, and every function is qualified.
CREATE FUNCTION roir.refuse_concurrent_detach() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    name pg_catalog.text;
    found pg_catalog.record;
BEGIN
    BEGIN
        name := (roir.detached_in_two(pg_catalog.current_query())).partition;
        IF name IS NULL THEN
            RETURN;
        END IF;
        SELECT * INTO found FROM roir.detached_concurrently(
            roir.relation_in_path(name, pg_catalog.current_setting('search_path'), roir.outer_role()));
    EXCEPTION WHEN OTHERS THEN
        RAISE WARNING 'roir could not check this statement: %', SQLERRM
            USING HINT = 'The statement runs all the same. `roir status` shows whether an index lacks a change.';
        RETURN;
    END;
    IF found.problem IS NOT NULL THEN
        RAISE object_in_use USING MESSAGE = found.problem, HINT = found.hint;
    END IF;
END $$;

-- Drops the event triggers, if they exist. Only a superuser may.
CREATE FUNCTION roir.unguard() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DROP EVENT TRIGGER IF EXISTS roir_refuse_ddl;
    DROP EVENT TRIGGER IF EXISTS roir_refuse_drop;
    DROP EVENT TRIGGER IF EXISTS roir_refuse_concurrent_detach;
    -- roir init doesn't install them again, after a restore either.
    UPDATE roir.setting SET guarded = false WHERE guarded;
END $$;

-- Installs the event triggers; false if the caller is no superuser and they don't exist. CREATE SCHEMA may contain a
-- CREATE TABLE … PARTITION OF.
CREATE FUNCTION roir.guard() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    installed boolean := EXISTS (SELECT FROM pg_event_trigger WHERE evtname = 'roir_refuse_ddl');
BEGIN
    IF installed OR NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        RETURN installed;
    END IF;
    PERFORM roir.unguard();
    UPDATE roir.setting SET guarded = true;
    CREATE EVENT TRIGGER roir_refuse_ddl ON ddl_command_end
        WHEN TAG IN ('ALTER TABLE', 'CREATE TABLE', 'CREATE SCHEMA') EXECUTE FUNCTION roir.refuse_ddl();
    CREATE EVENT TRIGGER roir_refuse_drop ON sql_drop EXECUTE FUNCTION roir.refuse_drop();
    CREATE EVENT TRIGGER roir_refuse_concurrent_detach ON ddl_command_start
        WHEN TAG IN ('ALTER TABLE') EXECUTE FUNCTION roir.refuse_concurrent_detach();
    -- ALWAYS, as the capture: they fire under every session_replication_role.
    ALTER EVENT TRIGGER roir_refuse_ddl ENABLE ALWAYS;
    ALTER EVENT TRIGGER roir_refuse_drop ENABLE ALWAYS;
    ALTER EVENT TRIGGER roir_refuse_concurrent_detach ENABLE ALWAYS;
    RETURN true;
END $$;
