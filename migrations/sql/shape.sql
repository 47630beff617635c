-- The shape: the parts of a source's definition that entries depend on. Each generation keeps it, since the server
-- doesn't report what a part was before it changed. The names of the table and its schema aren't in it, since no entry
-- depends on them.

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

-- Keeps the shape and the marks that a generation's entries depend on, as they are now: at prepare, and when all oids
-- have changed.
CREATE FUNCTION roir.keep_shape(generation bigint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.generation g
       SET shape = roir.source_shape(i.source_oid::oid, roir.entry_columns(g.entry))
                   || jsonb_build_object('marks', roir.marks(g.id))
      FROM roir.index i WHERE i.id = g.index_id AND g.id = keep_shape.generation
$$;

-- The differences between a source's shape now and the shape that a generation keeps. kind: column (its name belongs to
-- another column, or to none), expression (of a generated column), attribute (of a composite type: one was dropped or
-- has another type), label (of an enum), mark (of an object that was gone or altered for a while). written_by: the
-- transactions that wrote the catalog rows compared. No difference: a generated column that becomes a plain one, since
-- it keeps its values; attributes and labels that a type got in addition.
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
        SELECT t.relation FROM kept k CROSS JOIN LATERAL roir.partition_tree(k.source) t
         WHERE k.shape -> 'expressions' <> '{}')
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
    UNION ALL
    SELECT 'mark', m.name, m.was, m.is_now, NULL FROM roir.mark_changes(shape_changes.generation) m
$$;
