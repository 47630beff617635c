-- The rows view of an index, "<index>_rows": whole rows of the table, found and written through the index. Its key
-- columns come from the entries, so that the planner uses their B-tree; the other columns come from the row, which
-- roir.row_of reads in its own leaf. The functions that readers and writers call run with their rights, settings and
-- row security; a trigger of the table must find what it finds under a plain statement. So these functions have no
-- settings of their own, and qualify every name.
--
-- The plan of a rows view is JSON, which the view and its trigger contain: source, the oid of the table for which it
-- was made; same, the condition that a row `s` belongs to the entry $1; identity, that its primary key is that of $1;
-- columns, in the view's order, each with its name, its number in the table, its type, and the default of the table;
-- read, the columns that roir.row_of reads.

-- The columns of a plan, with the present names of the table's columns: NULL if the column was dropped. A column is
-- known by its name, and after a rename by its number, which is another one after a restore from a dump.
CREATE FUNCTION roir.rows_columns(source oid, plan jsonb)
RETURNS TABLE (place integer, name text, type text, number smallint, now text, now_type text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.position::integer, c.value ->> 'name', c.value ->> 'type', a.attnum, a.attname, a.now_type
      FROM jsonb_array_elements(plan -> 'columns') WITH ORDINALITY AS c (value, position)
      LEFT JOIN LATERAL (
           SELECT x.attnum, x.attname, format_type(x.atttypid, x.atttypmod) AS now_type FROM pg_attribute x
            WHERE x.attrelid = source AND x.attnum > 0 AND NOT x.attisdropped
              AND (x.attname = c.value ->> 'name'
                   OR x.attnum = (c.value -> 'number')::smallint AND source::bigint = (plan -> 'source')::bigint
                      AND NOT EXISTS (SELECT FROM jsonb_array_elements(plan -> 'columns') o
                                       WHERE o ->> 'name' = x.attname))
            ORDER BY x.attname = c.value ->> 'name' DESC LIMIT 1) a ON true
$$;

-- A table's name for a statement under any search_path. As regclass a temporary table would have no schema.
CREATE FUNCTION roir.full_name(relation oid) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.oid = relation
$$;

-- The statement by which roir.row_of reads a row, if columns were dropped or renamed since the view was made.
CREATE FUNCTION roir.row_statement(source regclass, plan jsonb) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    c record;
    columns text;
BEGIN
    FOR c IN SELECT * FROM roir.rows_columns(source, plan) r
              WHERE (plan -> 'columns' -> r.place - 1 -> 'read')::boolean ORDER BY r.place LOOP
        IF c.now_type <> c.type THEN
            RAISE object_not_in_prerequisite_state USING
                MESSAGE = format('column %I of table %s has another type than in the rows view: %s, not %s',
                                 c.now, source, c.now_type, c.type),
                HINT = 'Run roir rows-view for its index. If other objects depend on the view, drop them first.';
        END IF;
        columns := concat_ws(', ', columns,
                             CASE WHEN c.now IS NULL THEN 'NULL::' || c.type ELSE format('s.%I', c.now) END);
    END LOOP;
    RETURN format('SELECT %s FROM %s%s s WHERE %s', columns,
                  (SELECT CASE WHEN k.relkind = 'p' THEN '' ELSE 'ONLY ' END FROM pg_class k WHERE k.oid = source),
                  roir.full_name(source), plan ->> 'same');
END $$;

-- True, or an error if the caller may not read the table: without it a query that finds no entry would succeed.
CREATE FUNCTION roir.may_select(source regclass) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT pg_catalog.has_any_column_privilege(source, 'SELECT') THEN
        RAISE insufficient_privilege USING MESSAGE = pg_catalog.format('permission denied for table %s', source);
    END IF;
    RETURN true;
END $$;

-- The row of an entry, read by a statement that is planned with the entry's values, so that the planner opens the row's
-- leaf alone. The statement has the names that columns had when the view was made, unless that fails: then it is made
-- from the catalogs. STABLE, so that it has the snapshot of the calling query, as the entries have.
CREATE FUNCTION roir.row_of(entry record, source regclass, plan jsonb) RETURNS SETOF record
LANGUAGE plpgsql STABLE ROWS 1 COST 5000 AS $$
BEGIN
    BEGIN
        RETURN QUERY EXECUTE pg_catalog.concat('SELECT ', plan OPERATOR(pg_catalog.->>) 'read', source, ' s WHERE ',
                                               plan OPERATOR(pg_catalog.->>) 'same') USING entry;
    EXCEPTION WHEN undefined_column OR datatype_mismatch THEN
        RETURN QUERY EXECUTE roir.row_statement(source, plan) USING entry;
    END;
    -- As in roir.rows.
    IF NOT FOUND THEN
        PERFORM roir.refuse_rewritten(source);
    END IF;
END $$;

-- How a row of a rows view is written, from the catalogs alone.
--     given: SQL for an array of truths, one for each column of the view: the statement that is being run changes it,
--     or gives it a value.
--     source: the table. names: of its columns, NULL if a column was dropped. makes: columns that the table itself
--     fills: 'g' by a generation expression, 'i' by an identity. read: SQL for each column of the row `s`, as the view
--     has it.
--     unchanged: the condition that the row `s` is the old row $1, in each column that the table doesn't generate.
CREATE FUNCTION roir.row_writing(view oid, plan jsonb, operation text, OUT source regclass, OUT names text[],
                                 OUT makes text[], OUT given text, OUT read text[], OUT unchanged text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    stale text;
BEGIN
    SELECT k.oid::regclass INTO source
      FROM pg_rewrite w
      JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid AND d.refclassid = 'pg_class'::regclass
      JOIN pg_class k ON k.oid = d.refobjid AND k.relkind IN ('r', 'p') WHERE w.ev_class = view LIMIT 1;
    SELECT array_agg(x.now ORDER BY x.position),
           array_agg(x.makes ORDER BY x.position),
           format('ARRAY[%s]', string_agg(CASE operation
               WHEN 'INSERT' THEN format('($2).%I IS DISTINCT FROM NULL', x.attname)
               -- NULL is the view's DEFAULT.
               ELSE CASE WHEN x.makes = 'g' THEN format('($2).%I IS DISTINCT FROM NULL AND ', x.attname) ELSE '' END
                    || format('pg_catalog.record_image_ne(ROW(($1).%1$I), ROW(($2).%1$I))', x.attname) END,
               ', ' ORDER BY x.position)),
           array_agg(x.value ORDER BY x.position),
           format('pg_catalog.record_image_eq(ROW(%s), ROW(%s))',
                  string_agg(x.value, ', ' ORDER BY x.position) FILTER (WHERE x.now IS NOT NULL AND x.makes <> 'g'),
                  string_agg(format('($1).%I', x.attname), ', ' ORDER BY x.position)
                      FILTER (WHERE x.now IS NOT NULL AND x.makes <> 'g')),
           string_agg(quote_ident(x.now), ', ' ORDER BY x.position)
               FILTER (WHERE x.makes = '' AND x.filled IS DISTINCT FROM x.default
                             AND x.filled IS DISTINCT FROM x.view_default)
      INTO names, makes, given, read, unchanged, stale
      FROM (SELECT c.place AS position, c.now, v.attname,
                   -- A cast only where the types differ, since it may name a type.
                   CASE WHEN c.now IS NULL THEN 'NULL::' || t.name
                        WHEN (a.atttypid, a.atttypmod) = (v.atttypid, v.atttypmod) THEN format('s.%I', c.now)
                        ELSE format('s.%I::%s', c.now, t.name) END AS value,
                   CASE WHEN a.attgenerated <> '' THEN 'g' WHEN a.attidentity <> '' THEN 'i' ELSE '' END AS makes,
                   plan -> 'columns' -> c.place - 1 ->> 'default' AS default,
                   coalesce(pg_get_expr(d.adbin, d.adrelid), pg_get_expr(y.typdefaultbin, 0)) AS filled,
                   pg_get_expr(w.adbin, w.adrelid) AS view_default
              FROM roir.rows_columns(source, plan) c
              JOIN pg_attribute v ON v.attrelid = view AND v.attnum = c.place
             CROSS JOIN LATERAL (
                   SELECT CASE WHEN v.atttypmod = -1 THEN format('%I.%I', n.nspname, b.typname)
                               ELSE format_type(v.atttypid, v.atttypmod) END AS name
                     FROM pg_type b JOIN pg_namespace n ON n.oid = b.typnamespace WHERE b.oid = v.atttypid) t
              LEFT JOIN pg_attribute a ON a.attrelid = source AND a.attnum = c.number
              LEFT JOIN pg_type y ON y.oid = a.atttypid
              LEFT JOIN pg_attrdef d ON d.adrelid = source AND d.adnum = c.number
              LEFT JOIN pg_attrdef w ON w.adrelid = view AND w.adnum = c.place) x;
    IF operation = 'INSERT' AND stale IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('the default of %s in table %s has changed since view %s was made', stale, source,
                             view::regclass),
            HINT = 'Run roir rows-view for its index, then repeat the statement.';
    END IF;
END $$;

-- The statement that writes a row of a rows view; $1 is the old row, $2 the new one. given: as roir.row_writing says.
CREATE FUNCTION roir.row_write_statement(operation text, view oid, source regclass, names text[], makes text[],
                                         given boolean[], read text[], unchanged text, same text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    only_table text := CASE WHEN (SELECT k.relkind FROM pg_class k WHERE k.oid = source) = 'p' THEN '' ELSE 'ONLY ' END;
    relation text := roir.full_name(source);
    returned text := array_to_string(read, ', ');
    c record;
    targets text[] := '{}';
    values text[] := '{}';
BEGIN
    IF operation = 'DELETE' THEN
        RETURN format('DELETE FROM %s%s s WHERE %s RETURNING %s', only_table, relation,
                      concat_ws(' AND ', same, unchanged), returned);
    END IF;
    FOR c IN SELECT v.attname AS name, x.now, x.makes, x.given
               FROM unnest(names, makes, given) WITH ORDINALITY AS x (now, makes, given, position)
               JOIN pg_attribute v ON v.attrelid = view AND v.attnum = x.position ORDER BY x.position LOOP
        IF c.given AND c.now IS NULL THEN
            RAISE undefined_column USING
                MESSAGE = format('table %s has no column %I any more', source, c.name),
                HINT = 'Run roir rows-view for its index: the view follows the table.';
        ELSIF c.given AND c.makes = 'g' THEN
            RAISE generated_always USING
                MESSAGE = format(CASE operation WHEN 'INSERT' THEN 'cannot insert a non-DEFAULT value into column "%s"'
                                 ELSE 'column "%s" can only be updated to DEFAULT' END, c.now),
                DETAIL = format('Column "%s" is a generated column.', c.now);
        END IF;
        -- The view has filled in the defaults already.
        IF c.given OR operation = 'INSERT' AND c.now IS NOT NULL AND c.makes = '' THEN
            targets := targets || quote_ident(c.now);
            values := values || format('($2).%I', c.name);
        END IF;
    END LOOP;
    IF operation = 'INSERT' THEN
        RETURN format(CASE WHEN targets = '{}' THEN 'INSERT INTO %1$s AS s DEFAULT VALUES RETURNING %4$s'
                           ELSE 'INSERT INTO %1$s AS s (%2$s) VALUES (%3$s) RETURNING %4$s' END, relation,
                      array_to_string(targets, ', '), array_to_string(values, ', '), returned);
    END IF;
    -- Nothing changes, but the table's triggers fire all the same.
    IF targets = '{}' THEN
        SELECT ARRAY[quote_ident(x.now)], ARRAY[format('s.%I', x.now)] INTO targets, values
          FROM unnest(names, makes) WITH ORDINALITY AS x (now, makes, position)
         WHERE x.now IS NOT NULL AND x.makes = ''
         ORDER BY has_column_privilege(source, x.now, 'UPDATE') DESC, x.position DESC LIMIT 1;
    END IF;
    RETURN format('UPDATE %s%s s SET %s WHERE %s RETURNING %s', only_table, relation,
                  (SELECT string_agg(x.target || ' = ' || x.value, ', ' ORDER BY x.n)
                     FROM unnest(targets, values) WITH ORDINALITY AS x (target, value, n)),
                  concat_ws(' AND ', same, unchanged), returned);
END $$;

-- Runs a statement for a row of a rows view; NULL if it returns no row. VOLATILE, so that it may write, with a new
-- snapshot; its caller has the snapshot of the user's statement.
CREATE FUNCTION roir.run_for_row(statement text, old record, new record) RETURNS record
LANGUAGE plpgsql AS $$
DECLARE
    written pg_catalog.record;
    returned pg_catalog.int8;
BEGIN
    EXECUTE statement INTO written USING old, new;
    GET DIAGNOSTICS returned = ROW_COUNT;
    IF returned OPERATOR(pg_catalog.=) 0 THEN
        RETURN NULL;
    END IF;
    RETURN written;
END $$;

-- True if a version of a row that our snapshot doesn't see any more was deleted, or got another primary key, by our own
-- transaction. removed_by: its xmax, which is a multixact if the row was locked, too, say before a savepoint. Another
-- transaction's id can be the number of a multixact of ours: then a row that it has removed counts as removed by us.
CREATE FUNCTION roir.is_removed_by_me(removed_by xid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN roir.is_mine(removed_by)
           OR EXISTS (SELECT FROM pg_get_multixact_members(removed_by) m WHERE m.mode = 'upd' AND roir.is_mine(m.xid));
EXCEPTION WHEN OTHERS THEN
    -- There is no such multixact.
    RETURN false;
END $$;

-- Writes a row of a rows view into the table, which routes it to its leaf. An UPDATE or DELETE writes only if the row
-- is as the user's statement has read it. Otherwise another transaction has changed the row meanwhile, and whether it
-- still meets the user's condition isn't known here: so a serialization failure, at READ COMMITTED too. A row that the
-- same statement has written already, as a join may have it twice, isn't written again.
-- STABLE: the last question needs the snapshot of the user's statement.
CREATE FUNCTION roir.write_row() RETURNS trigger
LANGUAGE plpgsql STABLE AS $$
DECLARE
    plan pg_catalog.jsonb := TG_ARGV[0];
    same pg_catalog.text := plan OPERATOR(pg_catalog.->>) 'identity';
    how pg_catalog.record;
    given pg_catalog.bool[];
    written pg_catalog.record;
    changes pg_catalog.text;
BEGIN
    how := roir.row_writing(TG_RELID, plan, TG_OP);
    IF TG_OP OPERATOR(pg_catalog.<>) 'DELETE' THEN
        EXECUTE pg_catalog.concat('SELECT ', how.given) INTO given USING OLD, NEW;
    END IF;
    written := roir.run_for_row(roir.row_write_statement(TG_OP, TG_RELID, how.source, how.names, how.makes, given,
                                                         how.read, how.unchanged, same), OLD, NEW);
    IF written IS DISTINCT FROM NULL THEN
        RETURN written;
    ELSIF TG_OP OPERATOR(pg_catalog.=) 'INSERT' THEN
        RETURN NULL;
    END IF;
    -- The row as it is now.
    IF TG_OP OPERATOR(pg_catalog.=) 'UPDATE' THEN
        SELECT pg_catalog.format('pg_catalog.record_image_eq(ROW(%s), ROW(%s))', pg_catalog.string_agg(x.value, ', '),
                                 pg_catalog.string_agg(pg_catalog.format('($2).%I', v.attname), ', ')) INTO changes
          FROM ROWS FROM (pg_catalog.unnest(how.read), pg_catalog.unnest(given)) WITH ORDINALITY AS x (value, given, n)
          JOIN pg_catalog.pg_attribute v ON v.attrelid OPERATOR(pg_catalog.=) TG_RELID
                                        AND v.attnum OPERATOR(pg_catalog.=) x.n WHERE x.given;
    END IF;
    written := roir.run_for_row(
        pg_catalog.format('SELECT %s AS same, roir.is_mine(s.xmin) AS mine, %s AS done FROM %s s WHERE %s',
                          how.unchanged, coalesce(changes, 'false'), roir.full_name(how.source), same), OLD, NEW);
    IF written IS DISTINCT FROM NULL THEN
        IF written.same THEN
            -- A BEFORE trigger or a policy keeps it from being written.
            RETURN NULL;
        ELSIF written.mine AND TG_OP OPERATOR(pg_catalog.=) 'DELETE' THEN
            RETURN roir.run_for_row(roir.row_write_statement(TG_OP, TG_RELID, how.source, how.names, how.makes, given,
                                                             how.read, NULL, same), OLD, NEW);
        ELSIF written.mine AND written.done THEN
            RETURN NULL;
        ELSIF written.mine THEN
            RAISE cardinality_violation USING
                MESSAGE = pg_catalog.format('the statement changes a row of view %s a second time',
                                            TG_RELID::pg_catalog.regclass),
                HINT = 'Make sure that it finds each row once.';
        END IF;
    ELSE
        -- As the user's statement sees it.
        EXECUTE pg_catalog.format('SELECT roir.is_removed_by_me(s.xmax) AS mine FROM %s s WHERE %s',
                                  roir.full_name(how.source), same) INTO written USING OLD;
        IF written.mine THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE serialization_failure USING
        MESSAGE = 'could not serialize access: the row was changed after the statement''s snapshot',
        DETAIL = pg_catalog.format('The statement writes by view %s.', TG_RELID::pg_catalog.regclass),
        HINT = 'Retry the transaction.';
END $$;

-- The rows view of an index, NULL if there is none: the view above the index's view that has our trigger.
CREATE FUNCTION roir.rows_view_of(index bigint) RETURNS regclass
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.oid::regclass
      FROM roir.generation g
      JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
                      AND d.refobjid = roir.view_of(g.id)
      JOIN pg_rewrite w ON w.oid = d.objid
      JOIN pg_class c ON c.oid = w.ev_class AND c.relkind = 'v'
     WHERE g.index_id = rows_view_of.index AND g.status = 'active'
       AND EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgfoid = 'roir.write_row()'::regprocedure)
     ORDER BY c.oid LIMIT 1
$$;

-- The plan of an index's rows view, as its table is now. also: columns of the former plan that the view must keep,
-- since other objects depend on it; their values are NULL, or cast to their former types.
CREATE FUNCTION roir.rows_plan(index bigint, also jsonb DEFAULT '[]') RETURNS jsonb
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    WITH source AS (
        SELECT i.source_oid::oid AS oid, g.entry, roir.view_of(g.id) AS view
          FROM roir.index i JOIN roir.generation g ON g.index_id = i.id AND g.status = 'active'
         WHERE i.id = rows_plan.index),
    keyed AS (
        SELECT c.position, c.value ->> 'source' AS name, c.value ->> 'cast' AS type, c.value ->> 'equals' AS equals,
               (c.value ->> 'domain')::boolean AS domain, (c.value ->> 'primary_key')::boolean AS identifies
          FROM source s CROSS JOIN jsonb_array_elements(s.entry -> 'columns') WITH ORDINALITY AS c (value, position)
         WHERE c.position <= (s.entry -> 'identity')::int),
    listed AS (
        SELECT o.value ->> 'name' AS name, (o.value -> 'number')::integer AS number, o.value ->> 'type' AS type,
               o.value ->> 'collation' AS collation, o.value ->> 'default' AS filled,
               EXISTS (SELECT FROM keyed k WHERE k.name = o.value ->> 'name') AS keyed, o.position AS place
          FROM jsonb_array_elements(also) WITH ORDINALITY AS o (value, position)
        UNION ALL
        SELECT a.attname, a.attnum, format_type(a.atttypid, a.atttypmod),
               (SELECT format('%I.%I', n.nspname, c.collname) FROM pg_collation c
                  JOIN pg_namespace n ON n.oid = c.collnamespace
                 WHERE c.oid = a.attcollation AND a.attcollation <> t.typcollation),
               CASE WHEN a.attgenerated = '' AND a.attidentity = ''
                    THEN coalesce(pg_get_expr(d.adbin, d.adrelid), pg_get_expr(t.typdefaultbin, 0)) END,
               EXISTS (SELECT FROM keyed k WHERE k.name = a.attname), 10000 + a.attnum
          FROM source s
          JOIN pg_attribute a ON a.attrelid = s.oid AND a.attnum > 0 AND NOT a.attisdropped
          JOIN pg_type t ON t.oid = a.atttypid
          LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE NOT EXISTS (SELECT FROM jsonb_array_elements(also) o WHERE o ->> 'name' = a.attname)),
    -- A function must return a column: the first one, if all are of the key.
    chosen AS (SELECT l.*, NOT l.keyed OR bool_and(l.keyed) OVER () AND l.place = min(l.place) OVER () AS read
                 FROM listed l)
    SELECT jsonb_build_object(
               'source', s.oid::bigint,
               'columns', (SELECT jsonb_agg(jsonb_build_object('name', l.name, 'number', l.number, 'type', l.type,
                                                               'collation', l.collation, 'default', l.filled,
                                                               'key', l.keyed, 'read', l.read) ORDER BY l.place)
                             FROM chosen l),
               'read', (SELECT concat(string_agg(format('s.%I', l.name), ', ' ORDER BY l.place),
                                      ' FROM ', CASE WHEN t.relkind <> 'p' THEN 'ONLY ' END)
                          FROM chosen l, pg_class t WHERE t.oid = s.oid AND l.read GROUP BY t.relkind),
               'identity', (SELECT string_agg(format('s.%I%s %s ($1).%I', k.name,
                                                     CASE WHEN k.domain THEN '::' || k.type END, k.equals, k.name),
                                              ' AND ' ORDER BY k.position)
                              FROM keyed k WHERE k.identifies),
               'same', (SELECT string_agg(CASE WHEN k.identifies THEN c.same
                                               ELSE format('(%s OR %s IS NOT DISTINCT FROM NULL '
                                                           'AND %s IS NOT DISTINCT FROM NULL)',
                                                           c.same, c.ours, c.theirs)
                                          END, ' AND ' ORDER BY k.identifies DESC, k.position)
                          FROM keyed k
                         CROSS JOIN LATERAL (SELECT concat(format('s.%I', k.name),
                                                           CASE WHEN k.domain THEN '::' || k.type END) AS ours,
                                                    format('($1).%I', k.name) AS theirs) v
                         CROSS JOIN LATERAL (SELECT v.*, concat_ws(' ', v.ours, k.equals, v.theirs) AS same) c))
      FROM source s
$$;

-- Makes the rows view of an index, or makes it follow its table: a new column comes last, a renamed one is renamed, and
-- both keep the view's grants and the objects that depend on it. If a column was dropped or has another type, the view
-- is created again, with its grants and comments; as long as other objects depend on it, it keeps such a column, which
-- is NULL or cast. Nothing happens if nothing has changed. The caller holds the locks that roir.hold_view needs.
CREATE FUNCTION roir.make_rows_view(index bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own record;
    view oid;
    name text;
    plan jsonb;
    former jsonb;
    c record;
    kept jsonb := '[]';
    owner regrole;
    rights text[];
    comments text[];
    one text;
BEGIN
    PERFORM roir.hold_view(make_rows_view.index);
    SELECT i.schema_name, i.name || '_rows' AS name, i.source_oid::oid::regclass AS source, i.rows_view,
           i.shard_table IS NOT NULL AS apart, roir.view_of(g.id)::oid AS index_view INTO own
      FROM roir.index i JOIN roir.generation g ON g.index_id = i.id AND g.status = 'active'
     WHERE i.id = make_rows_view.index;
    IF own.index_view IS NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'the index has no view: it isn''t published, or its view was dropped';
    END IF;
    view := roir.rows_view_of(make_rows_view.index);
    former := own.rows_view;
    plan := roir.rows_plan(make_rows_view.index);
    IF view IS NULL THEN
        name := format('%I.%I', own.schema_name, own.name);
        IF octet_length(own.name) > 63 THEN
            RAISE name_too_long USING MESSAGE = format('the name %I is too long for a view', own.name);
        ELSIF to_regclass(name) IS NOT NULL THEN
            RAISE duplicate_table USING
                MESSAGE = format('relation %s exists already, and isn''t this index''s rows view', name);
        END IF;
    ELSE
        name := roir.full_name(view);
        IF former = plan THEN
            RETURN;
        END IF;
        -- Locks the view alone, as for the index's view.
        EXECUTE format('ALTER VIEW %s SET SCHEMA %I', name, (SELECT n.nspname FROM pg_class k
                       JOIN pg_namespace n ON n.oid = k.relnamespace WHERE k.oid = view));
        FOR c IN SELECT r.name, r.now, r.place FROM roir.rows_columns(own.source, former) r
                  WHERE r.now <> r.name ORDER BY r.place LOOP
            EXECUTE format('ALTER VIEW %s RENAME COLUMN %I TO %I', name, c.name, c.now);
            former := jsonb_set(former, ARRAY['columns', (c.place - 1)::text, 'name'], to_jsonb(c.now));
        END LOOP;
        -- OR REPLACE allows new columns at the end, but no other change.
        IF EXISTS (SELECT FROM jsonb_array_elements(former -> 'columns') WITH ORDINALITY AS f (value, n)
                    WHERE (f.value ->> 'name', f.value ->> 'type', f.value ->> 'collation', f.value -> 'key')
                          IS DISTINCT FROM (SELECT (p ->> 'name', p ->> 'type', p ->> 'collation', p -> 'key')
                                              FROM (SELECT plan -> 'columns' -> (f.n - 1)::int AS p) p)) THEN
            rights := ARRAY(
                SELECT format('GRANT %s%s ON %s TO %s%s', x.privilege_type, ' (' || quote_ident(g.attname) || ')', name,
                              CASE WHEN x.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(x.grantee)) END,
                              CASE WHEN x.is_grantable THEN ' WITH GRANT OPTION' END)
                  FROM (SELECT k.relacl AS acl, NULL::name AS attname, k.relowner FROM pg_class k WHERE k.oid = view
                        UNION ALL
                        SELECT a.attacl, a.attname, k.relowner FROM pg_attribute a JOIN pg_class k ON k.oid = a.attrelid
                         WHERE a.attrelid = view AND a.attnum > 0
                           AND EXISTS (SELECT FROM jsonb_array_elements(plan -> 'columns') p
                                        WHERE p ->> 'name' = a.attname)) g
                 CROSS JOIN LATERAL aclexplode(g.acl) x WHERE x.grantee <> g.relowner);
            comments := ARRAY(
                SELECT format('COMMENT ON %s IS %L',
                              CASE WHEN d.objsubid = 0 THEN 'VIEW ' || name
                                   ELSE format('COLUMN %s.%I', name, a.attname) END, d.description)
                  FROM pg_description d LEFT JOIN pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid
                 WHERE d.classoid = 'pg_class'::regclass AND d.objoid = view
                   AND (d.objsubid = 0 OR EXISTS (SELECT FROM jsonb_array_elements(plan -> 'columns') p
                                                   WHERE p ->> 'name' = a.attname)));
            owner := (SELECT k.relowner FROM pg_class k WHERE k.oid = view AND k.relowner <> current_user::regrole);
            BEGIN
                EXECUTE format('DROP VIEW %s', name);
                view := NULL;
            EXCEPTION WHEN dependent_objects_still_exist THEN
                SELECT jsonb_agg(f.value ORDER BY f.n) INTO kept
                  FROM jsonb_array_elements(former -> 'columns') WITH ORDINALITY AS f (value, n);
                plan := roir.rows_plan(make_rows_view.index, kept);
            END;
        END IF;
    END IF;
    -- The planner removes the first item; by it readers lock the table before the index's view, as a detach does.
    EXECUTE format(
        'CREATE OR REPLACE VIEW %s WITH (security_invoker = true) AS SELECT %s '
        'FROM (SELECT EXISTS (SELECT FROM ONLY %s)) t CROSS JOIN %s i '
        'CROSS JOIN LATERAL roir.row_of(i.*, %L::regclass, %L::jsonb) r (%s) '
        'WHERE (SELECT roir.may_select(%L::regclass))',
        name,
        (SELECT string_agg(format('%s.%I', CASE WHEN (p.value -> 'key')::boolean THEN 'i' ELSE 'r' END,
                                  p.value ->> 'name'), ', ' ORDER BY p.n)
           FROM jsonb_array_elements(plan -> 'columns') WITH ORDINALITY AS p (value, n)),
        roir.full_name(own.source), roir.full_name(own.index_view), roir.full_name(own.source), plan,
        (SELECT string_agg(concat(format('%I %s', p.value ->> 'name', p.value ->> 'type'),
                                  ' COLLATE ' || (p.value ->> 'collation')), ', ' ORDER BY p.n)
           FROM jsonb_array_elements(plan -> 'columns') WITH ORDINALITY AS p (value, n)
          WHERE (p.value -> 'read')::boolean),
        roir.full_name(own.source));
    EXECUTE format('CREATE OR REPLACE TRIGGER roir_write_row INSTEAD OF INSERT OR UPDATE OR DELETE ON %s FOR EACH ROW '
                   'EXECUTE FUNCTION roir.write_row(%L)', name, plan);
    -- A statement through the view fills columns that it doesn't name by the view's defaults.
    FOR c IN SELECT p.value ->> 'name' AS name, p.value ->> 'default' AS filled
               FROM jsonb_array_elements(plan -> 'columns') AS p (value) LOOP
        EXECUTE format('ALTER VIEW %s ALTER COLUMN %I ', name, c.name)
                || coalesce('SET DEFAULT ' || c.filled, 'DROP DEFAULT');
    END LOOP;
    IF owner IS NOT NULL AND view IS NULL THEN
        BEGIN
            EXECUTE format('ALTER VIEW %s OWNER TO %s', name, owner);
        -- The owner may no longer have a view in this schema.
        EXCEPTION WHEN insufficient_privilege THEN
            NULL;
        END;
    END IF;
    FOREACH one IN ARRAY coalesce(rights || comments, '{}') LOOP
        EXECUTE one;
    END LOOP;
    UPDATE roir.index i SET rows_view = plan WHERE i.id = make_rows_view.index;
END $$;

-- Drops the rows view of an index, if it has one.
CREATE FUNCTION roir.drop_rows_view(index bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    view oid;
BEGIN
    PERFORM roir.hold_view(drop_rows_view.index);
    view := roir.rows_view_of(drop_rows_view.index);
    IF view IS NOT NULL THEN
        EXECUTE format('DROP VIEW %s', roir.full_name(view));
    END IF;
    UPDATE roir.index i SET rows_view = NULL WHERE i.id = drop_rows_view.index;
    RETURN view IS NOT NULL;
END $$;

-- Makes the rows views of these tables follow the DDL that has just been run on them. If a session holds the lock of a
-- view, the next clean-up does it: a user's statement waits for 50 ms at most, and never fails because of a view.
CREATE FUNCTION roir.follow_tables(relations oid[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
    index bigint;
BEGIN
    FOR index IN SELECT i.id FROM roir.index i
                  WHERE i.dropped_at IS NULL AND i.rows_view IS NOT NULL AND i.source_oid::oid = ANY (relations)
                    AND roir.rows_view_of(i.id) IS NOT NULL ORDER BY i.id LOOP
        BEGIN
            PERFORM roir.make_rows_view(index);
        EXCEPTION WHEN OTHERS THEN
            NULL;
        END;
    END LOOP;
END $$;
