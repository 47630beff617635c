-- Checks that a build finds what it was prepared for: its own tables, and a digest and a stamp of its source.

-- The number of rules and triggers that others have added to a generation's tables, and of tables with row security:
-- these change or hide rows.
CREATE FUNCTION roir.table_additions(generation bigint) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    -- As an array, so that only their rows of the catalogs are read.
    WITH stored (oids) AS MATERIALIZED (
        SELECT ARRAY(
            SELECT to_regclass(format('roir_data.g%s', generation))::oid
            UNION ALL SELECT to_regclass(format('roir_data.g%s_delta', generation))::oid
            UNION ALL SELECT t.relation FROM roir.partition_tree(to_regclass(format('roir_data.g%s', generation))) t))
    SELECT (SELECT count(*) FROM pg_rewrite r WHERE r.ev_class = ANY ((SELECT oids FROM stored)::oid[]))
           + (SELECT count(*) FROM pg_trigger g
               WHERE g.tgrelid = ANY ((SELECT oids FROM stored)::oid[]) AND NOT g.tgisinternal
                 -- Segments that are being compacted have a trigger of ours.
                 AND g.tgfoid <> ALL (roir.touch_functions(generation)))
           + (SELECT count(*) FROM pg_class c WHERE c.oid = ANY ((SELECT oids FROM stored)::oid[]) AND c.relrowsecurity)
$$;

-- The number of faults of a building generation's tables: missing columns, by name, and unique indexes; segments that
-- are missing or don't survive a crash; additions. OFFSET 0: looks them up one by one; a join would read the whole
-- catalog.
CREATE FUNCTION roir.table_faults(generation bigint) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT (SELECT count(*)
              FROM unnest(ARRAY['', '_delta']) AS suffix
             CROSS JOIN generate_series(1, jsonb_array_length(g.entry -> 'columns')) AS position
             WHERE NOT EXISTS (SELECT FROM pg_attribute a
                                WHERE a.attrelid = to_regclass(format('roir_data.g%s%s', g.id, suffix))
                                  AND a.attname = 'c' || position AND NOT a.attisdropped OFFSET 0))
           + (SELECT count(*) FROM unnest(ARRAY['', '_delta']) AS suffix
               -- The base has its unique index from the seal on.
               WHERE (suffix = '_delta' OR g.capture_mode = 'direct')
                 AND NOT EXISTS (SELECT FROM pg_index x
                                  WHERE x.indrelid = to_regclass(format('roir_data.g%s%s', g.id, suffix))
                                    AND x.indisunique AND x.indisvalid OFFSET 0))
           + (SELECT count(*) FROM roir.segment s WHERE s.generation_id = g.id)
           - (SELECT count(*) FROM pg_class c
               WHERE c.oid = ANY (ARRAY(SELECT t.relation
                                          FROM roir.partition_tree(to_regclass(format('roir_data.g%s', g.id))) t))
                 AND c.relpersistence = 'p')
           + roir.table_additions(g.id)
      FROM roir.generation g WHERE g.id = table_faults.generation
$$;

-- 1 if a generation's view of its source is gone or isn't as it was created: with all rows and the same columns, owned
-- by a role that may read the source.
CREATE FUNCTION roir.view_faults(generation bigint) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT count(*)
      FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
      LEFT JOIN pg_rewrite r ON r.ev_class = to_regclass(format('roir_data.g%s_source', g.id))
     WHERE g.id = view_faults.generation
       AND (r.oid IS NULL
            OR NOT has_table_privilege((SELECT c.relowner FROM pg_class c WHERE c.oid = r.ev_class),
                                       i.source_oid::oid, 'SELECT')
            OR (position('WHERE' IN pg_get_viewdef(r.ev_class)) > 0) <> (g.entry ->> 'condition' IS NOT NULL)
            OR (SELECT array_agg(DISTINCT d.refobjid::bigint) FROM pg_depend d
                 WHERE d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid AND d.refclassid = 'pg_class'::regclass
                   AND d.refobjid <> r.ev_class) IS DISTINCT FROM ARRAY[i.source_oid]
            OR EXISTS (SELECT FROM jsonb_each_text(g.shape -> 'columns') c
                        WHERE NOT EXISTS (SELECT FROM pg_depend d
                                           WHERE d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                                             AND d.refobjid = i.source_oid::oid AND d.refobjsubid = c.value::int))
            OR EXISTS (SELECT FROM generate_series(1, jsonb_array_length(g.entry -> 'columns')) AS position
                        WHERE NOT EXISTS (SELECT FROM pg_attribute a
                                           WHERE a.attrelid = r.ev_class AND a.attname = 'c' || position OFFSET 0)))
$$;

-- The number of faults of a source's building generations, from what they keep themselves: changes of the shape;
-- missing statements in the capture function, for their mode; faults of their tables; and leaves without the trigger of
-- TRUNCATE.
CREATE FUNCTION roir.build_faults(source oid) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(sum(
               (SELECT count(*) FROM roir.shape_changes(g.id) s WHERE s.kind <> 'label')
               + (SELECT count(*) FROM roir.source_partition p
                    JOIN roir.partition_tree(build_faults.source) t ON t.relation = p.relation::oid AND t.link = p.link
                   WHERE p.generation_id = g.id AND p.status = 'present' AND p.leaf
                     AND NOT EXISTS (SELECT FROM pg_trigger w WHERE w.tgrelid = t.relation AND w.tgtype & 32 <> 0
                                        AND w.tgfoid = ANY (c.functions)))
               + roir.table_faults(g.id)
               + roir.view_faults(g.id)
               + CASE WHEN has_table_privilege(f.proowner, to_regclass(format('roir_data.g%s_delta', g.id)), 'INSERT')
                       AND has_table_privilege(f.proowner, build_faults.source, 'SELECT') THEN 0 ELSE 1 END
               + CASE WHEN w.prosrc !~ format('roir_data\.g%s\M', g.id) THEN 1 ELSE 0 END
               + CASE WHEN position(format('-- generation %s, %s mode', g.id, g.capture_mode) IN f.prosrc) > 0
                      THEN 0 ELSE 1 END), 0)::bigint
      FROM roir.generation g
      JOIN roir.index i ON i.id = g.index_id AND i.source_oid = build_faults.source::bigint
      JOIN pg_proc f ON f.oid = to_regprocedure(format('roir_data.capture_%s()', build_faults.source))
      LEFT JOIN pg_proc w ON w.oid = to_regprocedure(format('roir_data.truncate_%s()', build_faults.source))
     CROSS JOIN (SELECT ARRAY(SELECT function FROM roir.captures(build_faults.source)) AS functions) c
     WHERE g.status = 'building' AND g.capture_mode <> 'none'
$$;

-- A digest of all parts of a source's shape that a build depends on. It has only the oids that pg_upgrade keeps: of
-- tables, types and enum values. Other objects are in it by what they do: a collation by its locale, the capture's
-- triggers by their function and when they fire. Partitions aren't in it: roir.partition_changes follows them.
CREATE FUNCTION roir.fingerprint(source oid, columns text[]) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT md5(concat_ws('|',
        (SELECT concat_ws(',', c.oid, c.relkind, c.relpersistence, c.relrowsecurity,
                          c.relrowsecurity AND c.relforcerowsecurity,
                          -- Look-ups would also find rows of inheritance children.
                          c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = c.oid),
                          EXISTS (SELECT FROM pg_class l
                                   WHERE l.oid = ANY (ARRAY(SELECT t.relation
                                                            FROM roir.partition_tree(fingerprint.source) t))
                                     AND l.relpersistence = 'u'))
           FROM pg_class c WHERE c.oid = source),
        (SELECT string_agg(concat_ws(',', a.attnum, quote_ident(a.attname), a.atttypid, a.atttypmod,
                                     l.value ->> 'collprovider', l.value ->> 'collcollate', l.value ->> 'collctype',
                                     l.value ->> 'colllocale', l.value ->> 'colliculocale',
                                     l.value ->> 'collicurules', l.value ->> 'collisdeterministic',
                                     quote_nullable(CASE WHEN a.attgenerated <> ''
                                                         THEN pg_get_expr(d.adbin, d.adrelid) END)), ';'
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
        (SELECT count(*) FROM pg_trigger
          WHERE tgfoid IN (SELECT function FROM roir.captures(source)) AND tgenabled <> 'A'),
        roir.build_faults(source)))
$$;

-- A stamp that changes whenever the server has written a row of a catalog that the fingerprint or
-- roir.partition_changes reads, or when a right changes that the fingerprint contains. It is cheap enough for every
-- batch, also over many partitions. If it hasn't changed, nothing else needs a look. It may change without a reason,
-- but not by an ANALYZE. In plpgsql, which keeps its plans. Many rows are combined by a sum of hashes, since to sort
-- them costs more than to read them.
CREATE FUNCTION roir.stamp(source oid) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    building bigint[];
    capture oid[] := ARRAY(SELECT c.function FROM roir.captures(source) c);
    bases oid[];
    deltas oid[];
    views oid[];
    segments oid[];
    own oid[];
    types oid[] := '{}';
    composites oid[] := '{}';
    relations oid[] := ARRAY[source];
    level oid[] := relations;
    children oid[];
    has_types boolean;
    generates boolean;
    links text;
    rows text;
    tree text;
BEGIN
    SELECT coalesce(array_agg(g.id ORDER BY g.id), '{}'),
           coalesce(array_agg(to_regclass(format('roir_data.g%s', g.id))::oid ORDER BY g.id), '{}'),
           coalesce(array_agg(to_regclass(format('roir_data.g%s_delta', g.id))::oid ORDER BY g.id), '{}'),
           coalesce(array_agg(to_regclass(format('roir_data.g%s_source', g.id))::oid ORDER BY g.id), '{}')
      INTO building, bases, deltas, views
      FROM roir.index i JOIN roir.generation g ON g.index_id = i.id
     WHERE i.source_oid = source::bigint AND g.status = 'building';
    SELECT coalesce(array_agg(i.inhrelid), '{}'),
           concat(count(*), ' ', sum(hashoidextended(i.inhrelid, i.xmin::text::bigint)))
      INTO segments, tree
      FROM pg_inherits i WHERE i.inhparent = ANY (bases);
    own := bases || deltas || views || segments;
    -- None of the server's own types is an enum or a composite, or contains one. Each partition has its own
    -- expressions.
    SELECT bool_or(t.typnamespace <> 'pg_catalog'::regnamespace), bool_or(a.attgenerated <> '')
      INTO has_types, generates
      FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
     WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped;
    IF has_types THEN
        types := ARRAY(SELECT DISTINCT roir.type_tree(a.atttypid) FROM pg_attribute a
                        WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped);
        composites := ARRAY(SELECT t.typrelid FROM pg_type t WHERE t.oid = ANY (types) AND t.typtype = 'c');
    END IF;
    WHILE level <> '{}' LOOP
        SELECT coalesce(array_agg(i.inhrelid), '{}'),
               concat(count(*), ' ',
                      sum(hashoidextended(i.inhrelid, i.xmin::text::bigint * 2 + i.inhdetachpending::int)))
          INTO children, links
          FROM pg_inherits i WHERE i.inhparent = ANY (level);
        EXIT WHEN children = '{}';
        SELECT coalesce(array_agg(c.oid) FILTER (WHERE c.relkind = 'p'), '{}'),
               concat(count(*), ' ', sum(hashoidextended(c.oid, c.xmin::text::bigint)))
          INTO level, rows
          FROM pg_class c WHERE c.oid = ANY (children);
        relations := relations || children;
        tree := concat_ws('/', tree, links, rows);
    END LOOP;
    RETURN md5(concat_ws('|', tree, bases::text, deltas::text, views::text, capture::text, types::text, roir.moved(),
        (SELECT string_agg(concat(c.oid, ' ', c.xmin), ',' ORDER BY c.oid) FROM pg_class c
          WHERE c.oid = ANY (source || own)),
        (SELECT concat(count(*), ' ', sum(hashoidextended(a.attrelid, a.xmin::text::bigint * 2048 + a.attnum)))
           FROM pg_attribute a
          WHERE a.attrelid = ANY (source || bases || deltas || views || composites) AND a.attnum > 0),
        (SELECT string_agg(concat(d.oid, ' ', d.xmin), ',' ORDER BY d.oid) FROM pg_attrdef d WHERE d.adrelid = source),
        -- As text, since an object that an expression names can be renamed.
        CASE WHEN generates THEN
            (SELECT md5(string_agg(concat(d.oid, ' ', d.xmin, ' ', pg_get_expr(d.adbin, d.adrelid)), ','
                                   ORDER BY d.oid))
               FROM pg_attrdef d WHERE d.adrelid = ANY (relations)) END,
        (SELECT string_agg(concat(i.indexrelid, ' ', i.xmin), ',' ORDER BY i.indexrelid)
           FROM pg_index i WHERE i.indrelid = ANY (source || bases || deltas)),
        (SELECT string_agg(concat(o.xmin, ' ', n.xmin), ',' ORDER BY o.oid)
           FROM pg_opclass o JOIN pg_namespace n ON n.oid = o.opcnamespace
          WHERE o.oid = ANY ((SELECT i.indclass FROM pg_index i WHERE i.indrelid = source AND i.indisprimary)::oid[])),
        (SELECT string_agg(concat(k.oid, ' ', k.xmin), ',' ORDER BY k.oid) FROM pg_constraint k
          WHERE k.conrelid = source),
        (SELECT string_agg(concat(p.oid, ' ', p.xmin), ',' ORDER BY p.oid) FROM pg_proc p WHERE p.oid = ANY (capture)),
        (SELECT concat(count(*), ' ', sum(hashoidextended(t.oid, t.xmin::text::bigint)))
           FROM pg_trigger t WHERE t.tgrelid = ANY (relations || own)),
        (SELECT count(*) FROM pg_trigger t WHERE t.tgfoid = ANY (capture) AND t.tgenabled <> 'A'),
        (SELECT string_agg(concat(r.oid, ' ', r.xmin), ',' ORDER BY r.oid) FROM pg_rewrite r
          WHERE r.ev_class = ANY (own)),
        CASE WHEN has_types THEN
            (SELECT string_agg(concat(e.oid, ' ', e.xmin), ',' ORDER BY e.oid) FROM pg_enum e
              WHERE e.enumtypid = ANY (types)) END,
        (SELECT string_agg(concat(g.id, ' ', g.xmin), ',' ORDER BY g.id) FROM roir.generation g
          WHERE g.id = ANY (building)),
        (SELECT count(*) FROM roir.segment s WHERE s.generation_id = ANY (building)),
        (SELECT concat(count(*), ' ', sum(hashint8extended(p.id, p.xmin::text::bigint)))
           FROM roir.source_partition p WHERE p.generation_id = ANY (building) AND p.status = 'present'),
        (SELECT string_agg(concat(has_table_privilege(f.proowner, d.oid, 'INSERT'),
                                  has_table_privilege(f.proowner, source, 'SELECT')),
                           ',' ORDER BY f.oid, d.oid)
           FROM pg_proc f CROSS JOIN unnest(deltas) d (oid) WHERE f.oid = ANY (capture)),
        (SELECT string_agg(has_table_privilege(c.relowner, source, 'SELECT')::text, ',' ORDER BY c.oid)
           FROM pg_class c WHERE c.oid = ANY (views))));
END $$;
