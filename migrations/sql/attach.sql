-- Makes a loaded table a partition of an indexed source, in three steps. begin_attach: the table takes no writes from
-- now on, and its bounds are joining, so that its entries stay hidden while they are copied (roir attach-partition
-- copies them, in batches). validate_attach: checks the table's rows under a weaker lock than the attach takes.
-- finish_attach: the table becomes a partition; in the same instant its entries have rows, and are shown.

CREATE FUNCTION roir.refuse_write() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE object_in_use USING
        MESSAGE = format('%s is being attached to a table with a roir index, and takes no writes until that ends',
                         TG_RELID::regclass),
        HINT = format('Wait for roir attach-partition, or cancel the attach: SELECT roir.cancel_attach(%L).',
                      TG_RELID::regclass);
END $$;

-- Notes rows that the default partition gets within the bounds of a table that is being attached. Such a row may have
-- the same entry as a copied row: then the copy must not be the entry's last writer, and the entry must not go when the
-- row goes. So the transaction that brings the row notes it, and the copy begins again. A snapshot that is older than
-- the attach doesn't see the bounds: then each row is noted. A note is inserted, never updated: an update would make
-- one user's statement wait for another's.
CREATE FUNCTION roir.note_arrival() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    joining record;
    within boolean := true;
BEGIN
    SELECT p.parent, p.condition INTO joining FROM roir.source_partition p
     WHERE p.relation = TG_ARGV[0]::bigint AND p.status = 'joining' LIMIT 1;
    IF FOUND THEN
        -- The default partition may have been detached since, and belong to another table.
        IF NOT EXISTS (SELECT FROM pg_partition_ancestors(TG_RELID) a WHERE a.relid::oid::bigint = joining.parent) THEN
            RETURN NULL;
        END IF;
        -- Since the attach began, reading the bounds may have come to run code of others.
        PERFORM roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(TG_RELID) a));
        EXECUTE format('SELECT %s FROM (SELECT ($1).*) r', joining.condition) INTO within USING NEW;
    END IF;
    -- One note is enough; but an old snapshot may show a note that has been used since.
    IF within AND (current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
                   OR NOT EXISTS (SELECT FROM roir.emptied e
                                   WHERE e.generation_id = 0 AND e.relation = TG_ARGV[0]::bigint)) THEN
        INSERT INTO roir.emptied (generation_id, relation) VALUES (0, TG_ARGV[0]::bigint);
    END IF;
    RETURN NULL;
END $$;
-- It runs with our rights, by triggers that we create.
REVOKE ALL ON FUNCTION roir.note_arrival() FROM PUBLIC;

-- Makes the default partition note the rows that it gets.
CREATE FUNCTION roir.note_arrivals(parent regclass, partition oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rest regclass;
    name text := 'roir_joining_' || partition;
BEGIN
    SELECT p.partdefid INTO rest FROM pg_partitioned_table p WHERE p.partrelid = parent AND p.partdefid <> 0
       AND NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = p.partdefid AND t.tgname = name);
    IF FOUND THEN
        EXECUTE format('CREATE TRIGGER %I AFTER INSERT OR UPDATE ON %s '
                       'FOR EACH ROW EXECUTE FUNCTION roir.note_arrival(%L)',
                       name, rest, partition);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', rest, name);
    END IF;
END $$;

-- Drops the trigger that notes, and the notes. ended: the caller ends the attach. Otherwise it drops them only if no
-- attach of the table is under way: one may begin until the default partition is locked, so it looks after that.
CREATE FUNCTION roir.stop_noting(partition oid, ended boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    rest record;
BEGIN
    FOR rest IN SELECT t.tgrelid::regclass AS relation, t.tgname AS name FROM pg_trigger t
                 WHERE t.tgname = 'roir_joining_' || partition AND t.tgparentid = 0
                   AND t.tgfoid = 'roir.note_arrival()'::regprocedure LOOP
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', rest.relation);
        IF NOT ended AND EXISTS (SELECT FROM roir.source_partition p
                                  WHERE p.relation = partition::bigint AND p.status = 'joining') THEN
            RETURN;
        END IF;
        EXECUTE format('DROP TRIGGER %I ON %s', rest.name, rest.relation);
    END LOOP;
    DELETE FROM roir.emptied e WHERE e.generation_id = 0 AND e.relation = partition::bigint
       AND (ended OR NOT EXISTS (SELECT FROM roir.source_partition p
                                  WHERE p.relation = e.relation AND p.status = 'joining'));
END $$;

CREATE FUNCTION roir.release_table(partition regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM roir.stop_noting(partition);
    EXECUTE format('DROP TRIGGER IF EXISTS roir_joining ON %s', partition);
    EXECUTE format('DROP TRIGGER IF EXISTS roir_joining_truncate ON %s', partition);
    EXECUTE format('ALTER TABLE %s DROP CONSTRAINT IF EXISTS roir_bounds', partition);
END $$;

-- A text that differs once DDL has given the columns of a table without writes other values: the table's file and its
-- columns' names.
CREATE FUNCTION roir.values_of(relation regclass) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat_ws(' ', pg_relation_filenode(relation),
                     md5(string_agg(a.attnum || ' ' || a.attname, ',' ORDER BY a.attnum)))
      FROM pg_attribute a WHERE a.attrelid = relation AND a.attnum > 0 AND NOT a.attisdropped
$$;

-- A text that differs once copied entries may be gone, or may not match the joining table. It is made of the table's
-- values (values_of); the files of the entries, which a TRUNCATE of the source replaces; and the default partition,
-- which alone takes rows within the table's bounds. If the table itself is to be the default partition, its bounds
-- change with each partition that is created meanwhile, so then its siblings count.
CREATE FUNCTION roir.joins_as(generation bigint, parent oid, partition regclass, as_default boolean) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat_ws(' ', roir.values_of(partition),
        (SELECT md5(string_agg(concat(r.oid, ' ', pg_relation_filenode(r.oid)), ',' ORDER BY r.oid))
           FROM (SELECT to_regclass(format('roir_data.g%s', generation))::oid AS oid
                 UNION ALL
                 SELECT t.relation FROM roir.partition_tree(to_regclass(format('roir_data.g%s', generation))) t) r),
        CASE WHEN as_default
             THEN 'default ' || coalesce((SELECT md5(string_agg(h.inhrelid::text, ',' ORDER BY h.inhrelid))
                                            FROM pg_inherits h WHERE h.inhparent = parent), '')
             ELSE (SELECT p.partdefid::text FROM pg_partitioned_table p WHERE p.partrelid = parent) END)
$$;

-- True if the copy of a joining table's rows must begin again; false once the table is a partition.
CREATE FUNCTION roir.is_disturbed(joining bigint) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM roir.source_partition p
                    WHERE p.id = joining AND p.status = 'joining' AND p.bounds IS NOT NULL
                      AND (p.link <> roir.joins_as(p.generation_id, p.parent::oid, p.relation::oid,
                                                   p.link LIKE '% default %')
                           OR EXISTS (SELECT FROM roir.emptied e
                                       WHERE e.generation_id = 0 AND e.relation = p.relation)))
$$;

-- An error if a table can't be attached, as far as that can be known before anything is changed.
CREATE FUNCTION roir.may_attach(parent regclass, partition regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
DECLARE
    source oid := coalesce(pg_partition_root(parent), parent);
BEGIN
    PERFORM roir.check_isolation('roir.begin_attach');
    IF NOT EXISTS (SELECT FROM roir.index i WHERE i.source_oid = source::bigint AND i.dropped_at IS NULL) THEN
        RAISE no_data_found USING MESSAGE = format('%s has no roir index', parent),
            HINT = 'Use ALTER TABLE … ATTACH PARTITION.';
    ELSIF NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = partition AND c.relkind = 'r' AND NOT c.relispartition) THEN
        RAISE object_in_use USING
            MESSAGE = format('%s can''t be attached: it is a partition already, or no plain table', partition);
    ELSIF NOT EXISTS (SELECT FROM pg_index x WHERE x.indrelid = partition AND x.indisprimary) THEN
        RAISE object_in_use USING
            MESSAGE = format('%s has no primary key; the attach would build one under its lock', partition),
            HINT = 'Give it the primary key of the table that it is attached to.';
    ELSIF NOT EXISTS (SELECT FROM pg_partitioned_table p WHERE p.partrelid = parent) THEN
        RAISE wrong_object_type USING MESSAGE = format('%s isn''t partitioned', parent);
    END IF;
    PERFORM roir.check_code(parent, partition, true);
END $$;

-- Tries the attach, to get its errors about columns, constraints and triggers: attaches the table as the only
-- partition, for all values, of an empty table like the parent, without looking at rows; undoes it at once.
CREATE FUNCTION roir.try_table(parent regclass, partition regclass, trial text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
BEGIN
    -- An attach that continues needn't wait for the table's readers.
    IF EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = partition AND t.tgname = 'roir_joining') THEN
        RETURN;
    END IF;
    EXECUTE (
        SELECT format('CREATE TABLE roir_data.%I (LIKE %s INCLUDING ALL EXCLUDING INDEXES EXCLUDING COMMENTS, %s) '
                      'PARTITION BY LIST (%I)', trial, parent, pg_get_constraintdef(k.oid), a.attname)
          FROM pg_constraint k, pg_partitioned_table p
          JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
         WHERE k.conrelid = parent AND k.contype = 'p' AND p.partrelid = parent);
    EXECUTE format('ALTER TABLE roir_data.%I ATTACH PARTITION %s DEFAULT', trial, partition);
    RAISE SQLSTATE 'RO001';
EXCEPTION WHEN SQLSTATE 'RO001' THEN
    NULL;
END $$;

-- The bounds of a partition as the server writes them, which mean the same in every session, and their condition. NULL
-- if it isn't a partition of that parent.
CREATE FUNCTION roir.written_bounds(parent regclass, trial text, OUT bounds text, OUT condition text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_get_expr(c.relpartbound, c.oid), coalesce(nullif(pg_get_partition_constraintdef(c.oid), ''), 'true')
      FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
     WHERE h.inhparent = parent AND c.oid = to_regclass(format('roir_data.%I', trial))
$$;

-- Raises an error again, with the names of the real tables.
CREATE FUNCTION roir.raise_of_trial(code text, message text, detail text, hint text, trial text, parent regclass,
                                    partition regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    -- The trial table stands for the parent when the table is tried, and for the partition when its bounds are.
    message := replace(message, format('parent "%s"', trial),
                       format('parent "%s"', (SELECT c.relname FROM pg_class c WHERE c.oid = parent)));
    message := concat_ws(': ', message, nullif(detail, ''));
    message := replace(message, trial, (SELECT c.relname FROM pg_class c WHERE c.oid = partition));
    IF hint = '' THEN
        RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message;
    END IF;
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message, HINT = hint;
END $$;

-- Reads a text as the bounds of a partition, and checks that the table can become one. The function has no settings of
-- its own: TimeZone, DateStyle, search_path and rights are the caller's, as for an ATTACH PARTITION that the caller
-- sends. Afterwards only the bounds as the server understood them are used, never the text.
CREATE FUNCTION roir.read_bounds(parent regclass, partition regclass, bounds text, OUT written text, OUT condition text)
LANGUAGE plpgsql AS $$
DECLARE
    attach CONSTANT pg_catalog.text := pg_catalog.format('ALTER TABLE %s ATTACH PARTITION %s ', parent, partition);
    trial CONSTANT pg_catalog.text := pg_catalog.concat('joining_', partition::pg_catalog.oid);
    of_one pg_catalog.text;
    message pg_catalog.text;
    detail pg_catalog.text;
    hint pg_catalog.text;
    reading pg_catalog.refcursor;
BEGIN
    -- This runs nothing: the server's parser finds one statement that ends with the bounds. Its error says, in the
    -- server's language, that no cursor can be over such a statement. For several statements the error differs.
    BEGIN
        OPEN reading FOR EXECUTE pg_catalog.concat(attach, 'DEFAULT');
    EXCEPTION WHEN invalid_cursor_definition THEN
        of_one := SQLERRM;
    END;
    BEGIN
        OPEN reading FOR EXECUTE pg_catalog.concat(attach, bounds);
    EXCEPTION
        WHEN invalid_cursor_definition THEN
            message := SQLERRM;
        WHEN syntax_error THEN
            RAISE syntax_error USING MESSAGE = pg_catalog.format('these are no bounds: %s', SQLERRM),
                HINT = 'Give them as in ATTACH PARTITION, from FOR VALUES on, or DEFAULT.';
    END;
    IF NOT coalesce(pg_catalog.texteq(of_one, message), false) THEN
        RAISE syntax_error USING MESSAGE = 'these are no bounds: another statement is behind them',
            HINT = 'Give them as in ATTACH PARTITION, from FOR VALUES on, or DEFAULT.';
    END IF;
    BEGIN
        PERFORM roir.try_table(parent, partition, trial);
        EXECUTE pg_catalog.format('CREATE TABLE roir_data.%I PARTITION OF %s %s', trial, parent, bounds);
        SELECT w.bounds, w.condition INTO written, condition FROM roir.written_bounds(parent, trial) w;
        RAISE SQLSTATE 'RO001';
    EXCEPTION
        WHEN SQLSTATE 'RO001' THEN
            NULL;
        WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
            PERFORM roir.raise_of_trial(SQLSTATE, message, detail, hint, trial, parent, partition);
    END;
    IF written IS NULL THEN
        RAISE syntax_error USING MESSAGE = format('these are no bounds of a partition of %s', parent),
            HINT = 'Give them as in ATTACH PARTITION, from FOR VALUES on, or DEFAULT.';
    END IF;
END $$;

-- bounds: as in ATTACH PARTITION, from FOR VALUES on, or DEFAULT. Returns them as the server writes them. If the build
-- of an index has begun meanwhile, call it again with the returned bounds. If it fails, it changes nothing.
CREATE FUNCTION roir.begin_attach(parent regclass, partition regclass, bounds text, actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    found pg_catalog.record;
BEGIN
    PERFORM roir.may_attach(parent, partition);
    -- Before the bounds are read: its lock on the default partition stays, so later rows are noted.
    PERFORM roir.note_arrivals(parent, partition);
    SELECT b.written, b.condition INTO found FROM roir.read_bounds(parent, partition, bounds) b;
    PERFORM roir.begin_attach_within(parent, partition, found.written, found.condition, actor);
    RETURN found.written;
END $$;

CREATE FUNCTION roir.begin_attach_within(parent regclass, partition regclass, bounds text, condition text, actor text)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
DECLARE
    source oid := coalesce(pg_partition_root(parent), parent);
    other record;
    g record;
BEGIN
    -- Another attach of the table may have begun.
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', partition);
    SELECT p.bounds, p.parent::oid::regclass AS parent INTO other
      FROM roir.source_partition p
      JOIN roir.generation x ON x.id = p.generation_id
      JOIN roir.index i ON i.id = x.index_id
     WHERE p.relation = partition::oid::bigint AND p.status = 'joining'
       AND (p.bounds IS DISTINCT FROM begin_attach_within.bounds OR i.source_oid <> source::bigint
            -- If the database was restored since, the level above isn't known.
            OR p.parent <> begin_attach_within.parent::oid::bigint
               AND p.parent IN (SELECT t.relid::oid::bigint FROM pg_partition_tree(source) t)) LIMIT 1;
    IF FOUND THEN
        RAISE object_in_use USING
            MESSAGE = format('%s is being attached to %s already', partition, other.parent)
                      || coalesce(', ' || other.bounds, ''),
            HINT = format('Attach it there, with these bounds, or cancel that first: SELECT roir.cancel_attach(%L).',
                          partition);
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = partition AND t.tgname = 'roir_joining') THEN
        EXECUTE format('CREATE TRIGGER roir_joining BEFORE INSERT OR UPDATE OR DELETE ON %s '
                       'FOR EACH STATEMENT EXECUTE FUNCTION roir.refuse_write()', partition);
        EXECUTE format('CREATE TRIGGER roir_joining_truncate BEFORE TRUNCATE ON %s '
                       'FOR EACH STATEMENT EXECUTE FUNCTION roir.refuse_write()', partition);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER roir_joining', partition);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER roir_joining_truncate', partition);
    END IF;
    IF NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = partition AND k.conname = 'roir_bounds') THEN
        -- With this constraint the attach needn't look at the rows; NOT VALID, since validate_attach looks at them,
        -- under a weaker lock.
        EXECUTE format('ALTER TABLE %s ADD CONSTRAINT roir_bounds CHECK (%s) NOT VALID', partition, condition);
    END IF;
    FOR g IN
        SELECT x.id, x.index_id FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
         WHERE i.source_oid = source::bigint AND x.status IN ('building', 'active', 'retired') ORDER BY i.id, x.id
    LOOP
        -- A publish or a revert may be showing it at this moment.
        PERFORM roir.hold_view(g.index_id);
        INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, link, name, condition, bounds, status)
        VALUES (g.id, partition::oid::bigint, parent::oid::bigint, true,
                roir.joins_as(g.id, parent, partition, bounds = 'DEFAULT'), partition::text, condition, bounds,
                'joining')
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO roir.event (index_id, actor, action, detail)
            VALUES (g.index_id, actor, 'attach partition', concat_ws(' ', partition::text, bounds));
            PERFORM roir.refresh_view(g.id);
        END IF;
    END LOOP;
END $$;

-- Scans the rows, so that the attach needn't. Checks the constraint first: another session may have replaced it since.
CREATE FUNCTION roir.validate_attach(parent regclass, partition regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM roir.check_code(parent, partition, true);
    IF EXISTS (SELECT FROM pg_constraint k
                WHERE k.conrelid = partition AND k.conname = 'roir_bounds' AND k.contype = 'c') THEN
        EXECUTE format('ALTER TABLE %s VALIDATE CONSTRAINT roir_bounds', partition);
    END IF;
END $$;

-- Attaches the table in one short transaction. False if the build of an index has begun meanwhile, or the copy must
-- begin again: then begin_attach, copy, and try again.
CREATE FUNCTION roir.finish_attach(parent regclass, partition regclass) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
DECLARE
    source oid := coalesce(pg_partition_root(parent), parent);
    g record;
    bounds text;
    joining bigint[];
BEGIN
    PERFORM roir.check_isolation('roir.finish_attach');
    -- As a drain: no generation begins, is switched or published meanwhile.
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', source::regclass);
    -- Nor is the attach cancelled.
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', partition);
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = partition AND t.tgname = 'roir_joining') THEN
        RAISE no_data_found USING
            MESSAGE = format('%s is not being attached any more: another session has cancelled or finished that',
                             partition);
    END IF;
    IF EXISTS (SELECT FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
                WHERE i.source_oid = source::bigint AND x.status IN ('building', 'active', 'retired')
                  AND NOT EXISTS (SELECT FROM roir.source_partition p WHERE p.generation_id = x.id
                                     AND p.relation = partition::oid::bigint AND p.status = 'joining')) THEN
        RETURN false;
    END IF;
    PERFORM roir.check_code(parent, partition, true);
    -- The copied entries leave and the copy begins again, for all generations, since the notes are deleted.
    IF EXISTS (SELECT FROM roir.source_partition p
                WHERE p.relation = partition::oid::bigint AND p.status = 'joining' AND roir.is_disturbed(p.id)) THEN
        UPDATE roir.source_partition p SET status = 'leaving'
         WHERE p.relation = partition::oid::bigint AND p.status = 'joining';
        DELETE FROM roir.emptied e WHERE e.generation_id = 0 AND e.relation = partition::oid::bigint;
        -- A default partition's bounds have changed if a sibling was created.
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT IF EXISTS roir_bounds', partition);
        RETURN false;
    END IF;
    SELECT p.bounds INTO bounds FROM roir.source_partition p
     WHERE p.relation = partition::oid::bigint AND p.status = 'joining' LIMIT 1;
    IF bounds IS NULL THEN
        RAISE no_data_found USING MESSAGE = format('%s is not being attached to %s any more', partition, parent);
    END IF;
    -- Asked of its file, as by the guard: to read it would run its owner's code.
    IF pg_relation_size(partition) > 0 AND EXISTS (
        SELECT FROM roir.source_partition p
         WHERE p.relation = partition::oid::bigint AND p.status = 'joining' AND NOT p.copied) THEN
        RAISE object_not_in_prerequisite_state
            USING MESSAGE = format('the rows of %s are not all copied into the indexes of %s', partition,
                                   source::regclass),
                  HINT = 'Use roir attach-partition, which copies them, then attaches the table.';
    END IF;
    EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s %s', parent, partition, bounds);
    PERFORM roir.release_table(partition);
    SELECT array_agg(p.generation_id ORDER BY x.index_id, x.id) INTO joining
      FROM roir.source_partition p JOIN roir.generation x ON x.id = p.generation_id
     WHERE p.relation = partition::oid::bigint AND p.status = 'joining';
    FOR g IN SELECT unnest(joining) AS id LOOP
        PERFORM roir.hold_view(x.index_id) FROM roir.generation x WHERE x.id = g.id;
        DELETE FROM roir.source_partition p
         WHERE p.generation_id = g.id AND p.relation = partition::oid::bigint AND p.status = 'joining';
        PERFORM roir.register_partitions(g.id, source, ARRAY[partition::oid]);
        PERFORM roir.refresh_view(g.id);
    END LOOP;
    PERFORM roir.watch_truncate(source);
    RETURN true;
END $$;

-- Gives it up: the table is its own again, and the entries that were copied are removed by the next clean-up.
CREATE FUNCTION roir.cancel_attach(partition regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
BEGIN
    PERFORM roir.check_isolation('roir.cancel_attach');
    -- The last step of the attach may be under way.
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', partition);
    UPDATE roir.source_partition p SET status = 'leaving'
     WHERE p.relation = partition::oid::bigint AND p.status = 'joining';
    IF NOT FOUND AND NOT EXISTS (SELECT FROM pg_trigger t
                                  WHERE t.tgrelid = partition AND t.tgname = 'roir_joining') THEN
        RAISE no_data_found USING MESSAGE = format('%s is not being attached', partition);
    END IF;
    PERFORM roir.release_table(partition);
END $$;
