-- What entries depend on in the definition of their source, kept with each generation: the server tells of none of it
-- once it has changed. A rename of the table or its schema isn't in it, since nothing goes by those names.

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

-- columns: their numbers by name. expressions: of stored generated columns, by relation and name, since each partition
-- has its own. attributes: of composite types, by type and number. labels: of the primary key's enums by oid, since
-- watermarks hold them as text.
CREATE FUNCTION roir.source_shape(source oid, columns text[]) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH indexed AS MATERIALIZED (
        SELECT a.attname, a.attnum, a.atttypid, a.attgenerated,
               EXISTS (SELECT FROM pg_index i
                        WHERE i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY (i.indkey)) AS in_key
          FROM pg_attribute a WHERE a.attrelid = source AND a.attname = ANY (columns) AND NOT a.attisdropped),
    relation AS (
        SELECT source_shape.source AS oid
        UNION ALL
        SELECT t.relation FROM roir.partition_tree(source_shape.source) t),
    expression AS (
        SELECT r.oid, jsonb_object_agg(a.attname, pg_get_expr(d.adbin, d.adrelid)) AS of_columns
          FROM indexed i CROSS JOIN relation r
          JOIN pg_attribute a ON a.attrelid = r.oid AND a.attname = i.attname AND a.attgenerated = 's'
          JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE EXISTS (SELECT FROM indexed WHERE attgenerated = 's')
         GROUP BY r.oid),
    attribute AS (
        SELECT t.oid, jsonb_object_agg(a.attnum, a.atttypid::bigint) AS of_type
          FROM (SELECT DISTINCT roir.type_tree(i.atttypid) AS oid FROM indexed i) x
          JOIN pg_type t ON t.oid = x.oid AND t.typtype = 'c'
          JOIN pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
         GROUP BY t.oid),
    label AS (
        SELECT e.oid, e.enumlabel
          FROM (SELECT DISTINCT roir.type_tree(i.atttypid) AS oid FROM indexed i WHERE i.in_key) x
          JOIN pg_enum e ON e.enumtypid = x.oid)
    SELECT jsonb_build_object(
        'columns', (SELECT coalesce(jsonb_object_agg(attname, attnum), '{}') FROM indexed),
        'expressions', (SELECT coalesce(jsonb_object_agg(oid, of_columns), '{}') FROM expression),
        'attributes', (SELECT coalesce(jsonb_object_agg(oid, of_type), '{}') FROM attribute),
        'labels', (SELECT coalesce(jsonb_object_agg(oid, enumlabel), '{}') FROM label))
$$;

-- The names of an entry's columns in its source.
CREATE FUNCTION roir.entry_columns(entry jsonb) RETURNS text[]
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT array_agg(c ->> 'source') FROM jsonb_array_elements(entry -> 'columns') c
$$;

-- Keeps the shape that a generation's entries depend on, as it is now. At prepare, and where all oids are other ones.
CREATE FUNCTION roir.keep_shape(generation bigint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.generation g SET shape = roir.source_shape(i.source_oid::oid, roir.entry_columns(g.entry))
      FROM roir.index i WHERE i.id = g.index_id AND g.id = keep_shape.generation
$$;

-- What has changed of the shape that a generation keeps. kind: column (its name belongs to another one now, or to none),
-- expression (of a generated one), attribute (of a composite type: one was dropped), label (of an enum). written_by: the
-- transactions that wrote what it looks at. A generated column that becomes a plain one keeps its values, and is
-- none of it; nor is what a type got in addition.
CREATE FUNCTION roir.shape_changes(generation bigint)
RETURNS TABLE (kind text, name text, was text, is_now text, written_by xid[])
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH kept AS MATERIALIZED (
        SELECT i.source_oid::oid AS source, g.shape
          FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
          JOIN pg_class c ON c.oid = i.source_oid::oid
         WHERE g.id = shape_changes.generation AND g.shape IS NOT NULL),
    relation AS (
        SELECT k.source AS oid FROM kept k
        UNION ALL
        SELECT t.relation FROM kept k CROSS JOIN LATERAL roir.partition_tree(k.source) t WHERE k.shape -> 'expressions' <> '{}')
    SELECT 'column', c.key, c.value, n.attnum::text, ARRAY[o.xmin, n.xmin]
      FROM kept k CROSS JOIN LATERAL jsonb_each_text(k.shape -> 'columns') c
      LEFT JOIN pg_attribute n ON n.attrelid = k.source AND n.attname = c.key AND NOT n.attisdropped
      LEFT JOIN pg_attribute o ON o.attrelid = k.source AND o.attnum = c.value::smallint
     WHERE n.attnum IS DISTINCT FROM c.value::smallint
    UNION ALL
    SELECT 'expression', c.key, c.value, pg_get_expr(d.adbin, d.adrelid), ARRAY[d.xmin]
      FROM kept k CROSS JOIN LATERAL jsonb_each(k.shape -> 'expressions') r
     CROSS JOIN LATERAL jsonb_each_text(r.value) c
      JOIN relation x ON x.oid = r.key::oid
      JOIN pg_attribute a ON a.attrelid = x.oid AND a.attname = c.key AND a.attgenerated <> ''
      JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
     WHERE pg_get_expr(d.adbin, d.adrelid) <> c.value
    UNION ALL
    SELECT 'attribute', format_type(t.oid, NULL), c.value, NULL, ARRAY[a.xmin]
      FROM kept k CROSS JOIN LATERAL jsonb_each(k.shape -> 'attributes') r
     CROSS JOIN LATERAL jsonb_each_text(r.value) c
      JOIN pg_type t ON t.oid = r.key::oid AND t.typtype = 'c'
      LEFT JOIN pg_attribute a ON a.attrelid = t.typrelid AND a.attnum = c.key::smallint
     WHERE a.attisdropped OR a.atttypid IS DISTINCT FROM c.value::oid
    UNION ALL
    SELECT 'label', format_type(e.enumtypid, NULL), l.value, e.enumlabel, ARRAY[e.xmin]
      FROM kept k CROSS JOIN LATERAL jsonb_each_text(k.shape -> 'labels') l
      JOIN pg_enum e ON e.oid = l.key::oid
     WHERE e.enumlabel <> l.value
$$;

-- What is missing of a building generation's tables: columns by their names, unique
-- indexes, and segments that outlive a crash.
CREATE FUNCTION roir.table_faults(generation bigint) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT (SELECT count(*)
              FROM unnest(ARRAY['', '_delta']) AS suffix
             CROSS JOIN generate_series(1, jsonb_array_length(g.entry -> 'columns')) AS position
             WHERE NOT EXISTS (SELECT FROM pg_attribute a
                                WHERE a.attrelid = to_regclass(format('roir_data.g%s%s', g.id, suffix))
                                  AND a.attname = 'c' || position AND NOT a.attisdropped))
           + (SELECT count(*) FROM unnest(ARRAY['', '_delta']) AS suffix
               -- The base has its unique index from the seal on.
               WHERE (suffix = '_delta' OR g.capture_mode = 'direct')
                 AND NOT EXISTS (SELECT FROM pg_index x
                                  WHERE x.indrelid = to_regclass(format('roir_data.g%s%s', g.id, suffix))
                                    AND x.indisunique AND x.indisvalid))
           + (SELECT count(*) FROM roir.segment s WHERE s.generation_id = g.id)
           - (SELECT count(*) FROM roir.partition_tree(to_regclass(format('roir_data.g%s', g.id))) t
                JOIN pg_class c ON c.oid = t.relation AND c.relpersistence = 'p')
      FROM roir.generation g WHERE g.id = table_faults.generation
$$;

-- 1 where a generation's view of its source is gone, or isn't the one that was made: of all rows, and of those columns, by
-- a role that may read them.
CREATE FUNCTION roir.view_faults(generation bigint) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT count(*)
      FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
      LEFT JOIN pg_rewrite r ON r.ev_class = to_regclass(format('roir_data.g%s_source', g.id))
     WHERE g.id = view_faults.generation
       AND (r.oid IS NULL
            OR NOT has_table_privilege((SELECT c.relowner FROM pg_class c WHERE c.oid = r.ev_class), i.source_oid::oid, 'SELECT')
            OR position('WHERE' IN pg_get_viewdef(r.ev_class)) > 0
            OR (SELECT array_agg(DISTINCT d.refobjid::bigint) FROM pg_depend d
                 WHERE d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
                   AND d.refobjid <> r.ev_class) IS DISTINCT FROM ARRAY[i.source_oid]
            OR EXISTS (SELECT FROM jsonb_each_text(g.shape -> 'columns') c
                        WHERE NOT EXISTS (SELECT FROM pg_depend d
                                           WHERE d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                                             AND d.refobjid = i.source_oid::oid AND d.refobjsubid = c.value::int))
            OR EXISTS (SELECT FROM generate_series(1, jsonb_array_length(g.entry -> 'columns')) AS position
                        WHERE NOT EXISTS (SELECT FROM pg_attribute a
                                           WHERE a.attrelid = r.ev_class AND a.attname = 'c' || position)))
$$;

-- How often the building generations of a source find something else than they were prepared for, which only looks at
-- what they keep themselves: what they keep of the shape; the statements that maintain them in the capture function, for
-- their mode; their tables; and on each leaf that they hold the trigger that tells of its TRUNCATE.
CREATE FUNCTION roir.build_faults(source oid) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(sum(
               (SELECT count(*) FROM roir.shape_changes(g.id) s WHERE s.kind <> 'label')
               + (SELECT count(*) FROM roir.source_partition p
                    JOIN roir.partition_tree(build_faults.source) t ON t.relation = p.relation::oid AND t.link = p.link
                   WHERE p.generation_id = g.id AND p.status = 'present' AND p.leaf
                     AND NOT EXISTS (SELECT FROM pg_trigger w WHERE w.tgrelid = t.relation AND w.tgtype & 32 <> 0
                                        AND w.tgfoid IN (SELECT function FROM roir.captures(build_faults.source))))
               + roir.table_faults(g.id)
               -- Operations that an older version has begun have no view, and no function for TRUNCATE, yet.
               + CASE WHEN w.oid IS NULL THEN 0 ELSE roir.view_faults(g.id) END
               + CASE WHEN has_table_privilege(f.proowner, to_regclass(format('roir_data.g%s_delta', g.id)), 'INSERT')
                       AND has_table_privilege(f.proowner, build_faults.source, 'SELECT') THEN 0 ELSE 1 END
               + CASE WHEN w.prosrc !~ format('roir_data\.g%s\M', g.id) THEN 1 ELSE 0 END
               + CASE WHEN position(format('-- generation %s, %s mode', g.id, g.capture_mode) IN f.prosrc) > 0
                      THEN 0 ELSE 1 END), 0)::bigint
      FROM roir.generation g
      JOIN roir.index i ON i.id = g.index_id AND i.source_oid = build_faults.source::bigint
      JOIN pg_proc f ON f.oid = to_regprocedure(format('roir_data.capture_%s()', build_faults.source))
      LEFT JOIN pg_proc w ON w.oid = to_regprocedure(format('roir_data.truncate_%s()', build_faults.source))
     WHERE g.status = 'building' AND g.capture_mode <> 'none'
$$;

-- A digest of all of a source's shape that a build depends on. Of the oids only those that pg_upgrade keeps: of tables,
-- types and enum values. What has no other name goes by what it does: a collation by its locale, the capture's triggers
-- by their function and when they fire. Partitions come and go: roir.partition_changes follows them.
CREATE OR REPLACE FUNCTION roir.fingerprint(source oid, columns text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH tree AS MATERIALIZED (
        SELECT t.relation AS oid FROM roir.partition_tree(fingerprint.source) t)
    SELECT md5(concat_ws('|',
        (SELECT concat_ws(',', c.oid, c.relkind, c.relpersistence, c.relrowsecurity,
                          c.relrowsecurity AND c.relforcerowsecurity,
                          -- Rows of inheritance children would be among those that are looked up.
                          c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = c.oid),
                          EXISTS (SELECT FROM tree JOIN pg_class l ON l.oid = tree.oid AND l.relpersistence = 'u'))
           FROM pg_class c WHERE c.oid = source),
        (SELECT string_agg(concat_ws(',', a.attnum, quote_ident(a.attname), a.atttypid, a.atttypmod,
                                     l.value ->> 'collprovider', l.value ->> 'collcollate', l.value ->> 'collctype',
                                     l.value ->> 'colllocale', l.value ->> 'colliculocale',
                                     l.value ->> 'collicurules', l.value ->> 'collisdeterministic',
                                     quote_nullable(CASE WHEN a.attgenerated <> '' THEN pg_get_expr(d.adbin, d.adrelid) END)), ';'
                           ORDER BY a.attnum)
           FROM pg_attribute a
           LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
           LEFT JOIN pg_collation k ON k.oid = a.attcollation
          CROSS JOIN LATERAL (SELECT to_jsonb(k) AS value) l
          WHERE a.attrelid = source AND a.attname = ANY (columns) AND NOT a.attisdropped),
        (SELECT string_agg(concat_ws(',', i.indisvalid, i.indimmediate, x.attnum, n.nspname, o.opcname), ';'
                           ORDER BY x.position)
           FROM pg_index i
          CROSS JOIN LATERAL unnest(i.indkey[0:i.indnkeyatts - 1], i.indclass[0:i.indnkeyatts - 1])
                WITH ORDINALITY AS x (attnum, opclass, position)
           JOIN pg_opclass o ON o.oid = x.opclass JOIN pg_namespace n ON n.oid = o.opcnamespace
          WHERE i.indrelid = source AND i.indisprimary),
        (SELECT string_agg(concat_ws(',', tgtype, tgenabled, tgattr, tgqual IS NULL), ';' ORDER BY tgtype, tgenabled)
           FROM pg_trigger
          WHERE tgrelid = source AND tgfoid IN (SELECT function FROM roir.captures(source))),
        -- 'A' is ENABLE ALWAYS: a partition's own capture triggers can be disabled one by one.
        (SELECT count(*) FROM pg_trigger WHERE tgfoid IN (SELECT function FROM roir.captures(source)) AND tgenabled <> 'A'),
        roir.build_faults(source)))
$$;

-- A stamp that differs whenever the server has written to a row of the catalogs that a source and its capture are made of.
-- Cheap enough for every batch: where it is as it was there is nothing to look for. An ANALYZE leaves it alone.
CREATE FUNCTION roir.stamp(source oid) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH capture AS MATERIALIZED (SELECT c.function FROM roir.captures(stamp.source) c)
    SELECT md5(concat_ws('|',
        (SELECT c.xmin FROM pg_class c WHERE c.oid = source),
        (SELECT string_agg(a.xmin::text, ',' ORDER BY a.attnum) FROM pg_attribute a WHERE a.attrelid = source AND a.attnum > 0),
        (SELECT string_agg(d.xmin::text, ',' ORDER BY d.adnum) FROM pg_attrdef d WHERE d.adrelid = source),
        (SELECT string_agg(i.xmin::text, ',' ORDER BY i.indexrelid) FROM pg_index i WHERE i.indrelid = source),
        (SELECT string_agg(p.xmin::text, ',' ORDER BY p.oid) FROM pg_proc p WHERE p.oid IN (SELECT function FROM capture)),
        -- Watermarks are texts.
        (SELECT string_agg(e.xmin::text, ',' ORDER BY e.oid)
           FROM (SELECT DISTINCT roir.type_tree(a.atttypid) AS oid
                   FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
                   -- None of the server's own types is an enum, nor made of one.
                   JOIN pg_type t ON t.oid = a.atttypid AND t.typnamespace <> 'pg_catalog'::regnamespace
                  WHERE i.indrelid = source AND i.indisprimary) x
           JOIN pg_enum e ON e.enumtypid = x.oid),
        -- A partition's own capture triggers can be disabled one by one.
        (SELECT string_agg(t.xmin::text, ',' ORDER BY t.oid) FROM pg_trigger t WHERE t.tgrelid = source),
        (SELECT count(*) FROM pg_trigger t WHERE t.tgfoid IN (SELECT function FROM capture) AND t.tgenabled <> 'A')))
$$;

-- As fingerprint was before: for operations that are unfinished when they get the new one.
CREATE FUNCTION roir.fingerprint_before(source oid, columns text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5(concat_ws('|',
        (SELECT concat_ws(',', c.oid, c.relkind, c.relrowsecurity, n.nspname, c.relname)
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = source),
        (SELECT string_agg(concat_ws(',', attnum, quote_ident(attname), atttypid, atttypmod, attcollation), ';'
                           ORDER BY attnum)
           FROM pg_attribute WHERE attrelid = source AND attname = ANY (columns) AND NOT attisdropped),
        (SELECT concat_ws(',', indkey, indclass, indisvalid, indimmediate)
           FROM pg_index WHERE indrelid = source AND indisprimary),
        -- By the names that they had then, whatever they are called now. 32 is TRIGGER_TYPE_TRUNCATE.
        (SELECT string_agg(concat_ws(',', x.name, tgfoid, tgenabled, tgtype), ';' ORDER BY x.name)
           FROM pg_trigger
          CROSS JOIN LATERAL (SELECT CASE WHEN tgtype & 32 <> 0 THEN 'roir_capture_truncate'
                                          ELSE 'roir_capture' END AS name) x
          WHERE tgrelid = source AND tgfoid = to_regprocedure(format('roir_data.capture_%s()', source))),
        (SELECT count(*) FROM pg_trigger
          WHERE tgfoid = to_regprocedure(format('roir_data.capture_%s()', source)) AND tgenabled <> 'A')))
$$;
UPDATE roir.generation g SET shape = roir.source_shape(i.source_oid::oid, roir.entry_columns(g.entry))
  FROM roir.index i JOIN pg_class c ON c.oid = i.source_oid::oid
 WHERE i.id = g.index_id AND g.status IN ('building', 'active', 'retired');
-- Where the old one says that the source was altered, so does the new one.
UPDATE roir.operation o SET fingerprint = roir.fingerprint(i.source_oid::oid, roir.entry_columns(g.entry))
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE g.id = o.generation_id AND o.status IN ('running', 'paused')
   AND o.fingerprint = roir.fingerprint_before(i.source_oid::oid, roir.entry_columns(g.entry));
DROP FUNCTION roir.fingerprint_before(oid, text[]);
