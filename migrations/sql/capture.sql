-- The functions that a source's capture functions call, and the trigger that notices the TRUNCATE of a leaf. The
-- capture reads a source by the generation's own view, and runs as the source's owner; TRUNCATE has a function of its
-- own, which runs as our role. Triggers are identified by the function that they call: a table and one of its
-- partitions may both be sources.

-- The functions that a source's capture triggers call. Ask by IN (SELECT …), which asks once for all triggers.
CREATE FUNCTION roir.captures(source oid) RETURNS TABLE (function oid)
LANGUAGE sql STABLE ROWS 2 SET search_path = pg_catalog, pg_temp AS $$
    SELECT to_regprocedure(format('roir_data.%s_%s()', kind, source))::oid
      FROM unnest(ARRAY['capture', 'truncate']) kind
$$;

-- True if a transaction of this id is in progress. pg_xact_status raises an error for an id that hasn't been assigned
-- yet: then the row is frozen, and its id is one of 4 billion ids ago.
CREATE FUNCTION roir.is_in_progress(id xid8) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN coalesce(pg_xact_status(id) = 'in progress', false);
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN false;
END $$;

-- The careful path's question about a version of a row (docs/architecture.md#the-careful-path), by its xmin: true if
-- the transaction that wrote it hasn't ended. We see the version, so that transaction is ours, or one of its
-- savepoints. A savepoint's id is higher than ours by as many ids as were assigned meanwhile: a million in minutes on a
-- busy server.
CREATE FUNCTION roir.is_mine(written_by xid) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN x.id < 3 THEN false
                WHEN x.id <= x.me + 1000000 THEN coalesce(pg_xact_status(x.id::text::xid8) = 'in progress', false)
                -- More expensive, since an error is caught.
                ELSE roir.is_in_progress(x.id::text::xid8) END
      FROM (SELECT n.me, n.me + CASE WHEN n.ahead < 2147483648 THEN n.ahead ELSE n.ahead - 4294967296 END AS id
              FROM (SELECT m.me, mod(4294967296 + written_by::text::numeric - mod(m.me, 4294967296), 4294967296)
                           AS ahead
                      FROM (SELECT pg_current_xact_id()::text::numeric AS me) m) n) x
$$;

-- True if the caller's snapshot sees the generation in this capture mode. If not, the snapshot is older than the
-- switch, or the publish, or, by the layout, than a swap of segments, and doesn't see all entries.
CREATE FUNCTION roir.is_in_mode(generation bigint, mode text, layout integer DEFAULT 0) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM roir.generation g
                    WHERE g.id = is_in_mode.generation AND g.capture_mode = is_in_mode.mode
                      AND g.layout >= is_in_mode.layout)
$$;

-- An error if the caller's snapshot is older than a rewrite of this table, or of a partition below it. ALTER TABLE,
-- TRUNCATE and pg_repack write all rows again, and an older snapshot then finds no rows instead of raising an error. A
-- rewrite changes the file: pg_class has the snapshot's file, the function the present one. VACUUM FULL, CLUSTER and
-- SET TABLESPACE keep rows visible, but look the same. The rows of a partition aren't found either once a newer table
-- has taken its place. Call this after the query of the rows, which locks their table. STABLE, to have the caller's
-- snapshot.
CREATE FUNCTION roir.refuse_rewritten(relation oid) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    other oid;
BEGIN
    SELECT x.oid INTO other
      FROM (SELECT refuse_rewritten.relation AS oid, false AS leaf
            UNION ALL SELECT t.relation, true FROM roir.partition_tree(refuse_rewritten.relation) t WHERE t.leaf) x
      LEFT JOIN pg_class c ON c.oid = x.oid
     WHERE pg_relation_filenode(x.oid) IS DISTINCT FROM nullif(c.relfilenode, 0)
        OR x.leaf AND pg_partition_root(x.oid) IS DISTINCT FROM pg_partition_root(refuse_rewritten.relation) LIMIT 1;
    IF FOUND THEN
        RAISE serialization_failure USING
            MESSAGE = format('could not serialize access: table %s was rewritten or detached '
                             'after the transaction''s snapshot',
                             other::regclass),
            DETAIL = 'This snapshot may not see rows whose entries a roir index has.',
            HINT = 'Retry the transaction.';
    END IF;
END $$;

-- An error if the owner of one of these leaves hasn't all rights of the caller. To read a leaf can run its owner's
-- code (an index's condition), and that owner may be another role than the source's owner, as which the capture
-- runs. An older snapshot may show a former owner.
CREATE FUNCTION roir.refuse_leaves_of_others(leaves oid[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    leaf record;
BEGIN
    FOR leaf IN SELECT c.oid::regclass AS name, c.relowner AS owner, c.xmax AS replaced_by FROM pg_class c
                 WHERE c.oid = ANY (leaves) AND (c.xmax <> '0' OR NOT pg_has_role(c.relowner, current_user, 'USAGE'))
    LOOP
        PERFORM roir.refuse_replaced(leaf.replaced_by, format('table %s', leaf.name));
        IF NOT pg_has_role(leaf.owner, current_user, 'USAGE') THEN
            RAISE insufficient_privilege USING
                MESSAGE = format('partition %s belongs to %s, but its table, which has a roir index, to %s',
                                 leaf.name, pg_get_userbyid(leaf.owner), current_user),
                HINT = format('ALTER TABLE %s OWNER TO %I', leaf.name, current_user);
        END IF;
    END LOOP;
END $$;

-- True if a TRUNCATE of a leaf concerns the source; false if the leaf was detached but has kept the trigger. An error
-- if the transaction's snapshot may not see all entries.
CREATE FUNCTION roir.may_truncate(source oid, leaf oid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_partition_ancestors(leaf) a WHERE a.relid = source) THEN
        RETURN false;
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE feature_not_supported USING
            MESSAGE = format('partition %s can''t be truncated in a %s transaction', leaf::regclass,
                             current_setting('transaction_isolation')),
            DETAIL = 'Its table has a roir index, with entries that this transaction''s snapshot may not see.',
            HINT = 'Truncate it in a READ COMMITTED transaction.';
    END IF;
    RETURN true;
END $$;

-- Deletes the entries of a leaf from a delta or base, in the transaction of its TRUNCATE; called by the truncate
-- function. No batch and no writer of that leaf is under way, since TRUNCATE locks it exclusively. The constraint is a
-- text, which must mean the same under all settings of the user's session.
CREATE FUNCTION roir.forget_leaf(generation bigint, store text, leaf oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    any_entry boolean;
BEGIN
    -- A TRUNCATE of the whole source fires for each leaf, when all entries are gone already.
    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', store) INTO any_entry;
    IF any_entry THEN
        EXECUTE format('DELETE FROM %s x WHERE %s', store, roir.entry_condition(
            (SELECT g.entry FROM roir.generation g WHERE g.id = generation),
            coalesce(roir.bounds_of(leaf), 'true'), 'x'));
        -- A default partition also has the bounds of a table that is being attached; its copied entries are gone now.
        INSERT INTO roir.emptied (generation_id, relation)
        SELECT 0, p.relation FROM roir.source_partition p
         WHERE p.generation_id = generation AND p.status = 'joining'
           AND EXISTS (SELECT FROM pg_trigger t
                        WHERE t.tgrelid = forget_leaf.leaf AND t.tgname = 'roir_joining_' || p.relation);
    END IF;
END $$;

-- Gives leaves, for NULL all of them, the trigger of TRUNCATE: unlike row triggers it isn't cloned.
CREATE FUNCTION roir.watch_leaves(source oid, leaves oid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    unwatched oid;
    name text := 'roir_truncate_' || source;
    before text := coalesce(current_setting('roir.own_ddl', true), '');
BEGIN
    -- Not by SET in the function's head: for a setting that no extension knows only a superuser may write that.
    PERFORM set_config('roir.own_ddl', 'on', true);
    FOR unwatched IN
        SELECT t.relation FROM roir.partition_tree(source) t
         WHERE t.leaf AND (leaves IS NULL OR t.relation = ANY (leaves))
           AND NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = t.relation AND g.tgtype & 32 <> 0
                              AND g.tgfoid IN (SELECT function FROM roir.captures(source)))
         ORDER BY t.relation
    LOOP
        EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', unwatched::regclass);
        -- Another command may have created it before we got the lock.
        CONTINUE WHEN EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = unwatched AND g.tgname = name);
        EXECUTE format('CREATE TRIGGER %I AFTER TRUNCATE ON %s '
                       'FOR EACH STATEMENT EXECUTE FUNCTION roir_data.truncate_%s()',
                       name, unwatched::regclass, source);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', unwatched::regclass, name);
    END LOOP;
    PERFORM set_config('roir.own_ddl', before, true);
END $$;

-- Watches the TRUNCATE of all leaves.
CREATE FUNCTION roir.watch_truncate(source oid) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.watch_leaves(source, NULL)
$$;

-- Refuses a row whose key another row has, as PostgreSQL's own constraint does, with the error code, names and detail
-- that clients look at. The detail has the values only if the writer may read them in each row: no policy may hide any.
-- labels: the key as the detail names it, where expressions are in it. Then the right on the whole table counts.
CREATE FUNCTION roir.refuse_duplicate(
    source oid, relation oid, index_name text, columns text[], key_values text[], labels text[] DEFAULT NULL)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    -- The role that sent the statement: the capture itself runs as the table's owner.
    writer text := coalesce(nullif(current_setting('role'), 'none'), session_user);
    named record;
    message text := format('duplicate key value violates unique constraint "%s"', index_name);
BEGIN
    -- In a restored database the old oid may be another table's. COLLATE: text variables have the key's collation here.
    SELECT n.nspname, c.relname, c.oid, NOT EXISTS (
               SELECT FROM pg_class s
                WHERE s.oid IN (c.oid, relation) AND s.relrowsecurity
                  AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = writer COLLATE "C"
                                     AND (r.rolsuper OR r.rolbypassrls))
                  AND (s.relforcerowsecurity OR NOT pg_has_role(writer, s.relowner, 'USAGE'))) AS sees_all
      INTO named FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.oid = coalesce((SELECT a.relid FROM pg_partition_ancestors(relation) a WHERE a.relid = source),
                            pg_partition_root(relation), relation);
    IF named.sees_all
        AND (labels IS NULL OR has_table_privilege(writer, named.oid, 'SELECT'))
        AND (labels IS NOT NULL OR NOT EXISTS (
                 SELECT FROM unnest(columns) k WHERE NOT has_column_privilege(writer, named.oid, k, 'SELECT')))
    THEN
        RAISE unique_violation USING
            MESSAGE = message, SCHEMA = named.nspname, TABLE = named.relname, CONSTRAINT = index_name,
            DETAIL = format('Key (%s)=(%s) already exists.',
                            coalesce(array_to_string(labels, ', '),
                                     (SELECT string_agg(quote_ident(k), ', ' ORDER BY n)
                                        FROM unnest(columns) WITH ORDINALITY c (k, n))),
                            array_to_string(key_values, ', ', 'null'));
    END IF;
    RAISE unique_violation USING
        MESSAGE = message, SCHEMA = named.nspname, TABLE = named.relname, CONSTRAINT = index_name;
END $$;

-- Notes that an entry was taken over from a row that is in no partition. The row may be of a table that is being
-- attached: then that table's copy begins again, and meets the row that has the key now. Only entries within such a
-- table's bounds are noted: otherwise a copy might never end while keys are shifted. place: a segment of the
-- generation. No other relation is read: a view of the caller's would run the caller's code as us.
CREATE FUNCTION roir.note_taken(generation bigint, place oid, spot tid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    joining record;
    within boolean;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_inherits i
                    WHERE i.inhrelid = place AND i.inhparent = to_regclass(format('roir_data.g%s', generation))) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('%s is no segment of generation %s', place, generation);
    END IF;
    FOR joining IN
        SELECT p.relation, p.parent, roir.entry_condition(g.entry, p.condition, 'x') AS condition
          FROM roir.source_partition p JOIN roir.generation g ON g.id = p.generation_id
         WHERE p.generation_id = note_taken.generation AND p.status = 'joining' AND p.bounds IS NOT NULL
    LOOP
        -- Since the attach began, reading the bounds may have come to run code of others.
        PERFORM roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(joining.parent::oid) a));
        EXECUTE format('SELECT %s FROM %s x WHERE x.ctid = $1', joining.condition, place::regclass)
            INTO within USING spot;
        -- NULL: the entry was written again meanwhile.
        IF within IS DISTINCT FROM false THEN
            -- The owners of all sources may call it. Only the capture of this generation has just written there.
            IF NOT EXISTS (SELECT FROM pg_locks l WHERE l.pid = pg_backend_pid() AND l.mode = 'RowExclusiveLock'
                              AND l.relation = to_regclass(format('roir_data.g%s', generation))) THEN
                RAISE insufficient_privilege USING
                    MESSAGE = format('only a write to its table takes entries of generation %s over', generation);
            END IF;
            INSERT INTO roir.emptied (generation_id, relation) VALUES (0, joining.relation);
        END IF;
    END LOOP;
END $$;
-- For the owners of sources, as which the capture runs.
REVOKE ALL ON FUNCTION roir.note_taken(bigint, oid, tid) FROM PUBLIC;
