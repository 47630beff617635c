-- What is below a table, and below a type. A shard has these functions, too (airflow_roir/engine/shards/home.py).

-- All partitions below a table, whole levels too; none for an ordinary table. One that is being detached concurrently
-- has gone already. link: the transaction that attached it; another one means that it was out meanwhile. Not
-- pg_partition_tree(), which locks every one of them.
CREATE FUNCTION roir.partition_tree(source oid) RETURNS TABLE (relation oid, parent oid, leaf boolean, link text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE tree AS (
        SELECT i.inhrelid, i.inhparent, i.xmin::text AS link, c.relkind
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = partition_tree.source AND NOT i.inhdetachpending
        UNION ALL
        SELECT i.inhrelid, i.inhparent, i.xmin::text AS link, c.relkind
          FROM tree t JOIN pg_inherits i ON i.inhparent = t.inhrelid JOIN pg_class c ON c.oid = i.inhrelid
         WHERE t.relkind = 'p' AND NOT i.inhdetachpending)
    SELECT t.inhrelid, t.inhparent, t.relkind <> 'p', t.link FROM tree t
$$;

-- A type and all that its values are made of: base types of domains, elements of arrays, attributes of composites, what
-- ranges range over.
CREATE FUNCTION roir.type_tree(type oid) RETURNS SETOF oid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE tree (oid) AS (
        SELECT type_tree.type
        UNION
        SELECT n.oid
          FROM tree JOIN pg_type t ON t.oid = tree.oid
         CROSS JOIN LATERAL (
               SELECT t.typbasetype AS oid WHERE t.typtype = 'd'
               UNION ALL SELECT t.typelem WHERE t.typelem <> 0
               UNION ALL SELECT a.atttypid FROM pg_attribute a
                          WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
               UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE r.rngtypid = t.oid
               UNION ALL SELECT r.rngtypid FROM pg_range r WHERE r.rngmultitypid = t.oid) n)
    SELECT tree.oid FROM tree
$$;
