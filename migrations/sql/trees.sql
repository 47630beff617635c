-- The partitions below a table, and the types below a type. A shard has these functions, too
-- (airflow_roir/shards/home.py).

-- All partitions below a table, with all levels; none for an ordinary table. A partition that is being detached
-- concurrently doesn't count. link: the transactions that attached the partition and the levels above it; if the link
-- changes, the partition was out meanwhile, alone or with a level. Not pg_partition_tree(), which locks all partitions.
CREATE FUNCTION roir.partition_tree(source oid) RETURNS TABLE (relation oid, parent oid, leaf boolean, link text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH RECURSIVE tree AS (
        SELECT i.inhrelid, i.inhparent, i.xmin::text AS link, c.relkind
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
         WHERE i.inhparent = partition_tree.source AND NOT i.inhdetachpending
        UNION ALL
        SELECT i.inhrelid, i.inhparent, concat(t.link, '.', i.xmin), c.relkind
          FROM tree t JOIN pg_inherits i ON i.inhparent = t.inhrelid JOIN pg_class c ON c.oid = i.inhrelid
         WHERE t.relkind = 'p' AND NOT i.inhdetachpending)
    SELECT t.inhrelid, t.inhparent, t.relkind <> 'p', t.link FROM tree t
$$;

-- A type and all types that its values contain: base types of domains, elements of arrays, attributes of composites,
-- subtypes of ranges.
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

-- The rules by which this server compares the values of columns, by the columns' names: another server's rules of the
-- same name may differ. 'C': by bytes. A rule that begins with '= ' also decides whether two values are equal.
CREATE FUNCTION roir.rules(source oid, columns text[]) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH part AS MATERIALIZED (
        SELECT a.attname AS name, a.attcollation, t.oid, t.typname, t.typtype, t.typrelid
          FROM pg_attribute a CROSS JOIN LATERAL roir.type_tree(a.atttypid) x (oid) JOIN pg_type t ON t.oid = x.oid
         WHERE a.attrelid = rules.source AND a.attname = ANY (rules.columns) AND NOT a.attisdropped),
    used AS (
        SELECT p.name, p.attcollation AS collation, false AS folds FROM part p
        UNION
        SELECT p.name, r.rngcollation, false FROM part p JOIN pg_range r ON r.rngtypid = p.oid
        UNION
        SELECT p.name, a.attcollation, false FROM part p JOIN pg_attribute a ON a.attrelid = p.typrelid
         WHERE p.typtype = 'c' AND a.attnum > 0 AND NOT a.attisdropped
        UNION
        -- These types use the database's collation, even if the column has another one.
        SELECT p.name, 'pg_catalog."default"'::regcollation, p.typname = 'citext' FROM part p
         WHERE p.typname IN ('citext', 'jsonb')),
    known AS (
        SELECT u.name, u.folds OR NOT c.collisdeterministic AS equates, x.*
          FROM used u JOIN pg_collation c ON c.oid = u.collation
         CROSS JOIN LATERAL (
               SELECT c.collprovider AS provider, to_jsonb(c) AS told, c.collcollate AS "order", c.collctype AS class,
                      pg_collation_actual_version(c.oid) AS version
                WHERE c.oid <> 'pg_catalog."default"'::regcollation
               UNION ALL
               SELECT d.datlocprovider, to_jsonb(d), d.datcollate, d.datctype,
                      pg_database_collation_actual_version(d.oid)
                 FROM pg_database d
                WHERE d.datname = current_database() AND c.oid = 'pg_catalog."default"'::regcollation) x),
    rule AS (
        SELECT k.name, concat(CASE WHEN k.equates THEN '= ' END,
                   CASE WHEN k.provider <> 'c'
                        -- The name of the column has changed with the versions of PostgreSQL.
                        THEN concat_ws(' ', CASE k.provider WHEN 'i' THEN 'ICU' WHEN 'b' THEN 'builtin'
                                                            ELSE k.provider::text END,
                                       coalesce(k.told ->> 'colllocale', k.told ->> 'colliculocale',
                                                k.told ->> 'datlocale',
                                                k.told ->> 'daticulocale'),
                                       coalesce(k.told ->> 'collicurules', k.told ->> 'daticurules'), k.version)
                        WHEN k."order" IN ('C', 'POSIX') AND k.class IN ('C', 'POSIX') THEN 'C'
                        ELSE concat_ws(' ', 'libc', replace(lower(k."order"), 'utf-8', 'utf8'),
                                       nullif(replace(lower(k.class), 'utf-8', 'utf8'),
                                              replace(lower(k."order"), 'utf-8', 'utf8')),
                                       k.version) END) AS text
          FROM known k
        UNION
        SELECT k.name, 'encoding ' || getdatabaseencoding() FROM known k
        UNION
        SELECT p.name, format('enum %s %s', p.oid::regtype,
                              (SELECT to_jsonb(array_agg(e.enumlabel::text ORDER BY e.enumsortorder))
                                                               FROM pg_enum e WHERE e.enumtypid = p.oid))
          FROM part p WHERE p.typtype = 'e')
    SELECT coalesce(jsonb_object_agg(n.name,
                                     (SELECT coalesce(jsonb_agg(r.text ORDER BY r.text COLLATE "C"), '[]') FROM rule r
                                               WHERE r.name = n.name)), '{}')
      FROM (SELECT DISTINCT p.name FROM part p) n
$$;
