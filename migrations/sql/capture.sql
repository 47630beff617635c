-- The capture reads a source by the generation's own view, and runs as the source's owner; TRUNCATE has a function of its
-- own, which runs as ours. Triggers are told by what they call: a table and one of its partitions may both be sources.

-- Tables and functions of these schemas have rights of their own. A source's owner, as whom the capture runs, needs this.
GRANT USAGE ON SCHEMA roir, roir_data TO PUBLIC;

-- Entries know the numbers of their columns.
UPDATE roir.generation g
   SET entry = jsonb_set(g.entry, '{columns}', (
       SELECT jsonb_agg(c.value || jsonb_build_object('attnum', coalesce(a.attnum, 0)) ORDER BY c.position)
         FROM jsonb_array_elements(g.entry -> 'columns') WITH ORDINALITY AS c (value, position)
         LEFT JOIN pg_attribute a ON a.attrelid = i.source_oid::oid AND a.attname = c.value ->> 'source'
              AND NOT a.attisdropped))
  FROM roir.index i WHERE i.id = g.index_id AND g.status <> 'dropped';

-- True for the functions that a source's capture triggers call.
CREATE FUNCTION roir.is_capture(function oid, source oid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT function IN (to_regprocedure(format('roir_data.capture_%s()', source)),
                        to_regprocedure(format('roir_data.truncate_%s()', source)))
$$;

-- True where the caller's snapshot sees the generation in this capture mode: else it is older than the switch, or the
-- publish, and doesn't see all of the entries.
CREATE FUNCTION roir.is_in_mode(generation bigint, mode text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT EXISTS (SELECT FROM roir.generation g
                    WHERE g.id = is_in_mode.generation AND g.capture_mode = is_in_mode.mode)
$$;

-- Whether a TRUNCATE of a leaf is one of the source's: not where it was detached, and kept the trigger. An error where the
-- transaction's snapshot may not see all of the entries.
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

-- TRUNCATE of one leaf, called by the truncate function: its entries go in the same transaction, out of a delta or base. No
-- batch of that leaf is under way, since TRUNCATE has the leaf for itself, and no writer of it. The constraint is a text,
-- which must mean what it says whatever the user's session is set to.
CREATE FUNCTION roir.forget_leaf(generation bigint, store text, leaf oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' SET lc_monetary = 'C' AS $$
DECLARE
    any_entry boolean;
BEGIN
    -- A TRUNCATE of the whole source tells of every leaf, when all entries have gone already.
    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', store) INTO any_entry;
    IF any_entry THEN
        EXECUTE format('DELETE FROM %s x WHERE %s', store, roir.entry_condition(
            (SELECT g.entry FROM roir.generation g WHERE g.id = generation),
            coalesce(nullif(pg_get_partition_constraintdef(leaf), ''), 'true'), 'x'));
    END IF;
END $$;

-- What capture functions of the version before call, until the next clean-up makes them anew.
ALTER FUNCTION roir.forget_partition(oid, oid) SET datestyle = 'ISO, YMD';
ALTER FUNCTION roir.forget_partition(oid, oid) SET timezone = 'UTC';
ALTER FUNCTION roir.forget_partition(oid, oid) SET intervalstyle = 'postgres';
ALTER FUNCTION roir.forget_partition(oid, oid) SET extra_float_digits = 3;
ALTER FUNCTION roir.forget_partition(oid, oid) SET bytea_output = 'hex';

-- Gives every leaf the trigger that tells of its TRUNCATE: unlike row triggers it isn't cloned from the parent.
CREATE OR REPLACE FUNCTION roir.watch_truncate(source oid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    unwatched oid;
    name text := 'roir_truncate_' || source;
    before text := coalesce(current_setting('roir.own_ddl', true), '');
BEGIN
    -- Not by SET in the head, which only a superuser may write for a setting that no extension knows.
    PERFORM set_config('roir.own_ddl', 'on', true);
    FOR unwatched IN
        SELECT t.relation FROM roir.partition_tree(source) t
         WHERE t.leaf AND NOT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = t.relation AND g.tgtype & 32 <> 0
                                         AND roir.is_capture(g.tgfoid, source))
         ORDER BY t.relation
    LOOP
        EXECUTE format('CREATE TRIGGER %I AFTER TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION roir_data.truncate_%s()',
                       name, unwatched::regclass, source);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', unwatched::regclass, name);
    END LOOP;
    PERFORM set_config('roir.own_ddl', before, true);
END $$;

-- As before, but the capture triggers are told by what they call.
CREATE OR REPLACE FUNCTION roir.fingerprint(source oid, columns text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5(concat_ws('|',
        (SELECT concat_ws(',', c.oid, c.relkind, c.relrowsecurity, n.nspname, c.relname)
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = source),
        (SELECT string_agg(concat_ws(',', attnum, quote_ident(attname), atttypid, atttypmod, attcollation), ';'
                           ORDER BY attnum)
           FROM pg_attribute WHERE attrelid = source AND attname = ANY (columns) AND NOT attisdropped),
        (SELECT concat_ws(',', indkey, indclass, indisvalid, indimmediate)
           FROM pg_index WHERE indrelid = source AND indisprimary),
        (SELECT string_agg(concat_ws(',', tgenabled, tgtype), ';' ORDER BY tgtype)
           FROM pg_trigger WHERE tgrelid = source AND roir.is_capture(tgfoid, source)),
        -- 'A' is ENABLE ALWAYS: a partition's own capture triggers can be disabled one by one.
        (SELECT count(*) FROM pg_trigger WHERE roir.is_capture(tgfoid, source) AND tgenabled <> 'A')))
$$;

-- Sources by the oid that is recorded and by the one that they have. None where nothing was restored.
CREATE OR REPLACE FUNCTION roir.restored_sources() RETURNS TABLE (recorded oid, present oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT DISTINCT i.source_oid::oid, t.tgrelid
      FROM roir.index i
      JOIN pg_proc p ON p.proname = 'capture_' || i.source_oid AND p.pronamespace = 'roir_data'::regnamespace
      JOIN pg_trigger t ON t.tgfoid = p.oid AND t.tgtype & 1 <> 0 AND t.tgparentid = 0
     WHERE i.dropped_at IS NULL AND t.tgrelid <> i.source_oid::oid
$$;

-- Makes the control schema name the tables that there are, sources by their triggers and partitions by their names.
-- A partition that was renamed since it was written down is then one that is gone and one that came: sync-partitions.
CREATE OR REPLACE FUNCTION roir.adopt_restored() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC'
SET intervalstyle = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex' AS $$
DECLARE
    s record;
BEGIN
    CREATE TEMP TABLE restored ON COMMIT DROP AS
        SELECT r.recorded, r.present, i.id AS index FROM roir.restored_sources() r
          JOIN roir.index i ON i.source_oid = r.recorded::bigint AND i.dropped_at IS NULL;
    -- By way of another name, since one's new oid may be another one's old.
    FOR s IN SELECT DISTINCT r.recorded, f.kind FROM pg_temp.restored r, unnest(ARRAY['capture', 'truncate']) AS f (kind)
              WHERE to_regprocedure(format('roir_data.%s_%s()', f.kind, r.recorded)) IS NOT NULL LOOP
        EXECUTE format('ALTER FUNCTION roir_data.%s_%s() RENAME TO restored_%s_%s', s.kind, s.recorded, s.kind, s.recorded);
    END LOOP;
    FOR s IN SELECT DISTINCT r.recorded, r.present, f.kind FROM pg_temp.restored r, unnest(ARRAY['capture', 'truncate']) AS f (kind)
              WHERE to_regprocedure(format('roir_data.restored_%s_%s()', f.kind, r.recorded)) IS NOT NULL LOOP
        EXECUTE format('ALTER FUNCTION roir_data.restored_%s_%s() RENAME TO %s_%s', s.kind, s.recorded, s.kind, s.present);
    END LOOP;
    UPDATE roir.index i SET source_oid = r.present::bigint FROM pg_temp.restored r WHERE i.id = r.index;
    UPDATE roir.source_partition p
       SET relation = t.relation, parent = t.parent, link = CASE WHEN p.status = 'present' THEN t.link END,
           condition = CASE WHEN p.status = 'present'
                            THEN coalesce(nullif(pg_get_partition_constraintdef(t.relation), ''), 'true')
                            ELSE p.condition END
      FROM pg_temp.restored r
      JOIN roir.generation g ON g.index_id = r.index
     CROSS JOIN LATERAL roir.partition_tree(r.present) t
     WHERE p.generation_id = g.id AND p.name = t.relation::regclass::text;
    -- What is on its way in or out isn't in the tree.
    UPDATE roir.source_partition p
       SET relation = coalesce(to_regclass(p.name)::oid::bigint, 0),
           -- A hash partition's constraint names its parent's oid. Wider bounds are right too: they are asked for rows.
           condition = CASE WHEN p.condition LIKE '%satisfies_hash_partition%' THEN 'true' ELSE p.condition END
      FROM pg_temp.restored r JOIN roir.generation g ON g.index_id = r.index
     WHERE p.generation_id = g.id AND p.status <> 'present';
    PERFORM roir.refresh_view(g.id)
       FROM pg_temp.restored r JOIN roir.generation g ON g.index_id = r.index AND g.status = 'active'
      WHERE EXISTS (SELECT FROM roir.source_partition p WHERE p.generation_id = g.id AND p.status <> 'present');
    -- Its ranges name leaves by their old oids, and what went on in the first database nobody knows here.
    UPDATE roir.operation o
       SET status = 'failed', error = 'the database was restored from a dump while it was unfinished',
           heartbeat_at = NULL, ticked_at = NULL
      FROM pg_temp.restored r WHERE o.index_id = r.index AND o.status IN ('running', 'paused');
    INSERT INTO roir.event (index_id, actor, action, detail)
    SELECT r.index, session_user, 'restored', format('%s has oid %s now, not %s', r.present::regclass, r.present, r.recorded)
      FROM pg_temp.restored r;
END $$;

-- Takes a partition out of an indexed source: one short transaction. roir clean-up then removes the entries.
CREATE OR REPLACE FUNCTION roir.detach_partition(partition regclass, reason text DEFAULT NULL, and_drop boolean DEFAULT false,
                                      actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO, YMD' SET timezone = 'UTC' SET intervalstyle = 'postgres'
SET extra_float_digits = 3 SET bytea_output = 'hex'
-- Below the server's deadlock_timeout: it is always this that gives way.
SET lock_timeout = '500ms' AS $$
DECLARE
    parent regclass;
    source regclass;
    bounds text;
    below oid[];
    g record;
    watch record;
BEGIN
    SELECT a.relid INTO source
      FROM pg_partition_ancestors(partition) a JOIN roir.index i ON i.source_oid = a.relid::oid
     WHERE i.dropped_at IS NULL AND a.relid <> partition LIMIT 1;
    IF source IS NULL THEN
        RAISE no_data_found USING MESSAGE = format('%s is no partition of a table with a roir index', partition),
            HINT = 'Use ALTER TABLE … DETACH PARTITION, or DROP TABLE.';
    END IF;
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE feature_not_supported USING
            MESSAGE = 'roir.detach_partition needs a READ COMMITTED transaction: it must see all that is committed';
    END IF;
    SELECT i.inhparent INTO parent FROM pg_inherits i WHERE i.inhrelid = partition;
    EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', parent);
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', partition);
    bounds := coalesce(nullif(pg_get_partition_constraintdef(partition), ''), 'true');
    SELECT array_agg(t.relid::oid) INTO below FROM pg_partition_tree(partition) t;
    IF EXISTS (SELECT FROM roir.source_partition p WHERE p.status = 'joining' AND p.parent = ANY (below)) THEN
        RAISE object_in_use USING MESSAGE = format('a table is being attached to %s', partition),
            HINT = 'Finish that first: roir attach-partition.';
    END IF;
    -- Those of this source only: a partition may have an index of its own.
    FOR watch IN
        SELECT x.tgrelid::regclass AS leaf, x.tgname AS name FROM pg_trigger x
         WHERE x.tgrelid = ANY (below) AND x.tgtype & 32 <> 0 AND roir.is_capture(x.tgfoid, source)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', watch.name, watch.leaf);
    END LOOP;
    FOR g IN
        SELECT x.id, x.index_id FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
         WHERE i.source_oid = source::oid AND x.status IN ('building', 'active', 'retired') ORDER BY x.id
    LOOP
        PERFORM roir.forget_gone(g.id, partition, bounds);
        INSERT INTO roir.event (index_id, actor, action, detail)
        VALUES (g.index_id, actor, 'detach partition', concat_ws(': ', partition::text, reason));
    END LOOP;
    EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', parent, partition);
    IF and_drop THEN
        EXECUTE format('DROP TABLE %s', partition);
    END IF;
    RETURN format('%s; its entries are hidden, roir clean-up removes them',
                  CASE WHEN and_drop THEN 'detached and dropped' ELSE 'detached' END);
END $$;
