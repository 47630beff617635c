-- The marks of objects that must have existed, unchanged, all the while for entries to be right: the primary key, since
-- without it rows could share a value; the capture's triggers and functions, and the view by which it reads the source,
-- since writes were missed or misread without them; the expressions of generated columns, which determine their values;
-- the bodies of functions that compute keys;
-- our own tables. An object that was gone for a while, or was altered and altered back, looks as before. But the server
-- has created it again: with another oid, or by another transaction (xmin, which a freeze leaves as it is). So a
-- generation keeps these marks, by name, in its shape. Nothing is concluded from a mark that isn't kept.

-- The functions of users that compute an index's expressions and its condition, as far as their texts name them. The
-- server's own have no dependencies.
CREATE FUNCTION roir.functions_of(entry jsonb) RETURNS TABLE (oid oid)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT DISTINCT CASE WHEN d.refclassid = 'pg_proc'::regclass THEN d.refobjid ELSE o.oprcode END
      FROM (SELECT c ->> 'call' FROM jsonb_array_elements(entry -> 'columns') c WHERE c ->> 'call' <> ''
            UNION ALL SELECT entry #>> '{condition,call}') x (call)
      JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = to_regproc(x.call)
                      AND d.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass)
      LEFT JOIN pg_operator o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
$$;

-- The constraint of a primary key outlives REINDEX CONCURRENTLY and a rename. The triggers are those of the source and
-- of its partitions; those of a partition have its link in their name, so a partition that was out meanwhile has other
-- marks. A column that becomes a plain one keeps its values and its mark, without the expression's oid. It may have had
-- another expression meanwhile only if the table was rewritten, too.
CREATE FUNCTION roir.marks(generation bigint) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH generation AS MATERIALIZED (
        SELECT g.id, g.entry, g.shape, i.source_oid::oid AS source,
               to_regclass(format('roir_data.g%s', g.id))::oid AS base
          FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.id = marks.generation),
    -- Looked up one by one: a join would read all functions, columns and triggers of the database.
    capture AS MATERIALIZED (
        SELECT ARRAY(SELECT c.function FROM generation g CROSS JOIN LATERAL roir.captures(g.source) c) AS functions,
               (SELECT to_regproc(format('roir_data.capture_row_%s', g.source)) FROM generation g) AS called),
    relation AS MATERIALIZED (
        SELECT g.source AS oid, '' AS link FROM generation g
        UNION ALL
        SELECT t.relation, t.link FROM generation g CROSS JOIN LATERAL roir.partition_tree(g.source) t),
    mark (name, value) AS (
        SELECT 'key', k.oid::text
          FROM generation g JOIN pg_constraint k ON k.conrelid = g.source AND k.contype = 'p'
        UNION ALL
        SELECT format('trigger %s/%s/%s', r.oid, r.link, t.tgtype & 1),
               string_agg(concat(t.oid, ' ', t.xmin), ',' ORDER BY t.oid)
          FROM relation r CROSS JOIN LATERAL (
               SELECT t.oid, t.xmin, t.tgtype FROM pg_trigger t
                WHERE t.tgrelid = r.oid AND t.tgfoid = ANY ((SELECT functions FROM capture)::oid[]) OFFSET 0) t
         GROUP BY r.oid, r.link, t.tgtype & 1
        UNION ALL
        SELECT 'function ' || regexp_replace(p.proname, '_.*', ''), concat(p.oid, ' ', p.proowner, ' ', p.xmin)
          FROM pg_proc p WHERE p.oid = ANY ((SELECT functions FROM capture)::oid[])
        UNION ALL
        SELECT 'function row', concat(p.oid, ' ', p.proowner, ' ', p.xmin)
          FROM pg_proc p WHERE p.oid = (SELECT called FROM capture)
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
        SELECT a.name, concat(d.oid, ' ', pg_relation_filenode(r.oid))
          FROM (SELECT roir.entry_columns(g.entry) AS columns, g.shape -> 'marks' AS kept FROM generation g
                 WHERE g.shape -> 'expressions' <> '{}'
                    OR EXISTS (SELECT FROM pg_attribute s
                                WHERE s.attrelid = g.source AND s.attgenerated = 's') OFFSET 0) g
         CROSS JOIN relation r
         CROSS JOIN LATERAL (SELECT a.attnum, a.attgenerated,
                                    format('expression %s/%s/%s', r.oid, r.link, a.attname) AS name
                               FROM pg_attribute a WHERE a.attrelid = r.oid AND a.attname = ANY (g.columns) OFFSET 0) a
          LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum AND a.attgenerated = 's'
         WHERE a.attgenerated = 's' OR g.kept ? a.name
        UNION ALL
        SELECT 'computed ' || p.oid, md5(concat(p.prosrc, p.probin, p.prosqlbody))
          FROM generation g CROSS JOIN LATERAL roir.functions_of(g.entry) f JOIN pg_proc p ON p.oid = f.oid)
    SELECT coalesce(jsonb_object_agg(m.name, m.value), '{}') FROM mark m
$$;

-- The marks that differ now; other checks find objects that are gone altogether. None after pg_upgrade until roir init
-- has run, since pg_upgrade creates all these objects again.
CREATE FUNCTION roir.mark_changes(generation bigint) RETURNS TABLE (name text, was text, is_now text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT k.key, k.value, n.value
      FROM roir.generation g
     CROSS JOIN LATERAL jsonb_each_text(g.shape -> 'marks') k
      JOIN jsonb_each_text(roir.marks(mark_changes.generation)) n ON n.key = k.key
     WHERE g.id = mark_changes.generation AND n.value <> k.value AND roir.moved() IS NULL
       AND (k.key NOT LIKE 'expression %' OR split_part(k.value, ' ', 1) <> split_part(n.value, ' ', 1)
            AND (n.value NOT LIKE ' %' OR split_part(k.value, ' ', 2) <> split_part(n.value, ' ', 2)))
       -- REASSIGN OWNED gives functions to the table's new owner, and a clean-up then creates them again.
       AND NOT (k.key LIKE 'function %' AND split_part(k.value, ' ', 2) <> split_part(n.value, ' ', 2))
$$;

-- Locks a generation's row: a transaction that keeps marks does this first, in a statement of its own. Otherwise it
-- could put back a mark that it read before another session kept a newer one, and the next check would take our own
-- work for another's.
CREATE FUNCTION roir.hold_marks(generation bigint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT FROM roir.generation g WHERE g.id = hold_marks.generation FOR NO KEY UPDATE
$$;

-- Keeps the marks as they are now: all of them, or those of these names that it keeps already.
CREATE FUNCTION roir.keep_marks(generation bigint, names text[] DEFAULT NULL) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    SELECT roir.hold_marks(keep_marks.generation);
    UPDATE roir.generation g
       SET shape = jsonb_set(g.shape, '{marks}', coalesce(g.shape -> 'marks', '{}') || (
               SELECT coalesce(jsonb_object_agg(n.key, n.value), '{}') FROM jsonb_each(roir.marks(g.id)) n
                WHERE names IS NULL OR (n.key = ANY (names) AND g.shape -> 'marks' ? n.key)))
     WHERE g.id = keep_marks.generation AND g.shape IS NOT NULL
$$;

-- The marks with those of partitions that came, and without those of partitions that went; NULL if these are kept.
CREATE FUNCTION roir.followed_marks(generation bigint) RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH now AS MATERIALIZED (SELECT roir.marks(followed_marks.generation) AS marks),
    place AS MATERIALIZED (
        SELECT concat(t.relation, '/', t.link) AS name
          FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
         CROSS JOIN LATERAL roir.partition_tree(i.source_oid::oid) t WHERE g.id = followed_marks.generation
        UNION ALL
        SELECT concat(i.source_oid, '/') FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
         WHERE g.id = followed_marks.generation),
    wanted AS (
        SELECT g.shape, n.marks || coalesce((
                   SELECT jsonb_object_agg(k.key, k.value) FROM jsonb_each(g.shape -> 'marks') k
                    WHERE k.key !~ '^(trigger|expression) '
                       OR (regexp_match(k.key, '^[a-z]+ (\d+/[\d.]*)'))[1] IN (SELECT p.name FROM place p)),
               '{}') AS marks
          FROM roir.generation g CROSS JOIN now n WHERE g.id = followed_marks.generation)
    SELECT w.marks FROM wanted w WHERE w.shape ? 'marks' AND w.shape -> 'marks' <> w.marks AND roir.moved() IS NULL
$$;

-- Keeps the marks of partitions that came, and forgets those of partitions that went. If there are none, it takes no
-- lock.
CREATE FUNCTION roir.follow_marks(generation bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF roir.followed_marks(generation) IS NOT NULL THEN
        PERFORM roir.hold_marks(generation);
        UPDATE roir.generation g SET shape = jsonb_set(g.shape, '{marks}', w.marks)
          FROM roir.followed_marks(generation) AS w (marks)
         WHERE g.id = follow_marks.generation AND w.marks IS NOT NULL;
    END IF;
END $$;
