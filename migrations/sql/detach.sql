-- Taking a partition out of an indexed source. Its rows go at once, its entries can be millions: they are hidden at
-- once, by the view, and then removed in batches. What the view hides are entries of the partition's bounds that no row
-- of the source projects to. So it is exact in every snapshot, whatever comes into those bounds again meanwhile: a
-- partition that is made anew, rows that fall into the default one, the entries of a partition that is about to join.

-- SQL that an entry, a row `alias` of a base or delta, has its row in the source.
CREATE FUNCTION roir.has_row(entry jsonb, source oid, alias text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('EXISTS (SELECT FROM %s s WHERE %s)', source::regclass, string_agg(
               CASE WHEN (c.value ->> 'primary_key')::boolean THEN x.same
                    ELSE format('(%s OR s.%I IS NOT DISTINCT FROM NULL AND %s.c%s IS NOT DISTINCT FROM NULL)',
                                x.same, c.value ->> 'source', alias, c.position) END,
               ' AND ' ORDER BY c.position))
      FROM jsonb_array_elements(entry -> 'columns') WITH ORDINALITY AS c (value, position)
     CROSS JOIN LATERAL (
           SELECT format('s.%I::%s %s %s.c%s', c.value ->> 'source', c.value ->> 'cast', c.value ->> 'equals', alias,
                         c.position) AS same) x
     WHERE c.position <= (entry -> 'identity')::int
$$;

-- SQL that an entry, a row `alias` of a base, is to be seen. NULL where all are: no partition is leaving or joining.
CREATE FUNCTION roir.is_shown(generation bigint, alias text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('(NOT (%s) OR %s)', string_agg(roir.entry_condition(g.entry, p.condition, alias), ' OR ' ORDER BY p.id),
                  roir.has_row(g.entry, i.source_oid::oid, alias))
      FROM roir.source_partition p
      JOIN roir.generation g ON g.id = p.generation_id
      JOIN roir.index i ON i.id = g.index_id
     WHERE p.generation_id = is_shown.generation AND p.status IN ('leaving', 'joining')
     GROUP BY g.entry, i.source_oid
$$;

-- Makes a generation's view anew, if it has one: guarded as it is, and hiding what belongs to partitions that are
-- leaving or joining. Locks the view in ACCESS EXCLUSIVE mode.
CREATE FUNCTION roir.refresh_view(generation bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    g record;
    conditions text[] := '{}';
BEGIN
    SELECT x.id, x.entry, c.oid::regclass AS name, c.reloptions AS options,
           EXISTS (SELECT FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                    WHERE r.ev_class = c.oid AND d.refclassid = 'pg_proc'::regclass
                      AND d.refobjid = 'roir.published(bigint)'::regprocedure) AS guarded
      INTO g
      FROM roir.generation x
      JOIN roir.index i ON i.id = x.index_id
      JOIN pg_namespace n ON n.nspname = i.schema_name
      JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = i.name AND c.relkind = 'v'
     WHERE x.id = generation AND x.status = 'active';
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF g.guarded THEN
        conditions := ARRAY[format('(SELECT roir.published(%s))', generation)];
    END IF;
    conditions := array_remove(conditions || roir.is_shown(generation, 'b'), NULL);
    EXECUTE format('CREATE OR REPLACE VIEW %s %s AS SELECT %s FROM roir_data.g%s b %s', g.name,
        (SELECT format('WITH (%s)', string_agg(format('%I = %L', split_part(o, '=', 1), split_part(o, '=', 2)), ', '))
           FROM unnest(g.options) o HAVING count(*) > 0),
        (SELECT string_agg(format('b.c%s AS %I', c.position, c.value ->> 'source'), ', ' ORDER BY c.position)
           FROM jsonb_array_elements(g.entry -> 'columns') WITH ORDINALITY AS c (value, position)),
        generation,
        (SELECT 'WHERE ' || string_agg(c, ' AND ') FROM unnest(conditions) c HAVING count(*) > 0));
END $$;

-- Writes down that a partition's rows have left a generation's source, hides its entries and gives up its ranges.
-- What was written down of the partitions below it, and of those that left it earlier, is covered by its own bounds.
CREATE FUNCTION roir.forget_gone(generation bigint, partition oid, bounds text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    below oid[];
BEGIN
    WITH RECURSIVE tree AS (
        (SELECT partition AS relation UNION SELECT t.relation FROM roir.partition_tree(partition) t)
        UNION
        SELECT p.relation::oid FROM tree t JOIN roir.source_partition p
            ON p.parent = t.relation AND p.generation_id = generation)
    SELECT array_agg(relation) INTO below FROM tree;
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, name, condition, status)
    SELECT generation, partition, coalesce(max(p.parent), 0), coalesce(bool_or(p.leaf), true),
           coalesce(max(p.name), partition::regclass::text), coalesce(bounds, max(p.condition)), 'leaving'
      FROM roir.source_partition p
     WHERE p.generation_id = generation AND p.relation = partition AND p.status = 'present';
    DELETE FROM roir.source_partition p
     WHERE p.generation_id = generation AND p.relation = ANY (below)
       AND NOT (p.relation = partition AND p.status = 'leaving');
    UPDATE roir.scan_range r SET done = true
      FROM roir.operation o
     WHERE o.id = r.operation_id AND o.generation_id = generation AND r.relation = ANY (below) AND NOT r.done;
    PERFORM roir.refresh_view(generation);
END $$;

-- Takes a partition out of an indexed source: one short transaction. roir clean-up then removes the entries.
CREATE FUNCTION roir.detach_partition(partition regclass, reason text DEFAULT NULL, and_drop boolean DEFAULT false,
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
    leaf regclass;
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
    FOR leaf IN
        SELECT t.tgrelid FROM pg_trigger t WHERE t.tgrelid = ANY (below) AND t.tgname = 'roir_capture_truncate'
    LOOP
        EXECUTE format('DROP TRIGGER roir_capture_truncate ON %s', leaf);
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
