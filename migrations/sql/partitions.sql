-- The partitions of a source, as a generation's entries know them. The primary key of a partitioned table holds all of
-- its partition key, and every entry holds the primary key: so a partition's constraint can be asked of an entry.

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

-- A partition's bounds, or wider ones: of the uppermost default partition that it is in. Once one next to that leaves,
-- the server knows that one's new bounds at once, but a session that has asked for those below it goes on with the old
-- ones.
CREATE FUNCTION roir.wide_bounds(partition oid) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(roir.bounds_of(coalesce((
               SELECT a.relid::oid FROM pg_partition_ancestors(partition) WITH ORDINALITY AS a (relid, n)
                 JOIN pg_partitioned_table t ON t.partdefid = a.relid ORDER BY a.n DESC LIMIT 1), partition)), 'true')
$$;

-- Writes down that a generation holds the rows of these leaves, of all leaves by default, and all levels above them.
-- links: only of those that are partitions by one of these still. Texts under settings that make them read back as the
-- same, whoever calls.
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

-- Takes leaves in that a generation doesn't know. from_birth: their TRUNCATE is seen from their first row on, since
-- this is the end of the statement that brought them. Without that a TRUNCATE in the transaction that made the leaf
-- leaves no trace, so what is within its bounds is asked for its row, as when a partition leaves. So it is for a leaf
-- that has another file than its first one. Only these leaves are touched: whoever makes one waits for nobody who
-- writes to another.
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
