-- What must have been there all the while for entries to be right: the primary key, since rows shared one while there was
-- none; the capture's triggers and functions, and the view that it reads the source by, since writes were missed or
-- misread while they were others; generated columns, whose values are written anew with their expression; our own
-- tables. Gone for a while, or altered and altered back, they look as before, and yet the server has made them anew: with
-- another oid, or by another transaction (xmin, which a freeze leaves as it is). So a generation keeps these marks, by
-- name, in its shape. One that isn't kept is unknown, and nothing is said of it.

-- The constraint of a primary key outlives REINDEX CONCURRENTLY and a rename. Triggers are those of the source and, by the
-- link of each, its partitions: one that was out meanwhile is told by that link.
CREATE FUNCTION roir.marks(generation bigint) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH generation AS MATERIALIZED (
        SELECT g.id, g.entry, i.source_oid::oid AS source, to_regclass(format('roir_data.g%s', g.id))::oid AS base
          FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.id = marks.generation),
    capture AS MATERIALIZED (SELECT c.function FROM generation g CROSS JOIN LATERAL roir.captures(g.source) c),
    relation AS MATERIALIZED (
        SELECT g.source AS oid, '' AS link FROM generation g
        UNION ALL
        SELECT t.relation, t.link FROM generation g CROSS JOIN LATERAL roir.partition_tree(g.source) t),
    mark (name, value) AS (
        SELECT 'key', k.oid::text
          FROM generation g JOIN pg_constraint k ON k.conrelid = g.source AND k.contype = 'p'
        UNION ALL
        SELECT format('trigger %s/%s/%s', r.oid, r.link, t.tgtype & 1), string_agg(concat(t.oid, ' ', t.xmin), ',' ORDER BY t.oid)
          FROM relation r JOIN pg_trigger t ON t.tgrelid = r.oid
         WHERE t.tgfoid IN (SELECT function FROM capture)
         GROUP BY r.oid, r.link, t.tgtype & 1
        UNION ALL
        SELECT 'function ' || regexp_replace(p.proname, '_.*', ''), concat(p.oid, ' ', p.proowner, ' ', p.xmin)
          FROM pg_proc p WHERE p.oid IN (SELECT function FROM capture)
        UNION ALL
        SELECT 'view', concat(w.oid, ' ', w.xmin)
          FROM generation g JOIN pg_rewrite w ON w.ev_class = to_regclass(format('roir_data.g%s_source', g.id))
        UNION ALL
        SELECT 'entries', md5(string_agg(concat(h.inhparent, ' ', h.inhrelid, ' ', h.xmin), ',' ORDER BY h.inhrelid))
          FROM generation g JOIN pg_inherits h ON h.inhparent = g.base HAVING count(*) > 0
        UNION ALL
        SELECT 'delta', d.oid::text
          FROM generation g JOIN pg_class d ON d.oid = to_regclass(format('roir_data.g%s_delta', g.id))
        UNION ALL
        SELECT format('expression %s/%s/%s', r.oid, r.link, a.attname), d.oid::text
          FROM generation g CROSS JOIN relation r
          JOIN pg_attribute a ON a.attrelid = r.oid AND a.attname = ANY (roir.entry_columns(g.entry)) AND a.attgenerated = 's'
          JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE EXISTS (SELECT FROM pg_attribute s WHERE s.attrelid = g.source AND s.attgenerated = 's'))
    SELECT coalesce(jsonb_object_agg(m.name, m.value), '{}') FROM mark m
$$;

-- Which marks are other ones now; what is gone altogether is told by others. Before a roir init has seen to a database that
-- pg_upgrade made nobody can tell, since that makes all of these anew.
CREATE FUNCTION roir.mark_changes(generation bigint) RETURNS TABLE (name text, was text, is_now text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT k.key, k.value, n.value
      FROM roir.generation g
     CROSS JOIN LATERAL jsonb_each_text(g.shape -> 'marks') k
      JOIN jsonb_each_text(roir.marks(mark_changes.generation)) n ON n.key = k.key
     WHERE g.id = mark_changes.generation AND n.value <> k.value AND roir.moved() IS NULL
       -- REASSIGN OWNED brings functions to the table's new owner, and a clean-up makes them anew.
       AND NOT (k.key LIKE 'function %' AND split_part(k.value, ' ', 2) <> split_part(n.value, ' ', 2))
$$;

-- Keeps the marks as they are now: all of them, or those of these names that it keeps already.
CREATE FUNCTION roir.keep_marks(generation bigint, names text[] DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.generation g
       SET shape = jsonb_set(g.shape, '{marks}', coalesce(g.shape -> 'marks', '{}') || (
               SELECT coalesce(jsonb_object_agg(n.key, n.value), '{}') FROM jsonb_each(roir.marks(g.id)) n
                WHERE names IS NULL OR (n.key = ANY (names) AND g.shape -> 'marks' ? n.key)))
     WHERE g.id = keep_marks.generation AND g.shape IS NOT NULL
$$;

-- Keeps the marks of partitions that came, and forgets those of partitions that went. Changes nothing where there are none.
CREATE FUNCTION roir.follow_marks(generation bigint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    WITH now AS MATERIALIZED (SELECT roir.marks(follow_marks.generation) AS marks),
    place AS MATERIALIZED (
        SELECT concat(t.relation, '/', t.link) AS name
          FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
         CROSS JOIN LATERAL roir.partition_tree(i.source_oid::oid) t WHERE g.id = follow_marks.generation
        UNION ALL
        SELECT concat(i.source_oid, '/') FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
         WHERE g.id = follow_marks.generation),
    wanted AS (
        SELECT n.marks || coalesce((
                   SELECT jsonb_object_agg(k.key, k.value) FROM jsonb_each(g.shape -> 'marks') k
                    WHERE k.key !~ '^(trigger|expression) '
                       OR (regexp_match(k.key, '^[a-z]+ (\d+/\d*)'))[1] IN (SELECT p.name FROM place p)), '{}') AS marks
          FROM roir.generation g CROSS JOIN now n WHERE g.id = follow_marks.generation)
    UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{marks}', w.marks)
      FROM wanted w WHERE g.id = follow_marks.generation AND g.shape ? 'marks' AND g.shape -> 'marks' <> w.marks
       AND roir.moved() IS NULL
$$;

CREATE OR REPLACE FUNCTION roir.keep_shape(generation bigint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    UPDATE roir.generation g
       SET shape = roir.source_shape(i.source_oid::oid, roir.entry_columns(g.entry)) || jsonb_build_object('marks', roir.marks(g.id))
      FROM roir.index i WHERE i.id = g.index_id AND g.id = keep_shape.generation
$$;

-- What pg_upgrade made anew it is that is kept from now on.
CREATE OR REPLACE FUNCTION roir.adopt_upgraded() RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.link_again(u.source) FROM roir.upgraded_sources() u;
    UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{marks}', roir.marks(g.id))
      FROM roir.index i JOIN pg_class c ON c.oid = i.source_oid::oid
     WHERE i.id = g.index_id AND g.status IN ('building', 'active', 'retired') AND g.shape ? 'marks'
       AND roir.moved() = 'upgraded';
    INSERT INTO roir.event (index_id, actor, action, detail)
    SELECT i.id, session_user, 'upgraded', 'by pg_upgrade; its partitions are known again'
      FROM roir.upgraded_sources() u JOIN roir.index i ON i.source_oid = u.source::bigint AND i.dropped_at IS NULL
$$;

-- What has changed of the shape that a generation keeps. kind: column (its name belongs to another one now, or to none),
-- expression (of a generated one), attribute (of a composite type: one was dropped), label (of an enum),
-- mark (of what was gone or altered for a while). written_by: the
-- transactions that wrote what it looks at. A generated column that becomes a plain one keeps its values, and is
-- none of it; nor is what a type got in addition.
CREATE OR REPLACE FUNCTION roir.shape_changes(generation bigint)
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
    UNION ALL
    SELECT 'mark', m.name, m.was, m.is_now, NULL FROM roir.mark_changes(shape_changes.generation) m
$$;

-- As before, and of levels that came since the index was made, too: no entry could be told to which partition it belongs,
-- since the server hashes values of the key's very type, and an entry has them as the domain's base type.
CREATE OR REPLACE FUNCTION roir.check_source(source oid) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    hashed record;
BEGIN
    PERFORM roir.check_levels(ARRAY(SELECT a.relid::oid FROM pg_partition_ancestors(source) a
                                    UNION SELECT t.relation FROM roir.partition_tree(source) t));
    SELECT x.partrelid::regclass AS level, a.attname AS name INTO hashed
      FROM (SELECT source AS oid UNION ALL SELECT t.relation FROM roir.partition_tree(source) t) l
      JOIN pg_partitioned_table x ON x.partrelid = l.oid AND x.partstrat = 'h'
      JOIN pg_attribute a ON a.attrelid = x.partrelid AND a.attnum = ANY (x.partattrs)
      JOIN pg_type y ON y.oid = a.atttypid AND y.typtype = 'd' LIMIT 1;
    IF FOUND THEN
        RAISE feature_not_supported USING
            MESSAGE = format('%s is partitioned by the hash of %I, which is of a domain; roir can''t tell which partition an entry belongs to',
                             hashed.level, hashed.name),
            HINT = format('Make its partitions by a column of the domain''s base type, or take it out: SELECT roir.detach_partition(%L).',
                          hashed.level);
    END IF;
END $$;
