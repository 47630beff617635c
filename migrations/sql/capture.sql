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

-- The functions that a source's capture triggers call. Ask by IN (SELECT …), which asks once for all triggers.
CREATE FUNCTION roir.captures(source oid) RETURNS TABLE (function oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT to_regprocedure(format('roir_data.%s_%s()', kind, source))::oid FROM unnest(ARRAY['capture', 'truncate']) kind
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
                                         AND g.tgfoid IN (SELECT function FROM roir.captures(source)))
         ORDER BY t.relation
    LOOP
        EXECUTE format('CREATE TRIGGER %I AFTER TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION roir_data.truncate_%s()',
                       name, unwatched::regclass, source);
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', unwatched::regclass, name);
    END LOOP;
    PERFORM set_config('roir.own_ddl', before, true);
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
         WHERE x.tgrelid = ANY (below) AND x.tgtype & 32 <> 0 AND x.tgfoid IN (SELECT function FROM roir.captures(source))
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
