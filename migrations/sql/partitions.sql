-- The partitions of a source that a generation has entries of. The primary key of a partitioned table contains its
-- whole partition key, and every entry contains the primary key. So an entry can be tested against a partition's
-- constraint.

-- The changes since a generation's partitions were registered: partitions that are gone (of those that went together
-- only the uppermost), and leaves that aren't registered. Waits for no lock.
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

-- A partition's bounds; if it is in a default partition, the bounds of the uppermost of these, which are wider. When a
-- sibling of the default partition leaves, its bounds widen at once. But a session that has already read the bounds of
-- a partition below it keeps the old ones.
CREATE FUNCTION roir.wide_bounds(partition oid) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(roir.bounds_of(coalesce((
               SELECT a.relid::oid FROM pg_partition_ancestors(partition) WITH ORDINALITY AS a (relid, n)
                 JOIN pg_partitioned_table t ON t.partdefid = a.relid ORDER BY a.n DESC LIMIT 1), partition)), 'true')
$$;

-- Registers that a generation has the entries of these leaves (by default, of all), and all levels above them. links:
-- only leaves that are still attached by one of these links. The texts of bounds don't depend on the caller's settings
-- (session_settings.sql).
CREATE FUNCTION roir.register_partitions(generation bigint, source oid, leaves oid[] DEFAULT NULL,
                                         links text[] DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.check_source(register_partitions.source);
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, link, name, condition, status)
    SELECT register_partitions.generation, t.relation, t.parent, t.leaf, t.link, t.relation::regclass::text,
           -- No constraint: the only partition is the default one.
           coalesce(nullif(pg_get_partition_constraintdef(t.relation), ''), 'true'), 'present'
      FROM roir.partition_tree(register_partitions.source) t
     WHERE leaves IS NULL OR t.relation = ANY (leaves) AND (links IS NULL OR t.link = ANY (links)) OR NOT t.leaf
    ON CONFLICT DO NOTHING
$$;

-- Registers leaves that a generation doesn't know. from_birth: the caller is the end of the statement that brought the
-- leaves, so each TRUNCATE since their first row is noticed. Otherwise a TRUNCATE in the transaction that created the
-- leaf leaves no trace; so each entry within its bounds is checked for its row, as when a partition leaves. The same
-- holds for a leaf whose file isn't its first one. Only these leaves are locked: a session that creates a leaf doesn't
-- wait for writers of another.
CREATE FUNCTION roir.adopt_partitions(generation bigint, source oid, leaves oid[], from_birth boolean DEFAULT false,
                                      links text[] DEFAULT NULL)
RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.register_partitions(generation, source, leaves, links);
    SELECT roir.watch_leaves(source, leaves);
    INSERT INTO roir.source_partition (generation_id, relation, parent, leaf, name, condition, status)
    SELECT p.generation_id, p.relation, p.parent, p.leaf, p.name, p.condition, 'leaving'
      FROM roir.source_partition p JOIN pg_class c ON c.oid = p.relation::oid
     WHERE p.generation_id = generation AND p.status = 'present' AND p.relation::oid = ANY (leaves)
       AND NOT (from_birth AND c.relfilenode = c.oid);
$$;
