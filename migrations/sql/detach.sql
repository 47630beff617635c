-- Takes a partition out of an indexed source. Its rows go at once, but its entries can be millions: the view hides them
-- at once, then they are removed in batches. The view hides each entry within the partition's bounds that has no row in
-- the source. So it is exact in every snapshot, even if rows or entries come into these bounds again meanwhile: from a
-- new partition, from the default one, from a partition that is about to join.

-- Widens the registered bounds of a parent's default partition, and of the partitions below it, after a sibling has
-- left: they take its rows from now on.
CREATE FUNCTION roir.widen_default(generation bigint, parent oid) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.source_partition p SET condition = roir.wide_bounds(p.relation::oid)
     WHERE p.generation_id = generation AND p.status = 'present'
       AND p.relation IN (SELECT x.oid::bigint FROM pg_partitioned_table t
                           CROSS JOIN LATERAL (SELECT t.partdefid UNION
                                               SELECT b.relation FROM roir.partition_tree(t.partdefid) b) x (oid)
                           WHERE t.partrelid = widen_default.parent)
$$;

-- Registers that a partition's rows have left a generation's source, hides its entries and marks its ranges as done.
-- Its bounds cover the partitions below it, and those that left it earlier, so their registrations go. A partition that
-- left it earlier may be elsewhere in the source by now: then that registration stays.
CREATE FUNCTION roir.forget_gone(generation bigint, partition oid, bounds text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    below oid[];
BEGIN
    PERFORM roir.hold_view(x.index_id) FROM roir.generation x WHERE x.id = generation;
    PERFORM roir.widen_default(generation, p.parent::oid)
       FROM roir.source_partition p
      WHERE p.generation_id = generation AND p.relation = partition AND p.status = 'present';
    WITH RECURSIVE tree AS (
        (SELECT partition AS relation UNION SELECT t.relation FROM roir.partition_tree(partition) t)
        UNION
        SELECT p.relation::oid FROM tree t JOIN roir.source_partition p
            ON p.parent = t.relation AND p.generation_id = generation AND p.status = 'present')
    SELECT array_agg(relation) INTO below FROM tree;
    -- A partition that came after the attach of a table began may have had that table's bounds, and written its
    -- entries.
    INSERT INTO roir.emptied (generation_id, relation)
    SELECT DISTINCT 0, j.relation
      FROM roir.source_partition j
      JOIN roir.source_partition p ON p.generation_id = j.generation_id
     WHERE j.generation_id = generation AND j.status = 'joining' AND j.bounds IS NOT NULL
       AND p.relation = partition AND p.status = 'present' AND p.id > j.id;
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, name, condition, status)
    SELECT generation, partition, coalesce(max(p.parent), 0), coalesce(bool_or(p.leaf), true),
           coalesce(max(p.name), partition::regclass::text),
           -- A user's type, or an enum's labels, may have been renamed since. Wider bounds are right, too.
           coalesce(forget_gone.bounds,
                    CASE WHEN max(p.condition) ~ '::("([^"]|"")+"|\w+)\.' THEN 'true' ELSE max(p.condition) END),
           'leaving'
      FROM roir.source_partition p
     WHERE p.generation_id = generation AND p.relation = partition AND p.status = 'present'
    -- Another session may have registered already that it is gone.
    HAVING forget_gone.bounds IS NOT NULL OR count(*) > 0;
    DELETE FROM roir.source_partition p
     WHERE p.generation_id = generation
       AND (p.parent = ANY (below) OR p.relation = partition AND p.status <> 'leaving');
    UPDATE roir.scan_range r SET done = true
      FROM roir.operation o
     WHERE o.id = r.operation_id AND o.generation_id = generation AND r.relation = ANY (below) AND NOT r.done
       AND NOT EXISTS (SELECT FROM roir.source_partition p
                        WHERE p.generation_id = generation AND p.relation = r.relation AND p.status = 'present');
    PERFORM roir.refresh_view(generation);
END $$;

-- Drops from these tables the triggers of TRUNCATE for these sources, each of which may have an index of its own.
CREATE FUNCTION roir.unwatch_leaves(sources oid[], leaves oid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    watch record;
BEGIN
    FOR watch IN
        SELECT x.tgrelid::regclass AS leaf, x.tgname AS name FROM pg_trigger x
         WHERE x.tgrelid = ANY (leaves) AND x.tgtype & 32 <> 0
           AND x.tgfoid IN (SELECT c.function FROM unnest(sources) AS s (oid), roir.captures(s.oid) c)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', watch.name, watch.leaf);
    END LOOP;
END $$;

-- Takes a partition out of an indexed source: one short transaction. roir clean-up then removes the entries.
CREATE FUNCTION roir.detach_partition(partition regclass, reason text DEFAULT NULL, and_drop boolean DEFAULT false,
                                      actor text DEFAULT session_user)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
-- Below the server's deadlock_timeout, so that this always gives way, never a user's session.
SET lock_timeout = '500ms' AS $$
DECLARE
    parent regclass;
    sources oid[];
    bounds text;
    below oid[];
    g record;
BEGIN
    SELECT array_agg(DISTINCT a.relid::oid) INTO sources
      FROM pg_partition_ancestors(partition) a JOIN roir.index i ON i.source_oid = a.relid::oid
     WHERE i.dropped_at IS NULL AND a.relid <> partition;
    IF sources IS NULL THEN
        RAISE no_data_found USING MESSAGE = format('%s is no partition of a table with a roir index', partition),
            HINT = 'Use ALTER TABLE … DETACH PARTITION, or DROP TABLE.';
    END IF;
    PERFORM roir.check_isolation('roir.detach_partition');
    SELECT i.inhparent INTO parent FROM pg_inherits i WHERE i.inhrelid = partition;
    IF parent IS NOT NULL THEN
        EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', parent);
    END IF;
    -- Another detach, or a DROP, may have got that lock before.
    IF NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = partition AND i.inhparent = parent) THEN
        RAISE no_data_found USING
            MESSAGE = format('%s is no partition any more: it was detached or dropped meanwhile', partition);
    END IF;
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', partition);
    PERFORM roir.check_code(parent, partition, false);
    bounds := roir.wide_bounds(partition);
    SELECT array_agg(t.relid::oid) INTO below FROM pg_partition_tree(partition) t;
    IF EXISTS (SELECT FROM roir.source_partition p WHERE p.status = 'joining' AND p.parent = ANY (below)) THEN
        RAISE object_in_use USING MESSAGE = format('a table is being attached to %s', partition),
            HINT = 'Finish that first: roir attach-partition.';
    END IF;
    PERFORM roir.unwatch_leaves(sources, below);
    FOR g IN
        SELECT x.id, x.index_id FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
         WHERE i.source_oid::oid = ANY (sources) AND x.status IN ('building', 'active', 'retired') ORDER BY i.id, x.id
    LOOP
        PERFORM roir.forget_gone(g.id, partition, bounds);
        INSERT INTO roir.event (index_id, actor, action, detail)
        VALUES (g.index_id, actor, 'detach partition', concat_ws(': ', partition::text, reason));
    END LOOP;
    EXECUTE format('ALTER TABLE %s DETACH PARTITION %s', parent, partition);
    PERFORM roir.widen_default(x.id, parent)
       FROM roir.generation x JOIN roir.index i ON i.id = x.index_id
      WHERE i.source_oid::oid = ANY (sources) AND x.status <> 'dropped';
    IF and_drop THEN
        EXECUTE format('DROP TABLE %s', partition);
    END IF;
    RETURN format('%s; its entries are hidden, roir clean-up removes them',
                  CASE WHEN and_drop THEN 'detached and dropped' ELSE 'detached' END);
END $$;
